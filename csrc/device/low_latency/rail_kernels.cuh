// The low-latency kernels of groups of several nodes as types, as a target needs them for a launch.
#pragma once

#include "device/layout/kernel_traits.cuh"
#include "device/low_latency/rail_combine.cuh"
#include "device/low_latency/rail_dispatch.cuh"

namespace deep_comm {

template <PayloadFormat kFormat>
struct LowLatencyRailDispatchKernel
    : WaitingKernel<LowLatencyRailDispatchArgs, Kernel::kLowLatencyDispatch, 512> {
  DC_DEVICE static void run(const LowLatencyRailDispatchArgs& args) {
    low_latency_rail_dispatch<kFormat>(args);
  }
};

template <CombineRows kRows, bool kLogFmt = false>
struct LowLatencyRailCombineKernel
    : WaitingKernel<LowLatencyRailCombineArgs, Kernel::kLowLatencyCombine, 512> {
  DC_DEVICE static void run(const LowLatencyRailCombineArgs& args) {
    low_latency_rail_combine<kRows, kLogFmt>(args);
  }
};

}  // namespace deep_comm
