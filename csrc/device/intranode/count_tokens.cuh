// The ranks that a token goes to, from its experts: the pass over topk_idx that get_dispatch_layout
// and notify_dispatch share. It runs inside a block, one thread per token, without words of other
// ranks.
#pragma once

#include "device/intranode/args.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"
#include "device/sync/counters.cuh"

namespace deep_comm {

// Sets the word by which the next notify informs the peers, and writes the error record. Its channel
// is the number of columns of topk_idx.
DC_DEVICE_COLD void report_bad_expert(const World& world, Kernel kernel, TopkIdx topk,
                                      int64_t position) {
  arch::st_relaxed_gpu(&world.state()->bad_expert_index, 1u);
  report_error(Context{world, kernel, 0},
               {ErrorKind::kExpertIndex,
                {Stage::kCheckArguments, Word::kTopkIdx, world.rank, topk.num_topk},
                static_cast<uint64_t>(load_given_expert(topk.data, position, topk.element_bytes)),
                static_cast<uint64_t>(topk.num_experts),
                0,
                position});
}

// One thread, one token: returns the mask of its ranks, and counts every top-k entry in
// num_per_expert (shared memory). An expert of an absent rank counts as -1. So does an index
// outside [-1, E), which is reported.
DC_DEVICE uint32_t count_token(const World& world, Kernel kernel, const TopkIdx& topk,
                               const ExpertMap& experts, int token, int32_t* num_per_expert) {
  uint32_t rank_mask = 0;
  for_each_expert(topk.data, static_cast<int64_t>(token) * topk.num_topk, topk.num_topk,
                  topk.element_bytes, [&](int expert, int64_t position) {
                    if (expert == -1) return;
                    if (expert < 0 || expert >= topk.num_experts) {
                      return report_bad_expert(world, kernel, topk, position);
                    }
                    const int rank = experts.rank_of(expert);
                    if (world.is_absent(rank)) return;
                    rank_mask |= 1u << rank;
                    arch::atomic_add_relaxed_cta(num_per_expert + expert, 1);
                  });
  return rank_mask;
}

}  // namespace deep_comm
