"""What the links can carry, measured in the same run as what dispatch and combine make of them.

Two limits: rows pushed to all other ranks at once by bulk copies of the SMs, with nothing to count
or wait for, and large copies around the ring of ranks by the copy engines. Percentages in the
tables are of the first: it is what a kernel that moves rows could reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_comm.bench import payload
from deep_comm.bench.measure import Effort, gather, time_over_ranks

PUSH_BLOCKS = (8, 24, 64, 132)
NUM_PUSH_WARPS = 3  # more were never faster
AREA_BYTES = 1 << 30


class WrongLinkResult(RuntimeError):
    """The pushed or copied bytes did not arrive; no rate was taken."""


@dataclass(frozen=True)
class LinkLimit:
    """GB/s out of the slowest rank, own rows not counted."""

    row_bytes: int
    push_gb_per_s: dict[int, float]  # by number of blocks
    copy_ring_gb_per_s: float

    @property
    def gb_per_s(self) -> float:
        return max(self.push_gb_per_s.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gb_per_s": self.gb_per_s}

    def describe(self) -> str:
        pushes = " / ".join(f"{rate:.0f}" for rate in self.push_gb_per_s.values())
        blocks = " / ".join(str(num_blocks) for num_blocks in self.push_gb_per_s)
        return (
            f"link limit: bulk-store all-to-all of {self.row_bytes}-byte rows {pushes} GB/s with "
            f"{blocks} blocks; copy-engine ring {self.copy_ring_gb_per_s:.0f} GB/s (both checked)"
        )


class _Memory:
    """Foreign device memory in the form that torch takes."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@contextmanager
def _receive_areas(device: int, num_bytes: int) -> Iterator[list[int]]:
    """Every rank's receive area, as this process sees it. Collective, also at its end."""
    from deep_comm import _cuda

    own = _cuda.allocate(device, num_bytes)
    opened: list[int] = []
    try:
        areas = []
        for rank, handle in enumerate(gather(_cuda.ipc_handle(own))):
            if rank == dist.get_rank():
                areas.append(own)
            else:
                opened.append(_cuda.ipc_open(device, handle))
                areas.append(opened[-1])
        yield areas
        torch.cuda.synchronize()
        dist.barrier()  # nobody writes any more
    finally:
        for address in opened:
            _cuda.ipc_close(device, address)
        _cuda.free(device, own)


def push_order(rank: int, num_ranks: int, num_rows_per_peer: int) -> tuple[Tensor, Tensor]:
    """(peer, row there) of every row that this rank pushes; rows there count from the rank's
    block."""
    row = torch.arange((num_ranks - 1) * num_rows_per_peer)
    return (rank + 1 + row % (num_ranks - 1)) % num_ranks, row // (num_ranks - 1)


def _require_everywhere(is_right: bool, what: str) -> None:
    wrong = [rank for rank, verdict in enumerate(gather(is_right)) if not verdict]
    if wrong:
        raise WrongLinkResult(f"{what}: wrong bytes on ranks {wrong}")


def _pushed_keys(rank: int, num_ranks: int, num_rows_per_peer: int, device: torch.device) -> Tensor:
    """A key for every row that ``rank`` pushes."""
    rows = torch.arange((num_ranks - 1) * num_rows_per_peer, device=device)
    return payload.row_keys(rank, rows, slot=0, salt=500)


def measure(device: torch.device, row_bytes: int, effort: Effort, max_blocks: int) -> LinkLimit:
    """Collective over the default group; at least two ranks, one device each."""
    from deep_comm import _cuda

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_warps = min(NUM_PUSH_WARPS, _cuda.max_push_warps(row_bytes))
    if num_warps == 0:
        raise ValueError(f"rows of {row_bytes} bytes are too large for the link measurement")
    num_rows = min(4096, AREA_BYTES // (num_ranks * row_bytes))
    with _receive_areas(device.index, AREA_BYTES) as areas:
        source = torch.zeros(AREA_BYTES, dtype=torch.uint8, device=device)
        keys = _pushed_keys(rank, num_ranks, num_rows, device)
        pushed = payload.byte_rows(keys, row_bytes)
        source[: pushed.numel()] = pushed.view(-1)
        del pushed

        def push(num_blocks: int) -> None:
            _cuda.push_rows(
                destinations=areas,
                src=source.data_ptr(),
                rank=rank,
                num_rows_per_peer=num_rows,
                row_bytes=row_bytes,
                num_blocks=num_blocks,
                num_warps=num_warps,
                stream=torch.cuda.current_stream().cuda_stream,
            )

        def copy() -> None:
            _cuda.copy_async(
                dst=areas[(rank + 1) % num_ranks],
                src=source.data_ptr(),
                num_bytes=AREA_BYTES,
                stream=torch.cuda.current_stream().cuda_stream,
            )

        area = torch.as_tensor(_Memory(areas[rank], AREA_BYTES), device=device)
        push(8)
        torch.cuda.synchronize()
        dist.barrier()
        _require_everywhere(_rows_arrived(area, num_rows, row_bytes), "bulk-store all-to-all")
        push_bytes = (num_ranks - 1) * num_rows * row_bytes
        pushes = {
            num_blocks: _rate(push_bytes, partial(_ignore_call, push, num_blocks), effort, device)
            for num_blocks in sorted({min(blocks, max_blocks) for blocks in PUSH_BLOCKS})
        }
        dist.barrier()
        copy()
        torch.cuda.synchronize()
        dist.barrier()
        _require_everywhere(_copy_arrived(area, num_rows, row_bytes), "copy-engine ring")
        ring = _rate(AREA_BYTES, lambda _call: copy(), effort, device)
    return LinkLimit(row_bytes, pushes, ring)


def _ignore_call(push: Callable[[int], None], num_blocks: int, _call: int) -> None:
    push(num_blocks)


def _rate(num_bytes: int, work: Any, effort: Effort, device: torch.device) -> float:
    return num_bytes / time_over_ranks(work, effort, device).mean_us / 1e3


def _rows_arrived(area: Tensor, num_rows: int, row_bytes: int) -> bool:
    """Each other rank's block holds its rows for this rank, in its order."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    blocks = area[: num_ranks * num_rows * row_bytes].view(num_ranks, num_rows, row_bytes)
    for source in range(num_ranks):
        if source == rank:
            continue
        peers, rows = push_order(source, num_ranks, num_rows)
        keys = _pushed_keys(source, num_ranks, num_rows, area.device)[
            (peers == rank).to(area.device)
        ]
        assert rows[peers == rank].tolist() == list(range(num_rows))
        if not payload.same_bits(blocks[source], payload.byte_rows(keys, row_bytes)):
            return False
    return True


def _copy_arrived(area: Tensor, num_rows: int, row_bytes: int) -> bool:
    num_ranks = dist.get_world_size()
    keys = _pushed_keys((dist.get_rank() - 1) % num_ranks, num_ranks, num_rows, area.device)
    want = payload.byte_rows(keys, row_bytes).view(-1)
    return payload.same_bits(area[: want.numel()], want)


def fraction(rate_gb_per_s: float, limit: LinkLimit | None) -> float | None:
    return None if limit is None else rate_gb_per_s / limit.gb_per_s
