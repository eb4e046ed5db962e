// The kernels that post on the rail, by number: what the NVSHMEM module compiles a second time. All
// of them stand here: one that did not would post to a software NIC that is not there.
#pragma once

#include <cstddef>
#include <type_traits>

#include "device/internode/kernels.cuh"
#include "device/low_latency/rail_kernels.cuh"

namespace deep_comm {

template <class... Kernels>
struct KernelList {
  static constexpr int kCount = static_cast<int>(sizeof...(Kernels));

  // The place of a kernel, or -1.
  template <class Wanted>
  static constexpr int index_of() {
    int index = -1, place = 0;
    ((index = std::is_same_v<Wanted, Kernels> ? place : index, ++place), ...);
    return index;
  }
  // visit(index, std::type_identity<K>) for each.
  template <class Visit>
  static void for_each(Visit visit) {
    int place = 0;
    (visit(place++, std::type_identity<Kernels>{}), ...);
  }
};

using RailKernelList =
    KernelList<InternodeNotifyKernel, InternodeBarrierKernel, InternodeDispatchKernel<false>,
               InternodeDispatchKernel<true>, InternodeCombineKernel<Dtype::kBfloat16>,
               InternodeCombineKernel<Dtype::kFloat16>, InternodeCombineKernel<Dtype::kFloat32>,
               LowLatencyRailDispatchKernel<PayloadFormat::kBfloat16>,
               LowLatencyRailDispatchKernel<PayloadFormat::kFp8>,
               LowLatencyRailDispatchKernel<PayloadFormat::kNvFp4>,
               LowLatencyRailCombineKernel<CombineRows::kSums>,
               LowLatencyRailCombineKernel<CombineRows::kReduced>,
               LowLatencyRailCombineKernel<CombineRows::kSelections>,
               LowLatencyRailCombineKernel<CombineRows::kSums, true>,
               LowLatencyRailCombineKernel<CombineRows::kReduced, true>>;

}  // namespace deep_comm
