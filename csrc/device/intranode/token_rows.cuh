// The rows of a received token in an expanded output, for expand_rows and reduce_experts.
#pragma once

#include "device/intranode/args.cuh"

namespace deep_comm {

inline constexpr int kMaxTopk = 64;

// One warp's token, in shared memory, in the order of its top-k entries.
struct TokenRows {
  int32_t row_idx[kMaxTopk];

  DC_DEVICE static TokenRows& of_warp() {
    return reinterpret_cast<TokenRows*>(arch::dynamic_smem())[arch::warp_idx()];
  }
  // The whole warp; returns how many rows there are. Rows past num_rows, which a worst-case output
  // has dropped, do not count.
  DC_DEVICE int load(const int32_t* recv_rows, int64_t token, int num_topk, int num_rows) {
    const uint32_t lower_lanes = (1u << arch::lane_idx()) - 1;
    int count = 0;
    // All lanes are done with the warp's last token.
    arch::sync_warp();
    for (int base = 0; base < num_topk; base += kWarpSize) {
      const int k = base + arch::lane_idx();
      const int32_t row = k < num_topk ? arch::ld_weak(recv_rows + token * num_topk + k) : -1;
      const bool is_here = row >= 0 && row < num_rows;
      const uint32_t present = arch::ballot(kFullMask, is_here);
      if (is_here) row_idx[count + arch::popc(present & lower_lanes)] = row;
      count += arch::popc(present);
    }
    arch::sync_warp();
    return count;
  }
};

// Tokens that this rank has received, at most those that the outputs have room for.
DC_DEVICE int num_received(const World& world, const int32_t* rank_prefix_matrix, int num_limit) {
  const int num_tokens =
      arch::ld_nc(rank_prefix_matrix + (world.num_ranks - 1) * world.num_ranks + world.rank);
  return min_of(num_tokens, num_limit);
}

}  // namespace deep_comm
