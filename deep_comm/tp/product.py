"""The Triton products of ``deep_comm.tp``: persistent, for rows that come from peers or go to them
while the product runs.

Written for Triton 3.6 and sm_90. Sums are taken in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from deep_comm.triton import peer_stores_done, signal_word, wait_word

__all__ = ["CONFIGS", "Gathered", "ProductConfig", "Scattered", "product", "scattered_product"]


@dataclass(frozen=True)
class ProductConfig:
    """How tiles are made.

    flatten: the loops over tiles and over K become one, so that loads of the next tile begin while
    this one is stored. Not in ``scattered_product``: Triton 3.6 gives it wrong counts of tiles.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    num_stages: int = 3
    num_warps: int = 8
    flatten: bool = False

    def options(self) -> dict[str, int]:
        """Of a launch of either kernel."""
        return dict(
            BLOCK_M=self.block_m, BLOCK_N=self.block_n, BLOCK_K=self.block_k, GROUP_M=self.group_m,
            num_stages=self.num_stages, num_warps=self.num_warps,
        )  # fmt: skip


CONFIGS = (
    ProductConfig(flatten=True, num_stages=4),
    ProductConfig(flatten=True, num_stages=3),
    ProductConfig(flatten=True, num_stages=3, group_m=16),
    ProductConfig(num_stages=3),
    ProductConfig(num_stages=4),
)
"""The first is taken where none has been measured."""


@dataclass(frozen=True)
class Waits:
    """What waits need.

    sequence: int64 [1]; a word is there when it is at least that. It lies on the device, so that a
    CUDA graph can be replayed. fault: int64 [1]; nobody waits unless it is zero. After a wait of
    ``timeout_ns`` it holds 1 + the rank that did not come, and all waits end.
    """

    sequence: torch.Tensor
    fault: torch.Tensor
    timeout_ns: int


@dataclass(frozen=True)
class Gathered:
    """Rows of x that peers store while the product runs; R ranks, this one is ``rank``.

    rows: [R * S, K]; shard p comes from rank p, the nearest before ``rank`` first. This rank's own
    shard is not read. words: int64 [R, C]: word [p, c] says that rows [c, c + 1) * chunk_rows of
    shard p are there. chunk_rows: a multiple of block_m.
    """

    rows: torch.Tensor
    words: torch.Tensor
    chunk_rows: int
    rank: int
    waits: Waits


@dataclass(frozen=True)
class Scattered:
    """Where shards of a product go, R of S rows: slot r of every rank is for rank r's part.

    bases: int64 [R]: where each rank's memory begins. slot_offset: bytes from there to slot
    ``rank`` [S, N]. own_slots: [R, S, N], this rank's. words_offset: bytes to the words of this
    rank's chunks. own_words: int64 [R, C]. A chunk is group_m * block_m rows; C is enough for S.
    counters: int32 [R, C] zeros, and zeros again afterwards.
    """

    bases: torch.Tensor
    slot_offset: int
    own_slots: torch.Tensor
    words_offset: int
    own_words: torch.Tensor
    counters: torch.Tensor
    rank: int
    waits: Waits


@triton.jit
def _place(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """(group, row block, column block): columns go by in groups of row blocks, which keeps what is
    loaded again in the L2 cache.
    """
    tiles_of_group = GROUP_M * num_n
    group = tile // tiles_of_group
    first = group * GROUP_M
    group_size = min(num_m - first, GROUP_M)
    return group, first + (tile % tiles_of_group) % group_size, tile % tiles_of_group // group_size


@triton.jit
def _halves(acc, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _store(desc, acc, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """In two halves, which takes half the shared memory."""
    left, right = _halves(acc, BLOCK_M, BLOCK_N)
    desc.store([m, n], left.to(desc.dtype))
    desc.store([m, n + BLOCK_N // 2], right.to(desc.dtype))


@triton.jit
def _tile(
    x_desc, w_desc, m, n, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_N_MAJOR: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k_block in range(tl.cdiv(K, BLOCK_K)):
        x = x_desc.load([m, k_block * BLOCK_K])
        if IS_N_MAJOR:
            acc = tl.dot(x, w_desc.load([k_block * BLOCK_K, n]), acc)
        else:
            acc = tl.dot(x, w_desc.load([n, k_block * BLOCK_K]).T, acc)
    return acc


@triton.jit
def _first_tile(program, before, NUM_PROGRAMS: tl.constexpr):
    """Of a list that begins behind ``before`` tiles of other lists."""
    return (program + NUM_PROGRAMS - before % NUM_PROGRAMS) % NUM_PROGRAMS


@triton.jit(do_not_specialize=["timeout_ns", "chunk_rows", "own_first", "shard_rows", "rank", "K"])
def _product_kernel(
    own_desc,  # [S, K] of this rank, blocks of [BLOCK_M, BLOCK_K]
    x_desc,  # [R * S, K] of all ranks
    w_desc,  # [K, N] or [N, K]
    out_desc,  # [R * S, N], blocks of [BLOCK_M, BLOCK_N / 2]
    words,
    fault,
    sequence,
    timeout_ns,
    chunk_rows,
    words_of_rank: tl.constexpr,
    rank,
    num_ranks: tl.constexpr,
    shard_rows,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    IS_N_MAJOR: tl.constexpr,
):
    own_m = tl.cdiv(shard_rows, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    own_tiles = own_m * num_n
    for tile in tl.range(program, own_tiles, NUM_PROGRAMS, flatten=FLATTEN):
        _, m_block, n_block = _place(tile, own_m, num_n, GROUP_M)
        m, n = m_block * BLOCK_M, n_block * BLOCK_N
        acc = _tile(own_desc, w_desc, m, n, K, BLOCK_M, BLOCK_N, BLOCK_K, IS_N_MAJOR)
        _store(out_desc, acc, rank * shard_rows + m, n, BLOCK_M, BLOCK_N)
    if num_ranks > 1:
        rest_m = own_m * (num_ranks - 1)
        first = _first_tile(program, own_tiles, NUM_PROGRAMS)
        for tile in tl.range(first, rest_m * num_n, NUM_PROGRAMS, flatten=FLATTEN):
            _, m_block, n_block = _place(tile, rest_m, num_n, GROUP_M)
            source = (rank + 2 * num_ranks - 1 - m_block // own_m) % num_ranks
            row = m_block % own_m * BLOCK_M
            m, n = source * shard_rows + row, n_block * BLOCK_N
            word = words + source * words_of_rank + row // chunk_rows
            there = m + wait_word(word, tl.load(sequence), fault, source + 1, timeout_ns)
            acc = _tile(x_desc, w_desc, there, n, K, BLOCK_M, BLOCK_N, BLOCK_K, IS_N_MAJOR)
            _store(out_desc, acc, m, n, BLOCK_M, BLOCK_N)


def _weight_blocks(weight: torch.Tensor, config: ProductConfig) -> tuple[TensorDescriptor, bool]:
    """Of weight [K, N], and whether its rows lie one after the other."""
    if weight.is_contiguous():
        blocks = [config.block_k, config.block_n]
        return TensorDescriptor.from_tensor(weight, blocks), True
    blocks = [config.block_n, config.block_k]
    return TensorDescriptor.from_tensor(weight.t(), blocks), False


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: ProductConfig,
    *,
    out: torch.Tensor,
    num_programs: int,
    gathered: Gathered | None = None,
) -> None:
    """``out = rows of all ranks @ weight``.

    x: [S, K] bf16 or fp16, this rank's rows, each of a multiple of 16 bytes. weight: [K, N],
    contiguous, or its transpose is. out: [R * S, N]. num_programs: blocks, at most one per SM.
    gathered: where the other ranks' rows arrive; then S is a multiple of block_m. None: R is 1.
    """
    shard_rows, depth = x.shape
    num_columns = weight.shape[1]
    blocks = [config.block_m, config.block_k]
    w_desc, is_n_major = _weight_blocks(weight, config)
    _product_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, blocks),
        TensorDescriptor.from_tensor(x if gathered is None else gathered.rows, blocks),
        w_desc,
        TensorDescriptor.from_tensor(out, [config.block_m, config.block_n // 2]),
        out if gathered is None else gathered.words,
        out if gathered is None else gathered.waits.fault,
        out if gathered is None else gathered.waits.sequence,
        0 if gathered is None else gathered.waits.timeout_ns,
        1 if gathered is None else gathered.chunk_rows,
        1 if gathered is None else gathered.words.shape[1],
        0 if gathered is None else gathered.rank,
        out.shape[0] // shard_rows,
        shard_rows,
        num_columns,
        depth,
        NUM_PROGRAMS=num_programs,
        FLATTEN=config.flatten,
        IS_N_MAJOR=is_n_major,
        **config.options(),
    )


@triton.jit
def _tell(tile, counters, peer_words, sequence, num_m, num_n, GROUP_M: tl.constexpr):
    """A tile that has been stored to a peer is there. Who completes a chunk tells the peer."""
    peer_stores_done()
    group, _, _ = _place(tile, num_m, num_n, GROUP_M)
    tiles = min(num_m - group * GROUP_M, GROUP_M) * num_n
    # Each program releases its stores to the next one, the last one all of them to the peer.
    before = tl.atomic_add(counters + group, 1, sem="acq_rel", scope="gpu")
    if before == tiles - 1:
        tl.store(counters + group, 0)
        signal_word(peer_words + group, sequence)


@triton.jit
def _add_and_store(
    acc, out_desc, slots, slot_size, own, num_ranks: tl.constexpr, m, n, shard_rows, N,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum in float32 in rank order of every rank's part, of which this rank's is ``acc``."""
    rows = m + tl.arange(0, BLOCK_M)[:, None]
    columns = n + tl.arange(0, COLUMNS)[None, :]
    is_inside = (rows < shard_rows) & (columns < N)
    at = rows.to(tl.int64) * N + columns
    rounded = acc.to(out_desc.dtype).to(tl.float32)
    total = tl.zeros((BLOCK_M, COLUMNS), dtype=tl.float32)
    for source in range(num_ranks):
        part = tl.load(slots + source * slot_size + at, mask=is_inside & (source != own), other=0.0)
        total += tl.where(source == own, rounded, part.to(tl.float32))
    out_desc.store([m, n], total.to(out_desc.dtype))


@triton.jit(
    do_not_specialize=["slot_offset", "words_offset", "timeout_ns", "rank", "shard_rows", "K"]
)
def _scattered_product_kernel(
    x_desc,  # [R * S, K], blocks of [BLOCK_M, BLOCK_K]
    w_desc,  # [K, N] or [N, K]
    out_desc,  # [S, N], blocks of [BLOCK_M, BLOCK_N / 4]
    bases,
    slot_offset,
    own_slots,
    words_offset,
    own_words,
    counters,
    fault,
    sequence,
    timeout_ns,
    words_of_rank: tl.constexpr,
    rank,
    num_ranks: tl.constexpr,
    shard_rows,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    IS_N_MAJOR: tl.constexpr,
):
    num_m = tl.cdiv(shard_rows, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    num_tiles = num_m * num_n
    program = tl.program_id(0)
    number = tl.load(sequence)
    for turn in range(1, num_ranks):
        peer = (rank + turn) % num_ranks
        base = tl.load(bases + peer)
        slot = (base + slot_offset).to(tl.pointer_type(out_desc.dtype))
        words = (base + words_offset).to(tl.pointer_type(tl.int64))
        counts = counters + peer * words_of_rank
        slot_desc = tl.make_tensor_descriptor(
            slot, shape=[shard_rows, N], strides=[N, 1], block_shape=[BLOCK_M, BLOCK_N // 2]
        )
        first = _first_tile(program, (turn - 1) * num_tiles, NUM_PROGRAMS)
        # A tile is told of when the next one has been multiplied: its stores have long arrived.
        stored = -1
        for tile in tl.range(first, num_tiles, NUM_PROGRAMS):
            _, m_block, n_block = _place(tile, num_m, num_n, GROUP_M)
            m, n = m_block * BLOCK_M, n_block * BLOCK_N
            acc = _tile(
                x_desc, w_desc, peer * shard_rows + m, n, K, BLOCK_M, BLOCK_N, BLOCK_K, IS_N_MAJOR
            )
            if stored >= 0:
                _tell(stored, counts, words, number, num_m, num_n, GROUP_M)
            _store(slot_desc, acc, m, n, BLOCK_M, BLOCK_N)
            stored = tile
        if stored >= 0:
            _tell(stored, counts, words, number, num_m, num_n, GROUP_M)
    first = _first_tile(program, (num_ranks - 1) * num_tiles, NUM_PROGRAMS)
    slot_size = shard_rows.to(tl.int64) * N
    for tile in tl.range(first, num_tiles, NUM_PROGRAMS):
        group, m_block, n_block = _place(tile, num_m, num_n, GROUP_M)
        m, n = m_block * BLOCK_M, n_block * BLOCK_N
        acc = _tile(
            x_desc, w_desc, rank * shard_rows + m, n, K, BLOCK_M, BLOCK_N, BLOCK_K, IS_N_MAJOR
        )
        there = m
        for source in range(num_ranks):
            if source != rank:
                word = own_words + source * words_of_rank + group
                there += wait_word(word, number, fault, source + 1, timeout_ns)
        left, right = _halves(acc, BLOCK_M, BLOCK_N)
        first_half, second_half = _halves(left, BLOCK_M, BLOCK_N // 2)
        third, fourth = _halves(right, BLOCK_M, BLOCK_N // 2)
        COLUMNS: tl.constexpr = BLOCK_N // 4
        _add_and_store(
            first_half, out_desc, own_slots, slot_size, rank, num_ranks, there, n, shard_rows, N,
            BLOCK_M, COLUMNS,
        )  # fmt: skip
        _add_and_store(
            second_half, out_desc, own_slots, slot_size, rank, num_ranks, there, n + COLUMNS,
            shard_rows, N, BLOCK_M, COLUMNS,
        )  # fmt: skip
        _add_and_store(
            third, out_desc, own_slots, slot_size, rank, num_ranks, there, n + 2 * COLUMNS,
            shard_rows, N, BLOCK_M, COLUMNS,
        )  # fmt: skip
        _add_and_store(
            fourth, out_desc, own_slots, slot_size, rank, num_ranks, there, n + 3 * COLUMNS,
            shard_rows, N, BLOCK_M, COLUMNS,
        )  # fmt: skip


def scattered_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: ProductConfig,
    *,
    out: torch.Tensor,
    num_programs: int,
    scattered: Scattered,
) -> None:
    """``out = this rank's rows of the sum over the ranks of x @ weight``, each part rounded before.

    x: [R * S, K] bf16 or fp16. weight: as of ``product``. out: [S, N], rows of a multiple of 16
    bytes.
    """
    depth = x.shape[1]
    shard_rows, num_columns = out.shape
    w_desc, is_n_major = _weight_blocks(weight, config)
    triton.set_allocator(_scratch)
    _scattered_product_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        w_desc,
        TensorDescriptor.from_tensor(out, [config.block_m, config.block_n // 4]),
        scattered.bases,
        scattered.slot_offset,
        scattered.own_slots,
        scattered.words_offset,
        scattered.own_words,
        scattered.counters,
        scattered.waits.fault,
        scattered.waits.sequence,
        scattered.waits.timeout_ns,
        scattered.own_words.shape[1],
        scattered.rank,
        scattered.bases.shape[0],
        shard_rows,
        num_columns,
        depth,
        NUM_PROGRAMS=num_programs,
        IS_N_MAJOR=is_n_major,
        **config.options(),
    )


def _scratch(num_bytes: int, _alignment: int, _stream: int | None) -> torch.Tensor:
    """For descriptors that programs make."""
    return torch.empty(num_bytes, dtype=torch.int8, device="cuda")
