"""A dispatch between nodes goes out behind its notify, before the host knows how many rows come:
when that succeeds, when not, and what failures leave behind. Under schedules, and with faults:
test_internode_simulated.py.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deep_comm._simt_tests import EarlyDispatches
from on_buffers import on_buffers
from run_by import run_by

from deep_comm import Buffer
from deep_comm.errors import PeerTimeout

pytestmark = pytest.mark.usefixtures("poison")

E, H = 8, 32
# get_dispatch_layout, internode_count, internode_notify, internode_dispatch
EARLY, TWICE = 4, 5


def on_nodes(body: Callable[[Buffer], Any], **options: Any) -> list[Any]:
    given = dict(num_rdma_bytes=1 << 19, num_direct_bytes=1 << 18, ranks_per_node=2)
    return on_buffers(body, 4, 1 << 19, **(given | options))


def call(
    buffer: Buffer, num_tokens: int, to_all: bool = True, call_idx: int = 0
) -> tuple[int, torch.Tensor]:
    """A dispatch and a combine, checked; launches of the dispatch, and what has come."""
    x = (torch.arange(num_tokens * H) % 251 + buffer.rank + call_idx).view(num_tokens, H)
    idx = (torch.arange(2 * num_tokens).view(num_tokens, 2) * 3) % E if to_all else None
    if idx is None:
        idx = torch.zeros(num_tokens, 2, dtype=torch.int64)
        idx[:, 1] = 1
    assert buffer.runtime is not None
    before = buffer.runtime.num_launches
    recv_x, *_, handle, _ = buffer.dispatch(x.bfloat16(), topk_idx=idx, num_experts=E)
    launches = buffer.runtime.num_launches - before
    combined, *_ = buffer.combine(recv_x, handle)
    copies = handle.is_token_in_rank.sum(1, keepdim=True)
    assert torch.equal(combined, x.bfloat16() * copies)
    assert handle.num_recv_tokens == len(recv_x) == len(handle.recv_src_idx)
    assert handle.send_nvl_head.shape[0] == int(handle.recv_rdma_rank_prefix_sum[-1])
    return launches, recv_x


@run_by(on_nodes)
def test_rows_move_before_the_host_knows_how_many(buffer: Buffer, /, way: str) -> None:
    assert [call(buffer, 20, call_idx=step)[0] for step in range(3)] == [EARLY] * 3
    # Fewer and more than ever: what was reserved was for others.
    assert call(buffer, 3)[0] == EARLY
    assert call(buffer, 24)[0] == EARLY


@run_by(on_nodes)
def test_a_rank_that_knew_of_no_rows_has_room_the_next_time(buffer: Buffer, /) -> None:
    num_tokens = 0 if buffer.rank == 3 else 12
    launches = [call(buffer, num_tokens, call_idx=step)[0] for step in range(3)]
    assert launches == [TWICE, EARLY, EARLY]


@pytest.mark.parametrize(
    "options", [dict(num_direct_bytes=4096), dict(num_rdma_bytes=40_000)], ids=["region", "slots"]
)
def test_without_room_all_ranks_launch_again_and_try_less_often(options: dict[str, int]) -> None:
    def main(buffer: Buffer) -> list[int]:
        return [call(buffer, 200, call_idx=step)[0] for step in range(10)]

    # Tried at once after the first failure, then after 1, 2, 3 calls.
    tried = [True, True, False, True, False, False, True, False, False, False]
    assert on_nodes(main, **options) == [[TWICE if early else EARLY for early in tried]] * 4


@run_by(on_nodes)
def test_one_call_with_very_many_tokens_is_not_remembered_for_ever(buffer: Buffer, /) -> None:
    launches = [call(buffer, num_tokens)[0] for num_tokens in (20, 4000, 20, 20)]
    assert launches == [EARLY, TWICE, EARLY, EARLY]


def test_attempts_come_back_after_a_success() -> None:
    early = EarlyDispatches()
    for _ in range(200):
        if early.is_next():
            early.learn(False)
    skipped = 0
    while not early.is_next():
        skipped += 1
    assert skipped <= 63
    early.learn(True)
    assert all(early.is_next() for _ in range(5))
    early.learn(False)
    assert early.is_next()


@run_by(on_nodes, num_direct_bytes=0)
def test_without_a_region_nothing_goes_out_early(buffer: Buffer, /) -> None:
    assert [call(buffer, 9)[0] for _ in range(2)] == [EARLY] * 2


def test_a_rank_that_ends_between_the_two_launches_is_named_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no room in its region, and none anywhere when all launch again."""
    make, full = torch.empty_strided, threading.local()

    def empty_strided(*args: Any, **options: Any) -> torch.Tensor:
        if getattr(full, "is_so", lambda: False)():
            raise MemoryError("the host could not go on")
        return make(*args, **options)

    monkeypatch.setattr(torch, "empty_strided", empty_strided)

    def main(buffer: Buffer) -> int | None:
        call(buffer, 6)
        named = None
        if buffer.rank == 2:
            region, engine = buffer._context.region, buffer.runtime
            kept, before = region.allocate(region.num_free_bytes), engine.num_launches
            full.is_so = lambda: engine.num_launches == before + EARLY
            idx = torch.zeros(5, 2, dtype=torch.int64)
            with pytest.raises(MemoryError):
                buffer.dispatch(torch.ones(5, H).bfloat16(), topk_idx=idx, num_experts=E)
            full.is_so = lambda: False
            del kept
        else:
            with pytest.raises(PeerTimeout) as caught:
                call(buffer, 5, to_all=False)
            named = caught.value.peer
        buffer.reset()
        assert call(buffer, 6)[0] == EARLY
        return named

    assert on_nodes(main, timeout_s=0.5) == [2, 2, None, 2]
