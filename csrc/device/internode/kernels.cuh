// The internode kernels as types, as a target needs them for a launch.
#pragma once

#include "device/internode/barrier.cuh"
#include "device/internode/combine.cuh"
#include "device/internode/count.cuh"
#include "device/internode/dispatch.cuh"
#include "device/internode/layout.cuh"
#include "device/internode/notify.cuh"
#include "device/layout/kernel_traits.cuh"

namespace deep_comm {

struct InternodeLayoutKernel : LocalKernel<InternodeLayoutArgs, Kernel::kLayout, 1024> {
  DC_DEVICE static void run(const InternodeLayoutArgs& args) { internode_layout(args); }
};

struct InternodeCountKernel : LocalKernel<InternodeCountArgs, Kernel::kInternodeCount, 1024> {
  DC_DEVICE static void run(const InternodeCountArgs& args) { internode_count(args); }
};

struct InternodeNotifyKernel : LocalKernel<InternodeNotifyArgs, Kernel::kInternodeNotify, 1024> {
  DC_DEVICE static void run(const InternodeNotifyArgs& args) { internode_notify(args); }
};

struct InternodeBarrierKernel : LocalKernel<InternodeBarrierArgs, Kernel::kBarrier, kWarpSize> {
  DC_DEVICE static void run(const InternodeBarrierArgs& args) { internode_barrier(args); }
};

template <bool kIsQuantised>
struct InternodeDispatchKernel
    : WaitingKernel<InternodeDispatchArgs, Kernel::kInternodeDispatch, 512> {
  DC_DEVICE static void run(const InternodeDispatchArgs& args) {
    internode_dispatch<kIsQuantised>(args);
  }
};

template <Dtype kDtype>
struct InternodeCombineKernel
    : WaitingKernel<InternodeCombineArgs, Kernel::kInternodeCombine, 768> {
  // As combine's inside a node: registers for loads of four rows in flight.
  DC_DEVICE static void run(const InternodeCombineArgs& args) { internode_combine<kDtype>(args); }
};

}  // namespace deep_comm
