"""Time of low-latency dispatch and combine: one burst of messages, no rings.

Three ways for a row between nodes:

* "expert": one message a (token, expert), as libraries with a slot an expert send;
* "rank": one a (token, rank), straight to the rank, as this engine combines,
  and dispatches few tokens;
* "node": one a (token, node), which a rank there hands on over NVLink, as this engine dispatches
  (to the first rank with one of the token's experts; here, where the choice is not counted, to the
  one of the sender's local index).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deep_comm import _core
from deep_comm.errors import ArgumentError
from deep_comm.scale.machine import Machine
from deep_comm.scale.routing import Job
from deep_comm.scale.traffic import Traffic

WAYS = ("expert", "rank", "node")
_HEADER_BYTES = 16  # beside a row of "expert"


@dataclass(frozen=True)
class Burst:
    """One operation. Bytes and messages are those of the rank that has most."""

    us: float
    rail_rows: int  # out of the rank, over its NIC
    rail_bytes: int


def dispatch(job: Job, traffic: Traffic, machine: Machine, way: str) -> Burst:
    slot_bytes = _core.low_latency_slot_bytes(job.row_bytes, job.scale_row_bytes // 4, job.num_topk)
    if way == "expert":
        slot_bytes = job.row_bytes + job.scale_row_bytes + _HEADER_BYTES
    return _burst(traffic, machine, way, slot_bytes)


def combine(job: Job, traffic: Traffic, machine: Machine, way: str) -> Burst:
    """The rows of the dispatch return: received ones are sent."""
    return _burst(traffic, machine, way, job.combine_row_bytes)


def _burst(traffic: Traffic, machine: Machine, way: str, row_bytes: int) -> Burst:
    if way not in WAYS:
        raise ArgumentError("way", way, f"must be one of {', '.join(WAYS)}")
    is_remote = traffic.is_remote.repeat_interleave(traffic.ranks_per_node, 1)  # [R, R]
    rows = traffic.selections if way == "expert" else traffic.to_rank
    inside = rows * (~is_remote & ~torch.eye(traffic.num_ranks, dtype=torch.bool))
    if way == "node":
        nic_out, nic_in = traffic.rail_rows(), traffic.rail_rows_in()
        nvlink_out, nvlink_in = traffic.forwarded_rows()
    else:
        nic_out, nic_in = (rows * is_remote).sum(1), (rows * is_remote).sum(0)
        nvlink_out, nvlink_in = inside.sum(1), inside.sum(0)

    def nic_us(num_rows: Tensor) -> float:
        return float(num_rows.max()) * max(
            row_bytes / machine.nic_gb_per_s / 1e3, machine.nic_message_us
        )

    nvlink_rows = max(int(nvlink_out.max()), int(nvlink_in.max()))
    nvlink_us = nvlink_rows * row_bytes / machine.nvlink_gb_per_s / 1e3
    links_us = max(nic_us(nic_out), nic_us(nic_in), nvlink_us)
    hop_us = machine.nvlink_latency_us if way == "node" and traffic.num_nodes > 1 else 0.0
    rail_rows = int(nic_out.max())
    return Burst(
        machine.low_latency_us + links_us + hop_us,
        rail_rows,
        rail_rows * row_bytes,
    )
