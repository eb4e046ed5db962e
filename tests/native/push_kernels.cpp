// The kernel of the link limit, device/bench/push_rows.cuh, on the host: it moves what it says it moves.
#include "device/bench/push_rows.cuh"

#include "test_kernel.hpp"

namespace deep_comm::test {
namespace {

// params: ranks, rows per peer, bytes of a row. memory: the receive areas of all ranks, then their sources.
void push_all(const Args& args) {
  const int num_ranks = static_cast<int>(args.params[0]);
  const int num_rows = static_cast<int>(args.params[1]);
  const int row_bytes = static_cast<int>(args.params[2]);
  const int64_t area_bytes = args.params[0] * num_rows * row_bytes;
  const int64_t source_bytes = (args.params[0] - 1) * num_rows * row_bytes;
  auto* memory = reinterpret_cast<uint8_t*>(args.memory);
  PushRowsArgs push{.destinations = {},
                    .src = memory + num_ranks * area_bytes + args.rank * source_bytes,
                    .rank = static_cast<int>(args.rank),
                    .num_ranks = num_ranks,
                    .num_rows_per_peer = num_rows,
                    .row_bytes = row_bytes};
  for (int peer = 0; peer < num_ranks; ++peer) push.destinations[peer] = memory + peer * area_bytes;
  push_rows(push);
}

constexpr Kernel kKernels[] = {kernel<push_all>("push_all")};

}  // namespace

std::span<const Kernel> push_kernels() { return kKernels; }

}  // namespace deep_comm::test
