// Device memory of the CUDA target: allocations that other processes of the host can map, and what
// the heap needs to know about devices. Every failure is a std::runtime_error that says what was
// tried and CUDA's name for what went wrong. The device current in the calling thread is left as it
// was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace deep_comm {

// Zeroed, and at the start of its own CUDA allocation, as IPC wants it.
uintptr_t cuda_allocate(int device, size_t num_bytes);
void cuda_free(int device, uintptr_t address);

// 64 bytes naming the allocation that starts at `address` to other processes of this host.
std::string cuda_ipc_handle(uintptr_t address);
uintptr_t cuda_ipc_open(int device, const std::string& handle);
void cuda_ipc_close(int device, uintptr_t address);

// Lets kernels on `device` reach the memory of `peer_device`, both of this process. Idempotent.
void cuda_enable_peer_access(int device, int peer_device);
bool cuda_can_access_peer(int device, int peer_device);
int cuda_num_sms(int device);

// Shared memory that one block may have: 99 KiB to 227 KiB.
int cuda_smem_bytes_limit(int device);

}  // namespace deep_comm
