"""Normal mode: layout, dispatch, combine, beside a plain all-to-all of the same rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from deep_comm import Buffer, Config
from deep_comm.bench.measure import (
    Timing,
    nccl_group,
    over_ranks,
    peak_rss_bytes,
    time_iterations,
)
from deep_comm.bench.workload import (
    Volume,
    Workload,
    combine_volume,
    expected_results,
    make_inputs,
    volume,
)


class WrongResult(RuntimeError):
    """The measured operation does not compute what the reference says; nothing was timed."""


@dataclass(frozen=True)
class Measured:
    """One line of the report. ``volume`` is that of the rank that moves most."""

    name: str
    timing: Timing
    volume: Volume

    def rate(self, num_bytes: int) -> float:
        """GB/s (10^9 bytes per second) at the median time."""
        return num_bytes / self.timing.p50_us / 1e3

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **self.timing.to_json(),
            "logical_bytes": self.volume.logical_bytes,
            "wire_bytes": self.volume.wire_bytes,
            "logical_gb_per_s": self.rate(self.volume.logical_bytes),
            "wire_gb_per_s": self.rate(self.volume.wire_bytes),
        }


@dataclass(frozen=True)
class NormalReport:
    lines: list[Measured] = field(default_factory=list)
    peak_rss_bytes: list[int] = field(default_factory=list)  # by rank
    counts: list[int] = field(default_factory=list)  # rows received, by rank


def _largest(volume_of_rank: Volume) -> Volume:
    gathered = [volume_of_rank] * dist.get_world_size()
    dist.all_gather_object(gathered, volume_of_rank)
    return Volume(
        logical_bytes=max(item.logical_bytes for item in gathered),
        wire_bytes=max(item.wire_bytes for item in gathered),
    )


def _gather(value: int) -> list[int]:
    gathered = [0] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _require_on_all_ranks(good: bool, what: str) -> None:
    verdicts = _gather(int(good))
    bad = [rank for rank, verdict in enumerate(verdicts) if not verdict]
    if bad:
        raise WrongResult(f"{what} differs from the reference on ranks {bad}")


def run(
    workload: Workload,
    device: torch.device,
    *,
    num_warmup: int,
    num_iterations: int,
    num_nvl_bytes: int,
    config: Config | None = None,
) -> NormalReport:
    """Collective over the default group; every rank gets the same report."""
    rank = dist.get_rank()
    inputs = make_inputs(workload, rank)
    x, topk_idx, weights = (t.to(device) for t in (inputs.x, inputs.topk_idx, inputs.topk_weights))
    report = NormalReport()
    with Buffer(dist.group.WORLD, num_nvl_bytes, device=device) as buffer:
        per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(
            topk_idx, workload.num_experts
        )

        def layout() -> object:
            return buffer.get_dispatch_layout(topk_idx, workload.num_experts)

        def dispatch() -> tuple[Any, ...]:
            return buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=mask,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=weights,
                config=config,
            )

        recv_x, _, _, _, handle, _ = dispatch()

        def cached() -> tuple[Any, ...]:
            return buffer.dispatch(x, handle=handle, config=config)

        def combine() -> tuple[Any, ...]:
            return buffer.combine(recv_x, handle, config=config)

        def both() -> None:
            received = dispatch()
            buffer.combine(received[0], received[4], config=config)

        want_rows, want_sum = expected_results(workload, rank)
        _require_on_all_ranks(torch.equal(recv_x.cpu(), want_rows), "dispatch")
        _require_on_all_ranks(torch.equal(cached()[0].cpu(), want_rows), "cached dispatch")
        _require_on_all_ranks(torch.equal(combine()[0].cpu(), want_sum), "combine")

        num_rows, num_own = recv_x.shape[0], int(per_rank[rank])
        incoming = _largest(volume(workload, num_rows, num_own))
        num_sent = int(per_rank.sum())
        outgoing = _largest(combine_volume(workload, num_sent, num_own))
        pair = Volume(
            incoming.logical_bytes + outgoing.logical_bytes,
            incoming.wire_bytes + outgoing.wire_bytes,
        )
        measured: list[tuple[str, Callable[[], object], Volume]] = [
            ("layout", layout, Volume(0, 0)),
            ("dispatch", dispatch, incoming),
            ("dispatch cached", cached, _largest(combine_volume(workload, num_rows, num_own))),
            ("combine", combine, outgoing),
            ("dispatch + combine", both, pair),
        ]
        if device.type == "cuda" and dist.is_nccl_available():
            measured.append(_all_to_all(per_rank, handle, workload, recv_x))
        for name, work, moved in measured:
            times = time_iterations(work, num_warmup, num_iterations, device)
            report.lines.append(Measured(name, over_ranks(times), moved))
        report.counts.extend(_gather(num_rows))
    report.peak_rss_bytes.extend(_gather(peak_rss_bytes()))
    return report


def _all_to_all(
    per_rank: torch.Tensor, handle: Any, workload: Workload, recv_x: torch.Tensor
) -> tuple[str, Callable[[], object], Volume]:
    """NCCL moving the very rows that a dispatch moves, already sorted by destination."""
    group = nccl_group()
    rank = dist.get_rank()
    send_sizes = per_rank.tolist()
    ends = handle.rank_prefix_matrix[:, rank].tolist()
    recv_sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    rows = torch.empty(sum(send_sizes), workload.hidden, dtype=workload.dtype, device=recv_x.device)
    out = torch.empty_like(recv_x)

    def work() -> object:
        return dist.all_to_all_single(out, rows, recv_sizes, send_sizes, group=group)

    moved = _largest(combine_volume(workload, recv_x.shape[0], send_sizes[rank]))
    return "NCCL all_to_all_single", work, moved
