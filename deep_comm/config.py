"""Tuning of one dispatch or combine: SMs, ring sizes, and the recommended values."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from deep_comm.errors import ArgumentError
from deep_comm.ranks.topology import MAX_RANKS_PER_NODE, requested_ranks_per_node
from deep_comm.settings import env, integers
from deep_comm.settings.buffer import RING_BYTES

# What the size hints allow for beside the payload of a slot: the source index, and top-k indices
# (int64), top-k weights and scales (4 bytes) of up to this many columns each.
_HINT_COLUMNS = 128
_SLOT_METADATA_BYTES = 8 + _HINT_COLUMNS * (8 + 4 + 4)

# What the hint of the receive region allows for: see get_nvl_buffer_size_hint. Rows of a dispatch
# live until their combine, whose rows need room as well.
_TYPICAL_TOPK = 8
_IMBALANCE = 1.25
_USES = 2
_ROW_METADATA_BYTES = 256  # beside a row: indices, weights, scales, its source


@dataclass(frozen=True)
class Config:
    """Resources of one call. Every SM is a channel, with one ring per source rank.

    Equal on all ranks of a call.

    Attributes:
        num_sms: SMs (host target: blocks) that the kernels use, at least 1 where used.
        num_max_nvl_chunked_send_tokens: rows that a ring inside a node publishes together.
        num_max_nvl_chunked_recv_tokens: slots inside a node that two SMs share from one source, at
            least as many: each has a ring of half of them.
        num_max_rdma_chunked_send_tokens: rows that a ring between nodes publishes together. Without
            rings, rows of a put: rounded up to a power of two.
        num_max_rdma_chunked_recv_tokens: slots of a ring between nodes, at least twice as many;
            rounded up to a multiple.

    Examples:
        >>> config = deep_comm.Config(num_sms=24)
        >>> num_bytes = config.get_nvl_buffer_size_hint(2 * 7168, num_ranks=8)
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            smallest = 0 if name == "num_sms" else 1
            integers.require(name, getattr(self, name), smallest, integers.LARGEST)
        nvl_send, nvl_recv = (
            self.num_max_nvl_chunked_send_tokens,
            self.num_max_nvl_chunked_recv_tokens,
        )
        if nvl_send > nvl_recv:
            raise ArgumentError(
                "num_max_nvl_chunked_send_tokens",
                nvl_send,
                f"must not exceed num_max_nvl_chunked_recv_tokens ({nvl_recv})",
            )
        rdma_send, rdma_recv = (
            self.num_max_rdma_chunked_send_tokens,
            self.num_max_rdma_chunked_recv_tokens,
        )
        if 2 * rdma_send > rdma_recv:
            raise ArgumentError(
                "num_max_rdma_chunked_send_tokens",
                rdma_send,
                f"must be at most half of num_max_rdma_chunked_recv_tokens ({rdma_recv})",
            )
        rounded = -(-rdma_recv // rdma_send) * rdma_send
        integers.require(
            "num_max_rdma_chunked_recv_tokens", rounded, 1, integers.LARGEST,
            note=", rounded up to a multiple of num_max_rdma_chunked_send_tokens",
        )  # fmt: skip
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", rounded)
        # Configs are looked up in every call.
        fields = (getattr(self, name) for name in self.__dataclass_fields__)
        object.__setattr__(self, "_hash", hash(tuple(fields)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def num_channels(self) -> int:
        """C: one an SM."""
        return self.num_sms

    @property
    def num_slots(self) -> int:
        """Slots of a ring inside a node."""
        return -(-self.num_max_nvl_chunked_recv_tokens // 2)

    def get_nvl_buffer_size_hint(
        self,
        hidden_bytes: int,
        num_ranks: int,
        ranks_per_node: int | None = None,
        *,
        num_tokens: int | None = None,
    ) -> int:
        """Return num_nvl_bytes for rows of ``hidden_bytes``: rings and a receive region.

        The region holds the rows of a dispatch of ``num_tokens`` tokens per rank, and of their
        combine, if experts are chosen uniformly, eight per token, with a quarter more for
        imbalance. Calls that need more go through rings; `Buffer.stats()` counts them.

        Args:
            hidden_bytes: bytes of a row, without its scales.
            num_ranks: R.
            ranks_per_node: default: DEEP_COMM_RANKS_PER_NODE, else 8.
            num_tokens: default: DEEP_COMM_REGION_TOKENS, else 4096. 0: no region, only rings.

        Returns:
            Bytes on every rank.

        Raises:
            ArgumentError: a size is out of range.

        Examples:
            >>> num_bytes = deep_comm.Config().get_nvl_buffer_size_hint(2 * 7168, num_ranks=8)
        """
        rings = self.ring_bytes(hidden_bytes, num_ranks, ranks_per_node)
        if num_tokens is None:
            num_tokens = env.REGION_TOKENS.get()
        if integers.require("num_tokens", num_tokens, 0) == 0:
            return rings
        spread = 1 - (1 - 1 / num_ranks) ** _TYPICAL_TOPK  # of the ranks that a token goes to
        num_rows = math.ceil(num_tokens * num_ranks * min(1.0, _IMBALANCE * spread))
        region = _USES * num_rows * (hidden_bytes + _ROW_METADATA_BYTES)
        # From twice RING_BYTES on a Buffer makes all but RING_BYTES its receive region.
        return max(rings, integers.round_up(RING_BYTES + max(RING_BYTES, region)))

    def ring_bytes(
        self, hidden_bytes: int, num_ranks: int, ranks_per_node: int | None = None
    ) -> int:
        """Return the bytes of the rings inside a node for rows of ``hidden_bytes``.

        With room for up to 128 top-k and scale columns. Arguments and errors as of
        get_nvl_buffer_size_hint.

        Examples:
            >>> least = deep_comm.Config().ring_bytes(2 * 7168, num_ranks=8)
        """
        num_local, num_nodes = _split_ranks(num_ranks, ranks_per_node)
        words_per_pair = (2 * num_nodes + 3) * 4  # of SMs
        slot_bytes = integers.require("hidden_bytes", hidden_bytes, 1) + _SLOT_METADATA_BYTES
        per_pair = words_per_pair + 2 * self.num_slots * slot_bytes
        return integers.round_up(-(-self.num_channels // 2) * num_local * per_pair)

    def get_rdma_buffer_size_hint(
        self, hidden_bytes: int, num_ranks: int, ranks_per_node: int | None = None
    ) -> int:
        """Return num_rdma_bytes for rows of ``hidden_bytes`` between nodes; 0 inside a node.

        Arguments and errors as of get_nvl_buffer_size_hint.

        Examples:
            >>> num_bytes = deep_comm.Config().get_rdma_buffer_size_hint(2 * 7168, num_ranks=16)
        """
        _, num_nodes = _split_ranks(num_ranks, ranks_per_node)
        integers.require("hidden_bytes", hidden_bytes, 1)
        if num_nodes == 1:
            return 0
        words_per_ring = (MAX_RANKS_PER_NODE * 2 + 2) * 4
        slot_bytes = hidden_bytes + _SLOT_METADATA_BYTES + 16
        per_ring = words_per_ring + self.num_max_rdma_chunked_recv_tokens * slot_bytes
        return integers.round_up(self.num_channels * num_nodes * per_ring)


def _split_ranks(num_ranks: int, ranks_per_node: int | None) -> tuple[int, int]:
    """(ranks per node, nodes) of ``num_ranks`` ranks."""
    if ranks_per_node is None:
        ranks_per_node = min(
            requested_ranks_per_node(None) or MAX_RANKS_PER_NODE, MAX_RANKS_PER_NODE
        )
    integers.require("ranks_per_node", ranks_per_node, 1, MAX_RANKS_PER_NODE)
    integers.require("num_ranks", num_ranks, 1)
    if num_ranks > ranks_per_node and num_ranks % ranks_per_node != 0:
        raise ArgumentError(
            "num_ranks", num_ranks, f"must be a multiple of {ranks_per_node} beyond one node"
        )
    return min(num_ranks, ranks_per_node), max(num_ranks // ranks_per_node, 1)


# ranks, up to the next size -> (nvl send, nvl recv, rdma send, rdma recv). The values for 2, 4, 8,
# 16 and more ranks are those that callers know from DeepEP; 1, 3, 5, 6 and 7 lie between their
# neighbours.
_DISPATCH = {
    1: (24, 256, 6, 128),
    3: (12, 256, 6, 128),
    4: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
_COMBINE = {
    1: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    5: (8, 256, 6, 128),
    6: (6, 256, 6, 128),
    7: (5, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    24: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
}


@functools.cache
def recommended_dispatch_config(num_ranks: int, num_sms: int) -> Config:
    return _recommended(_DISPATCH, num_ranks, num_sms)


@functools.cache
def recommended_combine_config(num_ranks: int, num_sms: int) -> Config:
    return _recommended(_COMBINE, num_ranks, num_sms)


def _recommended(
    table: dict[int, tuple[int, int, int, int]], num_ranks: int, num_sms: int
) -> Config:
    integers.require("num_ranks", num_ranks, 1)
    return Config(num_sms, *table[max(size for size in table if size <= num_ranks)])


@functools.cache
def host_default(num_sms: int | None = None) -> Config:
    """The Config of the host target when none is given.

    It runs one fiber per thread of every block: one channel and small rings keep a job of several
    ranks quick on few cores.
    """
    return Config(1 if num_sms is None else num_sms, 4, 32)
