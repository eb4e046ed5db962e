// Copies a row through registers: one warp, 16 bytes per lane at a time. For rows that one warp
// copies inside its own GPU, to one destination. A pipeline of bulk copies would need stages of
// shared memory for every role.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

// num_bytes and both addresses: multiples of 16.
DC_DEVICE void copy_row(uint8_t* dst, const uint8_t* src, int num_bytes) {
  constexpr int kUnroll = 8;  // loads in flight
  const int num_vecs = num_bytes / static_cast<int>(sizeof(Vec16));
  const Vec16* from = reinterpret_cast<const Vec16*>(src);
  Vec16* to = reinterpret_cast<Vec16*>(dst);
  for (int base = arch::lane_idx(); base < num_vecs; base += kWarpSize * kUnroll) {
    Vec16 vecs[kUnroll];
    DC_UNROLL
    for (int step = 0; step < kUnroll; ++step) {
      const int vec_idx = base + step * kWarpSize;
      if (vec_idx < num_vecs) vecs[step] = arch::ld_weak(from + vec_idx);
    }
    DC_UNROLL
    for (int step = 0; step < kUnroll; ++step) {
      const int vec_idx = base + step * kWarpSize;
      if (vec_idx < num_vecs) arch::st_streaming(to + vec_idx, vecs[step]);
    }
  }
}

}  // namespace deep_comm
