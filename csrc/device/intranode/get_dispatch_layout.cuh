// get_dispatch_layout: how many tokens go where.
//
// in     topk_idx [T, K] int32 or int64; -1 selects nothing, an expert may appear twice in a row
// out    num_tokens_per_rank [R], num_tokens_per_node, num_tokens_per_expert [E],
//        is_token_in_rank [T, R]
//        ranks and nodes count a token once, experts count every top-k entry
// grid   any; each block counts `tokens_per_block` tokens in shared memory (R + E counters) and
//        adds them to the rank's accumulators; the last block writes the results and zeroes the
//        accumulators
// words  layout_counts, layout_ticket · this rank only · zero at rest
// errors an index outside [-1, E) counts as -1, is reported, and never indexes memory
#pragma once

#include "device/intranode/count_tokens.cuh"

namespace deep_comm {

DC_DEVICE void count_block(const LayoutArgs& args, int32_t* num_per_rank, int32_t* num_per_expert) {
  const int num_ranks = args.world.num_ranks;
  const int begin = arch::block_idx() * args.tokens_per_block;
  const int end = min_of(begin + args.tokens_per_block, args.num_tokens);
  // Whole warps step together, so that the ballots below are complete.
  for (int base = begin; base < end; base += arch::num_threads()) {
    const int token = base + arch::thread_idx();
    const uint32_t rank_mask = token < end ? count_token(args.world, Kernel::kLayout, args.topk,
                                                         args.experts, token, num_per_expert)
                                           : 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const bool goes = (rank_mask >> rank & 1) != 0;
      if (token < end) {
        arch::st_weak(args.is_token_in_rank + static_cast<int64_t>(token) * num_ranks + rank,
                      static_cast<uint8_t>(goes));
      }
      const int num_goes = arch::popc(arch::ballot(kFullMask, goes));
      if (arch::lane_idx() == 0 && num_goes != 0) {
        arch::atomic_add_relaxed_cta(num_per_rank + rank, num_goes);
      }
    }
  }
}

// The last block: writes the results and zeroes the accumulators.
DC_DEVICE void write_layout(const LayoutArgs& args) {
  const int num_ranks = args.world.num_ranks;
  int32_t* totals = args.world.layout_counts();
  for (int idx = arch::thread_idx(); idx < num_ranks + args.topk.num_experts;
       idx += arch::num_threads()) {
    const int32_t total = arch::ld_relaxed_gpu(totals + idx);
    arch::st_relaxed_gpu(totals + idx, 0);
    arch::st_weak(idx < num_ranks ? args.num_tokens_per_rank + idx
                                  : args.num_tokens_per_expert + (idx - num_ranks),
                  total);
  }
}

// Tokens per node: a node counts a token once, however many of its ranks get it.
DC_DEVICE void count_nodes(const LayoutArgs& args) {
  if (args.num_tokens_per_node == nullptr) return;
  for (int node = arch::thread_idx(); node < args.num_nodes; node += arch::num_threads()) {
    int32_t num_tokens = 0;
    for (int token = 0; token < args.num_tokens; ++token) {
      bool goes = false;
      for (int local = 0; local < args.ranks_per_node; ++local) {
        const int64_t position =
            static_cast<int64_t>(token) * args.world.num_ranks + node * args.ranks_per_node + local;
        goes = goes || arch::ld_weak(args.is_token_in_rank + position) != 0;
      }
      num_tokens += goes;
    }
    arch::st_weak(args.num_tokens_per_node + node, num_tokens);
  }
}

DC_DEVICE void get_dispatch_layout(const LayoutArgs& args) {
  const int num_counters = args.world.num_ranks + args.topk.num_experts;
  int32_t* counters = reinterpret_cast<int32_t*>(arch::dynamic_smem());
  uint32_t* ticket = reinterpret_cast<uint32_t*>(counters + num_counters);
  for (int idx = arch::thread_idx(); idx < num_counters; idx += arch::num_threads())
    counters[idx] = 0;
  arch::sync_block();
  count_block(args, counters, counters + args.world.num_ranks);
  arch::sync_block();
  add_counters(args.world.layout_counts(), counters, num_counters);
  if (!is_last_to_count(args.world, ticket)) return;
  write_layout(args);
  count_nodes(args);
}

}  // namespace deep_comm
