// The kernels of tensor parallelism as types, as a target needs them for a launch.
#pragma once

#include "device/tp/collective.cuh"
#include "device/tp/matmul.cuh"
#include "device/tp/words.cuh"

namespace deep_comm {

template <Collective kOp, Dtype kDtype>
struct CollectiveKernel {
  using Args = CollectiveArgs;
  static constexpr Kernel kName = CollectiveForm<kOp>::kKernel;
  static constexpr bool kBlocksWait = true;
  static constexpr int kMaxThreads = 512;
  DC_DEVICE static void run(const Args& args) { collective<kOp, kDtype>(args); }
};

struct SignalWordKernel {
  using Args = WordArgs;
  static constexpr Kernel kName = Kernel::kSignalWord;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = kWarpSize;
  DC_DEVICE static void run(const Args& args) { signal_word(args); }
};

struct AwaitWordKernel {
  using Args = WordArgs;
  static constexpr Kernel kName = Kernel::kAwaitWord;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = kWarpSize;
  DC_DEVICE static void run(const Args& args) { await_word(args); }
};

struct BeginMatmulKernel {
  using Args = MatmulArgs;
  static constexpr Kernel kName = Kernel::kMatmul;
  static constexpr bool kBlocksWait = true;
  static constexpr int kMaxThreads = kWarpSize;
  DC_DEVICE static void run(const Args& args) { begin_matmul(args); }
};

struct AwaitPushKernel {
  using Args = MatmulArgs;
  static constexpr Kernel kName = Kernel::kAwaitWord;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = kWarpSize;
  DC_DEVICE static void run(const Args& args) { await_push(args); }
};

struct EndMatmulKernel {
  using Args = MatmulArgs;
  static constexpr Kernel kName = Kernel::kAwaitWord;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = kWarpSize;
  DC_DEVICE static void run(const Args& args) { end_matmul(args); }
};

struct PushKernel {
  using Args = PushArgs;
  static constexpr Kernel kName = Kernel::kPush;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 2 * kWarpSize;
  DC_DEVICE static void run(const Args& args) { push(args); }
};

template <Dtype kDtype>
struct AddSlotsKernel {
  using Args = AddSlotsArgs;
  static constexpr Kernel kName = Kernel::kAddSlots;
  static constexpr bool kBlocksWait = false;
  static constexpr int kMaxThreads = 512;
  DC_DEVICE static void run(const Args& args) { add_slots<kDtype>(args); }
};

}  // namespace deep_comm
