#!/usr/bin/env python3
"""Which way should low-latency rows take between nodes? A message-level model.

    rank    straight to every rank that holds one of a token's experts
    node    once to each node, to the first rank there that holds one of the token's experts, which
            hands it on over NVLink to the others
    expert  once to every selected expert

A rank's put is posted, goes out through its NIC behind those before it, crosses the network,
comes in through the receiver's NIC in the order of arrival, and with "node" once more over
NVLink. Combine runs the other way: "rank" and "expert" bring a row from each, "node" adds up
inside the node first, which rounds once more than the contract of low_latency_combine does; it
stands there for comparison.

Assumed, not measured (options change them): NICs of 50 GB/s, one a GPU, at 20 million messages a
second; 2.5 us from the post to the word in the other GPU's memory; a warp posts a put in 0.3 us,
132 blocks post at the same time; NVLink 1.3 us and 350 GB/s out of a GPU; a hop costs its forwarder
1.4 us. What a kernel does besides is the same for all ways and left out.

Usage: tools/low_latency_ways.py [--nodes N ...] [--tokens T ...]
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WAYS = ("rank", "node", "expert")


@dataclass(frozen=True)
class Machine:
    """Microseconds, and bytes a microsecond."""

    nic: float = 50e3
    nic_message: float = 0.05
    network: float = 2.5
    post: float = 0.3
    posters: int = 132
    nvlink: float = 350e3
    nvlink_latency: float = 1.3
    hop: float = 1.4


@dataclass(frozen=True)
class Shape:
    num_nodes: int
    ranks_per_node: int
    num_experts: int
    num_topk: int
    hidden: int

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def position(self, rank: int, other: int) -> int:
        """When a rank comes to one of another node: LowLatencyGroup::rank_at of the kernels."""
        local = (other - rank) % self.ranks_per_node
        node = (self.node(other) - self.node(rank) - 1) % self.num_nodes
        return local * (self.num_nodes - 1) + node

    def rank_of(self, expert: int) -> int:
        return expert * self.num_ranks // self.num_experts

    @property
    def slot_bytes(self) -> int:
        """A message of dispatch in FP8: routes, their slots, row, scales."""
        routes = 16 * self.num_topk + -(-4 * (self.num_topk + 1) // 16) * 16
        return -(-(routes + self.hidden + 4 * (self.hidden // 128)) // 16) * 16

    @property
    def row_bytes(self) -> int:
        return 2 * self.hidden


Routing = list[list[list[int]]]
"""Experts of each token, by rank."""


def uniform_routing(shape: Shape, num_tokens: int, seed: int) -> Routing:
    choose = random.Random(seed)
    return [
        [choose.sample(range(shape.num_experts), shape.num_topk) for _ in range(num_tokens)]
        for _ in range(shape.num_ranks)
    ]


@dataclass
class Put:
    source: int
    destination: int
    num_bytes: int
    posted: float
    handed_on: tuple[int, ...] = ()  # ranks of the destination's node that get it over NVLink


def targets(
    shape: Shape, way: str, experts: Sequence[int], rank: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Ranks of other nodes that a token's row is put to, with those that they hand it on to."""
    ranks = [shape.rank_of(expert) for expert in experts]
    far = [other for other in ranks if shape.node(other) != shape.node(rank)]
    if way == "expert":
        yield from ((other, ()) for other in far)
    elif way == "rank":
        yield from ((other, ()) for other in dict.fromkeys(far))
    else:
        by_node: dict[int, dict[int, None]] = defaultdict(dict)
        for other in far:
            by_node[shape.node(other)][other] = None
        for first, *others in by_node.values():
            yield first, tuple(others)


def puts_of(
    shape: Shape, machine: Machine, way: str, routing: Routing, *, is_combine: bool
) -> list[Put]:
    """Of all ranks, in the order in which each posts them."""
    num_bytes = shape.row_bytes if is_combine else shape.slot_bytes
    by_source: dict[int, list[Put]] = defaultdict(list)
    for rank, tokens in enumerate(routing):
        # Tokens are dealt out over the blocks; a block posts its token's puts one after the other.
        for token, experts in enumerate(tokens):
            round_of_blocks = token // machine.posters
            for number, (other, further) in enumerate(targets(shape, way, experts, rank)):
                posted = machine.post * (1 + number + round_of_blocks * shape.num_topk)
                source, destination = (other, rank) if is_combine else (rank, other)
                by_source[source].append(Put(source, destination, num_bytes, posted, further))
    result = []
    for puts in by_source.values():
        if is_combine:  # each rank begins with another source; dealt out over the blocks likewise
            puts.sort(key=lambda put: shape.position(put.source, put.destination))
            for number, put in enumerate(puts):
                put.posted = machine.post * (1 + number // machine.posters)
                if way == "node" and put.handed_on:  # the partial sums come in over NVLink first
                    put.posted += machine.nvlink_latency + machine.hop
        result += sorted(puts, key=lambda put: put.posted)
    return result


def duration(machine: Machine, puts: list[Put], *, is_combine: bool) -> float:
    """Until the last row of any rank has come."""
    out_free: dict[int, float] = defaultdict(float)
    arrivals = []
    for put in puts:
        serial = max(put.num_bytes / machine.nic, machine.nic_message)
        out_free[put.source] = max(out_free[put.source], put.posted) + serial
        arrivals.append((out_free[put.source] + machine.network, serial, put))
    arrivals.sort(key=lambda arrival: arrival[0])
    in_free: dict[int, float] = defaultdict(float)
    link_free: dict[int, float] = defaultdict(float)
    end = 0.0
    for arrived, serial, put in arrivals:
        # Cut through: the receiver's NIC takes it in while the sender's puts it out.
        done = in_free[put.destination] = max(arrived, in_free[put.destination] + serial)
        end = max(end, done)
        if is_combine:
            continue
        for _ in put.handed_on:
            free = link_free[put.destination] = (
                max(link_free[put.destination], done + machine.hop) + put.num_bytes / machine.nvlink
            )
            end = max(end, free + machine.nvlink_latency)
    return end


def table(shape: Shape, machine: Machine, tokens: Sequence[int], num_seeds: int = 2) -> list[str]:
    title = (
        f"{shape.num_nodes} nodes x {shape.ranks_per_node} ranks, hidden {shape.hidden}, "
        f"top-{shape.num_topk} of {shape.num_experts}: us of the slowest rank, rail part alone; "
        "[KiB out of a rank's NIC]"
    )
    columns = [f"{stage} {way}" for stage in ("dispatch", "combine") for way in WAYS]
    lines = [title, f"{'tokens':>7}  " + "  ".join(f"{column:>22}" for column in columns)]
    for num_tokens in tokens:
        cells = []
        for is_combine in (False, True):
            for way in WAYS:
                times, num_bytes = [], 0
                for seed in range(num_seeds):
                    routing = uniform_routing(shape, num_tokens, seed)
                    puts = puts_of(shape, machine, way, routing, is_combine=is_combine)
                    times.append(duration(machine, puts, is_combine=is_combine))
                    num_bytes += sum(put.num_bytes for put in puts)
                kib = num_bytes / num_seeds / shape.num_ranks / 1024
                cells.append(f"{sum(times) / num_seeds:9.1f} [{kib:9.0f}]")
        lines.append(f"{num_tokens:>7}  " + "  ".join(f"{cell:>22}" for cell in cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--nic-gb-s", type=float, default=50.0)
    parser.add_argument("--network-us", type=float, default=2.5)
    parser.add_argument("--post-us", type=float, default=0.3)
    options = parser.parse_args()
    machine = Machine(nic=options.nic_gb_s * 1e3, network=options.network_us, post=options.post_us)
    for num_nodes in options.nodes:
        shape = Shape(
            num_nodes, options.ranks_per_node, options.experts, options.topk, options.hidden
        )
        print("\n".join(table(shape, machine, options.tokens)), end="\n\n")


if __name__ == "__main__":
    main()
