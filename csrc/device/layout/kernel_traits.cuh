// What a target needs to know of a kernel, beside the function that runs it. A kernel is a type with one of
// these as its base and `static void run(const Args&)`.
#pragma once

#include "device/layout/names.cuh"

namespace deep_comm {

template <class KernelArgs, Kernel kKernel, int kThreads, bool kWaits>
struct KernelTraits {
  using Args = KernelArgs;
  static constexpr Kernel kName = kKernel;
  static constexpr int kMaxThreads = kThreads;  // of a block
  static constexpr bool kBlocksWait = kWaits;
};

// Blocks wait for other blocks, here or at a peer, so all must run at once.
template <class Args, Kernel kKernel, int kThreads>
using WaitingKernel = KernelTraits<Args, kKernel, kThreads, true>;

// Blocks run in any order.
template <class Args, Kernel kKernel, int kThreads>
using LocalKernel = KernelTraits<Args, kKernel, kThreads, false>;

}  // namespace deep_comm
