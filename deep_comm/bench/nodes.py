"""Two tiers: which ranks share a host, bytes on the rail, and times beside those of one tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from deep_comm import Buffer
from deep_comm.bench.line import Line
from deep_comm.bench.measure import gather
from deep_comm.bench.names import TWO_TIER
from deep_comm.bench.operations import Operation
from deep_comm.bench.scenarios import MAX_TWO_TIER_SMS, Scenario
from deep_comm.bench.tables import align
from deep_comm.bench.workload import plan_of
from deep_comm.ranks.topology import discover, host_identity, requested_ranks_per_node
from deep_comm.scale.traffic import count

MAX_RATIO = 1.35  # two tiers over one, both with at most MAX_TWO_TIER_SMS


def discovered() -> int | None:
    """Ranks of a node, if the default group has several: by host names, or
    DEEP_COMM_RANKS_PER_NODE. Collective."""
    topology = discover(gather(host_identity()), requested_ranks_per_node(None))
    return topology.ranks_per_node if topology.num_nodes > 1 else None


def put_bytes(buffer: Buffer) -> int:
    """Bytes that this rank has put so far, once all kernels of all ranks have ended and the NICs
    have taken what they posted. Collective."""
    if buffer.device.type == "cuda":
        torch.cuda.synchronize()
    assert buffer.runtime is not None
    buffer.runtime.quiet_rail()
    dist.barrier()
    return sum(map(sum, buffer.rail_put_bytes))


def rail_count(
    scenario: Scenario, operation: Operation, rank: int, num_sms: int, num_bytes: int
) -> dict[str, Any]:
    """What one call of one rank put on the rail, and the rows that it should be: pairs of a token
    and another node; of combine, of the tokens that came to this rank over its rail."""
    per_node, shape = scenario.ranks_per_node, scenario.workload
    assert per_node is not None
    routings = [routing.topk_idx for routing in plan_of(shape).routings]
    traffic = count(routings, shape.num_ranks, per_node, shape.num_experts, num_channels=1)
    rows = traffic.rail_rows_in() if operation.name.startswith("combine") else traffic.rail_rows()
    return {
        "workload": shape.describe(), "operation": operation.name, "num_sms": num_sms,
        "rank": rank, "rows": int(rows[rank]), "row_bytes": operation.rail_row_bytes,
        "put_bytes": num_bytes,
    }  # fmt: skip


def ratios(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The fastest eager call over two tiers beside the fastest of one tier, both within
    MAX_TWO_TIER_SMS, by workload and operation."""
    fastest: dict[Any, dict[bool, Line]] = {}
    for line in sorted(lines, key=lambda line: -line.timing.mean_us):
        is_meant = line.volume is not None and line.execution == "eager" and not line.is_rival
        if is_meant and (line.num_sms or 0) <= MAX_TWO_TIER_SMS:
            by_tier = fastest.setdefault((line.workload, line.name), {})
            by_tier[line.mode == TWO_TIER] = line  # the fastest comes last
    found = []
    for (workload, name), by_tier in fastest.items():
        if len(by_tier) == 2:
            two, one = by_tier[True], by_tier[False]
            two_us, one_us = two.timing.mean_us, one.timing.mean_us
            found.append({
                "workload": workload.describe(), "operation": name, "two_tier_us": two_us,
                "two_tier_sms": two.num_sms, "single_us": one_us, "single_mode": one.mode,
                "single_sms": one.num_sms, "ratio": two_us / one_us, "at_most": MAX_RATIO,
            })  # fmt: skip
    return found


def describe(found: Sequence[dict[str, Any]], counts: Sequence[dict[str, Any]]) -> str:
    """What a run says of two tiers."""
    text = ""
    if found:
        rows = [["operation", "two tiers us", "SMs", "one tier us", "mode", "SMs", "ratio", "of"]]
        for it in found:
            cells = (it["operation"], f"{it['two_tier_us']:.1f}", it["two_tier_sms"],
                     f"{it['single_us']:.1f}", it["single_mode"], it["single_sms"],
                     f"{it['ratio']:.2f}", it["workload"])  # fmt: skip
            rows.append([str(cell) for cell in cells])
        text = f"two tiers beside one, at most {MAX_TWO_TIER_SMS} SMs "
        text += f"(target on GPUs: at most {MAX_RATIO})\n{align(rows, 1)}\n"
    num_rows, num_bytes = (sum(it[name] for it in counts) for name in ("rows", "put_bytes"))
    return (
        f"{text}rail: {num_rows} rows, {num_bytes} bytes in {len(counts)} calls counted: exactly "
        "one row a (token, remote node)\nevery bit and every byte as it should be"
    )
