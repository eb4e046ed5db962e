// A dispatch's outputs as one block of the receive region: a single offset tells a peer where each
// part of a row belongs.
//
//   block = [ recv_x | scales | top-k indices | top-k weights ]      each part row by row
//
// The source tokens are in a block of their own: they belong to the handle, which outlives the
// payload.
#pragma once

#include "device/layout/region.cuh"

namespace deep_comm {

struct OutputLayout {
  size_t x;
  size_t scales;
  size_t topk_idx;
  size_t topk_weights;
  size_t num_bytes;

  DC_HOST_DEVICE static OutputLayout make(int64_t num_rows, int row_bytes, int scale_row_bytes,
                                          int num_topk, int topk_idx_bytes) {
    OutputLayout layout{};
    RegionCursor cursor;
    layout.x = cursor.take(num_rows * row_bytes);
    layout.scales = cursor.take(num_rows * scale_row_bytes);
    layout.topk_idx = cursor.take(num_rows * num_topk * topk_idx_bytes);
    layout.topk_weights = cursor.take(num_rows * num_topk * sizeof(float));
    layout.num_bytes = cursor.num_bytes();
    return layout;
  }
};

// The block that belongs to the handle. `num_rows` is that of the OutputLayout: at least the
// received tokens.
//
//   block = [ recv_src_idx int32[num_rows] | expanded: recv_rows int32[num_rows, K] ]
struct SourceLayout {
  size_t recv_rows;
  size_t num_bytes;

  // num_topk: 0 without recv_rows.
  DC_HOST_DEVICE static SourceLayout make(int64_t num_rows, int num_topk) {
    SourceLayout layout{};
    RegionCursor cursor;
    cursor.take(num_rows * sizeof(int32_t));
    layout.recv_rows = cursor.take(num_rows * num_topk * sizeof(int32_t));
    layout.num_bytes = cursor.num_bytes();
    return layout;
  }
};

}  // namespace deep_comm
