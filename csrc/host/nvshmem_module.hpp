// What the NVSHMEM module offers: the rail's kernels, and the symmetric heap of the library that
// the process has initialised. Nothing of NVSHMEM's headers shows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/rail_kernels.hpp"

namespace deep_comm {

struct NvshmemPlace {
  int pe;
  int num_pes;
};

const RailKernels* nvshmem_rail_kernels();

// 10000 major + 100 minor + patch of the headers.
int nvshmem_module_version();
bool nvshmem_is_up();
// Gives this module's kernels the state of the library that runs. Once a process, after its start.
void nvshmem_attach();
NvshmemPlace nvshmem_place();
// Collective over all PEs. 0: there is no room.
uintptr_t nvshmem_allocate(size_t num_bytes);
void nvshmem_release(uintptr_t address);
// Where stores of this GPU reach the peer's part, or 0.
uintptr_t nvshmem_peer_address(uintptr_t address, int pe);
void nvshmem_clear(uintptr_t address, size_t num_bytes);
// All that this PE has put has landed.
void nvshmem_settle();
// Collective: handles of explicit queues in device memory; 0: there is the default one alone.
uintptr_t nvshmem_queues(int num_qps);

}  // namespace deep_comm
