// transpose_scales: received scales by column, as grouped GEMMs load them. Local: no peer takes
// part.
//
// in     src [N, S] words of 4 bytes
// out    dst [S, column_stride], dst[s][n] = src[n][s]
// grid   any number of blocks and warps: a warp takes 32 rows, whose lines stay in its L1 from
//        column to column. Scales cross the link row by row, since those of a row are neighbours:
//        single words would cost a packet each
#pragma once

#include "device/intranode/args.cuh"

namespace deep_comm {

DC_DEVICE void transpose_scales(const TransposeScalesArgs& args) {
  const int num_warps = arch::num_warps() * arch::num_blocks();
  const int warp = arch::warp_idx() * arch::num_blocks() + arch::block_idx();
  for (int64_t row = static_cast<int64_t>(warp) * kWarpSize + arch::lane_idx(); row < args.num_rows;
       row += static_cast<int64_t>(num_warps) * kWarpSize) {
    for (int column = 0; column < args.num_columns; ++column) {
      arch::st_weak(args.dst + column * args.column_stride + row,
                    arch::ld_nc(args.src + row * args.num_columns + column));
    }
  }
}

}  // namespace deep_comm
