// The send phase of dispatch. dispatch_send, at the end, takes a token through these steps:
//
//   1 load      SendInputs: everything a block reads first, in one trip to memory
//   2 route     TokenRouting::check: the token's experts, and the ranks that hold them
//   3 count     count_tokens (dispatch_count.cuh): the tokens before those of the block, by expert
//               and by rank
//   4 stage     stage_row (dispatch_rows.cuh): few tokens; the row, encoded, in shared memory
//   5 credit    await_credit (block.cuh): the peers have read the buffer
//   6 ordinals  find_ordinals: where the token belongs; the last block: send_counts, to all peers
//   7 begin     send_stage or send_first_pieces: the first peer's row, to keep its link busy; then
//               send_routes, to all peers
//   8 rows      send_rest_of_stage or send_rows: the rows of the other peers
//
// Routes are sent before most rows. They are short, and the receiver looks up output rows while
// payload is still on the links. No store waits for another: each word tells by itself that it has
// arrived (sync/arrival.cuh).
#pragma once

#include "device/low_latency/dispatch_count.cuh"
#include "device/low_latency/dispatch_rows.cuh"

namespace deep_comm {

// Entries of the token of one warp, by lane: as many as there are lanes at a time.
struct TokenRouting {
  RawExpert expert;
  float weight = 0.0f;

  // first: the first of the entries.
  DC_DEVICE static TokenRouting load(const LowLatencyDispatchArgs& args, int token, int first = 0) {
    TokenRouting routing;
    const int k = first + arch::lane_idx();
    if (k >= args.shape.num_topk) return routing;
    const int64_t position = static_cast<int64_t>(token) * args.shape.num_topk + k;
    routing.expert = RawExpert::load(args.topk_idx, position, args.topk_idx_bytes);
    if (args.topk_weights != nullptr) routing.weight = arch::ld_nc(args.topk_weights + position);
    return routing;
  }
  // Reports an index out of range. Notes the experts, the weights and a mask of the experts' ranks
  // for the block. The routing is that of the first entries, the others are loaded here.
  DC_DEVICE void check(const Context& context, const LowLatencyDispatchArgs& args,
                       const BlockMemory& memory, int token) const {
    const int num_topk = args.shape.num_topk, warp = arch::warp_idx();
    TokenRouting routing = *this;
    uint32_t mask = 0;
    DC_NO_UNROLL
    for (int k = arch::lane_idx(); k < num_topk; k += kWarpSize) {
      if (k >= kWarpSize) routing = load(args, token, k - arch::lane_idx());
      const int expert = checked_expert(context, args, routing.expert.value(args.topk_idx_bytes),
                                        static_cast<int64_t>(token) * num_topk + k);
      memory.own_experts[warp * num_topk + k] = expert;
      memory.weights[warp * num_topk + k] = routing.weight;
      mask |= rank_bit(args.experts, expert);
    }
    mask = arch::reduce_or(kFullMask, mask);
    if (arch::lane_idx() == 0) memory.masks[warp] = mask;
  }
};

// What the send phase loads before it does anything with one of the values.
template <PayloadFormat kFormat, DispatchRows kRows>
struct SendInputs {
  LowLatencyShare share;
  Piece<kFormat> first;  // the piece of x that this thread sends first
  TokenRouting routing;  // of this warp's first token
  TokenBatch batch;      // of this rank's first tokens, to be counted

  DC_DEVICE static SendInputs load(const LowLatencyDispatchArgs& args,
                                   const LowLatencyShare& share) {
    SendInputs inputs{};
    inputs.share = share;
    const int num_tokens = min_of(share.num_tokens(), arch::num_warps());
    if (arch::warp_idx() < num_tokens) {
      inputs.routing = TokenRouting::load(args, share.begin + arch::warp_idx());
    }
    const int num_pieces = share.num_columns() / Piece<kFormat>::kElements;
    if (arch::thread_idx() < num_tokens * num_pieces) {
      const Position position = position_of_piece<kRows>(arch::thread_idx(), num_pieces);
      inputs.first.load(args.x + static_cast<size_t>(share.begin + position.row) *
                                     args.shape.hidden * sizeof(Bf16),
                        share.column_begin / Piece<kFormat>::kElements + position.column);
    }
    inputs.batch = TokenBatch::load(args, 0, num_counted_tokens(args, share));
    return inputs;
  }
};

// One warp sends the routes of its token to every rank. A rank that the token does not go to learns
// that from them. row_ordinal: in lane r, on rank r.
DC_DEVICE void send_routes(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                           const BlockMemory& memory, int32_t row_ordinal, int token_idx) {
  const World& world = args.world;
  const int num_topk = args.shape.num_topk, first = arch::warp_idx() * num_topk;
  const int num_total = world.num_ranks * num_topk;
  arch::sync_warp();  // the ordinals
  DC_NO_UNROLL
  for (int base = 0; base < num_total; base += kWarpSize) {
    const int idx = base + arch::lane_idx();
    const int peer = args.shape.by_topk.quotient(idx), k = idx - peer * num_topk;
    const int32_t my_row = arch::shfl(kFullMask, row_ordinal, peer);
    if (idx >= num_total || !is_active(memory, peer)) continue;
    const int expert = memory.own_experts[first + k];
    const int local = expert - args.experts.first_expert(peer);
    const bool is_there = expert >= 0 && local >= 0 && local < args.experts.num_local_experts(peer);
    Route route{-1, 0, 0.0f, my_row};
    if (is_there)
      route = {local, memory.own_ordinals[first + k], memory.weights[first + k], my_row};
    // pairs with: take_arrival in find_output_rows at the peer — nothing but the words themselves.
    arch::st_relaxed_sys(buffer.routes(peer, world.rank, arch::block_idx(), token_idx) + k,
                         route.pack());
  }
}

// After a barrier that follows zero_counters.
template <PayloadFormat kFormat, DispatchRows kRows>
DC_DEVICE bool dispatch_send(const Context& context, const LowLatencyDispatchArgs& args,
                             const LowLatencyBuffer& buffer, const BlockMemory& memory,
                             const LaunchState& launch, SendInputs<kFormat, kRows>& inputs) {
  constexpr bool kUsesStage = uses_stage(kRows), kHasGroups = kRows == DispatchRows::kMany;
  const LowLatencyShare& share = inputs.share;
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  if (warp < share.num_tokens()) inputs.routing.check(context, args, memory, share.begin + warp);
  count_earlier_tokens(args, memory, inputs.batch, num_counted_tokens(args, share));
  if constexpr (kUsesStage) stage_row<kFormat>(args, share, memory, inputs.first);
  const bool ok = !has_credit_warp() || await_credit(context, buffer, memory, launch,
                                                     args.signature, args.split.num_tokens);
  if (!block_agrees(ok)) return false;
  number_records(context, buffer, args.phases, launch);
  // Groups of a token per warp, the first of which may be empty. All kernels but one are for at
  // most one token per block. With several groups the counts follow the rows of all but the last.
  DC_NO_UNROLL
  for (int group = share.begin;; group += num_warps) {
    const int group_end = min_of(group + num_warps, share.end), token = group + warp;
    const bool is_first = group == share.begin, is_last = !kHasGroups || group_end >= share.end;
    const bool has_token = token < group_end;
    if (!is_first) {
      if (has_token) {
        inputs.routing = TokenRouting::load(args, token);
        inputs.routing.check(context, args, memory, token);
      }
      arch::sync_block();
    }
    const int32_t row_ordinal = has_token ? find_ordinals<kRows>(args, memory) : -1;
    if (!is_last || is_counting_block()) {
      // The counters have been read: by all warps, or by the one that has a token.
      if constexpr (kHasGroups) {
        arch::sync_block();
      } else {
        arch::sync_warp();
      }
      if (has_token) count_own(args, memory, row_ordinal);
      arch::sync_block();
      if (is_last) send_counts(context, args, buffer, memory);
    }
    if constexpr (kUsesStage) {
      send_stage<kRows>(args, buffer, share, memory);
    } else if (is_first) {
      send_first_pieces<kFormat, kRows>(args, buffer, share, memory, inputs.first);
    }
    if (has_token) send_routes(args, buffer, memory, row_ordinal, token - share.begin);
    if constexpr (kRows == DispatchRows::kWhole) {
      if (has_token) send_rest_of_stage(args, buffer, share, memory);
    }
    if constexpr (!kUsesStage) {
      send_rows<kFormat, kRows>(args, buffer, share, memory, group, group_end, inputs.first,
                                is_first);
    }
    if (is_last) return true;
    arch::sync_block();  // routes and masks have been read
  }
}

}  // namespace deep_comm
