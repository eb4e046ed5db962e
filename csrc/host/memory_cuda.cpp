#include "host/memory_cuda.hpp"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "host/check_cuda.hpp"

namespace deep_comm {

namespace {

std::string on_device(const std::string& action, int device) {
  return action + " on CUDA device " + std::to_string(device);
}

std::string hex(uintptr_t address) {
  char text[2 + 16 + 1];
  snprintf(text, sizeof(text), "0x%zx", static_cast<size_t>(address));
  return text;
}

class DeviceGuard {
 public:
  DeviceGuard(int device, const std::string& action) {
    check(cudaGetDevice(&previous_), on_device(action, device));
    if (device != previous_) check(cudaSetDevice(device), on_device(action, device));
    is_changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (is_changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
  bool is_changed_ = false;
};

void* as_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

uintptr_t cuda_allocate(int device, size_t num_bytes) {
  const std::string action = "allocating " + std::to_string(num_bytes) + " bytes";
  if (num_bytes == 0) throw std::invalid_argument(on_device(action, device) + ": must be > 0");
  DeviceGuard guard(device, action);
  void* memory = nullptr;
  // Whole pages: where the last one is not, a peer's copy engines store to all of it at 300 GB/s instead of 390.
  constexpr size_t kPage = size_t{2} << 20;
  const cudaError_t status = cudaMalloc(&memory, (num_bytes + kPage - 1) / kPage * kPage);
  if (status == cudaErrorMemoryAllocation) {
    size_t free_bytes = 0, total_bytes = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &total_bytes);
    check(status, on_device(action, device) + " (" + std::to_string(free_bytes) + " of " +
                      std::to_string(total_bytes) + " bytes are free)");
  }
  check(status, on_device(action, device));
  // A peer may write into the heap as soon as it has the handle, so the zeros must have landed. A
  // stream of its own: the default one would wait for kernels that may themselves wait for this
  // rank.
  cudaStream_t stream = nullptr;
  cudaError_t zeroed = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (zeroed == cudaSuccess) zeroed = cudaMemsetAsync(memory, 0, num_bytes, stream);
  if (zeroed == cudaSuccess) zeroed = cudaStreamSynchronize(stream);
  if (stream != nullptr) cudaStreamDestroy(stream);
  if (zeroed != cudaSuccess) {
    cudaFree(memory);
    check(zeroed, on_device("zeroing " + std::to_string(num_bytes) + " bytes", device));
  }
  return reinterpret_cast<uintptr_t>(memory);
}

void cuda_free(int device, uintptr_t address) {
  if (address == 0) return;
  const std::string action = "freeing " + hex(address);
  DeviceGuard guard(device, action);
  check(cudaFree(as_pointer(address)), on_device(action, device));
}

std::string cuda_ipc_handle(uintptr_t address) {
  cudaIpcMemHandle_t handle;
  static_assert(sizeof(handle) == 64);
  check(cudaIpcGetMemHandle(&handle, as_pointer(address)), "naming " + hex(address) + " for IPC");
  return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

uintptr_t cuda_ipc_open(int device, const std::string& handle_bytes) {
  cudaIpcMemHandle_t handle;
  if (handle_bytes.size() != sizeof(handle)) {
    throw std::invalid_argument("an IPC handle has " + std::to_string(sizeof(handle)) +
                                " bytes, got " + std::to_string(handle_bytes.size()));
  }
  memcpy(&handle, handle_bytes.data(), sizeof(handle));
  const std::string action = "mapping a peer's allocation by IPC";
  DeviceGuard guard(device, action);
  void* memory = nullptr;
  check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
        on_device(action, device));
  return reinterpret_cast<uintptr_t>(memory);
}

void cuda_ipc_close(int device, uintptr_t address) {
  if (address == 0) return;
  const std::string action = "unmapping the peer's allocation at " + hex(address);
  DeviceGuard guard(device, action);
  check(cudaIpcCloseMemHandle(as_pointer(address)), on_device(action, device));
}

void cuda_enable_peer_access(int device, int peer_device) {
  if (device == peer_device) return;
  const std::string action = "enabling access to peer device " + std::to_string(peer_device);
  DeviceGuard guard(device, action);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer_device, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  check(status, on_device(action, device));
}

bool cuda_can_access_peer(int device, int peer_device) {
  if (device == peer_device) return true;
  int can_access = 0;
  check(cudaDeviceCanAccessPeer(&can_access, device, peer_device),
        on_device("asking for access to peer device " + std::to_string(peer_device), device));
  return can_access != 0;
}

int cuda_num_sms(int device) {
  int num_sms = 0;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
        on_device("counting the SMs", device));
  return num_sms;
}

int cuda_smem_bytes_limit(int device) {
  constexpr int kPlannedFor = 227 * 1024;  // sm_90's; more would change the shapes of launches
  int num_bytes = 0;
  check(cudaDeviceGetAttribute(&num_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        on_device("asking for a block's shared memory", device));
  return num_bytes < kPlannedFor ? num_bytes : kPlannedFor;
}

}  // namespace deep_comm
