// The kernels of tensor parallelism as types, as a target needs them for a launch.
#pragma once

#include "device/layout/kernel_traits.cuh"
#include "device/tp/collective.cuh"
#include "device/tp/matmul.cuh"
#include "device/tp/words.cuh"

namespace deep_comm {

template <Collective kOp, Dtype kDtype, bool kMulticast = false>
struct CollectiveKernel : WaitingKernel<CollectiveArgs, CollectiveForm<kOp>::kKernel, 512> {
  DC_DEVICE static void run(const CollectiveArgs& args) {
    collective<kOp, kDtype, kMulticast>(args);
  }
};

struct SignalWordKernel : LocalKernel<WordArgs, Kernel::kSignalWord, kWarpSize> {
  DC_DEVICE static void run(const WordArgs& args) { signal_word(args); }
};

struct AwaitWordKernel : LocalKernel<WordArgs, Kernel::kAwaitWord, kWarpSize> {
  DC_DEVICE static void run(const WordArgs& args) { await_word(args); }
};

struct BeginMatmulKernel : WaitingKernel<MatmulArgs, Kernel::kMatmul, kWarpSize> {
  DC_DEVICE static void run(const MatmulArgs& args) { begin_matmul(args); }
};

struct AwaitPushKernel : LocalKernel<MatmulArgs, Kernel::kAwaitWord, kWarpSize> {
  DC_DEVICE static void run(const MatmulArgs& args) { await_push(args); }
};

struct EndMatmulKernel : LocalKernel<MatmulArgs, Kernel::kAwaitWord, kWarpSize> {
  DC_DEVICE static void run(const MatmulArgs& args) { end_matmul(args); }
};

struct PushKernel : LocalKernel<PushArgs, Kernel::kPush, 2 * kWarpSize> {
  DC_DEVICE static void run(const PushArgs& args) { push(args); }
};

template <Dtype kDtype>
struct AddSlotsKernel : LocalKernel<AddSlotsArgs, Kernel::kAddSlots, 512> {
  DC_DEVICE static void run(const AddSlotsArgs& args) { add_slots<kDtype>(args); }
};

}  // namespace deep_comm
