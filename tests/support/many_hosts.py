"""What every rank of several hosts does in test_many_hosts.py: Buffers over the world, over
parts of it, two at once.

Started by torchrun. Every check is bitwise, by the first rank of the group in question.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import roundtrip
import torch.distributed as dist
from cases import Case, InternodeCase

import deep_comm
from deep_comm.ranks.rendezvous import all_gather_object

RANKS_PER_HOST = 3
HOSTS = 2

TWO_TIER = dict(
    hidden=48, experts=12, topk=4, num_sms=4, send_chunk=1, slots=3, rail_chunk=1, rail_slots=3,
    biases=1,
)  # fmt: skip
SINGLE = dict(hidden=48, experts=7, topk=3, num_sms=2, send_chunk=1, slots=3, biases=1)


def group_of(ranks: Sequence[int]) -> Any:
    """Collective over the world; None on other ranks."""
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


def say(what: str) -> None:
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {what}", flush=True)


def two_tier_buffer(group: Any, case: InternodeCase) -> deep_comm.Buffer:
    """Without ranks_per_node: nodes are hosts."""
    return deep_comm.Buffer(group, case.nvl_bytes, case.rdma_bytes, device="cpu", timeout_s=60)


def check(group: Any, case: Case, mine: Any) -> None:
    results = all_gather_object(group, mine)
    if dist.get_rank(group) == 0:
        roundtrip.verify(case, [[result] for result in results])


def world_and_host_at_once(world: Any, host: Any) -> None:
    """A Buffer over all hosts and one inside this one, their calls in turn, then both again."""
    between = InternodeCase((5, 0, 9, 12, 3, 7), ranks_per_node=RANKS_PER_HOST, seed=1, **TWO_TIER)
    inside = Case((8, 3, 6), seed=2 + dist.get_rank() // RANKS_PER_HOST, **SINGLE)
    with (
        two_tier_buffer(world, between) as outer,
        deep_comm.Buffer(host, inside.nvl_bytes, device="cpu", timeout_s=60) as inner,
    ):
        nodes = len(outer.rail_put_bytes), len(inner.rail_put_bytes)
        assert nodes == (HOSTS, 0), nodes
        for _ in range(2):
            far = roundtrip.call_once(outer, between, 0)
            near = roundtrip.call_once(inner, inside, 0)
            check(world, between, far)
            check(host, inside, near)
    say("a Buffer over all hosts and one inside each, at once: equal")


def part_of_the_world(group: Any) -> None:
    """Two ranks of each host."""
    if group is not None:
        case = InternodeCase((6, 11, 0, 4), ranks_per_node=2, seed=3, **TWO_TIER)
        with two_tier_buffer(group, case) as buffer:
            check(group, case, roundtrip.call_once(buffer, case, 0))
    say("a Buffer over some ranks of each host: equal")


def uneven_part(group: Any) -> None:
    """Two ranks of one host and one of the other: refused on all of them."""
    if group is not None:
        try:
            deep_comm.Buffer(group, 1 << 20, 1 << 20, device="cpu").destroy()
        except deep_comm.TopologyError as error:
            assert "same number of consecutive ranks on every host" in str(error)
        else:
            raise AssertionError("ranks that are spread unevenly were accepted")
    say("an uneven part of the hosts: refused")


def main() -> None:
    assert int(os.environ["LOCAL_WORLD_SIZE"]) == RANKS_PER_HOST
    dist.init_process_group("gloo")
    assert dist.get_world_size() == HOSTS * RANKS_PER_HOST
    world = dist.group.WORLD
    hosts = [group_of(range(first, first + RANKS_PER_HOST)) for first in (0, RANKS_PER_HOST)]
    own = next(group for group in hosts if group is not None)
    some, uneven = group_of([0, 1, 3, 4]), group_of([0, 1, 3])
    world_and_host_at_once(world, own)
    part_of_the_world(some)
    uneven_part(uneven)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
