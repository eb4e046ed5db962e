// get_dispatch_layout of a group of several nodes: any number of ranks.
//
// in     topk_idx [T, K] int32 or int64; -1 selects nothing, an expert may appear twice in a row
// out    num_tokens_per_rank [R], num_tokens_per_node [N], num_tokens_per_expert [E],
//        is_token_in_rank [T, R]
//        ranks and nodes count a token once, experts count every top-k entry
// grid   any; each block counts `tokens_per_block` tokens in shared memory (R + N + E counters) and
//        adds them to the rank's accumulators; the last block writes the results and zeroes the
//        accumulators
// words  counters, layout_ticket · this rank only · zero at rest
// errors an index outside [-1, E) counts as -1, is reported, and never indexes memory
#pragma once

#include "device/internode/args.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"
#include "device/sync/counters.cuh"

namespace deep_comm {

DC_DEVICE_COLD void report_bad_expert(const InternodeLayoutArgs& args, int64_t position) {
  const Context context{args.world, Kernel::kLayout, 0, false, {args.tiers.rank, 0, 1}};
  arch::st_relaxed_gpu(&args.world.state()->bad_expert_index, 1u);
  report_error(
      context,
      {ErrorKind::kExpertIndex,
       {Stage::kCheckArguments, Word::kTopkIdx, args.tiers.rank, args.num_topk},
       static_cast<uint64_t>(load_given_expert(args.topk_idx, position, args.topk_idx_bytes)),
       static_cast<uint64_t>(args.experts.num_experts),
       0,
       position});
}

// One thread, one token: the ranks in [first_rank, first_rank + 32) that it goes to. The call with
// first_rank 0 also counts its entries, so that each is counted once.
DC_DEVICE uint32_t ranks_of_token(const InternodeLayoutArgs& args, int token, int first_rank,
                                  int32_t* num_per_expert) {
  uint32_t rank_mask = 0;
  for_each_expert(args.topk_idx, static_cast<int64_t>(token) * args.num_topk, args.num_topk,
                  args.topk_idx_bytes, [&](int expert, int64_t position) {
                    if (expert == -1) return;
                    const bool is_valid = expert >= 0 && expert < args.experts.num_experts;
                    if (first_rank == 0) {
                      if (!is_valid) return report_bad_expert(args, position);
                      arch::atomic_add_relaxed_cta(num_per_expert + expert, 1);
                    }
                    const int rank = is_valid ? args.experts.rank_of(expert) - first_rank : -1;
                    if (rank >= 0 && rank < kWarpSize) rank_mask |= 1u << rank;
                  });
  return rank_mask;
}

// The whole warp: adds the number of lanes with `goes`.
DC_DEVICE void count_lanes(int32_t* counter, bool goes) {
  const int num_goes = arch::popc(arch::ballot(kFullMask, goes));
  if (arch::lane_idx() == 0 && num_goes != 0) arch::atomic_add_relaxed_cta(counter, num_goes);
}

// counters: ranks, nodes, experts.
DC_DEVICE void count_tokens(const InternodeLayoutArgs& args, int32_t* counters) {
  const int num_ranks = args.tiers.num_ranks(), num_local = args.tiers.ranks_per_node();
  int32_t* num_per_node = counters + num_ranks;
  int32_t* num_per_expert = num_per_node + args.tiers.num_nodes();
  const int begin = arch::block_idx() * args.tokens_per_block;
  const int end = min_of(begin + args.tokens_per_block, args.num_tokens);
  // Whole warps step together, so that the ballots are complete.
  for (int base = begin; base < end; base += arch::num_threads()) {
    const int token = base + arch::thread_idx();
    uint32_t rank_mask = 0;
    bool goes_to_node = false;  // a node counts a token once, however many of its ranks get it
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (rank % kWarpSize == 0) {
        rank_mask = token < end ? ranks_of_token(args, token, rank, num_per_expert) : 0;
      }
      const bool goes = (rank_mask >> (rank % kWarpSize) & 1) != 0;
      if (token < end) {
        arch::st_weak(args.is_token_in_rank + static_cast<int64_t>(token) * num_ranks + rank,
                      static_cast<uint8_t>(goes));
      }
      count_lanes(counters + rank, goes);
      goes_to_node = goes_to_node || goes;
      if ((rank + 1) % num_local != 0) continue;
      count_lanes(num_per_node + rank / num_local, goes_to_node);
      goes_to_node = false;
    }
  }
}

// The last block: writes the results and zeroes the accumulators.
DC_DEVICE void write_internode_layout(const InternodeLayoutArgs& args, int32_t* totals) {
  const int num_ranks = args.tiers.num_ranks(), first_expert = num_ranks + args.tiers.num_nodes();
  for (int idx = arch::thread_idx(); idx < first_expert + args.experts.num_experts;
       idx += arch::num_threads()) {
    const int32_t total = arch::ld_relaxed_gpu(totals + idx);
    arch::st_relaxed_gpu(totals + idx, 0);
    arch::st_weak(idx < num_ranks      ? args.num_tokens_per_rank + idx
                  : idx < first_expert ? args.num_tokens_per_node + (idx - num_ranks)
                                       : args.num_tokens_per_expert + (idx - first_expert),
                  total);
  }
}

DC_DEVICE void internode_layout(const InternodeLayoutArgs& args) {
  const int num_counters =
      args.tiers.num_ranks() + args.tiers.num_nodes() + args.experts.num_experts;
  int32_t* totals = reinterpret_cast<int32_t*>(args.world.bases[args.world.rank] +
                                               args.tiers.rail.layout.counters);
  int32_t* counters = reinterpret_cast<int32_t*>(arch::dynamic_smem());
  uint32_t* ticket = reinterpret_cast<uint32_t*>(counters + num_counters);
  for (int idx = arch::thread_idx(); idx < num_counters; idx += arch::num_threads())
    counters[idx] = 0;
  arch::sync_block();
  count_tokens(args, counters);
  arch::sync_block();
  add_counters(totals, counters, num_counters);
  if (!is_last_to_count(args.world, ticket)) return;
  write_internode_layout(args, totals);
}

}  // namespace deep_comm
