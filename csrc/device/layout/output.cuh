// A dispatch's outputs as a block of the receive region, so that a single offset tells a peer where each of a
// row's parts belongs.
//
//   block = [ recv_x | scales | top-k indices | top-k weights ]      each part row by row
//
// The source tokens have a block of their own: they belong to the handle, which outlives the payload.
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

}  // namespace deep_comm
