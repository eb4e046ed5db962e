// The low-latency kernels as types: what a target needs to launch one. kBeginsEarly: they are
// launched while the launch before theirs still runs, which they await by themselves. What follows
// from the call's sizes is a kernel of its own, since every launch fetches its code anew: kMayShrink
// (without it there are no masks), how rows go, kTakesTurns (blocks begin with different peers).
#pragma once

#include "device/low_latency/combine.cuh"
#include "device/low_latency/dispatch.cuh"

namespace deep_comm {

template <PayloadFormat kFormat, bool kMayShrink = true, DispatchRows kRows = DispatchRows::kHalves>
struct LowLatencyDispatchKernel {
  using Args = LowLatencyDispatchArgs;
  static constexpr Kernel kName = Kernel::kLowLatencyDispatch;
  static constexpr bool kBlocksWait = true;
  static constexpr bool kBeginsEarly = true;
  static constexpr int kMaxThreads = 448;
  DC_DEVICE static void run(const Args& args) {
    low_latency_dispatch<kFormat, kMayShrink, kRows>(args);
  }
};

template <CombineRows kRows, bool kLogFmt = false, bool kMayShrink = true,
          bool kRotatesPeers = false>
struct LowLatencyCombineKernel {
  using Args = LowLatencyCombineArgs;
  static constexpr Kernel kName = Kernel::kLowLatencyCombine;
  static constexpr bool kBlocksWait = true;
  static constexpr bool kBeginsEarly = true;
  static constexpr int kMaxThreads = 448;
  DC_DEVICE static void run(const Args& args) {
    low_latency_combine<kRows, kLogFmt, kMayShrink, kRotatesPeers>(args);
  }
};

}  // namespace deep_comm
