// The rail's kernels over NVSHMEM: the same sources as in engine_cuda.cu, with
// another arch::rail_put.
#define DEEP_COMM_RAIL_NVSHMEM 1

#include <nvshmem.h>
#include <nvshmemx.h>

#include "host/launch_cuda.cuh"
#include "host/nvshmem_module.hpp"
#include "host/rail_fingerprint.hpp"
#include "host/rail_kernel_list.hpp"

namespace deep_comm {

namespace {

void prepare_rail_kernel(int kernel, int smem_bytes_limit) {
  RailKernelList::for_each([=]<class KernelType>(int place, std::type_identity<KernelType>) {
    if (place == kernel) prepare_kernel<KernelType>(smem_bytes_limit);
  });
}

void launch_rail_kernel(int kernel, const LaunchConfig& config, const void* args, uint64_t stream) {
  RailKernelList::for_each([&]<class KernelType>(int place, std::type_identity<KernelType>) {
    if (place != kernel) return;
    launch_kernel<KernelType>(config, *static_cast<const typename KernelType::Args*>(args), stream);
  });
}

}  // namespace

const RailKernels* nvshmem_rail_kernels() {
  static const RailKernels kernels{rail_fingerprint(), prepare_rail_kernel, launch_rail_kernel,
                                   nvshmem_quiet};
  return &kernels;
}

// ---- the host side ------------------------------------------------------------------------------

int nvshmem_module_version() {
  return 10000 * NVSHMEM_VENDOR_MAJOR_VERSION + 100 * NVSHMEM_VENDOR_MINOR_VERSION +
         NVSHMEM_VENDOR_PATCH_VERSION;
}

bool nvshmem_is_up() { return nvshmemx_init_status() >= NVSHMEM_STATUS_IS_INITIALIZED; }

void nvshmem_attach() {
  if (!nvshmem_is_up()) throw std::runtime_error("NVSHMEM is not initialised in this process");
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  // Bootstraps nothing: registers the device state of this module with the library that runs.
  const int status = nvshmemx_init_attr(0, &attributes);
  if (status != 0) {
    throw std::runtime_error("nvshmemx_init_attr failed with " + std::to_string(status));
  }
}

NvshmemPlace nvshmem_place() { return {nvshmem_my_pe(), nvshmem_n_pes()}; }

uintptr_t nvshmem_allocate(size_t num_bytes) {
  return reinterpret_cast<uintptr_t>(nvshmem_align(128, num_bytes));
}
void nvshmem_release(uintptr_t address) { nvshmem_free(reinterpret_cast<void*>(address)); }

uintptr_t nvshmem_peer_address(uintptr_t address, int pe) {
  return reinterpret_cast<uintptr_t>(nvshmem_ptr(reinterpret_cast<void*>(address), pe));
}

void nvshmem_clear(uintptr_t address, size_t num_bytes) {
  // A stream of its own: the default one would wait for kernels that may
  // themselves wait for this rank.
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  const cudaError_t zeroed =
      cudaMemsetAsync(reinterpret_cast<void*>(address), 0, num_bytes, stream);
  const cudaError_t ended = cudaStreamSynchronize(stream);
  (void)cudaStreamDestroy(stream);
  check(zeroed, "cudaMemsetAsync");
  check(ended, "cudaStreamSynchronize");
}

void nvshmem_settle() { nvshmem_quiet(); }

uintptr_t nvshmem_queues(int num_qps) {
#if NVSHMEM_VENDOR_MAJOR_VERSION > 3 || \
    (NVSHMEM_VENDOR_MAJOR_VERSION == 3 && NVSHMEM_VENDOR_MINOR_VERSION >= 5)
  nvshmemx_qp_handle_t* handles = nullptr;
  // Without a transport that has queues, one is as good as many.
  if (nvshmemx_qp_create(num_qps, &handles) != 0 || handles == nullptr) return 0;
  static_assert(sizeof(nvshmemx_qp_handle_t) == sizeof(int32_t));
  void* copy = nullptr;
  check(cudaMalloc(&copy, sizeof(int32_t) * num_qps), "cudaMalloc");
  const cudaError_t copied =
      cudaMemcpy(copy, handles, sizeof(int32_t) * num_qps, cudaMemcpyDefault);
  if (copied != cudaSuccess) (void)cudaFree(copy);
  check(copied, "cudaMemcpy");
  return reinterpret_cast<uintptr_t>(copy);
#else
  (void)num_qps;
  return 0;
#endif
}

}  // namespace deep_comm
