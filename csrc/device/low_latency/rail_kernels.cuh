// The low-latency kernels of groups of several nodes as types, as a target needs them for a launch.
#pragma once

#include "device/low_latency/rail_combine.cuh"
#include "device/low_latency/rail_dispatch.cuh"

namespace deep_comm {

template <PayloadFormat kFormat>
struct LowLatencyRailDispatchKernel {
  using Args = LowLatencyRailDispatchArgs;
  static constexpr Kernel kName = Kernel::kLowLatencyDispatch;
  static constexpr bool kBlocksWait = true;
  static constexpr int kMaxThreads = 512;
  DC_DEVICE static void run(const Args& args) { low_latency_rail_dispatch<kFormat>(args); }
};

template <CombineRows kRows, bool kLogFmt = false>
struct LowLatencyRailCombineKernel {
  using Args = LowLatencyRailCombineArgs;
  static constexpr Kernel kName = Kernel::kLowLatencyCombine;
  static constexpr bool kBlocksWait = true;
  static constexpr int kMaxThreads = 512;
  DC_DEVICE static void run(const Args& args) { low_latency_rail_combine<kRows, kLogFmt>(args); }
};

}  // namespace deep_comm
