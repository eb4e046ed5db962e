// Entry points of kernels on the GPU target, and their launch; included by the
// files that nvcc compiles.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "device/layout/names.cuh"
#include "host/check_cuda.hpp"
#include "host/target.hpp"

namespace deep_comm {

namespace {

// The functions that are launched. Callers look for operations by name in profiles, whose columns
// are short: so the operation comes first, in all its forms, and once per call.
namespace kernels {

// One block per SM: the kernels size their shared memory for a whole SM.
#define DC_LAUNCHED_AS(NAME)                                         \
  template <class KernelType>                                        \
  __global__ void __launch_bounds__(KernelType::kMaxThreads, 1)      \
      NAME(const __grid_constant__ typename KernelType::Args args) { \
    KernelType::run(args);                                           \
  }
DC_LAUNCHED_AS(layout)
DC_LAUNCHED_AS(notify)
DC_LAUNCHED_AS(dispatch)
DC_LAUNCHED_AS(combine)
DC_LAUNCHED_AS(barrier)
DC_LAUNCHED_AS(all_gather)
DC_LAUNCHED_AS(reduce_scatter)
DC_LAUNCHED_AS(all_reduce)
DC_LAUNCHED_AS(begin_matmul)
DC_LAUNCHED_AS(signal_word)
DC_LAUNCHED_AS(await_word)
DC_LAUNCHED_AS(local)
#undef DC_LAUNCHED_AS

}  // namespace kernels

template <class KernelType>
constexpr auto entry_of() {
  constexpr Kernel kName = KernelType::kName;
  if constexpr (kName == Kernel::kDispatch || kName == Kernel::kInternodeDispatch ||
                kName == Kernel::kLowLatencyDispatch) {
    return &kernels::dispatch<KernelType>;
  } else if constexpr (kName == Kernel::kCombine || kName == Kernel::kInternodeCombine ||
                       kName == Kernel::kLowLatencyCombine) {
    return &kernels::combine<KernelType>;
  } else if constexpr (kName == Kernel::kNotifyDispatch || kName == Kernel::kInternodeNotify) {
    return &kernels::notify<KernelType>;
  } else if constexpr (kName == Kernel::kBarrier) {
    return &kernels::barrier<KernelType>;
  } else if constexpr (kName == Kernel::kAllGather) {
    return &kernels::all_gather<KernelType>;
  } else if constexpr (kName == Kernel::kReduceScatter) {
    return &kernels::reduce_scatter<KernelType>;
  } else if constexpr (kName == Kernel::kAllReduce) {
    return &kernels::all_reduce<KernelType>;
  } else if constexpr (kName == Kernel::kMatmul) {
    return &kernels::begin_matmul<KernelType>;
  } else if constexpr (kName == Kernel::kSignalWord) {
    return &kernels::signal_word<KernelType>;
  } else if constexpr (kName == Kernel::kAwaitWord) {
    return &kernels::await_word<KernelType>;
  } else if constexpr (kName == Kernel::kLayout) {
    return &kernels::layout<KernelType>;
  } else {
    return &kernels::local<KernelType>;
  }
}

// The least part of an SM's shared memory that holds one block, on sm_90. A hint: where an SM has
// less, the driver gives what the block needs.
unsigned int carveout_percent(size_t smem_bytes) {
  constexpr size_t kSmemBytesOfSm = 228 * 1024, kReservedBytesOfBlock = 1024;
  return static_cast<unsigned int>(
      ceil_div<size_t>(100 * (smem_bytes + kReservedBytesOfBlock), kSmemBytesOfSm));
}

// Loads the kernel now: at its first launch, loading would wait for kernels that may be
// waiting for this rank.
//
// Once per device: the driver does the work of a function's first launch again after the attribute
// was set, even to the same value.
template <class KernelType>
void prepare_kernel(int smem_bytes_limit) {
  static std::atomic<uint64_t> prepared{0};  // a bit per device
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((prepared.load(std::memory_order_relaxed) & bit) != 0) return;
  check(cudaFuncSetAttribute(entry_of<KernelType>(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             smem_bytes_limit),
        "cudaFuncSetAttribute");
  prepared.fetch_or(bit, std::memory_order_relaxed);
}

#if CUDART_VERSION >= 12050

using DriverLaunch = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);

// Null if the driver has none.
DriverLaunch find_driver_launch() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const bool is_there =
      cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &found, 12000, cudaEnableDefault,
                                       &result) == cudaSuccess &&
      result == cudaDriverEntryPointSuccess;
  if (!is_there) cudaGetLastError();
  return is_there ? reinterpret_cast<DriverLaunch>(found) : nullptr;
}

// Of every device.
template <class KernelType>
CUfunction find_driver_kernel() {
  cudaKernel_t kernel = nullptr;
  if (cudaGetKernel(&kernel, reinterpret_cast<const void*>(entry_of<KernelType>())) ==
      cudaSuccess) {
    return reinterpret_cast<CUfunction>(kernel);
  }
  cudaGetLastError();
  return nullptr;
}

// Through the driver, which spares the host what the runtime does in every launch to find the
// kernel. False: it was not launched, and the runtime's launch says why, if it cannot either (the
// driver needs a context that the runtime would make current).
template <class KernelType>
bool launch_by_driver(const cudaLaunchConfig_t& config, const typename KernelType::Args& args) {
  static const DriverLaunch launch = find_driver_launch();
  static const CUfunction kernel = find_driver_kernel<KernelType>();
  if (launch == nullptr || kernel == nullptr) return false;
  CUlaunchConfig same{};
  same.gridDimX = config.gridDim.x;
  same.gridDimY = config.gridDim.y;
  same.gridDimZ = config.gridDim.z;
  same.blockDimX = config.blockDim.x;
  same.blockDimY = config.blockDim.y;
  same.blockDimZ = config.blockDim.z;
  same.sharedMemBytes = static_cast<unsigned int>(config.dynamicSmemBytes);
  same.hStream = config.stream;
  same.attrs = reinterpret_cast<CUlaunchAttribute*>(config.attrs);
  same.numAttrs = config.numAttrs;
  void* parameters[] = {const_cast<typename KernelType::Args*>(&args)};
  return launch(&same, kernel, parameters, nullptr) == CUDA_SUCCESS;
}

#else

template <class KernelType>
bool launch_by_driver(const cudaLaunchConfig_t&, const typename KernelType::Args&) {
  return false;
}

#endif

template <class KernelType>
void launch_kernel(const LaunchConfig& config, const typename KernelType::Args& args,
                   uint64_t stream) {
  constexpr bool kAwaitsEarlier = kBeginsEarly<KernelType> || kBeginsBeside<KernelType>;
  const bool begins_early = kAwaitsEarlier && config.may_begin_early;
  // Blocks that wait for each other and for their peers' blocks must all run at once, or not start.
  // But outside of graphs a cooperative launch begins when the one before it has ended.
  const bool is_cooperative =
      KernelType::kBlocksWait && !(kBeginsBeside<KernelType> && begins_early);
  cudaLaunchAttribute attributes[3]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = is_cooperative ? 1 : 0;
  // What shared memory leaves is L1, which bounds the loads that a block's
  // readers can have under way.
  attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[1].val.sharedMemCarveout = carveout_percent(config.smem_bytes);
  attributes[2].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[2].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch_config{};
  launch_config.gridDim = dim3(config.num_blocks);
  launch_config.blockDim = dim3(config.num_threads);
  launch_config.dynamicSmemBytes = config.smem_bytes;
  launch_config.stream = reinterpret_cast<cudaStream_t>(stream);
  launch_config.attrs = attributes;
  launch_config.numAttrs = begins_early ? 3 : 2;
  if (launch_by_driver<KernelType>(launch_config, args)) return;
  check(cudaLaunchKernelEx(&launch_config, entry_of<KernelType>(), args),
        kKernelNames[static_cast<int>(KernelType::kName)]);
}

}  // namespace

}  // namespace deep_comm
