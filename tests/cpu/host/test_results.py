"""Named results: items by name, and everything that a tuple does."""

from __future__ import annotations

import pickle
from typing import Any

import torch

import deep_comm
from deep_comm import local

SHAPE: dict[str, Any] = dict(hidden=128, num_experts=4, num_topk=2, max_tokens=8)
NAMES = {
    "DispatchLayout": "num_tokens_per_rank num_tokens_per_rdma_rank num_tokens_per_expert "
                      "is_token_in_rank event",
    "DispatchResult": "recv_x recv_topk_idx recv_topk_weights num_recv_tokens_per_expert_list "
                      "handle event",
    "CombineResult": "combined_x combined_topk_weights event",
    "LowLatencyDispatchResult": "recv_x recv_count handle event hook",
    "LowLatencyCombineResult": "combined_x event hook",
}  # fmt: skip


def results(group: Any, ranks_per_node: int | None = None) -> list[str]:
    """Checked here: threads share them, but not their Buffer."""
    with deep_comm.Buffer.for_shape(
        group, **SHAPE, device="cpu", ranks_per_node=ranks_per_node, timeout_s=30
    ) as buffer:
        x = torch.randn(3, 128).bfloat16()
        idx = torch.tensor([[0, 1], [2, 3], [0, 3]])
        weights = torch.ones(3, 2)
        layout = buffer.get_dispatch_layout(idx, 4)
        dispatch = buffer.dispatch if ranks_per_node is None else buffer.internode_dispatch
        combine = buffer.combine if ranks_per_node is None else buffer.internode_combine
        sent = dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=4)
        combined = combine(sent.recv_x, sent.handle, sent.recv_topk_weights)
        cached = dispatch(x, handle=sent.handle)
        few = buffer.low_latency_dispatch(x, idx, 8, 4, return_recv_hook=True)
        few.hook()
        rows = torch.zeros(few.handle.rows_shape, dtype=torch.bfloat16)
        sums = buffer.low_latency_combine(rows, idx, weights, few.handle)
        assert torch.equal(sent.handle.is_token_in_rank, layout.is_token_in_rank)
        assert cached.handle is None and torch.equal(cached.recv_x, sent.recv_x)
        for found in (layout, sent, combined, cached, few, sums):
            items = tuple(found)
            assert type(items) is tuple and isinstance(found, tuple)
            assert found._fields == tuple(NAMES[type(found).__name__].split())
            assert len(found) == len(items)
            for number, (name, item) in enumerate(zip(found._fields, items, strict=True)):
                assert getattr(found, name) is item and found[number] is item
            first, *rest = found
            assert first is items[0] and found[1:] == tuple(rest)
            assert found == items and items == found and hash(type(found))
        numbers = [each for each in combined[:2] if each is not None]
        assert [list(it.shape) for it in pickle.loads(pickle.dumps(numbers))] == [[3, 128], [3, 2]]
        return [repr(each) for each in (layout, sent, combined, few, sums)]


def test_items_have_names_and_tuples_stay_tuples() -> None:
    for texts in local.run(results, 2, timeout_s=60):
        layout, sent, combined, few, sums = texts
        assert layout.startswith("DispatchLayout(num_tokens_per_rank=int32 [2], num_tokens_per_rdma"
                                 "_rank=None, num_tokens_per_expert=int32 [4]")  # fmt: skip
        assert "recv_x=bfloat16 [" in sent and "recv_topk_weights=float32 [" in sent
        assert "combined_topk_weights=float32 [3, 2]" in combined
        assert "recv_x=(float8_e4m3fn [" in few and "hook=None" not in few
        assert "combined_x=bfloat16 [3, 128]" in sums and "hook=None" in sums
        assert all("tensor(" not in text for text in texts)


def test_calls_between_nodes_have_the_same_names() -> None:
    assert len(local.run(lambda group: results(group, 1), 2, timeout_s=60)) == 2


def test_the_classes_are_public() -> None:
    for name, fields in NAMES.items():
        made = getattr(deep_comm, name)
        assert made._fields == tuple(fields.split()) and issubclass(made, tuple)
        for field in made._fields:
            assert f"        {field}: " in (made.__doc__ or "")
