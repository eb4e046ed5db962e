"""What the links can carry, measured in the same run as dispatch and combine.

Two limits: rows pushed to all other ranks at once by bulk copies of the SMs, with nothing to count
or wait for, and large copies around the ring of ranks by the copy engines. Percentages in the
tables are of the first: it is what a kernel that moves rows could reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_comm.backends.foreign import tensor_at
from deep_comm.bench.measure import Work, gather, require_on_all_ranks, time_over_ranks
from deep_comm.bench.names import Effort
from deep_comm.bench.payload import integers, same_bits

PUSH_BLOCKS = (8, 24, 64, 132)
NUM_PUSH_WARPS = 3  # more were never faster
AREA_BYTES = 1 << 30


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
        blocks = " / ".join(map(str, self.push_gb_per_s))
        return (
            f"link limit: bulk-store all-to-all of {self.row_bytes}-byte rows {pushes} GB/s with "
            f"{blocks} blocks; copy-engine ring {self.copy_ring_gb_per_s:.0f} GB/s (both checked)"
        )


@contextmanager
def _receive_areas(device: int, num_bytes: int) -> Iterator[list[int]]:
    """Every rank's receive area, as this process sees it. Collective, also at its end."""
    from deep_comm import _cuda

    own = _cuda.allocate(device, num_bytes)
    areas: list[int] = []
    try:
        for rank, handle in enumerate(gather(_cuda.ipc_handle(own))):
            is_own = rank == dist.get_rank()
            areas.append(own if is_own else _cuda.ipc_open(device, handle))
        yield areas
        torch.cuda.synchronize()
        dist.barrier()  # nobody writes any more
    finally:
        for address in areas:
            if address != own:
                _cuda.ipc_close(device, address)
        _cuda.free(device, own)


def _pushed_rows(source: int, num_rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_rows, R - 1, row_bytes]: what a rank pushes, to the ranks after it in turn."""
    sizes = num_rows, dist.get_world_size() - 1, row_bytes
    return integers(0, 256, sizes, source, device, torch.uint8)


def measure(device: torch.device, row_bytes: int, effort: Effort) -> LinkLimit:
    """Collective over the default group; at least two ranks, one device each."""
    from deep_comm import _cuda

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_warps = min(NUM_PUSH_WARPS, _cuda.max_push_warps(row_bytes))
    if num_warps == 0:
        raise ValueError(f"rows of {row_bytes} bytes are too large for the link measurement")
    num_rows = min(4096, AREA_BYTES // (num_ranks * row_bytes))
    max_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    with _receive_areas(device.index, AREA_BYTES) as areas:
        area = tensor_at(areas[rank], [AREA_BYTES], device, None)
        source = torch.zeros(AREA_BYTES, dtype=torch.uint8, device=device)
        own_rows = _pushed_rows(rank, num_rows, row_bytes, device).view(-1)
        source[: own_rows.numel()] = own_rows

        def push(num_blocks: int) -> Work:
            return lambda _call: _cuda.push_rows(
                destinations=areas, src=source.data_ptr(), rank=rank, num_rows_per_peer=num_rows,
                row_bytes=row_bytes, num_blocks=num_blocks, num_warps=num_warps,
                stream=torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip

        def copy(_call: int) -> None:
            _cuda.copy_async(
                dst=areas[(rank + 1) % num_ranks], src=source.data_ptr(), num_bytes=AREA_BYTES,
                stream=torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip

        def rate(work: Work, num_bytes: int) -> float:
            return num_bytes / time_over_ranks(work, effort, device).mean_us / 1e3

        def run_together(work: Work) -> None:
            work(0)
            torch.cuda.synchronize()
            dist.barrier()

        run_together(push(8))
        blocks = area[: num_ranks * num_rows * row_bytes].view(num_ranks, num_rows, row_bytes)
        for peer in set(range(num_ranks)) - {rank}:  # its rows for this rank, in its order
            pushed = _pushed_rows(peer, num_rows, row_bytes, device)
            is_right = same_bits(blocks[peer], pushed[:, (rank - peer - 1) % num_ranks])
            require_on_all_ranks(is_right, "bulk-store all-to-all")
        pushes = {
            num_blocks: rate(push(num_blocks), own_rows.numel())
            for num_blocks in sorted({min(blocks, max_blocks) for blocks in PUSH_BLOCKS})
        }
        dist.barrier()
        run_together(copy)
        want = _pushed_rows((rank - 1) % num_ranks, num_rows, row_bytes, device).view(-1)
        require_on_all_ranks(same_bits(area[: want.numel()], want), "copy-engine ring")
        return LinkLimit(row_bytes, pushes, rate(copy, AREA_BYTES))
