// The link limit on GPUs, and what a launch takes: what deep_comm.bench measures beside dispatch and
// combine. No engine is involved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deep_comm {

struct PushRows {
  // [num_ranks] every rank's receive area; this rank's own is not used
  std::vector<uintptr_t> destinations;
  uintptr_t src;
  int rank;
  int num_rows_per_peer;
  int row_bytes;
  int num_blocks;
  int num_warps;
  uint64_t stream;
};

// Launches the kernel of device/bench/push_rows.cuh. Throws std::invalid_argument when the call
// breaks a rule of it, e.g. more warps than have shared memory for their rows.
void cuda_push_rows(const PushRows& call);

// The most warps of a block that cuda_push_rows takes for rows of this size on the current device;
// 0: such rows are too large.
int cuda_max_push_warps(int row_bytes);

// A kernel that does nothing, launched as the engine launches its own: 24 blocks of 320 threads that
// all run at once.
void cuda_launch_empty(uint64_t stream);

// A copy of the driver's choice, between any two addresses that the current device reaches: by a
// copy engine when they lie on different devices.
void cuda_copy_async(uintptr_t dst, uintptr_t src, size_t num_bytes, uint64_t stream);

}  // namespace deep_comm
