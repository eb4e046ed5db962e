// The engine on the GPU target: the kernels' entry points and their launches.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "host/engine_impl.hpp"
#include "host/target_cuda.hpp"

namespace deep_comm {

namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + " (" +
                           cudaGetErrorString(status) + ")");
}

// One block an SM: the kernels size their shared memory for a whole SM.
template <class KernelType>
__global__ void __launch_bounds__(KernelType::kMaxThreads, 1)
    entry(const __grid_constant__ typename KernelType::Args args) {
  KernelType::run(args);
}

// The least part of an SM's shared memory that holds one block.
unsigned int carveout_percent(size_t smem_bytes) {
  constexpr size_t kSmemBytesOfSm = 228 * 1024, kReservedBytesOfBlock = 1024;
  return static_cast<unsigned int>(
      ceil_div<size_t>(100 * (smem_bytes + kReservedBytesOfBlock), kSmemBytesOfSm));
}

}  // namespace

// Loads the kernel now: at its first launch, loading would wait for kernels that may be waiting for this rank.
template <class KernelType>
void CudaTarget::prepare() {
  check(cudaFuncSetAttribute(entry<KernelType>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kTuning.smem_bytes_limit),
        "cudaFuncSetAttribute");
}

template <class KernelType>
void CudaTarget::launch(const LaunchConfig& config, const typename KernelType::Args& args,
                        uint64_t stream) {
  // Blocks that wait for each other and for their peers' blocks must all run at once, or not start.
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = KernelType::kBlocksWait ? 1 : 0;
  // What shared memory leaves is L1, which bounds the loads that a block's readers can have under way.
  attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[1].val.sharedMemCarveout = carveout_percent(config.smem_bytes);
  cudaLaunchConfig_t launch_config{};
  launch_config.gridDim = dim3(config.num_blocks);
  launch_config.blockDim = dim3(config.num_threads);
  launch_config.dynamicSmemBytes = config.smem_bytes;
  launch_config.stream = reinterpret_cast<cudaStream_t>(stream);
  launch_config.attrs = attributes;
  launch_config.numAttrs = 2;
  check(cudaLaunchKernelEx(&launch_config, entry<KernelType>, args),
        kKernelNames[static_cast<int>(KernelType::kName)]);
}

void* CudaTarget::allocate_mapped(size_t num_bytes) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, num_bytes, cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  memset(memory, 0, num_bytes);
  return memory;
}

void CudaTarget::free_mapped(void* memory) {
  // Also called from destructors, where a failure (a context already gone) has nobody to hear of it.
  (void)cudaFreeHost(memory);
}

void CudaTarget::fill_zero(void* memory, size_t num_bytes) {
  check(cudaMemset(memory, 0, num_bytes), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void CudaTarget::copy_in(void* memory, const void* source, size_t num_bytes) {
  check(cudaMemcpy(memory, source, num_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

bool CudaTarget::is_idle(uint64_t stream) {
  const cudaError_t status = cudaStreamQuery(reinterpret_cast<cudaStream_t>(stream));
  if (status == cudaErrorNotReady) return false;
  check(status, "cudaStreamQuery");
  return true;
}

template class Engine<CudaTarget>;

}  // namespace deep_comm
