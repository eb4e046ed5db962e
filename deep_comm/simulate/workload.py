"""What `deep_comm simulate` runs: dispatch and combine of a random routing, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_comm import reference
from deep_comm.buffer import Buffer
from deep_comm.config import Config
from deep_comm.ranks.rendezvous import RankGroup
from deep_comm.simulate.shape import Workload


class WrongResult(AssertionError):
    """A result differs from the reference."""


@dataclass(frozen=True)
class Case:
    """Inputs of all ranks, and what must come out."""

    workload: Workload
    xs: list[Tensor]
    topk_idxs: list[Tensor]
    topk_weights: list[Tensor]
    dispatched: list[reference.Dispatched]
    combined: list[tuple[Tensor, Tensor | None]]


def make_case(workload: Workload, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shape = (workload.num_tokens, workload.num_topk)
    xs, topk_idxs, topk_weights = [], [], []
    for _ in range(workload.num_ranks):
        x = torch.randn(workload.num_tokens, workload.hidden, generator=generator)
        xs.append(x.to(torch.bfloat16))
        # -1 and repeated experts are part of the routing.
        topk_idxs.append(torch.randint(-1, workload.num_experts, shape, generator=generator))
        topk_weights.append(torch.rand(shape, generator=generator))
    dispatched = reference.dispatch(
        xs, topk_idxs, workload.num_experts, topk_weights, num_channels=workload.num_sms
    )
    combined = reference.combine(
        [received.recv_x for received in dispatched],
        dispatched,
        [received.recv_topk_weights for received in dispatched],  # type: ignore[misc]
    )
    return Case(workload, xs, topk_idxs, topk_weights, dispatched, combined)


def _require_equal(rank: int, what: str, actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape:
        raise WrongResult(
            f"rank {rank}: {what} has shape {list(actual.shape)}, expected {list(expected.shape)}"
        )
    differs = actual.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    if differs.any():
        rows = differs.flatten(1) if differs.dim() > 1 else differs.unsqueeze(1)
        bad = rows.any(dim=1).nonzero().squeeze(1)
        raise WrongResult(f"rank {rank}: {what} differs in {len(bad)} rows, first {int(bad[0])}")


def rank_main(case: Case) -> Callable[[RankGroup], None]:
    """What every rank does."""

    def main(group: RankGroup) -> None:
        workload, rank = case.workload, group.rank()
        config = Config(workload.num_sms, min(4, workload.num_slots), 2 * workload.num_slots)
        hidden_bytes = workload.hidden * 2
        num_nvl_bytes = config.ring_bytes(hidden_bytes, workload.num_ranks, workload.num_ranks)
        num_max_experts = max(workload.num_experts, 1)
        with Buffer(
            group, num_nvl_bytes, device="cpu", num_max_experts=num_max_experts,
            ranks_per_node=workload.num_ranks,  # whatever the environment says
        ) as buffer:  # fmt: skip
            idx = case.topk_idxs[rank]
            per_rank, _, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(
                idx, workload.num_experts
            )
            recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(
                case.xs[rank],
                num_tokens_per_rank=per_rank,
                is_token_in_rank=is_token_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=idx,
                topk_weights=case.topk_weights[rank],
                config=config,
            )
            assert isinstance(recv_x, Tensor) and handle is not None
            assert recv_idx is not None and recv_weights is not None
            expected = case.dispatched[rank]
            assert expected.recv_topk_weights is not None
            assert handle.recv_src_idx is not None
            _require_equal(rank, "recv_src_idx", handle.recv_src_idx, expected.recv_src_idx)
            _require_equal(rank, "recv_x", recv_x, expected.recv_x)
            _require_equal(rank, "recv_topk_idx", recv_idx, expected.recv_topk_idx)
            _require_equal(rank, "recv_topk_weights", recv_weights, expected.recv_topk_weights)
            if counts != expected.num_recv_tokens_per_expert:
                raise WrongResult(f"rank {rank}: counts {counts} differ")
            combined_x, combined_weights, _ = buffer.combine(
                recv_x, handle, topk_weights=recv_weights, config=config
            )
            expected_x, expected_weights = case.combined[rank]
            assert combined_weights is not None and expected_weights is not None
            _require_equal(rank, "combined_x", combined_x, expected_x)
            _require_equal(rank, "combined_topk_weights", combined_weights, expected_weights)

    return main
