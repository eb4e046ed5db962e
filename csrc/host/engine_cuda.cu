// The engine on the GPU target: the kernels' entry points and their launches.
#include "host/engine_impl.hpp"
#include "host/launch_cuda.cuh"
#include "host/rail_fingerprint.hpp"
#include "host/target_cuda.hpp"

namespace deep_comm {

template <class KernelType>
void CudaTarget::prepare() {
  constexpr int kPlace = RailKernelList::index_of<KernelType>();
  if (kPlace >= 0 && over_nvshmem_ != nullptr) {
    over_nvshmem_->kernels()->prepare(kPlace, smem_bytes_limit_);
  } else {
    prepare_kernel<KernelType>(smem_bytes_limit_);
  }
}

template <class KernelType>
void CudaTarget::launch(const LaunchConfig& config, const typename KernelType::Args& args,
                        uint64_t stream) {
  constexpr int kPlace = RailKernelList::index_of<KernelType>();
  if (kPlace >= 0 && over_nvshmem_ != nullptr) {
    over_nvshmem_->kernels()->launch(kPlace, config, &args, stream);
  } else {
    if (kPlace < 0 || nic_ == nullptr) return launch_kernel<KernelType>(config, args, stream);
    const uint64_t launch = nic_->next_launch();
    auto numbered = args;
    if constexpr (requires { numbered.tiers.rail.port.queue; }) {
      numbered.tiers.rail.port.queue.launch = launch;
    }
    launch_kernel<KernelType>(config, numbered, stream);
    nic_->see_through(reinterpret_cast<void*>(stream), launch);
  }
}

RailPort CudaTarget::open_rail(RailPort port, int num_peers, uint64_t timeout_ns,
                               const RailOptions& options) {
  if (options.nvshmem.kernels == nullptr) {
    nic_ = std::make_shared<SoftwareNic>(device_,
                                         std::vector<uint8_t*>(port.bases, port.bases + num_peers),
                                         port.num_qps, port.num_bytes, timeout_ns, options);
    port.queue = nic_->queue();
    return port;
  }
  if (options.nvshmem.kernels->fingerprint != rail_fingerprint()) {
    throw std::runtime_error(
        "deep_comm._cuda and deep_comm._nvshmem are of different builds; install the package "
        "again");
  }
  over_nvshmem_ = std::make_shared<NvshmemRailState>(options.nvshmem, port, num_peers);
  return over_nvshmem_->port();
}

std::vector<uint64_t> CudaTarget::rail_put_bytes(const uint64_t* counters, size_t count) const {
  if (over_nvshmem_ != nullptr) return over_nvshmem_->put_bytes();
  return {counters, counters + count};
}

void* CudaTarget::allocate_mapped(size_t num_bytes) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, num_bytes, cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  memset(memory, 0, num_bytes);
  return memory;
}

void CudaTarget::free_mapped(void* memory) {
  // Also called from destructors, where a failure (a context already gone)
  // has nobody to hear of it.
  (void)cudaFreeHost(memory);
}

void CudaTarget::fill_zero(void* memory, size_t num_bytes) {
  const CudaDeviceScope scope(device_);
  check(cudaMemset(memory, 0, num_bytes), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void CudaTarget::copy(void* to, const void* from, size_t num_bytes, uint64_t stream) {
  const CudaDeviceScope scope(device_);
  check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault,
                        reinterpret_cast<cudaStream_t>(stream)),
        "cudaMemcpyAsync");
}

void CudaTarget::copy_in(void* memory, const void* source, size_t num_bytes) {
  const CudaDeviceScope scope(device_);
  check(cudaMemcpy(memory, source, num_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void CudaTarget::copy_beside_kernels(void* to, const void* from, size_t num_bytes) {
  // A stream of its own: those of the kernels end behind them.
  const CudaDeviceScope scope(device_);
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  const cudaError_t copied = cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream);
  const cudaError_t ended = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  check(copied, "cudaMemcpyAsync");
  check(ended, "cudaStreamSynchronize");
}

namespace {

// Never launched: its bound tells the host which primitives the device's code has. The driver's
// ptxVersion will not do, since cubins do not say what their PTX was compiled for.
__global__ void __launch_bounds__(arch::kHasEarlyLaunches ? 2 * kWarpSize : kWarpSize)
    primitives_mark() {}

}  // namespace

// Code with the primitives of sm_80, even on newer GPUs, relies on the stream's order.
bool CudaTarget::has_early_launches(int device) {
  const CudaDeviceScope scope(device);
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, primitives_mark), "cudaFuncGetAttributes");
  return attributes.maxThreadsPerBlock > kWarpSize;
}

bool CudaTarget::is_idle(uint64_t stream) {
  const CudaDeviceScope scope(device_);  // stream 0 is the current device's
  const CudaCaptureLeave leave;
  const cudaError_t status = cudaStreamQuery(reinterpret_cast<cudaStream_t>(stream));
  if (status == cudaErrorNotReady) return false;
  check(status, "cudaStreamQuery");
  return true;
}

template class Engine<CudaTarget>;

}  // namespace deep_comm
