"""The same between nodes: one block for what a dispatch with new routing writes, tensors of its
handle on demand.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from deep_comm.handle_parts import ALIGNMENT, LINE, Memory, Part


class TierSlabLayout:
    """What the counting kernels write, in one block: N nodes of M ranks, R = N * M, C channels, T
    tokens, L local experts, E experts.

        node_prefix [N, C] | rank_prefix [R, C] | send_node_head [T, N] | recv_node_prefix [N, C]
        | recv_node_sum [N] | recv_rank_start [R, C] | recv_rank_sum [R]
        | forward_places [(N + 1) * M + C * N * M] | per expert [L] | rows by source [R]
        | send_places [T, N + R], with a receive region | combine_start [C, N, M]
        | tokens by rank [R], by node [N], by expert [E], is_token_in_rank [T, R]: of a layout that
          is not given

    Attributes: offsets in bytes, ``parts`` of the handle's names, ``num_bytes``; ``offsets``: all
    of them in that order from rank_prefix on, and num_bytes.
    """

    __slots__ = (
        "combine_start", "counts_per_expert", "counts_per_node", "counts_per_rank",
        "forward_places", "is_token_in_rank", "num_bytes", "num_channels", "num_nodes", "num_ranks",
        "num_tokens", "offsets", "parts", "per_expert", "per_rank", "rank_prefix",
        "recv_node_prefix", "recv_node_sum", "recv_rank_start", "recv_rank_sum",
        "send_node_head", "send_places",
    )  # fmt: skip

    def __init__(
        self, nodes: int, ranks: int, channels: int, experts: tuple[int, int], num_tokens: int,
        has_places: bool, has_mask: bool,
    ) -> None:  # fmt: skip
        """``experts``: local ones, all."""
        self.num_nodes, self.num_ranks = nodes, ranks
        self.num_channels, self.num_tokens = channels, num_tokens
        num_local, num_experts = experts
        num_forward_places = (nodes + 1 + channels * nodes) * (ranks // nodes)
        words = (
            nodes * channels, ranks * channels, num_tokens * nodes, nodes * channels, nodes,
            ranks * channels, ranks, num_forward_places, num_local, ranks,
            has_places * num_tokens * (nodes + ranks), channels * ranks,
            has_mask * ranks, has_mask * nodes, has_mask * num_experts,
        )  # fmt: skip
        sizes = (*(4 * size for size in words), has_mask * num_tokens * ranks)
        padded = ((size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT for size in sizes)
        *offsets, end = itertools.accumulate(padded)
        (
            self.rank_prefix, self.send_node_head, self.recv_node_prefix, self.recv_node_sum,
            self.recv_rank_start, self.recv_rank_sum, self.forward_places, self.per_expert,
            self.per_rank, self.send_places, self.combine_start, self.counts_per_rank,
            self.counts_per_node, self.counts_per_expert, self.is_token_in_rank,
        ) = offsets  # fmt: skip
        self.num_bytes = -(-end // LINE) * LINE
        self.offsets = (*offsets, self.num_bytes)
        int32 = torch.int32
        self.parts = {
            "rdma_channel_prefix_matrix": Part(0, nodes, channels, int32),
            "gbl_channel_prefix_matrix": Part(self.rank_prefix, ranks, channels, int32),
            "recv_rdma_channel_prefix_matrix": Part(self.recv_node_prefix, nodes, channels, int32),
            "recv_rdma_rank_prefix_sum": Part(self.recv_node_sum, None, nodes, int32),
            "recv_gbl_channel_prefix_matrix": Part(self.recv_rank_start, ranks, channels, int32),
            "recv_gbl_rank_prefix_sum": Part(self.recv_rank_sum, None, ranks, int32),
            "send_rdma_head": Part(self.send_node_head, num_tokens, nodes, int32),
            "forward_places": Part(self.forward_places, None, num_forward_places, int32),
            "num_recv_tokens_per_expert": Part(self.per_expert, None, num_local, int32),
            "num_recv_tokens_tensor": Part(self.recv_rank_sum + 4 * (ranks - 1), None, 1, int32),
            "num_recv_tokens_per_rank": Part(self.per_rank, None, ranks, int32),
        }
        if has_places:
            self.parts["send_places"] = Part(self.send_places, num_tokens, nodes + ranks, int32)
        if has_mask:
            self.parts["is_token_in_rank"] = Part(
                self.is_token_in_rank, num_tokens, ranks, torch.bool
            )


tier_slab_layout = functools.lru_cache(maxsize=256)(TierSlabLayout)


class FreshTiers:
    """Where the parts of a handle lie that no tensor has been made of.

    Attributes: ``owner``: whose calls need no checks; ``tensors``: parts that are torch's, by their
    names in the handle; ``routing``: see KnownTierHandle; ``rank_head``, ``num_rows``,
    ``num_forward_rows``: where send_nvl_head lies, Q and F.
    """

    __slots__ = (
        "_address", "_memory", "_num_local", "_src_address", "layout", "num_forward_rows",
        "num_rows", "owner", "rank_head", "routing", "storage", "tensors",
    )  # fmt: skip

    def __init__(
        self, owner: object, layout: TierSlabLayout, address: int, memory: tuple[Any, ...],
        routing: tuple[int, ...], rank_head: int, num_rows: int, num_forward_rows: int,
        tensors: dict[str, Tensor], storage: Tensor | None = None, src_address: int = 0,
        num_local: int = 0,
    ) -> None:  # fmt: skip
        """``memory``: of the slab at ``address``, arguments of Memory, as is what ``storage``
        keeps, if torch does. ``src_address``, ``num_local``: of what comes behind it there,
        recv_src_idx and recv_src_meta, and the M columns of send_nvl_head."""
        self.owner = owner
        self.layout, self._address, self._memory = layout, address, memory
        self.routing, self.rank_head = routing, rank_head
        self.num_rows, self.num_forward_rows = num_rows, num_forward_rows
        self.tensors, self.storage = tensors, storage
        self._src_address, self._num_local = src_address, num_local

    @property
    def forward_places(self) -> int:
        return self._address + self.layout.forward_places

    def tensor(self, name: str) -> Tensor | None:
        """A part by its name in the handle; None: there is none."""
        part, address = self.layout.parts.get(name), self._address
        if part is None:
            part, address = self._behind_slab(name)
        if part is None:
            return None
        return Memory(*self._memory).tensor(address + part.offset, part)

    def _behind_slab(self, name: str) -> tuple[Part | None, int]:
        num_rows, sources = self.num_rows, self._src_address
        if name == "send_nvl_head":
            head = Part(0, self.num_forward_rows, self._num_local, torch.int32)
            return head, self.rank_head
        if name == "recv_src_idx":
            return Part(0, None, num_rows, torch.int32), sources
        if name == "recv_src_meta":
            return Part(tier_source_layout(num_rows), num_rows, 8, torch.uint8), sources
        return None, 0


def tier_source_layout(num_rows: int) -> int:
    """Where recv_src_meta begins behind recv_src_idx."""
    from deep_comm import _core  # native: loaded no earlier than the backend's module

    meta_offset, _ = _core.Engine.tier_source_layout(num_rows=num_rows)
    return meta_offset
