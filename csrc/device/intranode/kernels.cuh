// The intranode kernels as types, as a target needs them for a launch.
#pragma once

#include "device/intranode/barrier.cuh"
#include "device/intranode/combine.cuh"
#include "device/intranode/combine_sums.cuh"
#include "device/intranode/dispatch.cuh"
#include "device/intranode/expand.cuh"
#include "device/intranode/expand_received.cuh"
#include "device/intranode/get_dispatch_layout.cuh"
#include "device/intranode/notify_dispatch.cuh"
#include "device/intranode/number_received.cuh"
#include "device/intranode/number_rows.cuh"
#include "device/intranode/reduce_experts.cuh"
#include "device/intranode/shrink_barrier.cuh"
#include "device/intranode/transpose_scales.cuh"
#include "device/layout/kernel_traits.cuh"

namespace deep_comm {

struct LayoutKernel : LocalKernel<LayoutArgs, Kernel::kLayout, 1024> {
  DC_DEVICE static void run(const LayoutArgs& args) { get_dispatch_layout(args); }
};

struct NotifyKernel : LocalKernel<NotifyArgs, Kernel::kNotifyDispatch, 1024> {
  DC_DEVICE static void run(const NotifyArgs& args) { notify_dispatch(args); }
};

template <bool kIsExpanded, bool kIsQuantised>
struct DispatchKernel : WaitingKernel<DispatchArgs, Kernel::kDispatch, 640> {
  // 20 warps leave 96 registers per thread. Rings need most_ring_warps and one more.

  // The notify. It is not cooperative then: a block waits for the same block, or channel, of every
  // peer, and for none of its own rank.
  static constexpr bool kBeginsBeside = !kIsExpanded;
  DC_DEVICE static void run(const DispatchArgs& args) {
    dispatch<DispatchForm<kIsExpanded, kIsQuantised>>(args);
  }
};

// kIsExpanded: beside CombineSumsKernel.
template <Dtype kDtype, bool kIsExpanded>
struct CombineKernel : WaitingKernel<CombineArgs, Kernel::kCombine, 832> {
  // 26 warps leave 72 registers per thread: loads of four rows in flight without spilling.
  static constexpr bool kBeginsBeside = kIsExpanded;
  DC_DEVICE static void run(const CombineArgs& args) { combine<kDtype, kIsExpanded>(args); }
};

struct BarrierKernel : LocalKernel<BarrierArgs, Kernel::kBarrier, kWarpSize> {
  DC_DEVICE static void run(const BarrierArgs& args) { barrier(args); }
};

struct NumberRowsKernel : LocalKernel<NumberRowsArgs, Kernel::kNumberRows, 1024> {
  DC_DEVICE static void run(const NumberRowsArgs& args) { number_rows(args); }
};

struct ExpandKernel : LocalKernel<ExpandRowsArgs, Kernel::kExpandRows, 512> {
  static constexpr bool kBeginsBeside = true;  // the dispatch
  DC_DEVICE static void run(const ExpandRowsArgs& args) { expand_rows(args); }
};

struct NumberReceivedKernel : LocalKernel<NumberReceivedArgs, Kernel::kNumberReceived, 1024> {
  DC_DEVICE static void run(const NumberReceivedArgs& args) { number_received(args); }
};

struct ExpandReceivedKernel : LocalKernel<ExpandReceivedArgs, Kernel::kExpandReceived, 1024> {
  DC_DEVICE static void run(const ExpandReceivedArgs& args) { expand_received(args); }
};

struct TransposeScalesKernel : LocalKernel<TransposeScalesArgs, Kernel::kTransposeScales, 1024> {
  DC_DEVICE static void run(const TransposeScalesArgs& args) { transpose_scales(args); }
};

template <Dtype kDtype>
struct ReduceExpertsKernel : LocalKernel<ReduceExpertsArgs, Kernel::kReduceExperts, 640> {
  DC_DEVICE static void run(const ReduceExpertsArgs& args) { reduce_experts<kDtype>(args); }
};

// Blocks wait for the peers' first ones, and for none of this rank but the first.
template <Dtype kDtype>
struct CombineSumsKernel : LocalKernel<CombineSumsArgs, Kernel::kReduceExperts, 640> {
  DC_DEVICE static void run(const CombineSumsArgs& args) { combine_sums<kDtype>(args); }
};

struct ShrinkBarrierKernel : LocalKernel<ShrinkBarrierArgs, Kernel::kShrinkBarrier, 32> {
  DC_DEVICE static void run(const ShrinkBarrierArgs& args) { shrink_barrier(args); }
};

}  // namespace deep_comm
