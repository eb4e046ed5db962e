// transpose_scales: received scales by column, as grouped GEMMs load them. Local: no peer takes
// part.
//
// in     src [N, S] words of 4 bytes
// out    dst [S, column_stride], dst[s][n] = src[n][s]
// grid   any number of blocks and warps: a warp takes 32 rows and 16 columns, whose loads are issued
//        together
//
// Why a pass of its own: scales cross the link row by row, since those of a row are neighbours.
// Single words would cost a packet each.
#pragma once

#include "device/intranode/args.cuh"

namespace deep_comm {

DC_DEVICE void transpose_scales(const TransposeScalesArgs& args) {
  constexpr int kColumns = 16;  // of a warp's tile
  const int num_warps = arch::num_warps() * arch::num_blocks();
  const int warp = arch::warp_idx() * arch::num_blocks() + arch::block_idx();
  const int num_row_tiles = ceil_div(args.num_rows, kWarpSize);
  const int num_tiles = num_row_tiles * ceil_div(args.num_columns, kColumns);
  for (int tile = warp; tile < num_tiles; tile += num_warps) {
    const int64_t row = tile % num_row_tiles * kWarpSize + arch::lane_idx();
    const int first = tile / num_row_tiles * kColumns;
    if (row >= args.num_rows) continue;
    uint32_t scales[kColumns];
    DC_UNROLL
    for (int idx = 0; idx < kColumns; ++idx) {
      if (first + idx < args.num_columns) {
        scales[idx] = arch::ld_nc(args.src + row * args.num_columns + first + idx);
      }
    }
    DC_UNROLL
    for (int idx = 0; idx < kColumns; ++idx) {
      if (first + idx < args.num_columns) {
        arch::st_weak(args.dst + (first + idx) * args.column_stride + row, scales[idx]);
      }
    }
  }
}

}  // namespace deep_comm
