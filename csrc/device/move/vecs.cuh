// Rows in 16-byte vectors, by ordinary loads and stores of a warp.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

enum class VecSource { kInput, kPeerWritten };  // read-only during the kernel, or not

// One warp. All loads of a batch are issued before the first store: otherwise each load would cost
// a trip to memory.
template <VecSource kSource>
DC_DEVICE void copy_vecs(uint8_t* dst, const uint8_t* src, int num_vecs) {
  constexpr int kBatch = 8;
  Vec16* to = reinterpret_cast<Vec16*>(dst);
  const Vec16* from = reinterpret_cast<const Vec16*>(src);
  for (int base = arch::lane_idx(); base < num_vecs; base += kBatch * kWarpSize) {
    Vec16 batch[kBatch];
    DC_UNROLL
    for (int idx = 0; idx < kBatch; ++idx) {
      const int vec = base + idx * kWarpSize;
      if (vec >= num_vecs) continue;
      batch[idx] =
          kSource == VecSource::kInput ? arch::ld_nc(from + vec) : arch::ld_weak(from + vec);
    }
    DC_UNROLL
    for (int idx = 0; idx < kBatch; ++idx) {
      const int vec = base + idx * kWarpSize;
      if (vec < num_vecs) arch::st_streaming(to + vec, batch[idx]);
    }
  }
}

}  // namespace deep_comm
