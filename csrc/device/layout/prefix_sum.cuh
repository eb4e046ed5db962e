// A warp's prefix sum.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

// The whole warp: the sum of the values of this lane and of those below it.
template <class T>
DC_DEVICE T prefix_sum(T value) {
  DC_NO_UNROLL
  for (int delta = 1; delta < kWarpSize; delta *= 2) {
    const T lower = arch::shfl_up(kFullMask, value, delta);
    if (arch::lane_idx() >= delta) value += lower;
  }
  return value;
}

}  // namespace deep_comm
