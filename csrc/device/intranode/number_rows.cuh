// number_rows: where the rows of an expanded dispatch belong. Local: no peer takes part.
//
// in     topk_idx [T, K], first_rows [E] of notify_dispatch
// out    send_rows [T, K]  output row of each top-k entry at its expert's rank, or -1
//        send_row [T, R]   output row of a token's first row at a rank, or -1
// order  within an expert: source rank, source token, top-k entry; so a token that selects an
//        expert twice has two neighbouring rows there
// grid   any number of blocks; each numbers tokens_per_block tokens and counts all earlier ones by
//        itself: reading indices again costs less than a second kernel or a barrier of the grid
// smem   uint32 [E]: next row in each expert's group
// not promised: anything about rows of experts out of range, which get_dispatch_layout has reported
#pragma once

#include "device/intranode/args.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

DC_DEVICE int selected_expert(const NumberReceivedArgs& args, int64_t position) {
  const int expert = load_expert(args.topk_idx, position, args.topk_idx_bytes);
  return expert >= 0 && expert < args.num_experts ? expert : -1;
}
// An expert of an absent rank counts as none.
DC_DEVICE int selected_expert(const NumberRowsArgs& args, int64_t position) {
  const int expert = load_expert(args.topk_idx, position, args.topk_idx_bytes);
  const bool is_one = expert >= 0 && expert < args.experts.num_experts &&
                      !args.world.is_absent(args.experts.rank_of(expert));
  return is_one ? expert : -1;
}

// One warp: rows[position] of top-k entries [begin, end), in order.
template <class Args>
DC_DEVICE void number_topk_entries(const Args& args, int32_t* rows, uint32_t* next_rows,
                                   int64_t begin, int64_t end) {
  constexpr int kBatches = 4;  // loads in flight
  const int lane = arch::lane_idx();
  const uint32_t lower_lanes = (1u << lane) - 1;
  for (int64_t base = begin; base < end; base += kBatches * kWarpSize) {
    int experts[kBatches];
    DC_UNROLL
    for (int batch = 0; batch < kBatches; ++batch) {
      const int64_t position = base + batch * kWarpSize + lane;
      experts[batch] = position < end ? selected_expert(args, position) : -1;
    }
    DC_UNROLL
    for (int batch = 0; batch < kBatches; ++batch) {
      const int64_t position = base + batch * kWarpSize + lane;
      const int expert = experts[batch];
      const uint32_t same = arch::match_any(kFullMask, expert);
      int32_t row = -1;
      if (expert >= 0)
        row = static_cast<int32_t>(next_rows[expert]) + arch::popc(same & lower_lanes);
      arch::sync_warp();  // all have read the row number that the first of them advances
      if (expert >= 0 && (same & lower_lanes) == 0) next_rows[expert] += arch::popc(same);
      arch::sync_warp();
      if (position < end) arch::st_weak(rows + position, row);
    }
  }
}

DC_DEVICE void number_rows(const NumberRowsArgs& args) {
  uint32_t* next_rows = reinterpret_cast<uint32_t*>(arch::dynamic_smem());
  const int num_ranks = args.world.num_ranks, num_topk = args.num_topk;
  const int first_token = min_of(arch::block_idx() * args.tokens_per_block, args.num_tokens);
  const int end_token = min_of(first_token + args.tokens_per_block, args.num_tokens);
  const int64_t begin = static_cast<int64_t>(first_token) * num_topk;
  const int64_t end = static_cast<int64_t>(end_token) * num_topk;
  for (int expert = arch::thread_idx(); expert < args.experts.num_experts;
       expert += arch::num_threads()) {
    next_rows[expert] = static_cast<uint32_t>(arch::ld_nc(args.first_rows + expert));
  }
  arch::sync_block();
  for (int64_t position = arch::thread_idx(); position < begin; position += arch::num_threads()) {
    const int expert = selected_expert(args, position);
    if (expert >= 0) arch::atomic_add_relaxed_cta(&next_rows[expert], 1u);
  }
  arch::sync_block();
  if (arch::warp_idx() == 0) number_topk_entries(args, args.send_rows, next_rows, begin, end);
  arch::sync_block();
  for (int idx = arch::thread_idx(); idx < (end_token - first_token) * num_ranks;
       idx += arch::num_threads()) {
    const int token = first_token + idx / num_ranks, rank = idx % num_ranks;
    int32_t row = -1;
    for (int k = 0; k < num_topk && row < 0; ++k) {
      const int64_t position = static_cast<int64_t>(token) * num_topk + k;
      const int expert = selected_expert(args, position);
      if (expert >= 0 && args.experts.rank_of(expert) == rank)
        row = arch::ld_weak(args.send_rows + position);
    }
    arch::st_weak(args.send_row + static_cast<int64_t>(token) * num_ranks + rank, row);
  }
}

}  // namespace deep_comm
