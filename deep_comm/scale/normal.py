"""Time of two-tier dispatch and combine: batches of rows through rings, SMs, NICs and NVLink.

Follows the kernels (csrc/device/internode): a channel takes the nodes in the order of the real one,
S sender warps each every S-th; a batch waits for a slot, is copied by an SM, queues for the NIC of
its rank and at that of the receiver, and is forwarded after all batches of earlier steps. NICs and
NVLink belong to a rank and serve its channels first come, first served.

Simplified: NICs serve batches step by step, so that one that is ready early may come behind one of
an earlier step; an SM's warps share it in the order of steps; rows of a (rank, node) spread over
its ranks in every batch as in all; no congestion between NICs other than at the receiver's port,
which holds back its senders by their rings alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_comm.scale.machine import Machine
from deep_comm.scale.queues import drain, serve
from deep_comm.scale.traffic import Traffic, Wire

NUM_SENDER_WARPS = 7  # of a channel in dispatch, at most one a node


@dataclass(frozen=True)
class Times:
    """Microseconds of one call on the slowest rank, and what each resource alone would
    take on its busiest rank.
    """

    total_us: float
    nic_us: float
    nvlink_us: float
    sm_us: float

    @property
    def bound_by(self) -> str:
        alone = {"NIC": self.nic_us, "NVLink": self.nvlink_us, "SM": self.sm_us}
        return max(alone, key=lambda name: alone[name])


def _per_us(gb_per_s: float) -> float:
    return gb_per_s * 1e3


def _times(ends: Sequence[Tensor], machine: Machine, wire: Wire, *loads: Tensor) -> Times:
    """``ends``: when ranks and channels are through. ``loads``: bytes by rank over the NIC out and
    in, over NVLink out and in, through the SMs of either kind.
    """
    nic_out, nic_in, nvlink_out, nvlink_in, sm_out, sm_on = (float(load.max()) for load in loads)
    sm_us = max(sm_out, sm_on) / _per_us(machine.sm_gb_per_s) / wire.num_channels
    return Times(
        max(machine.call_us + sm_us, *(float(end.max()) for end in ends)),
        max(nic_out, nic_in) / _per_us(machine.nic_gb_per_s),
        max(nvlink_out, nvlink_in) / _per_us(machine.nvlink_gb_per_s),
        sm_us,
    )


def _message_us(machine: Machine, rows: Tensor, slot_bytes: int) -> Tensor:
    """A NIC's time for puts of that many rows."""
    time = rows * (slot_bytes / _per_us(machine.nic_gb_per_s))
    return torch.where(rows > 0, time.clamp(min=machine.nic_message_us), 0.0)


class _Shape:
    """Rows as the steps need them. Ranks are [N, M]: node, index in it."""

    def __init__(self, traffic: Traffic) -> None:
        self.num_nodes, self.num_local = traffic.num_nodes, traffic.ranks_per_node
        self.num_channels = traffic.to_node.shape[2]
        num_nodes, num_local = self.num_nodes, self.num_local
        self.to_node = traffic.to_node.view(num_nodes, num_local, num_nodes, self.num_channels)
        totals = traffic.to_node.sum(2).view(num_nodes, num_local, num_nodes, 1)
        to_rank = traffic.to_rank.view(num_nodes, num_local, num_nodes, num_local)
        # [source node, source, node, rank there]: which part of the rows to
        # the node goes to the rank
        self.share = (to_rank / totals.clamp(min=1)).float()
        self.nodes = torch.arange(num_nodes)
        self.locals = torch.arange(num_local)
        self.channels = torch.arange(self.num_channels)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64)


def dispatch(traffic: Traffic, wire: Wire, machine: Machine) -> Times:
    """A cached dispatch."""
    if traffic.num_nodes == 1:
        return _inside_a_node(traffic, wire, machine, wire.dispatch_row_bytes)
    return _Dispatch(traffic, wire, machine).run()


def _inside_a_node(traffic: Traffic, wire: Wire, machine: Machine, row_bytes: int) -> Times:
    """The single tier, where every SM is a channel: the slower of NVLink and SMs."""
    own = traffic.to_rank.diagonal()
    out, into = traffic.to_rank.sum(1) - own, traffic.to_rank.sum(0) - own
    nvlink_us = float(torch.maximum(out, into).max()) * row_bytes / _per_us(machine.nvlink_gb_per_s)
    rate = _per_us(machine.sm_gb_per_s) * 2 * wire.num_channels
    sm_us = float(traffic.to_rank.sum(1).max()) * row_bytes / rate
    return Times(machine.call_us + max(nvlink_us, sm_us), 0.0, nvlink_us, sm_us)


class _Dispatch:
    def __init__(self, traffic: Traffic, wire: Wire, machine: Machine) -> None:
        self.traffic, self.wire, self.machine = traffic, wire, machine
        self.shape = _Shape(traffic)
        shape = self.shape
        self.num_warps = min(NUM_SENDER_WARPS, shape.num_nodes)
        ranks = (shape.num_nodes, shape.num_local)
        start = machine.call_us
        # By source:
        self.warp_free = shape.zeros(*ranks, shape.num_channels, self.num_warps) + start
        self.sm_free = shape.zeros(*ranks, shape.num_channels) + start
        self.nic_out_free = shape.zeros(*ranks) + start
        # By the rank that forwards, and that receives:
        self.nic_in_free = shape.zeros(*ranks) + start
        self.forward_free = shape.zeros(*ranks, shape.num_channels) + start
        self.nvlink_out_free = shape.zeros(*ranks) + start
        self.nvlink_in_free = shape.zeros(*ranks) + start
        self.receive_free = shape.zeros(*ranks, shape.num_channels) + start

    def run(self) -> Times:
        for step in range(self.shape.num_nodes):
            self._run_step(step)
        traffic, wire, machine = self.traffic, self.wire, self.machine
        out, into = traffic.forwarded_rows()
        forwarded = traffic.to_rank.view(
            self.shape.num_nodes, self.shape.num_local, self.shape.num_nodes, -1
        )
        ends = (self.forward_free, self.nvlink_in_free, self.receive_free)
        return _times(
            [end + machine.nvlink_latency_us for end in ends],
            machine,
            wire,
            traffic.rail_rows() * wire.dispatch_slot_bytes,
            traffic.rail_rows_in() * wire.dispatch_slot_bytes,
            out * wire.dispatch_row_bytes,
            into * wire.dispatch_row_bytes,
            # senders and receivers share SMs, forwarders have others
            traffic.to_node.sum((1, 2)) * wire.dispatch_slot_bytes
            + traffic.to_rank.sum(0) * wire.dispatch_row_bytes,
            forwarded.sum((0, 3)) * wire.dispatch_row_bytes,
        )

    def _run_step(self, step: int) -> None:
        shape, wire = self.shape, self.wire
        num_nodes = shape.num_nodes
        # [N, C]: the node a channel sends to, and the one it forwards from; a
        # permutation of each other.
        to = (shape.nodes[:, None] + shape.channels + step) % num_nodes
        source = (shape.nodes[:, None] - shape.channels - step) % num_nodes
        rows = shape.to_node.gather(2, to[:, None, None, :].expand(-1, shape.num_local, -1, -1))
        rows = rows.squeeze(2)  # [N, M, C] by source
        # [N, M, C, M]: by forwarder and rank
        share = shape.share[source[:, None, :], shape.locals[:, None], shape.nodes[:, None, None]]
        is_own = (to == shape.nodes[:, None])[:, None, :]
        window = wire.num_slots // wire.batch
        credit_at: list[Tensor] = []
        for batch in range(-(-int(rows.max()) // wire.batch)):
            some = (rows - batch * wire.batch).clamp(min=0, max=wire.batch)
            waits_for = credit_at[batch - window] if batch >= window else None
            arrival = self._send(step, some, is_own, waits_for)
            done = self._forward(
                _at_peer(arrival, source), _at_peer(some, source), _at_peer(is_own, source), share
            )
            # A credit, back to the source.
            latency = torch.where(is_own, 0.0, self.machine.nic_latency_us)
            credit_at.append(_at_peer(done, to) + latency)

    def _send(self, step: int, rows: Tensor, is_own: Tensor, credit_at: Tensor | None) -> Tensor:
        """[N, M, C] when batches of ``rows`` have left their ranks, or are in the
        ring if it is an own one.
        """
        wire, machine = self.wire, self.machine
        warp = step % self.num_warps
        # The SM works for the earliest step whose warp has a slot; a warp that waits for
        # credit holds up no other.
        begin = torch.maximum(self.sm_free, self.warp_free[..., warp])
        if credit_at is not None:
            begin = torch.maximum(begin, credit_at)
        fill_us = rows * (wire.dispatch_slot_bytes / _per_us(machine.sm_gb_per_s))
        filled = torch.where(rows > 0, begin + fill_us, self.warp_free[..., warp])
        self.warp_free[..., warp] = filled
        self.sm_free = self.sm_free + fill_us
        work = _message_us(machine, rows, wire.dispatch_slot_bytes) * ~is_own
        sent, self.nic_out_free = serve(self.nic_out_free, filled, work)
        return torch.where(is_own, filled, sent + machine.nic_latency_us)

    def _forward(self, arrival: Tensor, rows: Tensor, is_own: Tensor, share: Tensor) -> Tensor:
        """[N, M, C] when batches have been forwarded, all by forwarder."""
        wire, machine, shape = self.wire, self.machine, self.shape
        work = rows * (wire.dispatch_slot_bytes / _per_us(machine.nic_gb_per_s)) * ~is_own
        come, self.nic_in_free = serve(self.nic_in_free, arrival - work, work)
        come = torch.where(work > 0, come, arrival)
        start = torch.maximum(come, self.forward_free)
        sent_on = rows[..., None] * share * wire.dispatch_row_bytes  # [N, M, C, M] bytes
        # A warp for each rank of the node has its part of an SM.
        warp_us = sent_on.amax(3) * shape.num_local / _per_us(machine.sm_gb_per_s)
        leaves = sent_on * ~torch.eye(shape.num_local, dtype=torch.bool)[:, None, :]
        nvlink = _per_us(machine.nvlink_gb_per_s)
        out, self.nvlink_out_free = serve(self.nvlink_out_free, start, leaves.sum(3) / nvlink)
        done = torch.maximum(start + warp_us, torch.where(leaves.sum(3) > 0, out, start))
        # At the receiving end: what all forwarders and channels bring.
        first = torch.where(leaves > 0, start[..., None], torch.inf).amin((1, 2))
        self.nvlink_in_free = drain(self.nvlink_in_free, first, leaves.sum((1, 2)) / nvlink)
        # Receivers copy what comes to its place.
        came = torch.where(sent_on > 0, start[..., None], torch.inf).amin(1).transpose(1, 2)
        copies_us = sent_on.sum(1).transpose(1, 2) / _per_us(machine.sm_gb_per_s)
        self.receive_free = drain(self.receive_free, came, copies_us)
        # A forwarder is ahead of a receiver by a ring at most; a port takes a ring of
        # each of its senders in:
        ring_us = wire.num_local_slots * wire.dispatch_row_bytes / nvlink
        ring_us *= shape.num_channels * max(1, shape.num_local - 1)
        held = torch.where(leaves > 0, self.nvlink_in_free[:, None, None, :] - ring_us, 0.0).amax(3)
        done = torch.where(rows > 0, torch.maximum(done, held), self.forward_free)
        self.forward_free = done
        return done


def _at_peer(values: Tensor, peer: Tensor) -> Tensor:
    """[N, M, C] values as the ranks of node ``peer`` [N, C] have them."""
    index = peer[:, None, :].expand(-1, values.shape[1], -1)
    return values.expand(peer.shape[0], -1, -1).gather(0, index)


def combine(traffic: Traffic, wire: Wire, machine: Machine) -> Times:
    """The way back: sums of a node's rows over the rail, added at the rank that owns the token."""
    if traffic.num_nodes == 1:
        return _inside_a_node(traffic, wire, machine, wire.combine_slot_bytes)
    return _Combine(traffic, wire, machine).run()


class _Combine:
    def __init__(self, traffic: Traffic, wire: Wire, machine: Machine) -> None:
        self.traffic, self.wire, self.machine = traffic, wire, machine
        self.shape = _Shape(traffic)
        shape = self.shape
        ranks = (shape.num_nodes, shape.num_local)
        start = machine.call_us
        # By the rank that adds a node's rows ([C, N, M]: channel, node, index), and by its links.
        self.sum_free = shape.zeros(shape.num_channels, *ranks) + start
        self.two_before = self.sum_free
        self.nic_out_free = shape.zeros(*ranks) + start
        self.nvlink_in_free = shape.zeros(*ranks) + start
        self.nvlink_out_free = shape.zeros(*ranks) + start
        # By owner.
        self.nic_in_free = shape.zeros(*ranks) + start
        self.owner_free = shape.zeros(shape.num_channels, *ranks) + start

    def run(self) -> Times:
        for step in range(self.shape.num_nodes):
            self._run_step(step)
        traffic, wire, machine = self.traffic, self.wire, self.machine
        out, into = traffic.forwarded_rows()
        size = wire.combine_slot_bytes
        rows = traffic.to_rank.view(
            self.shape.num_nodes, self.shape.num_local, self.shape.num_nodes, -1
        )
        return _times(
            (self.owner_free, self.nvlink_in_free, self.nvlink_out_free),
            machine,
            wire,
            traffic.rail_rows_in() * size,
            traffic.rail_rows() * size,
            into * size,
            out * size,
            # owners' SMs send rows inside the node as well, others add them
            traffic.to_rank.sum(0) * size + traffic.to_node.sum((1, 2)) * size,
            rows.sum((0, 3)) * size,
        )

    def _run_step(self, step: int) -> None:
        shape, wire, machine = self.shape, self.wire, self.machine
        owner = (shape.channels + step) % shape.num_nodes  # [C]: one for all nodes
        by_owner = shape.to_node[owner]  # [C, M, N, C]
        rows = by_owner[shape.channels, :, :, shape.channels].transpose(1, 2)  # [C, N, M]
        share = shape.share[owner].transpose(1, 2)  # [C, N, M, M]: of which rank of the node
        is_own = (shape.nodes == owner[:, None])[:, :, None]  # [C, N, 1]
        # An owner adds tokens in order: its batch needs those of all nodes.
        num_batches = -(-rows.amax(1, keepdim=True) // wire.batch)  # [C, 1, M]
        window = wire.num_slots // wire.batch
        credit_at: list[Tensor] = []  # [C, M]
        for batch in range(int(num_batches.max())):
            count = num_batches.clamp(min=1)
            some = torch.where(
                batch < num_batches, rows * (batch + 1) // count - rows * batch // count, 0
            )
            waits_for = credit_at[batch - window] if batch >= window else None
            arrival = self._add_node(some, share, is_own, waits_for)
            done = self._add_at_owner(arrival, some, is_own, owner)
            credit_at.append(done + machine.nic_latency_us)

    def _add_node(
        self, rows: Tensor, share: Tensor, is_own: Tensor, credit_at: Tensor | None
    ) -> Tensor:
        """[C, N, M] when sums of ``rows`` have left the nodes' ranks, or are in the own ring."""
        wire, machine, shape = self.wire, self.machine, self.shape
        size, nvlink = wire.combine_slot_bytes, _per_us(machine.nvlink_gb_per_s)
        parts = rows[..., None] * share * size  # [C, N, M, M] bytes from each rank of the node
        comes = parts * ~torch.eye(shape.num_local, dtype=torch.bool)
        # Rows come ahead of their sums by a ring; here by a batch.
        ready = self.two_before
        into, free = serve(
            self.nvlink_in_free, ready.permute(1, 2, 0), comes.sum(3).permute(1, 2, 0) / nvlink
        )
        self.nvlink_in_free = free
        first = torch.where(comes > 0, ready[..., None], torch.inf).amin((0, 2))  # [N, M]
        self.nvlink_out_free = drain(self.nvlink_out_free, first, comes.sum((0, 2)) / nvlink)
        come = torch.where(comes.sum(3) > 0, into.permute(2, 0, 1), self.sum_free)
        ring_us = wire.num_local_slots * size / nvlink * shape.num_channels * (shape.num_local - 1)
        sender = self.nvlink_out_free[None, :, None, :] - ring_us
        come = torch.maximum(come, torch.where(comes > 0, sender, 0.0).amax(3))
        add_us = parts.sum(3) / _per_us(machine.sm_gb_per_s)
        done = torch.maximum(come, self.sum_free + add_us)
        if credit_at is not None:
            done = torch.maximum(done, credit_at[:, None, :])
        done = torch.where(rows > 0, done, self.sum_free)
        self.two_before, self.sum_free = self.sum_free, done
        work = _message_us(machine, rows, size) * ~is_own
        sent, free = serve(self.nic_out_free, done.permute(1, 2, 0), work.permute(1, 2, 0))
        self.nic_out_free = free
        return torch.where(is_own, done, sent.permute(2, 0, 1) + machine.nic_latency_us)

    def _add_at_owner(self, arrival: Tensor, rows: Tensor, is_own: Tensor, owner: Tensor) -> Tensor:
        """[C, M] when the owners of the step have added a batch."""
        wire, machine, shape = self.wire, self.machine, self.shape
        size, num_nodes = wire.combine_slot_bytes, shape.num_nodes
        work = rows * (size / _per_us(machine.nic_gb_per_s)) * ~is_own
        come = arrival.clone()
        # Channels whose owners differ at once; with more channels than nodes owners come again.
        for begin in range(0, shape.num_channels, num_nodes):
            part = slice(begin, begin + num_nodes)
            ready, load = (arrival - work)[part].transpose(1, 2), work[part].transpose(1, 2)
            taken, free = serve(self.nic_in_free[owner[part]], ready, load)
            self.nic_in_free[owner[part]] = free
            come[part] = torch.where(load > 0, taken, arrival[part].transpose(1, 2)).transpose(1, 2)
        come = torch.where(rows > 0, come, 0.0).amax(1)  # [C, M]: the last node's
        own = self.owner_free[shape.channels, owner]
        add_us = rows.sum(1) * size / _per_us(machine.sm_gb_per_s)
        done = torch.where(rows.sum(1) > 0, torch.maximum(come, own + add_us), own)
        self.owner_free[shape.channels, owner] = done
        return done
