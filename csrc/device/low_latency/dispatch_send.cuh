// The send phase of dispatch: rows straight from registers into the receivers' slots, then routes and counts. No
// store waits for another: every word says of itself that it has come.
//
//   warp:  masks of its token → block: rows → (first time) counts of earlier tokens → warp: routes → next tokens
//
// Rows go first: what the routes need is counted while the rows are on the links.
#pragma once

#include "device/low_latency/block.cuh"

namespace deep_comm {

// A warp's own token: its selections by lane, and where it goes.
struct TokenRouting {
  int experts[2];  // of selections lane and lane + 32; -1: none
  uint32_t mask;   // ranks that hold one of them

  DC_DEVICE static TokenRouting load(const Context& context, const LowLatencyDispatchArgs& args, int token) {
    const int num_topk = args.shape.num_topk, num_experts = args.shape.num_experts;
    const ExpertMap map{num_experts, args.world.num_ranks};
    TokenRouting routing{{-1, -1}, 0};
    DC_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int k = arch::lane_idx() + part * kWarpSize;
      if (k >= num_topk) continue;
      routing.experts[part] = checked_expert(context, args.topk_idx, static_cast<int64_t>(token) * num_topk + k,
                                             args.topk_idx_bytes, num_experts);
      if (routing.experts[part] >= 0) routing.mask |= 1u << map.rank_of(routing.experts[part]);
    }
    for (int lane_mask = 1; lane_mask < kWarpSize; lane_mask *= 2) {
      routing.mask |= arch::shfl_xor(kFullMask, routing.mask, lane_mask);
    }
    return routing;
  }
  // A whole warp: the expert of selection k.
  DC_DEVICE int expert(int k) const {
    const int low = arch::shfl(kFullMask, experts[0], k % kWarpSize);
    const int high = arch::shfl(kFullMask, experts[1], k % kWarpSize);
    return k < kWarpSize ? low : high;
  }
};

DC_DEVICE int valid_expert(const LowLatencyDispatchArgs& args, int64_t position) {
  const int expert = load_expert(args.topk_idx, position, args.topk_idx_bytes);
  return expert < args.shape.num_experts ? expert : -1;
}

// The block counts tokens [begin, end): counters[e] that select expert e, counters[E + r] that go to rank r.
DC_DEVICE void count_tokens(const LowLatencyDispatchArgs& args, uint32_t* counters, int begin, int end) {
  const int num_topk = args.shape.num_topk, num_experts = args.shape.num_experts;
  const ExpertMap map{num_experts, args.world.num_ranks};
  for (int64_t idx = static_cast<int64_t>(begin) * num_topk + arch::thread_idx();
       idx < static_cast<int64_t>(end) * num_topk; idx += arch::num_threads()) {
    const int expert = valid_expert(args, idx);
    if (expert < 0) continue;
    const int rank = args.out.is_compact ? map.rank_of(expert) : 0;
    bool is_repeat = false, is_first = args.out.is_compact;  // of this token's on that expert, on that rank
    for (int64_t other = idx / num_topk * num_topk; other < idx; ++other) {
      const int other_expert = valid_expert(args, other);
      is_repeat |= other_expert == expert;
      is_first = is_first && (other_expert < 0 || map.rank_of(other_expert) != rank);
    }
    if (!is_repeat) arch::atomic_add_relaxed_cta(&counters[expert], 1u);
    if (is_first) arch::atomic_add_relaxed_cta(&counters[num_experts + rank], 1u);
  }
}

// The block moves its columns of tokens [begin, end), one piece a thread. With has_first, `first` is what was loaded
// before of the piece that this thread moves first.
template <PayloadFormat kFormat>
DC_DEVICE void send_rows(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half, const LowLatencyShare& share,
                         const uint32_t* masks, int begin, int end, const Piece<kFormat>& first,
                         bool has_first) {
  using PieceType = Piece<kFormat>;
  const World& world = args.world;
  const int num_pieces = share.num_columns() / PieceType::kElements;
  const int first_piece = share.column_begin / PieceType::kElements;
  const int num_tokens = end - begin, num_total = num_tokens * num_pieces;
  // Bounds by warp, not by thread: encoding takes the whole warp.
  for (int base = arch::warp_idx() * kWarpSize; base < num_total; base += arch::num_threads()) {
    const int idx = base + arch::lane_idx();
    const bool is_active = idx < num_total;
    const Position position = Position::of(is_active ? idx : 0, num_tokens, num_pieces);
    const int token = begin + position.row, piece = first_piece + position.column;
    PieceType loaded = first;
    if (!has_first) {
      loaded.load(args.x + static_cast<size_t>(token) * args.shape.hidden * sizeof(Bf16), piece);
    }
    has_first = false;
    loaded.encode(args.round_scale, args.global_scale);
    if (!is_active) continue;
    const uint32_t mask = masks[token - begin];
    for (int step = 0; step < world.num_ranks; ++step) {
      // Each rank begins with another destination, so that none is hit by all at once.
      const int peer = (world.rank + 1 + step) % world.num_ranks;
      if ((mask >> peer & 1u) == 0) continue;
      loaded.send(half.slot(peer, world.rank, token), args.shape.row_bytes, piece);
    }
  }
}

// One warp: the routes of its token, to every rank: the others learn that it does not come.
DC_DEVICE void send_routes(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half, const BlockMemory& memory,
                           const TokenRouting& routing, int group_begin, int token, int token_idx) {
  const World& world = args.world;
  const int num_topk = args.shape.num_topk, num_experts = args.shape.num_experts, lane = arch::lane_idx();
  const ExpertMap map{num_experts, world.num_ranks};
  int32_t ordinals[2] = {0, 0};
  DC_UNROLL
  for (int part = 0; part < 2; ++part) {
    const int k = lane + part * kWarpSize, expert = routing.experts[part];
    if (k >= num_topk || expert < 0) continue;
    uint32_t ordinal = memory.counters[expert];
    // Tokens of the other warps that come before this one.
    for (int other = group_begin; other < token; ++other) {
      bool selects = false;
      for (int column = 0; column < num_topk; ++column) {
        selects |= valid_expert(args, static_cast<int64_t>(other) * num_topk + column) == expert;
      }
      if (selects) ++ordinal;
    }
    bool is_repeat = false;
    for (int column = 0; column < k; ++column) {
      is_repeat |= valid_expert(args, static_cast<int64_t>(token) * num_topk + column) == expert;
    }
    ordinals[part] = is_repeat ? Route::repeated(ordinal) : static_cast<int32_t>(ordinal);
  }
  uint32_t row_ordinal = 0;  // lane r: on rank r
  if (args.out.is_compact && lane < world.num_ranks) {
    row_ordinal = memory.counters[num_experts + lane];
    for (int warp = 0; warp < token - group_begin; ++warp) row_ordinal += memory.masks[warp] >> lane & 1u;
  }
  const int num_total = world.num_ranks * num_topk;
  for (int base = 0; base < num_total; base += kWarpSize) {
    const int idx = base + lane, peer = min_of(idx / num_topk, world.num_ranks - 1), k = idx % num_topk;
    const int expert = routing.expert(k);
    const int32_t low = arch::shfl(kFullMask, ordinals[0], k % kWarpSize);
    const int32_t high = arch::shfl(kFullMask, ordinals[1], k % kWarpSize);
    const uint32_t my_row = arch::shfl(kFullMask, row_ordinal, peer);
    if (idx >= num_total || !is_active(memory, peer)) continue;
    const int local = expert - map.first_expert(peer);
    const bool is_there = expert >= 0 && local >= 0 && local < map.num_local_experts(peer);
    Route route{-1, 0, 0.0f, 0};
    if (is_there) {
      const bool has_weight = args.topk_weights != nullptr;
      route = {local, k < kWarpSize ? low : high,
               has_weight ? arch::ld_nc(args.topk_weights + static_cast<int64_t>(token) * num_topk + k) : 0.0f,
               static_cast<int32_t>(my_row)};
    }
    // pairs with: take_arrival in find_places at the peer — nothing but the words themselves.
    arch::st_relaxed_sys(half.routes(peer, world.rank, arch::block_idx(), token_idx) + k, route.pack());
  }
}

// The block, when its counters hold all tokens: what each rank, and each of its experts, will get.
DC_DEVICE void send_counts(const Context& context, const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                           const BlockMemory& memory) {
  const World& world = args.world;
  const int num_experts = args.shape.num_experts;
  const ExpertMap map{num_experts, world.num_ranks};
  for (int idx = arch::thread_idx(); idx < num_experts + world.num_ranks; idx += arch::num_threads()) {
    const bool is_expert = idx < num_experts;
    const int peer = is_expert ? map.rank_of(idx) : idx - num_experts;
    if (!is_active(memory, peer)) continue;
    const int place = is_expert ? 1 + idx - map.first_expert(peer) : 0;
    // pairs with: await_counts at the peer — nothing but the word itself.
    arch::st_relaxed_sys(half.counts(peer, world.rank) + place, Tagged::pack(context.generation, memory.counters[idx]));
  }
}

template <PayloadFormat kFormat>
DC_DEVICE bool dispatch_send(const Context& context, const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                             const BlockMemory& memory, uint32_t previous) {
  const LowLatencyShape& shape = args.shape;
  const LowLatencyShare share = LowLatencyShare::of(shape, args.num_tokens, arch::block_idx());
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  const int num_counters = shape.num_experts + args.world.num_ranks;
  Piece<kFormat> first{};
  if (const int num_pieces = share.num_columns() / Piece<kFormat>::kElements;
      arch::thread_idx() < min_of(share.num_tokens(), num_warps) * num_pieces) {
    const Position position =
        Position::of(arch::thread_idx(), min_of(share.num_tokens(), num_warps), num_pieces);
    first.load(args.x + static_cast<size_t>(share.begin + position.row) * shape.hidden * sizeof(Bf16),
               share.column_begin / Piece<kFormat>::kElements + position.column);
  }
  for (int idx = arch::thread_idx(); idx < num_counters; idx += arch::num_threads()) memory.counters[idx] = 0;
  // Not by the warps that have tokens, if there are others.
  const bool has_credit_warp = warp == max_of(0, num_warps - 2);
  bool ok = !has_credit_warp || await_credit(context, half, memory, previous, args.signature, args.num_tokens);
  for (int group = share.begin; group < share.end; group += num_warps) {
    const int group_end = min_of(group + num_warps, share.end), token = group + warp;
    TokenRouting routing{};
    if (token < group_end) {
      routing = TokenRouting::load(context, args, token);
      if (arch::lane_idx() == 0) memory.masks[warp] = routing.mask & memory.header->active;
    }
    if (!block_agrees(memory, ok)) return false;
    const bool is_first = group == share.begin;
    send_rows<kFormat>(args, half, share, memory.masks, group, group_end, first, is_first);
    if (is_first) {
      count_tokens(args, memory.counters, 0, share.begin);
      arch::sync_block();
    }
    if (token < group_end) send_routes(args, half, memory, routing, group, token, token - share.begin);
    arch::sync_block();  // counters and masks have been read
    if (group_end < share.end) count_tokens(args, memory.counters, group, group_end);
  }
  if (!block_agrees(memory, ok)) return false;
  if (arch::block_idx() == arch::num_blocks() - 1) {
    // Its counters hold what comes before its last group of tokens; without tokens, nothing.
    const int num_counted = share.begin == share.end ? 0 : (share.end - share.begin - 1) / num_warps * num_warps + share.begin;
    count_tokens(args, memory.counters, num_counted, args.num_tokens);
    arch::sync_block();
    send_counts(context, args, half, memory);
  }
  return true;
}

}  // namespace deep_comm
