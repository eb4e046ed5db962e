"""The fill of DEEP_COMM_POISON between nodes: not over sums that the rail still reads."""

from typing import Any

import pytest
import torch
from schedules import some_of

from deep_comm import Buffer, simulate

pytestmark = pytest.mark.usefixtures("poison")

T, H, E = 16, 256, 8


@pytest.mark.parametrize(("num_ranks", "per_node"), [(2, 1), (4, 2)])
def test_a_dispatch_right_behind_a_combine_spoils_no_sum(
    num_ranks: int, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows get the memory that combine has just staged its sums in; puts end when they like."""
    monkeypatch.setenv("DEEP_COMM_RAIL_NEAR", "0")

    def main(group: Any) -> None:
        with Buffer(
            group, 1 << 19, 1 << 19, num_direct_bytes=1 << 18, device="cpu", ranks_per_node=per_node
        ) as buffer:
            for step in range(4):
                x = ((torch.arange(T * H) % 251) + buffer.rank + step).view(T, H).bfloat16()
                idx = (torch.arange(2 * T).view(T, 2) * 3 + step) % E
                rows, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=E)
                sums, *_ = buffer.combine(rows, handle)
                again = [buffer.dispatch(x, handle=handle)[0] for _ in range(2)]
                copies = handle.is_token_in_rank.sum(1, keepdim=True)
                assert torch.equal(sums, x * copies)
                assert all(torch.equal(other, rows) for other in again)

    for seed in some_of(range(40)):
        simulate.run(main, num_ranks, seed)
