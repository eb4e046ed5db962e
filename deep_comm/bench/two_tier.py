"""Two tiers beside one: the same ranks as logical nodes, and what crosses between those.

Bytes that the rail counted are compared with one row a (token, remote node)
before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deep_comm import Buffer, Config
from deep_comm.bench.measure import gather
from deep_comm.bench.workload import Workload, routing_of
from deep_comm.config import recommended_dispatch_config
from deep_comm.scale.traffic import Traffic, Wire, count
from deep_comm.topology import discover, host_identity, requested_ranks_per_node

if TYPE_CHECKING:
    from deep_comm.bench.operations import BufferOperations
    from deep_comm.bench.options import Scenario

MODE = "two-tier"
MAX_SMS = 24


def discovered() -> int | None:
    """Ranks of a node, if the default group has several: by host names, or
    DEEP_COMM_RANKS_PER_NODE. Collective.
    """
    topology = discover(gather(host_identity()), requested_ranks_per_node(None))
    return topology.ranks_per_node if topology.num_nodes > 1 else None


def configs_of(
    num_ranks: int,
    sms: Sequence[int | None],
    send: Sequence[int] | None,
    slots: Sequence[int] | None,
) -> tuple[Config | None, ...]:
    """One a combination; an odd number of SMs is rounded up, since a channel is two."""
    configs: list[Config | None] = [None] if None in sms else []
    for num_sms in {value + value % 2 for value in sms if value is not None}:
        base = recommended_dispatch_config(num_ranks, num_sms)
        for rail_send in send or (base.num_max_rdma_chunked_send_tokens,):
            for rail_slots in slots or (base.num_max_rdma_chunked_recv_tokens,):
                configs.append(
                    Config(
                        num_sms,
                        base.num_max_nvl_chunked_send_tokens,
                        base.num_max_nvl_chunked_recv_tokens,
                        min(rail_send, rail_slots // 2),
                        rail_slots,
                    )
                )
    return tuple(configs)


def make_buffer(scenario: Scenario, device: torch.device) -> Buffer:
    """Rings of both tiers for every Config."""
    shape = scenario.workload
    assert scenario.ranks_per_node is not None
    row_bytes = max(shape.row_bytes, shape.combine_row_bytes)
    sizes = (row_bytes, shape.num_ranks, scenario.ranks_per_node)
    base = recommended_dispatch_config(shape.num_ranks, MAX_SMS)
    configs = [base if config is None else config for config in scenario.configs]
    return Buffer(
        dist.group.WORLD,
        max(config.get_nvl_buffer_size_hint(*sizes) for config in configs),
        max(config.get_rdma_buffer_size_hint(*sizes) for config in configs),
        device=device,
        ranks_per_node=scenario.ranks_per_node,
    )


# ---- bytes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RailCount:
    """What one call of one rank put on the rail."""

    workload: str
    operation: str
    num_sms: int
    rank: int
    rows: int  # pairs of a token and another node
    row_bytes: int  # of each, padding included
    put_bytes: int  # as counted by the rail

    @property
    def is_exact(self) -> bool:
        return self.put_bytes == self.rows * self.row_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def traffic_of(workload: Workload, ranks_per_node: int) -> Traffic:
    """All in one channel: only sums are asked for."""
    routings = [routing_of(workload, rank).topk_idx for rank in range(workload.num_ranks)]
    return count(routings, workload.num_ranks, ranks_per_node, workload.num_experts, 1)


def count_rail(
    buffer: Buffer, subject: BufferOperations, workload: Workload, traffic: Traffic
) -> Iterator[RailCount]:
    """One cached dispatch and one combine of this rank. Collective."""
    wire = Wire.of(
        Config(), workload.hidden * workload.torch_dtype.itemsize, 4 * workload.num_scales, 0,
        workload.combine_row_bytes,
    )  # fmt: skip
    calls = (
        ("dispatch cached", subject.dispatch_cached, traffic.rail_rows(), wire.dispatch_slot_bytes),
        ("combine", subject.combine, traffic.rail_rows_in(), wire.combine_slot_bytes),
    )
    for name, call, rows, row_bytes in calls:
        before = _put_bytes(buffer)
        call(0)
        put_bytes = _put_bytes(buffer) - before
        yield RailCount(
            workload.describe(),
            name,
            subject.num_sms,
            buffer.rank,
            int(rows[buffer.rank]),
            row_bytes,
            put_bytes,
        )


def _put_bytes(buffer: Buffer) -> int:
    """So far, when all kernels of all ranks have ended and the NICs have taken what they posted."""
    if buffer.device.type == "cuda":
        torch.cuda.synchronize()
        assert buffer.runtime is not None
        buffer.runtime.quiet_rail()
    dist.barrier()
    return sum(map(sum, buffer.rail_put_bytes))
