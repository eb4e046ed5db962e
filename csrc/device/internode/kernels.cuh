// The internode kernels as types, as a target needs them for a launch. kBlocksWait: blocks wait for
// other blocks, here or at a peer, so all must run at once.
#pragma once

#include "device/internode/barrier.cuh"
#include "device/internode/combine.cuh"
#include "device/internode/count.cuh"
#include "device/internode/dispatch.cuh"
#include "device/internode/layout.cuh"
#include "device/internode/notify.cuh"

namespace deep_comm {

struct InternodeLayoutKernel {
  using Args = InternodeLayoutArgs;
  static constexpr Kernel kName = Kernel::kLayout;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 1024;
  DC_DEVICE static void run(const Args& args) { internode_layout(args); }
};

struct InternodeCountKernel {
  using Args = InternodeCountArgs;
  static constexpr Kernel kName = Kernel::kInternodeCount;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 1024;
  DC_DEVICE static void run(const Args& args) { internode_count(args); }
};

struct InternodeNotifyKernel {
  using Args = InternodeNotifyArgs;
  static constexpr Kernel kName = Kernel::kInternodeNotify;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 1024;
  DC_DEVICE static void run(const Args& args) { internode_notify(args); }
};

struct InternodeBarrierKernel {
  using Args = InternodeBarrierArgs;
  static constexpr Kernel kName = Kernel::kBarrier;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = kWarpSize;
  DC_DEVICE static void run(const Args& args) { internode_barrier(args); }
};

template <bool kIsQuantised>
struct InternodeDispatchKernel {
  using Args = InternodeDispatchArgs;
  static constexpr Kernel kName = Kernel::kInternodeDispatch;
  static constexpr bool kBlocksWait = true;
  static constexpr int kMaxThreads = 512;
  DC_DEVICE static void run(const Args& args) { internode_dispatch<kIsQuantised>(args); }
};

template <Dtype kDtype>
struct InternodeCombineKernel {
  using Args = InternodeCombineArgs;
  static constexpr Kernel kName = Kernel::kInternodeCombine;
  static constexpr bool kBlocksWait = true;
  // As combine's inside a node: registers for loads of four rows in flight.
  static constexpr int kMaxThreads = 768;
  DC_DEVICE static void run(const Args& args) { internode_combine<kDtype>(args); }
};

}  // namespace deep_comm
