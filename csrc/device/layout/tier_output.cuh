// What a handle of two tiers keeps of the received rows, as a block of the receive region.
//
//   block = [ recv_src_idx int32[Q] | recv_src_meta int32[Q, 2] ]
#pragma once

#include "device/layout/region.cuh"

namespace deep_comm {

struct TierSourceLayout {
  size_t src_meta;
  size_t num_bytes;

  DC_HOST_DEVICE static TierSourceLayout make(int64_t num_rows) {
    TierSourceLayout layout{};
    RegionCursor cursor;
    cursor.take(num_rows * sizeof(int32_t));
    layout.src_meta = cursor.take(2 * num_rows * sizeof(int32_t));
    layout.num_bytes = cursor.num_bytes();
    return layout;
  }
};

}  // namespace deep_comm
