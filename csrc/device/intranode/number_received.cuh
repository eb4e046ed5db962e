// number_received: where received rows belong in an expanded output, computed by the rank that has
// them. Local: no peer takes part. Between nodes, where rows have no output row on the way
// (docs/design/0025).
//
// in     topk_idx [N, K], local experts, -1 where an entry is for another rank; rows by (source
//        rank, source token)
// out    expert_offsets [L + 1], expert_counts [L]; recv_rows [N, K], -1 also past the received
//        rows
// order  within an expert as in number_rows: source rank, source token, top-k entry
// grid   any number of blocks; each numbers a part of the rows and counts all of them by itself:
//        reading indices again costs less than a second kernel or a barrier of the grid
// smem   uint32 [1 + W, L]: entries of an expert in all; then, by numbering warp, the next row in
//        its group
// errors more rows than the output has are reported; their output rows are past its end
#pragma once

#include "device/intranode/number_rows.cuh"
#include "device/intranode/token_rows.cuh"
#include "device/layout/prefix_sum.cuh"
#include "device/sync/context.cuh"

namespace deep_comm {

// The top-k entries that a block numbers; of_warp: entries of each numbering warp.
struct NumberedRange {
  int64_t begin;
  int64_t end;
  int64_t of_warp;

  DC_DEVICE static NumberedRange of_block(const NumberReceivedArgs& args, int num_tokens) {
    const int64_t all = static_cast<int64_t>(num_tokens) * args.num_topk;
    const int64_t of_warp =
        ceil_div<int64_t>(all, static_cast<int64_t>(arch::num_blocks()) * args.num_numbering_warps);
    const int64_t of_block = of_warp * args.num_numbering_warps;
    const int64_t begin = min_of(all, arch::block_idx() * of_block);
    return {begin, min_of(all, begin + of_block), of_warp};
  }
};

// The block: totals [L]; starts [W, L], where row w counts the entries of warp w - 1, and row 0
// those of earlier blocks.
DC_DEVICE void count_topk_entries(const NumberReceivedArgs& args, const NumberedRange& range,
                                  int num_tokens, uint32_t* totals, uint32_t* starts) {
  constexpr int kBatches = 4;  // loads in flight
  const int64_t all = static_cast<int64_t>(num_tokens) * args.num_topk;
  const int64_t step = arch::num_threads();
  for (int64_t base = arch::thread_idx(); base < all; base += kBatches * step) {
    int experts[kBatches];
    DC_UNROLL
    for (int batch = 0; batch < kBatches; ++batch) {
      const int64_t position = base + batch * step;
      experts[batch] = position < all ? selected_expert(args, position) : -1;
    }
    DC_UNROLL
    for (int batch = 0; batch < kBatches; ++batch) {
      const int64_t position = base + batch * step;
      if (experts[batch] < 0) continue;
      arch::atomic_add_relaxed_cta(&totals[experts[batch]], 1u);
      if (position >= range.end) continue;
      const uint32_t row = position < range.begin
                               ? 0
                               : 1 + static_cast<uint32_t>(position - range.begin) /
                                         static_cast<uint32_t>(range.of_warp);
      if (row < static_cast<uint32_t>(args.num_numbering_warps)) {  // nobody follows the last warp
        arch::atomic_add_relaxed_cta(&starts[row * args.num_experts + experts[batch]], 1u);
      }
    }
  }
}

// One warp: starts[0] becomes the row after those that earlier blocks number. Returns the rows of
// all groups.
DC_DEVICE int64_t place_groups(const NumberReceivedArgs& args, const uint32_t* totals,
                               uint32_t* starts) {
  const int lane = arch::lane_idx();
  int64_t before = 0;
  for (int base = 0; base < args.num_experts; base += kWarpSize) {
    const int expert = base + lane;
    const bool is_expert = expert < args.num_experts;
    const auto count = is_expert ? static_cast<int32_t>(totals[expert]) : 0;
    const int64_t own = align_up<int64_t>(count, args.expert_alignment);
    const int64_t inclusive = prefix_sum(own);
    if (is_expert) {
      const auto offset = static_cast<int32_t>(before + inclusive - own);
      starts[expert] += static_cast<uint32_t>(offset);
      if (arch::block_idx() == 0) {
        arch::st_weak(args.expert_offsets + expert, offset);
        arch::st_weak(args.expert_counts + expert, count);
      }
    }
    before += arch::shfl(kFullMask, inclusive, kWarpSize - 1);
  }
  if (arch::block_idx() == 0 && lane == 0) {
    arch::st_weak(args.expert_offsets + args.num_experts, static_cast<int32_t>(before));
  }
  return before;
}

DC_DEVICE void report_too_many_rows(const NumberReceivedArgs& args, int64_t num_rows) {
  const Context context{args.world, Kernel::kNumberReceived, 0, false, {args.rank, 0, 1}};
  report_error(context, {ErrorKind::kOverflow,
                         {Stage::kCheckArguments, Word::kNumRecvRows, -1, -1},
                         static_cast<uint64_t>(num_rows),
                         static_cast<uint64_t>(args.num_rows),
                         0,
                         -1});
}

DC_DEVICE void number_received(const NumberReceivedArgs& args) {
  uint32_t* totals = reinterpret_cast<uint32_t*>(arch::dynamic_smem());
  uint32_t* starts = totals + args.num_experts;
  const int num_tokens =
      max_of(0, num_received(args.world, args.rank_prefix_matrix, args.num_tokens_limit));
  const NumberedRange range = NumberedRange::of_block(args, num_tokens);
  const int num_counters = (1 + args.num_numbering_warps) * args.num_experts;
  for (int idx = arch::thread_idx(); idx < num_counters; idx += arch::num_threads())
    totals[idx] = 0;
  arch::sync_block();
  count_topk_entries(args, range, num_tokens, totals, starts);
  arch::sync_block();
  if (arch::warp_idx() == 0) {
    const int64_t num_rows = place_groups(args, totals, starts);
    if (num_rows > args.num_rows && arch::block_idx() == 0 && arch::lane_idx() == 0)
      report_too_many_rows(args, num_rows);
  }
  arch::sync_block();
  for (int expert = arch::thread_idx(); expert < args.num_experts; expert += arch::num_threads()) {
    for (int warp = 1; warp < args.num_numbering_warps; ++warp) {
      starts[warp * args.num_experts + expert] += starts[(warp - 1) * args.num_experts + expert];
    }
  }
  arch::sync_block();
  if (arch::warp_idx() < args.num_numbering_warps) {
    const int64_t begin = min_of(range.end, range.begin + arch::warp_idx() * range.of_warp);
    number_topk_entries(args, args.recv_rows, starts + arch::warp_idx() * args.num_experts, begin,
                        min_of(range.end, begin + range.of_warp));
  }
  const int64_t num_places = static_cast<int64_t>(args.num_tokens_limit) * args.num_topk;
  const int64_t grid_threads = static_cast<int64_t>(arch::num_blocks()) * arch::num_threads();
  for (int64_t position = static_cast<int64_t>(num_tokens) * args.num_topk +
                          arch::block_idx() * arch::num_threads() + arch::thread_idx();
       position < num_places; position += grid_threads) {
    arch::st_weak(args.recv_rows + position, -1);
  }
}

}  // namespace deep_comm
