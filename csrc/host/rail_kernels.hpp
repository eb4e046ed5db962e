// How the CUDA module reaches the kernels of the NVSHMEM module: a table of functions, by address,
// between two modules of one build. Arguments are the kernels' own structs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/arch/types.cuh"
#include "host/target.hpp"

namespace deep_comm {

struct RailKernels {
  // Of the list of kernels and the size of their arguments: modules of
  // different builds do not meet.
  uint64_t fingerprint;
  // `kernel`: its place in RailKernelList. They throw std::runtime_error.
  void (*prepare)(int kernel, int smem_bytes_limit);
  void (*launch)(int kernel, const LaunchConfig& config, const void* args, uint64_t stream);
  // While no kernel runs: everything that this rank has put has landed.
  void (*quiet)();
};

// The NVSHMEM rail of one Buffer.
struct NvshmemRail {
  const RailKernels* kernels = nullptr;
  const RailPeer* peers = nullptr;  // [num_peers], host memory
  uint8_t* base = nullptr;          // this rank's segment
  int32_t* qps = nullptr;           // [num_qps], device memory; null: the default queue
};

// What a target is told of its rail. `nvshmem.kernels` null: its own one.
struct RailOptions {
  NvshmemRail nvshmem;
  double nic_bytes_per_s = 0;  // the software NIC's limit; 0: none
  bool is_alone = false;       // no other rank is a thread of this process
  bool is_near = false;        // host target: stores reach all peers, and no network stands between
};

}  // namespace deep_comm
