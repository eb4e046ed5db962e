"""Time of low-latency dispatch and combine: one burst of messages, no rings.

Three ways for a row between nodes:

* "expert": one message a (token, expert), as libraries with a slot an expert send;
* "rank": one a (token, rank), straight to the rank, as this engine does inside a node;
* "node": one a (token, node), to the rank of the same local index, which hands it on over NVLink.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deep_comm.errors import ArgumentError
from deep_comm.scale.machine import Machine
from deep_comm.scale.routing import Job
from deep_comm.scale.traffic import Traffic

WAYS = ("expert", "rank", "node")
_ROUTE_BYTES = 16  # of one selection, beside a row of "rank" and "node"
_HEADER_BYTES = 16  # beside a row of "expert"


@dataclass(frozen=True)
class Burst:
    """One operation. Bytes and messages are those of the rank that has most."""

    us: float
    rail_rows: int  # out of the rank, over its NIC
    rail_bytes: int
    nvlink_bytes: int


def dispatch(job: Job, traffic: Traffic, machine: Machine, way: str) -> Burst:
    row_bytes = job.row_bytes + job.scale_row_bytes
    row_bytes += _HEADER_BYTES if way == "expert" else _ROUTE_BYTES * job.num_topk
    return _burst(traffic, machine, way, row_bytes)


def combine(job: Job, traffic: Traffic, machine: Machine, way: str) -> Burst:
    """The same rows back; what came in goes out."""
    return _burst(traffic, machine, way, job.combine_row_bytes)


def _burst(traffic: Traffic, machine: Machine, way: str, row_bytes: int) -> Burst:
    if way not in WAYS:
        raise ArgumentError("way", way, f"must be one of {', '.join(WAYS)}")
    num_ranks, num_local = traffic.num_ranks, traffic.ranks_per_node
    node = torch.arange(num_ranks) // num_local
    is_remote = node[:, None] != node
    rows = traffic.selections if way == "expert" else traffic.to_rank
    inside = rows * (~is_remote & ~torch.eye(num_ranks, dtype=torch.bool))
    if way == "node":
        nic_out, nic_in = traffic.rail_rows(), traffic.rail_rows_in()
        nvlink_out, nvlink_in = traffic.forwarded_rows()
    else:
        nic_out, nic_in = (rows * is_remote).sum(1), (rows * is_remote).sum(0)
        nvlink_out, nvlink_in = inside.sum(1), inside.sum(0)

    def nic_us(num_rows: Tensor) -> float:
        return float(num_rows.max()) * max(row_bytes / machine.nic_gb_per_s / 1e3, machine.nic_message_us)

    nvlink_rows = max(int(nvlink_out.max()), int(nvlink_in.max()))
    nvlink_us = nvlink_rows * row_bytes / machine.nvlink_gb_per_s / 1e3
    links_us = max(nic_us(nic_out), nic_us(nic_in), nvlink_us)
    hop_us = machine.nvlink_latency_us if way == "node" and traffic.num_nodes > 1 else 0.0
    rail_rows = int(nic_out.max())
    return Burst(
        machine.low_latency_us + links_us + hop_us, rail_rows, rail_rows * row_bytes, nvlink_rows * row_bytes
    )
