"""The matrix product of ``deep_comm.tp``: persistent, in Triton, each tile waits for its rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from deep_comm.triton import wait_word

__all__ = ["CONFIGS", "ProductConfig", "RowWords", "product"]


@dataclass(frozen=True)
class ProductConfig:
    """How tiles are made.

    flatten: the loops over tiles and over K become one, so that loads of the next tile begin while
    this one is stored.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    num_stages: int = 3
    num_warps: int = 8
    flatten: bool = False


CONFIGS = (
    ProductConfig(flatten=True, num_stages=4),
    ProductConfig(flatten=True, num_stages=3),
    ProductConfig(flatten=True, num_stages=3, group_m=16),
    ProductConfig(num_stages=3),
    ProductConfig(num_stages=4),
)


@dataclass(frozen=True)
class RowWords:
    """Rows of x that arrive while the product runs: word i stands for rows [i, i + 1) * num_rows.

    words: int64 [chunks]; a chunk is there when its word is at least ``expected``, int64 [1], on
    the device so that a CUDA graph can be replayed. num_rows: a multiple of the tile's rows, or a
    tile waits for too little. first_chunk: tiles of this chunk come first, then those after it,
    then from the start. fault: int64 [1], zero; after a wait of ``timeout_ns`` it holds the chunk
    that did not come, plus one.
    """

    words: torch.Tensor
    expected: torch.Tensor
    num_rows: int
    first_chunk: int
    fault: torch.Tensor
    timeout_ns: int


@triton.jit(do_not_specialize=["timeout_ns", "rows_of_chunk", "first_row_block", "M", "K"])
def _product_kernel(
    x_desc,  # [M, K], blocks of [BLOCK_M, BLOCK_K]
    w_desc,  # [N, K], blocks of [BLOCK_N, BLOCK_K]
    out_desc,  # [M, N], blocks of [BLOCK_M, BLOCK_N / 2]: a tile is stored in two halves, which
    # takes half the shared memory
    words,
    fault,
    expected,
    timeout_ns,
    rows_of_chunk,
    first_row_block,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    WAITS: tl.constexpr,
):
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    k_blocks = tl.cdiv(K, BLOCK_K)
    tiles_of_group = GROUP_M * num_n
    for tile in tl.range(
        tl.program_id(0),
        num_m * num_n,
        NUM_PROGRAMS,
        flatten=FLATTEN,
    ):
        first = tile // tiles_of_group * GROUP_M
        group_size = min(num_m - first, GROUP_M)
        m_block = first + (tile % tiles_of_group) % group_size
        n = (tile % tiles_of_group) // group_size * BLOCK_N
        if WAITS:
            m_block = (m_block + first_row_block) % num_m
        m = m_block * BLOCK_M
        m_loaded = m
        if WAITS:
            chunk = m // rows_of_chunk
            m_loaded += wait_word(words + chunk, tl.load(expected), fault, chunk + 1, timeout_ns)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k_block in range(k_blocks):
            x = x_desc.load([m_loaded, k_block * BLOCK_K])
            w = w_desc.load([n, k_block * BLOCK_K])
            acc = tl.dot(x, w.T, acc)
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        out_desc.store([m, n], left.to(out_desc.dtype))
        out_desc.store([m, n + BLOCK_N // 2], right.to(out_desc.dtype))


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: ProductConfig,
    *,
    out: torch.Tensor,
    num_programs: int,
    rows: RowWords | None = None,
) -> None:
    """``out = x @ weight.T``, summed in float32 and rounded once.

    x: [M, K] bf16 or fp16, rows of a multiple of 16 bytes. weight: [N, K], as a linear layer holds
    it. out: [M, N]. num_programs: blocks, at most one per SM. rows: which rows of x are still to
    come; None: none.
    """
    num_rows, depth = x.shape
    num_columns = weight.shape[0]
    _product_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        TensorDescriptor.from_tensor(out, [config.block_m, config.block_n // 2]),
        out if rows is None else rows.words,
        out if rows is None else rows.fault,
        out if rows is None else rows.expected,
        0 if rows is None else rows.timeout_ns,
        1 if rows is None else rows.num_rows,
        0 if rows is None else rows.first_chunk * rows.num_rows // config.block_m,
        num_rows,
        num_columns,
        depth,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        NUM_PROGRAMS=num_programs,
        FLATTEN=config.flatten,
        WAITS=rows is not None,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
    )
