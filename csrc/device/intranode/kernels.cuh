// The intranode kernels as types, as a target needs them for a launch. kBlocksWait: blocks wait for
// other blocks, here or at a peer, so all must run at once.
#pragma once

#include "device/intranode/barrier.cuh"
#include "device/intranode/combine.cuh"
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

namespace deep_comm {

struct LayoutKernel {
  using Args = LayoutArgs;
  static constexpr Kernel kName = Kernel::kLayout;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 1024;
  DC_DEVICE static void run(const Args& args) { get_dispatch_layout(args); }
};

struct NotifyKernel {
  using Args = NotifyArgs;
  static constexpr Kernel kName = Kernel::kNotifyDispatch;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 1024;
  DC_DEVICE static void run(const Args& args) { notify_dispatch(args); }
};

template <bool kIsExpanded, bool kIsQuantised>
struct DispatchKernel {
  using Args = DispatchArgs;
  static constexpr Kernel kName = Kernel::kDispatch;
  static constexpr bool kBlocksWait = true;
  // 20 warps leave 96 registers per thread, and let four ranks have four receiving warps each.
  static constexpr int kMaxThreads = 640;
  DC_DEVICE static void run(const Args& args) {
    dispatch<DispatchForm<kIsExpanded, kIsQuantised>>(args);
  }
};

// kIsExpanded: beside ReduceExpertsKernel<kDtype, true>.
template <Dtype kDtype, bool kIsExpanded>
struct CombineKernel {
  using Args = CombineArgs;
  static constexpr Kernel kName = Kernel::kCombine;
  static constexpr bool kBlocksWait = true;
  // 26 warps leave 72 registers per thread: loads of four rows in flight without spilling.
  static constexpr int kMaxThreads = 832;
  static constexpr bool kBeginsBeside = kIsExpanded;
  DC_DEVICE static void run(const Args& args) { combine<kDtype, kIsExpanded>(args); }
};

struct BarrierKernel {
  using Args = BarrierArgs;
  static constexpr Kernel kName = Kernel::kBarrier;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = kWarpSize;
  DC_DEVICE static void run(const Args& args) { barrier(args); }
};

struct NumberRowsKernel {
  using Args = NumberRowsArgs;
  static constexpr Kernel kName = Kernel::kNumberRows;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 1024;
  DC_DEVICE static void run(const Args& args) { number_rows(args); }
};

struct ExpandKernel {
  using Args = ExpandRowsArgs;
  static constexpr Kernel kName = Kernel::kExpandRows;
  static constexpr bool kBlocksWait = false;
  static constexpr bool kBeginsBeside = true;  // the dispatch
  static constexpr int kMaxThreads = 512;
  DC_DEVICE static void run(const Args& args) { expand_rows(args); }
};

struct NumberReceivedKernel {
  using Args = NumberReceivedArgs;
  static constexpr Kernel kName = Kernel::kNumberReceived;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 1024;
  DC_DEVICE static void run(const Args& args) { number_received(args); }
};

struct ExpandReceivedKernel {
  using Args = ExpandReceivedArgs;
  static constexpr Kernel kName = Kernel::kExpandReceived;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 1024;
  DC_DEVICE static void run(const Args& args) { expand_received(args); }
};

struct TransposeScalesKernel {
  using Args = TransposeScalesArgs;
  static constexpr Kernel kName = Kernel::kTransposeScales;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 1024;
  DC_DEVICE static void run(const Args& args) { transpose_scales(args); }
};

// kForPeers: inside a node, of tokens that return to peers, for CombineKernel<kDtype, true>.
template <Dtype kDtype, bool kForPeers>
struct ReduceExpertsKernel {
  using Args = ReduceExpertsArgs;
  static constexpr Kernel kName = Kernel::kReduceExperts;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 640;
  DC_DEVICE static void run(const Args& args) {
    if constexpr (kForPeers) {
      reduce_for_combine<kDtype>(args);
    } else {
      reduce_experts<kDtype>(args);
    }
  }
};

struct ShrinkBarrierKernel {
  using Args = ShrinkBarrierArgs;
  static constexpr Kernel kName = Kernel::kShrinkBarrier;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 32;
  DC_DEVICE static void run(const Args& args) { shrink_barrier(args); }
};

}  // namespace deep_comm
