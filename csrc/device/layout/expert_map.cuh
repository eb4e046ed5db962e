// Which rank holds which expert. Ranks hold contiguous ranges; when the experts do not divide
// evenly, the first `num_experts % num_ranks` ranks hold one more. deep_comm/topology.py states the
// same for Python.
#pragma once

#include "device/arch/types.cuh"

namespace deep_comm {

struct ExpertMap {
  int num_experts;
  int num_ranks;

  DC_HOST_DEVICE int first_expert(int rank) const {
    const int base = num_experts / num_ranks, extra = num_experts % num_ranks;
    return rank * base + min_of(rank, extra);
  }
  DC_HOST_DEVICE int num_local_experts(int rank) const {
    return num_experts / num_ranks + (rank < num_experts % num_ranks ? 1 : 0);
  }
  // expert must lie in [0, num_experts).
  DC_HOST_DEVICE int rank_of(int expert) const {
    const int base = num_experts / num_ranks, extra = num_experts % num_ranks;
    const int in_larger = extra * (base + 1);
    return expert < in_larger ? expert / (base + 1) : extra + (expert - in_larger) / base;
  }
};

}  // namespace deep_comm
