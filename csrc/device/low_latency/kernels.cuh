// The low-latency kernels as types, as a target needs them for a launch. kBeginsEarly: a kernel is
// launched while the one before it still runs, and awaits its end by itself. What follows from the
// sizes of a call is a template parameter, because every launch fetches its code anew: kMayShrink
// (false: no masks), how rows are sent, kRotatesPeers (blocks begin with different peers).
#pragma once

#include "device/layout/kernel_traits.cuh"
#include "device/low_latency/combine.cuh"
#include "device/low_latency/dispatch.cuh"

namespace deep_comm {

template <PayloadFormat kFormat, bool kMayShrink = true, DispatchRows kRows = DispatchRows::kMany>
struct LowLatencyDispatchKernel
    : WaitingKernel<LowLatencyDispatchArgs, Kernel::kLowLatencyDispatch, 448> {
  static constexpr bool kBeginsEarly = true;
  DC_DEVICE static void run(const LowLatencyDispatchArgs& args) {
    low_latency_dispatch<kFormat, kMayShrink, kRows>(args);
  }
};

template <CombineRows kRows, bool kLogFmt = false, bool kMayShrink = true,
          bool kRotatesPeers = false>
struct LowLatencyCombineKernel
    : WaitingKernel<LowLatencyCombineArgs, Kernel::kLowLatencyCombine, 448> {
  static constexpr bool kBeginsEarly = true;
  DC_DEVICE static void run(const LowLatencyCombineArgs& args) {
    low_latency_combine<kRows, kLogFmt, kMayShrink, kRotatesPeers>(args);
  }
};

}  // namespace deep_comm
