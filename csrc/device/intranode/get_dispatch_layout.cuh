// get_dispatch_layout: how many tokens go where.
//
// in     topk_idx [T, K] int32 or int64; -1 selects nothing, an expert may appear twice in a row
// out    num_tokens_per_rank [R], num_tokens_per_node, num_tokens_per_expert [E], is_token_in_rank [T, R]
//        ranks and nodes count a token once, experts count every selection
// grid   any; each block counts `tokens_per_block` tokens in shared memory (R + E counters), adds them to the
//        rank's accumulators, and the last block writes the results and leaves the accumulators at zero
// words  layout_counts, layout_ticket · this rank only · zero at rest
// errors an index outside [-1, E) counts as -1, is reported, and never indexes memory
#pragma once

#include "device/intranode/args.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"
#include "device/sync/context.cuh"

namespace deep_comm {

DC_DEVICE void report_bad_expert(const LayoutArgs& args, int64_t position, int expert) {
  const Context context{args.world, Kernel::kLayout, 0};
  arch::st_relaxed_gpu(&args.world.state()->bad_expert_index, 1u);
  report_error(context, {ErrorKind::kExpertIndex,
                         {Stage::kCheckArguments, Word::kTopkIdx, args.world.rank, -1},
                         static_cast<uint64_t>(static_cast<int64_t>(expert)),
                         static_cast<uint64_t>(args.num_experts),
                         0,
                         position});
}

// One thread, one token: marks the ranks it goes to, counts its experts.
DC_DEVICE uint32_t count_token(const LayoutArgs& args, int token, int32_t* num_per_expert) {
  const ExpertMap experts{args.num_experts, args.world.num_ranks};
  uint32_t rank_mask = 0;
  for (int k = 0; k < args.num_topk; ++k) {
    const int64_t position = static_cast<int64_t>(token) * args.num_topk + k;
    const int expert = load_expert(args.topk_idx, position, args.topk_idx_bytes);
    if (expert < 0 || expert >= args.num_experts) {
      if (expert != -1) report_bad_expert(args, position, expert);
      continue;
    }
    rank_mask |= 1u << experts.rank_of(expert);
    arch::atomic_add_relaxed_cta(num_per_expert + expert, 1);
  }
  return rank_mask;
}

DC_DEVICE void count_block(const LayoutArgs& args, int32_t* num_per_rank, int32_t* num_per_expert) {
  const int num_ranks = args.world.num_ranks;
  const int begin = arch::block_idx() * args.tokens_per_block;
  const int end = min_of(begin + args.tokens_per_block, args.num_tokens);
  // Whole warps step together, so that the ballots below are complete.
  for (int base = begin; base < end; base += arch::num_threads()) {
    const int token = base + arch::thread_idx();
    const uint32_t rank_mask = token < end ? count_token(args, token, num_per_expert) : 0;
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

// The last block: results out, accumulators back to zero.
DC_DEVICE void write_layout(const LayoutArgs& args) {
  const int num_ranks = args.world.num_ranks;
  int32_t* totals = args.world.layout_counts();
  for (int idx = arch::thread_idx(); idx < num_ranks + args.num_experts;
       idx += arch::num_threads()) {
    const int32_t total = arch::ld_relaxed_gpu(totals + idx);
    arch::st_relaxed_gpu(totals + idx, 0);
    arch::st_weak(idx < num_ranks ? args.num_tokens_per_rank + idx
                                  : args.num_tokens_per_expert + (idx - num_ranks),
                  total);
  }
}

// Tokens per node: a token counts once for a node however many of its ranks it goes to.
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
  const int num_counters = args.world.num_ranks + args.num_experts;
  int32_t* counters = reinterpret_cast<int32_t*>(arch::dynamic_smem());
  uint32_t* ticket = reinterpret_cast<uint32_t*>(counters + num_counters);
  for (int idx = arch::thread_idx(); idx < num_counters; idx += arch::num_threads())
    counters[idx] = 0;
  arch::sync_block();
  count_block(args, counters, counters + args.world.num_ranks);
  arch::sync_block();
  for (int idx = arch::thread_idx(); idx < num_counters; idx += arch::num_threads()) {
    if (counters[idx] != 0) {
      arch::atomic_add_relaxed_gpu(args.world.layout_counts() + idx, counters[idx]);
    }
  }
  arch::sync_block();  // the block's additions before the ticket that releases them
  if (arch::thread_idx() == 0) {
    // pairs with: itself in the last block — layout_counts and is_token_in_rank of all blocks.
    *ticket = arch::atomic_add_acq_rel_gpu(&args.world.state()->layout_ticket, 1u);
    if (*ticket + 1 == static_cast<uint32_t>(arch::num_blocks())) {
      arch::st_relaxed_gpu(&args.world.state()->layout_ticket, 0u);
    }
  }
  arch::sync_block();
  if (*ticket + 1 != static_cast<uint32_t>(arch::num_blocks())) return;
  write_layout(args);
  count_nodes(args);
}

}  // namespace deep_comm
