// The rows of a received token in an expanded output, for expand_rows and reduce_experts.
#pragma once

#include "device/intranode/args.cuh"

namespace deep_comm {

// One warp's token, in registers: the output rows of its top-k entries, or -1.
struct LoadedRows {
  int32_t row_idx[kMaxTopk / kWarpSize] = {};  // lane i: of entries i, i + 32

  DC_DEVICE void load(const int32_t* recv_rows, int64_t token, int num_topk) {
    DC_UNROLL
    for (int idx = 0; idx < kMaxTopk / kWarpSize; ++idx) {
      const int k = idx * kWarpSize + arch::lane_idx();
      row_idx[idx] = k < num_topk ? arch::ld_weak(recv_rows + token * num_topk + k) : -1;
    }
  }
};

// One warp's token, in shared memory, in the order of its top-k entries.
struct TokenRows {
  int32_t row_idx[kMaxTopk];

  DC_DEVICE static TokenRows& of_warp() {
    return reinterpret_cast<TokenRows*>(arch::dynamic_smem())[arch::warp_idx()];
  }
  // The whole warp; returns how many rows there are. Rows past num_rows, which a worst-case output
  // has dropped, do not count.
  DC_DEVICE int take(const LoadedRows& loaded, int num_rows) {
    const uint32_t lower_lanes = (1u << arch::lane_idx()) - 1;
    int count = 0;
    // All lanes are done with the warp's last token.
    arch::sync_warp();
    DC_UNROLL
    for (int idx = 0; idx < kMaxTopk / kWarpSize; ++idx) {
      const int32_t row = loaded.row_idx[idx];
      const bool is_here = row >= 0 && row < num_rows;
      const uint32_t present = arch::ballot(kFullMask, is_here);
      if (is_here) row_idx[count + arch::popc(present & lower_lanes)] = row;
      count += arch::popc(present);
    }
    arch::sync_warp();
    return count;
  }
  DC_DEVICE int load(const int32_t* recv_rows, int64_t token, int num_topk, int num_rows) {
    LoadedRows loaded;
    loaded.load(recv_rows, token, num_topk);
    return take(loaded, num_rows);
  }
};

// Tokens that this rank has received, at most those that the outputs have room for.
DC_DEVICE int num_received(const World& world, const int32_t* rank_prefix_matrix, int num_limit) {
  const int num_tokens =
      arch::ld_nc(rank_prefix_matrix + (world.num_ranks - 1) * world.num_ranks + world.rank);
  return min_of(num_tokens, num_limit);
}

}  // namespace deep_comm
