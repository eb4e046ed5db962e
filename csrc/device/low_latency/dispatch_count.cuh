// Counting for dispatch: how many of a rank's tokens select each expert, and how many go to each
// rank. A block counts the tokens before its own. So it knows the ordinals of its own tokens. The
// last block adds its own, and tells the peers what they will get.
#pragma once

#include "device/low_latency/block.cuh"

namespace deep_comm {

// ---- entries, as they are loaded ----------------------------------------------------------------

// A warp loads the entries of as many tokens at a time as it has lanes for, each lane one. Of more
// entries than lanes it loads the first.
struct EntryLanes {
  int num_tokens;  // at a time
  int token;       // of the lane, among them
  int k;

  DC_DEVICE static EntryLanes of(const LowLatencyShape& shape) {
    const int lane = arch::lane_idx(), token = shape.by_topk.quotient(lane);
    return {max_of(shape.by_topk.quotient(kWarpSize), 1), token, lane - token * shape.num_topk};
  }
  // The first token of a warp in its `step`-th turn, when all warps of the block take turns.
  DC_DEVICE int first(int step) const {
    return (step * arch::num_warps() + arch::warp_idx()) * num_tokens;
  }
};

// This lane's entries of the tokens that its warp counts in several turns.
struct TokenBatch {
  static constexpr int kTurns = 4;
  RawExpert raw[kTurns];

  // Of tokens [begin, end), as many as there are turns for.
  DC_DEVICE static TokenBatch load(const LowLatencyDispatchArgs& args, int begin, int end) {
    const EntryLanes lanes = EntryLanes::of(args.shape);
    TokenBatch batch;
    DC_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      const int token = begin + lanes.first(turn) + lanes.token;
      if (lanes.token >= lanes.num_tokens || token >= end) continue;
      batch.raw[turn] = RawExpert::load(args.topk_idx,
                                        static_cast<int64_t>(token) * args.shape.num_topk + lanes.k,
                                        args.topk_idx_bytes);
    }
    return batch;
  }
};

// The tokens that a block counts: those before its own. The last block counts for all, so it adds
// its own later.
DC_DEVICE int num_counted_tokens(const LowLatencyDispatchArgs& args, const LowLatencyShare& share) {
  return is_counting_block() ? args.split.num_tokens - share.num_tokens() : share.begin;
}

// ---- tokens before those of the block -----------------------------------------------------------

// Before a barrier of the block: counters[e], tokens that select expert e; counters[E + r], compact
// only: those that are sent to rank r.
DC_DEVICE void zero_counters(const LowLatencyDispatchArgs& args, const BlockMemory& memory) {
  DC_NO_UNROLL
  for (int idx = arch::thread_idx(); idx < args.shape.num_experts + args.world.num_ranks;
       idx += arch::num_threads()) {
    memory.counters[idx] = 0;
  }
}

// Of a token with more entries than lanes: an earlier one than entry `base` that has the same
// expert or the same rank.
struct Repeats {
  bool has_expert;
  bool has_rank;
};
DC_DEVICE_COLD Repeats find_repeats(const LowLatencyDispatchArgs& args, int token, int base,
                                    int expert, int rank) {
  Repeats repeats{};
  const int64_t begin = static_cast<int64_t>(token) * args.shape.num_topk;
  DC_NO_UNROLL
  for (int64_t other = begin; other < begin + base; ++other) {
    const int earlier = load_expert(args.topk_idx, other, args.topk_idx_bytes);
    repeats.has_expert |= earlier == expert;
    repeats.has_rank |= earlier >= 0 && args.experts.rank_of(earlier) == rank;
  }
  return repeats;
}

// An entry that is counted; expert -1: none.
struct CountedEntry {
  int token;
  int base;  // of its token's entries, when this one was looked at: those from `base` on are in lanes
  int expert;
  int rank;
  Repeats repeats;
};

// One warp: counts the tokens whose entries its lanes have, with count(CountedEntry), which all lanes
// call. `raw`: of this lane, if has_token.
template <class Count>
DC_DEVICE void count_entries(const LowLatencyDispatchArgs& args, const EntryLanes& lanes, int token,
                             bool has_token, const RawExpert& raw, const Count& count) {
  const int num_topk = args.shape.num_topk;
  DC_NO_UNROLL
  for (int base = 0; base < num_topk; base += kWarpSize) {
    const int k = base + lanes.k;
    const bool is_there = has_token && k < num_topk;
    int expert = is_there ? raw.value(args.topk_idx_bytes) : -1;
    if (base > 0 && is_there) {
      expert = load_expert(args.topk_idx, static_cast<int64_t>(token) * num_topk + k,
                           args.topk_idx_bytes);
    }
    // Not other negative numbers either: they would be keys of other experts.
    if (static_cast<uint32_t>(expert) >= static_cast<uint32_t>(args.shape.num_experts)) expert = -1;
    const int rank = expert >= 0 ? args.experts.rank_of(expert) : -1;
    // Among this token's entries: an earlier one has the same expert, the same rank.
    Repeats repeats{is_repeated(expert * kWarpSize + lanes.token),
                    is_repeated(rank * kWarpSize + lanes.token)};
    if (base > 0) {
      const Repeats more = find_repeats(args, token, base, expert, rank);
      repeats = {repeats.has_expert || more.has_expert, repeats.has_rank || more.has_rank};
    }
    count(CountedEntry{token, base, expert, rank, repeats});
  }
}

// The block counts tokens [begin, end). `batch`: of the first of them. The caller has a barrier of
// the block after it.
template <class Count>
DC_DEVICE void count_tokens(const LowLatencyDispatchArgs& args, TokenBatch& batch, int begin,
                            int end, const Count& count) {
  const EntryLanes lanes = EntryLanes::of(args.shape);
  DC_NO_UNROLL
  for (int next_turn = begin; next_turn < end;
       next_turn += lanes.num_tokens * arch::num_warps() * TokenBatch::kTurns) {
    if (next_turn > begin) batch = TokenBatch::load(args, next_turn, end);
    DC_NO_UNROLL
    for (int turn = 0; turn < TokenBatch::kTurns; ++turn) {
      const int first = next_turn + lanes.first(turn), token = first + lanes.token;
      if (first >= end) break;
      count_entries(args, lanes, token, lanes.token < lanes.num_tokens && token < end, batch.raw[0],
                    count);
      // The loop over turns is rolled, to be fetched once, and registers cannot be indexed.
      DC_UNROLL
      for (int next = 1; next < TokenBatch::kTurns; ++next) batch.raw[next - 1] = batch.raw[next];
    }
  }
}

// The same for counters that zero_counters describes, from the first token on.
DC_DEVICE void count_earlier_tokens(const LowLatencyDispatchArgs& args, const BlockMemory& memory,
                                    TokenBatch& batch, int num_tokens) {
  count_tokens(args, batch, 0, num_tokens, [&](const CountedEntry& entry) {
    if (entry.expert < 0) return;
    if (!entry.repeats.has_expert) {
      arch::atomic_add_relaxed_cta(&memory.counters[entry.expert], 1u);
    }
    if (entry.repeats.has_rank || !args.out.is_compact) return;
    arch::atomic_add_relaxed_cta(&memory.counters[args.shape.num_experts + entry.rank], 1u);
  });
}

// ---- tokens of the block ------------------------------------------------------------------------

// One warp, when the counters hold the tokens before those of the block's group: the ordinals of
// its token's entries, into shared memory. Returns, in lane r, the token's ordinal on rank r, or
// -1.
template <DispatchRows kRows>
DC_DEVICE int32_t find_ordinals(const LowLatencyDispatchArgs& args, const BlockMemory& memory) {
  const int num_topk = args.shape.num_topk, lane = arch::lane_idx(), warp = arch::warp_idx();
  const int32_t* own = memory.own_experts + warp * num_topk;
  DC_NO_UNROLL
  for (int base = 0; base < num_topk; base += kWarpSize) {
    const int k = base + lane, expert = k < num_topk ? own[k] : -1;
    bool is_repeat = is_repeated(expert);
    DC_NO_UNROLL
    for (int other = 0; other < base; ++other) is_repeat |= own[other] == expert;
    if (expert < 0) continue;
    uint32_t ordinal = memory.counters[expert];
    if constexpr (kRows == DispatchRows::kMany) {
      // Tokens of other warps of the block that come before this one.
      DC_NO_UNROLL
      for (const int32_t* other = memory.own_experts; other < own; other += num_topk) {
        bool selects = false;
        DC_UNROLL_BY(4)
        for (int column = 0; column < num_topk; ++column) selects |= other[column] == expert;
        if (selects) ++ordinal;
      }
    }
    memory.own_ordinals[warp * num_topk + k] =
        is_repeat ? Route::repeated(ordinal) : static_cast<int32_t>(ordinal);
  }
  if (!args.out.is_compact || lane >= args.world.num_ranks ||
      (memory.masks[warp] >> lane & 1u) == 0)
    return -1;
  int32_t ordinal = static_cast<int32_t>(memory.counters[args.shape.num_experts + lane]);
  if constexpr (kRows == DispatchRows::kMany) {
    DC_NO_UNROLL
    for (int other = 0; other < warp; ++other)
      ordinal += static_cast<int32_t>(memory.masks[other] >> lane & 1u);
  }
  return ordinal;
}

// One warp: counts its token, whose ordinals have been found.
DC_DEVICE void count_own(const LowLatencyDispatchArgs& args, const BlockMemory& memory,
                         int32_t row_ordinal) {
  const int num_topk = args.shape.num_topk, first = arch::warp_idx() * num_topk;
  DC_NO_UNROLL
  for (int k = arch::lane_idx(); k < num_topk; k += kWarpSize) {
    const int expert = memory.own_experts[first + k];
    if (expert >= 0 && memory.own_ordinals[first + k] >= 0)
      arch::atomic_add_relaxed_cta(&memory.counters[expert], 1u);
  }
  if (row_ordinal >= 0)
    arch::atomic_add_relaxed_cta(&memory.counters[args.shape.num_experts + arch::lane_idx()], 1u);
}

// The block, when its counters hold all tokens: what each rank, and each of its experts, will get.
DC_DEVICE void send_counts(const Context& context, const LowLatencyDispatchArgs& args,
                           const LowLatencyBuffer& buffer, const BlockMemory& memory) {
  const World& world = args.world;
  const int num_experts = args.shape.num_experts;
  DC_NO_UNROLL
  for (int idx = arch::thread_idx(); idx < num_experts + world.num_ranks;
       idx += arch::num_threads()) {
    const bool is_expert = idx < num_experts;
    const int peer = is_expert ? args.experts.rank_of(idx) : idx - num_experts;
    if (!is_active(memory, peer)) continue;
    const int column = is_expert ? 1 + idx - args.experts.first_expert(peer) : 0;
    // pairs with: await_counts at the peer — nothing but the word itself.
    arch::st_relaxed_sys(buffer.counts(peer, world.rank) + column,
                         Tagged::pack(context.generation, memory.counters[idx]));
  }
  note_in_block(context, TraceStep::kCounted);
}

}  // namespace deep_comm
