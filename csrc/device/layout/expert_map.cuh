// Which rank holds which expert. Ranks hold contiguous ranges. If the experts do not divide evenly,
// the first `num_experts % num_ranks` ranks hold one more. deep_comm/ranks/topology.py has the same
// rule in Python.
#pragma once

#include "device/layout/divisor.cuh"

namespace deep_comm {

// Made on the host, when a kernel's arguments are filled in, so that kernels do not divide. For fewer
// than Divisor::kMaxNumerator experts.
struct ExpertMap {
  int num_experts;
  int num_ranks;
  int base;       // experts of a rank that holds fewer
  int num_extra;  // ranks that hold one more
  int in_larger;  // experts on those ranks
  Divisor by_base;
  Divisor by_larger;

  static ExpertMap make(int num_experts, int num_ranks) {
    const int base = num_experts / num_ranks, extra = num_experts % num_ranks;
    return {num_experts,
            num_ranks,
            base,
            extra,
            extra * (base + 1),
            Divisor::make(max_of(base, 1)),
            Divisor::make(base + 1)};
  }
  DC_HOST_DEVICE int first_expert(int rank) const { return rank * base + min_of(rank, num_extra); }
  DC_HOST_DEVICE int num_local_experts(int rank) const { return base + (rank < num_extra ? 1 : 0); }
  DC_HOST_DEVICE int rank_of(int expert) const {
    // One quotient, of chosen numbers: branches would be more code, and a warp would take both.
    const bool is_larger = expert < in_larger;
    const Divisor by = is_larger ? by_larger : by_base;
    return (is_larger ? 0 : num_extra) + by.quotient(is_larger ? expert : expert - in_larger);
  }
};

}  // namespace deep_comm
