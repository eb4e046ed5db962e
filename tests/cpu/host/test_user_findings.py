"""What first users did wrong, and the words that they get: what to change, by names they know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import deep_comm
from deep_comm import Buffer, errors, local
from deep_comm.compat import legacy

TOKENS, HIDDEN, EXPERTS = 6, 128, 4
X = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
IDX = (torch.arange(2 * TOKENS) % EXPERTS).view(TOKENS, 2)
WEIGHTS = torch.ones(TOKENS, 2)
ROUTING: dict[str, Any] = dict(topk_idx=IDX, topk_weights=WEIGHTS, num_experts=EXPERTS)


def build(group: Any, num_nvl_bytes: int = 1 << 20, **options: Any) -> Buffer:
    return Buffer(group, num_nvl_bytes, device="cpu", timeout_s=2, **options)


def layer(group: Any, **options: Any) -> deep_comm.ExpertParallel:
    return deep_comm.ExpertParallel(
        group, hidden=HIDDEN, num_experts=EXPERTS, num_topk=2, max_tokens=16, device="cpu",
        timeout_s=2, **options,
    )  # fmt: skip


def combine_after_a_cached_dispatch(group: Any) -> None:
    buffer = build(group)
    handle = buffer.dispatch(X, **ROUTING)[4]
    recv_x, *_, none, _ = buffer.dispatch(X, handle)
    buffer.combine(recv_x, none)


def gradients_on_one_rank(group: Any) -> None:
    ep = layer(group)
    batch = ep.dispatch(X.clone().requires_grad_(group.rank() == 0), IDX, WEIGHTS)
    y = ep.combine(batch, 2 * batch.x)
    if group.rank() == 0:
        y.sum().backward()
    else:
        ep.dispatch(X, IDX, WEIGHTS)


def other_capacities(group: Any) -> None:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(16, HIDDEN, 2, EXPERTS)
    buffer = build(group, 0, num_rdma_bytes=num_bytes, low_latency_mode=True)
    buffer.low_latency_dispatch(X, IDX, 8 + 8 * group.rank(), EXPERTS, use_fp8=False)


def combine_of_another_dtype(group: Any) -> None:
    buffer = build(group)
    sent = buffer.dispatch(X, **ROUTING)
    buffer.combine(sent.recv_x.half() if group.rank() else sent.recv_x, sent.handle)


def different(**changed: Any) -> Callable[[Any], Any]:
    """A dispatch of which rank 1's arguments differ."""
    return lambda group: build(group).dispatch(
        **{"x": X, **ROUTING, **(changed if group.rank() == 1 else {})}
    )


@dataclass(frozen=True)
class Finding:
    body: Callable[[Any], Any]
    kind: type[Exception]
    words: tuple[str, ...]
    num_ranks: int = 1


MISMATCH, ARGUMENT = errors.ConfigMismatch, errors.ArgumentError
FINDINGS = {
    "a Buffer without bytes": Finding(
        lambda group: build(group, 0).dispatch(X, **ROUTING), errors.BufferTooSmall,
        ("without rings, and faster", "receive region", "num_nvl_bytes", "Buffer.for_shape finds"),
    ),
    "nodes without bytes between them": Finding(
        lambda group: build(group, ranks_per_node=1).dispatch(X, **ROUTING), errors.BufferTooSmall,
        ("num_rdma_bytes must be at least 3", "of 258 slots to each of 2 nodes", "with fewer, and"),
        2,
    ),
    "low latency without memory": Finding(
        lambda group: build(group, low_latency_mode=True), ARGUMENT,
        ("num_rdma_bytes must be get_low_latency_rdma_size_hint",),
    ),
    "topk_idx without num_experts": Finding(
        lambda group: build(group).dispatch(X, topk_idx=IDX), ARGUMENT,
        ("num_experts is needed with topk_idx",),
    ),
    "topk_idx by position": Finding(
        lambda group: build(group).dispatch(X, IDX, WEIGHTS, EXPERTS), ARGUMENT,
        ("pass topk_idx by name",),
    ),
    "combine after a cached dispatch": Finding(
        combine_after_a_cached_dispatch, ARGUMENT, ("use the handle that it was given",)
    ),
    "a gradient through FP8": Finding(
        lambda group: layer(group, fp8=True).dispatch(X.clone().requires_grad_(), IDX, WEIGHTS),
        ARGUMENT, ("x must not require a gradient in a layer with fp8=True",),
    ),
    "no group": Finding(lambda group: build(None), ARGUMENT, ("after init_process_group",)),
    "a rank outside the group": Finding(
        lambda group: build(-100), ARGUMENT, ("does not contain this process",)
    ),
    "bytes in the group's place": Finding(
        lambda group: build(1 << 20), ARGUMENT, ("must be a torch.distributed group", "got int")
    ),
    "gradients on one rank": Finding(
        gradients_on_one_rank, MISMATCH, ("the operation: rank 0 has '", "rank 1 has '"), 2
    ),
    "other capacities": Finding(
        other_capacities, MISMATCH,
        ("the operation low_latency_dispatch: ranks 0 and 1 differ in num_max_dispatch_tokens",
         "DEEP_COMM_LOG=debug", "reset()"), 2,
    ),
    "combines of other dtypes": Finding(
        combine_of_another_dtype, MISMATCH,
        ("the operation combine: ranks 0 and 1 differ in a shape, a dtype", "Compare the calls"),
        2,
    ),
    "weights on one rank": Finding(
        different(topk_weights=None), MISMATCH,
        ("topk_weights: rank 0 has 'given', rank 1 has 'none'",), 2,
    ),
    "another hidden size": Finding(
        different(x=X[:, :64].contiguous()), MISMATCH,
        ("hidden size of x times the size of its elements", "rank 0 has 256, rank 1 has 128"), 2,
    ),
    "another dtype": Finding(
        different(x=X.float()), MISMATCH,
        ("dtype of x: rank 0 has torch.bfloat16, rank 1 has torch.float32",), 2,
    ),
    "another dtype of equal size": Finding(
        different(x=X.half()), MISMATCH,
        ("dtype of x: rank 0 has torch.bfloat16, rank 1 has torch.float16",), 2,
    ),
    "an expert that is none": Finding(
        lambda group: build(group).dispatch(X, **{**ROUTING, "topk_idx": IDX.clone().fill_(9)}),
        errors.ExpertIndexError, ("topk_idx[", "0..3"),
    ),
    "rows without columns": Finding(
        lambda group: build(group).dispatch(X.view(-1), **ROUTING), ARGUMENT,
        ("x must have shape [tokens, hidden]",),
    ),
    "a misspelt keyword": Finding(
        lambda group: build(group).dispatch(X, topk_weight=WEIGHTS), TypeError,
        ("Buffer.dispatch() got", "'topk_weight'"),
    ),
    "a misspelt keyword of the drop-in": Finding(
        lambda group: legacy.Buffer(group, 1 << 20, device="cpu").dispatch(X, topk_weight=WEIGHTS),
        TypeError, ("Buffer.dispatch() got topk_weight=", "did you mean topk_weights?"),
    ),
    "a misspelt keyword of the drop-in's constructor": Finding(
        lambda group: legacy.Buffer(group, num_rdma_byte=1 << 20, device="cpu"), TypeError,
        ("Buffer() got num_rdma_byte=", "did you mean num_rdma_bytes?"),
    ),
    "a keyword of nobody": Finding(
        lambda group: legacy.Buffer(group, 1 << 20, device="cpu").dispatch(X, zzz=1), TypeError,
        ("no release of DeepEP that deep_comm follows",),
    ),
    "nodes larger than the group": Finding(
        lambda group: build(group, ranks_per_node=3), ARGUMENT,
        ("ranks_per_node must be at most the 2 ranks",), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINDINGS)
def test_a_mistake_is_told_in_the_words_of_the_caller(name: str) -> None:
    finding = FINDINGS[name]
    ended = local.run(finding.body, finding.num_ranks, timeout_s=60, return_errors=True)
    for error in ended:
        assert isinstance(error, finding.kind), repr(error)
        for words in finding.words:
            assert words in str(error), str(error)


def test_low_latency_calls_warn_of_a_gradient_that_is_lost() -> None:
    def body(group: Any) -> None:
        num_bytes = Buffer.get_low_latency_rdma_size_hint(16, HIDDEN, 1, EXPERTS)
        buffer = build(group, 0, num_rdma_bytes=num_bytes, low_latency_mode=True)
        x = X.clone().requires_grad_()
        with pytest.warns(UserWarning, match="low_latency_dispatch has no gradient"):
            sent = buffer.low_latency_dispatch(x, IDX, 16, EXPERTS, use_fp8=False)
        rows = sent.recv_x.detach().requires_grad_()
        with pytest.warns(UserWarning, match="low_latency_combine has no gradient"):
            buffer.low_latency_combine(rows, IDX, WEIGHTS, sent.handle)

    local.run(body, 1, timeout_s=60)
