// The low-latency kernels as types: what a target needs to launch one. kBeginsEarly: they are
// launched while the launch before theirs still runs, which they await by themselves. kMayShrink:
// without it there are no masks, and less code, which every launch fetches anew.
#pragma once

#include "device/low_latency/combine.cuh"
#include "device/low_latency/dispatch.cuh"

namespace deep_comm {

template <PayloadFormat kFormat, bool kMayShrink = true, bool kStaged = false>
struct LowLatencyDispatchKernel {
  using Args = LowLatencyDispatchArgs;
  static constexpr Kernel kName = Kernel::kLowLatencyDispatch;
  static constexpr bool kBlocksWait = true;
  static constexpr bool kBeginsEarly = true;
  static constexpr int kMaxThreads = 448;
  DC_DEVICE static void run(const Args& args) {
    low_latency_dispatch<kFormat, kMayShrink, kStaged>(args);
  }
};

template <CombineRows kRows, bool kLogFmt = false, bool kMayShrink = true>
struct LowLatencyCombineKernel {
  using Args = LowLatencyCombineArgs;
  static constexpr Kernel kName = Kernel::kLowLatencyCombine;
  static constexpr bool kBlocksWait = true;
  static constexpr bool kBeginsEarly = true;
  static constexpr int kMaxThreads = 448;
  DC_DEVICE static void run(const Args& args) {
    low_latency_combine<kRows, kLogFmt, kMayShrink>(args);
  }
};

}  // namespace deep_comm
