#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "device/bench/push_rows.cuh"
#include "host/check_cuda.hpp"
#include "host/link_bench_cuda.hpp"
#include "host/memory_cuda.hpp"

namespace deep_comm {

namespace {

constexpr int kMaxPushWarps = 8;  // more were never faster

void require(bool holds, const std::string& rule) {
  if (!holds) throw std::invalid_argument("push_rows: " + rule);
}

int current_smem_bytes_limit() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return cuda_smem_bytes_limit(device);
}

__global__ void __launch_bounds__(kMaxPushWarps* kWarpSize, 1)
    push_rows_entry(const __grid_constant__ PushRowsArgs args) {
  push_rows(args);
}

// Arguments of the size of a dispatch's, which a launch copies.
struct SomeArgs {
  uint8_t bytes[640];
};

__global__ void empty_entry(const __grid_constant__ SomeArgs) {}

}  // namespace

int cuda_max_push_warps(int row_bytes) {
  const auto limit = static_cast<size_t>(current_smem_bytes_limit());
  int num_warps = 0;
  while (num_warps < kMaxPushWarps && push_rows_smem_bytes(num_warps + 1, row_bytes) <= limit) {
    ++num_warps;
  }
  return num_warps;
}

void cuda_push_rows(const PushRows& call) {
  const int num_ranks = static_cast<int>(call.destinations.size());
  require(num_ranks >= 2 && num_ranks <= kMaxPushRanks, "2 to 8 ranks");
  require(call.rank >= 0 && call.rank < num_ranks, "rank must be one of them");
  require(call.row_bytes > 0 && call.row_bytes % 16 == 0, "row_bytes must be a multiple of 16");
  require(call.num_rows_per_peer >= 0, "num_rows_per_peer must not be negative");
  require(call.num_blocks >= 1, "num_blocks must be at least 1");
  const int max_warps = cuda_max_push_warps(call.row_bytes);
  require(call.num_warps >= 1 && call.num_warps <= max_warps,
          "num_warps must be 1 to " + std::to_string(max_warps) + " for rows of " +
              std::to_string(call.row_bytes) + " bytes");
  PushRowsArgs args{.destinations = {},
                    .src = reinterpret_cast<const uint8_t*>(call.src),
                    .rank = call.rank,
                    .num_ranks = num_ranks,
                    .num_rows_per_peer = call.num_rows_per_peer,
                    .row_bytes = call.row_bytes};
  for (int peer = 0; peer < num_ranks; ++peer) {
    args.destinations[peer] = reinterpret_cast<uint8_t*>(call.destinations[peer]);
  }
  check(cudaFuncSetAttribute(push_rows_entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             current_smem_bytes_limit()),
        "cudaFuncSetAttribute");
  const size_t smem_bytes = push_rows_smem_bytes(call.num_warps, call.row_bytes);
  push_rows_entry<<<call.num_blocks, call.num_warps * kWarpSize, smem_bytes,
                    reinterpret_cast<cudaStream_t>(call.stream)>>>(args);
  check(cudaGetLastError(), "push_rows");
}

void cuda_launch_empty(uint64_t stream) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[1].val.sharedMemCarveout = 50;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(24);
  config.blockDim = dim3(320);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  check(cudaLaunchKernelEx(&config, empty_entry, SomeArgs{}), "empty kernel");
}

void cuda_copy_async(uintptr_t dst, uintptr_t src, size_t num_bytes, uint64_t stream) {
  check(cudaMemcpyAsync(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), num_bytes,
                        cudaMemcpyDefault, reinterpret_cast<cudaStream_t>(stream)),
        "cudaMemcpyAsync");
}

}  // namespace deep_comm
