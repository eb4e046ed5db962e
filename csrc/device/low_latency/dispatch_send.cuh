// The send phase of dispatch: routes and counts, then rows straight from registers into the
// receivers' slots. No store waits for another: every word says of itself that it has come.
//
//   load: rows, experts → ranks of own tokens → rows of the first peer → counts of earlier tokens
//   → warp: routes → block: rows of the others
//
// All that a block reads is loaded at its begin, in one trip to memory. Routes go before most rows:
// they are few, and the receiver finds the places of rows while the rows are on the links.
#pragma once

#include "device/low_latency/block.cuh"

namespace deep_comm {

// A warp's own token: its selections by lane, and where it goes.
struct TokenRouting {
  RawExperts<2> raw;  // of selections lane and lane + 32
  int experts[2];     // the same, checked; -1: none
  float weights[2];

  DC_DEVICE static TokenRouting load(const LowLatencyDispatchArgs& args, int token) {
    TokenRouting routing{};
    const int num_topk = args.shape.num_topk;
    const int64_t begin = static_cast<int64_t>(token) * num_topk;
    routing.raw.load(args.topk_idx, begin + arch::lane_idx(), kWarpSize, begin + num_topk,
                     args.topk_idx_bytes);
    if (args.topk_weights == nullptr) return routing;
    DC_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int k = arch::lane_idx() + part * kWarpSize;
      if (k < num_topk) routing.weights[part] = arch::ld_nc(args.topk_weights + begin + k);
    }
    return routing;
  }
  // Reports what lies out of range; notes the experts and their ranks for the block.
  DC_DEVICE void check(const Context& context, const LowLatencyDispatchArgs& args,
                       const BlockMemory& memory, int token) {
    const int num_topk = args.shape.num_topk, warp = arch::warp_idx();
    uint32_t mask = 0;
    experts[0] = experts[1] = -1;
    DC_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int k = arch::lane_idx() + part * kWarpSize;
      if (k >= num_topk) continue;
      experts[part] =
          checked_expert(context, raw.get(part), static_cast<int64_t>(token) * num_topk + k,
                         args.shape.num_experts);
      memory.own_experts[warp * num_topk + k] = experts[part];
      mask |= rank_bit(args.experts, experts[part]);
    }
    mask = warp_or(mask);
    if (arch::lane_idx() == 0) memory.masks[warp] = mask;
  }
  // A whole warp: of selection k.
  template <class T>
  DC_DEVICE static T of(const T (&values)[2], int k) {
    const T low = arch::shfl(kFullMask, values[0], k % kWarpSize);
    const T high = arch::shfl(kFullMask, values[1], k % kWarpSize);
    return k < kWarpSize ? low : high;
  }
};

// Tokens whose experts the staging holds at once.
DC_DEVICE int num_staged_tokens(const LowLatencyDispatchArgs& args) {
  return args.shape.by_topk.quotient(BlockMemory::num_staged(arch::num_warps()));
}

// A thread's part of the experts of tokens [begin, end), at most num_staged_tokens.
struct StagedExperts {
  RawExperts<BlockMemory::kStagedPerThread> raw;

  DC_DEVICE void load(const LowLatencyDispatchArgs& args, int begin, int end) {
    const int64_t num_topk = args.shape.num_topk;
    raw.load(args.topk_idx, begin * num_topk + arch::thread_idx(), arch::num_threads(),
             end * num_topk, args.topk_idx_bytes);
  }
  DC_DEVICE void store(const LowLatencyDispatchArgs& args, const BlockMemory& memory) const {
    DC_UNROLL
    for (int step = 0; step < BlockMemory::kStagedPerThread; ++step) {
      const int expert = raw.get(step);
      const bool is_valid = expert >= 0 && expert < args.shape.num_experts;
      memory.staged[arch::thread_idx() + step * arch::num_threads()] = is_valid ? expert : -1;
    }
  }
};

DC_DEVICE void zero_counters(const LowLatencyDispatchArgs& args, const BlockMemory& memory) {
  DC_NO_UNROLL
  for (int idx = arch::thread_idx(); idx < args.shape.num_experts + args.world.num_ranks;
       idx += arch::num_threads()) {
    memory.counters[idx] = 0;
  }
}

// The block counts whole tokens: counters[e] that select expert e, counters[E
// + r] that go to rank r.
DC_DEVICE void count_entries(const LowLatencyDispatchArgs& args, uint32_t* counters,
                             const int32_t* experts, int num_tokens) {
  const int num_topk = args.shape.num_topk;
  DC_NO_UNROLL
  for (int idx = arch::thread_idx(); idx < num_tokens * num_topk; idx += arch::num_threads()) {
    const int expert = experts[idx];
    if (expert < 0) continue;
    const int rank = args.experts.rank_of(expert);
    const int first_expert = args.experts.first_expert(rank),
              end_expert = args.experts.first_expert(rank + 1);
    bool is_repeat = false,
         is_first = args.out.is_compact;  // of this token's on that expert, on that rank
    DC_UNROLL_BY(4)
    for (int other = args.shape.by_topk.quotient(idx) * num_topk; other < idx; ++other) {
      const int other_expert = experts[other];
      is_repeat |= other_expert == expert;
      is_first &= other_expert < first_expert || other_expert >= end_expert;
    }
    if (!is_repeat) arch::atomic_add_relaxed_cta(&counters[expert], 1u);
    if (is_first) arch::atomic_add_relaxed_cta(&counters[args.shape.num_experts + rank], 1u);
  }
}

// The same of tokens [begin, end). The staging holds the first num_staged of them. A barrier of the
// block before and behind it is the caller's.
DC_DEVICE void count_tokens(const LowLatencyDispatchArgs& args, const BlockMemory& memory,
                            int begin, int end, int num_staged) {
  DC_NO_UNROLL
  while (begin < end) {
    if (num_staged == 0) {
      num_staged = num_staged_tokens(args);
      StagedExperts staged;
      staged.load(args, begin, min_of(end, begin + num_staged));
      staged.store(args, memory);
      arch::sync_block();
    }
    count_entries(args, memory.counters, memory.staged, min_of(end - begin, num_staged));
    begin += num_staged;
    num_staged = 0;
    if (begin < end) arch::sync_block();  // has been read
  }
}

// Every thread's first piece, encoded, to the first peer: so the links have work while the block
// counts. More than that would hold up counts and routes.
template <PayloadFormat kFormat>
DC_DEVICE void send_first_pieces(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                                 const LowLatencyShare& share, const BlockMemory& memory,
                                 Piece<kFormat>& first) {
  const World& world = args.world;
  const int num_pieces = share.num_columns() / Piece<kFormat>::kElements;
  const int num_total = min_of(share.num_tokens(), arch::num_warps()) * num_pieces;
  // As in send_rows: encoding takes the whole warp.
  if (arch::warp_idx() * kWarpSize >= num_total) return;
  first.encode(args.round_scale, args.global_scale);
  const int idx = arch::thread_idx(), peer = source_at(world, memory.turn, 0);
  if (idx >= num_total) return;
  const Position position = Position::of(idx, Divisor::make(num_pieces), num_pieces);
  if (((memory.masks[position.row] & memory.active) >> peer & 1u) == 0) return;
  first.send(half.slot(peer, world.rank, share.begin + position.row), args.shape.row_bytes,
             share.column_begin / Piece<kFormat>::kElements + position.column);
}

// Of a block that has at most one token: its columns as they travel, in shared memory. From there
// the bulk-copy engine moves them to all peers at once, and nothing that the block loads waits
// behind stores that wait for the links. A barrier of the block behind it is the caller's.
// `first`: as SendInputs has loaded it.
template <PayloadFormat kFormat>
DC_DEVICE void stage_row(const LowLatencyDispatchArgs& args, const LowLatencyShare& share,
                         const BlockMemory& memory, const Piece<kFormat>& first) {
  using PieceType = Piece<kFormat>;
  const int first_piece = share.column_begin / PieceType::kElements;
  const int num_pieces = share.num_tokens() * share.num_columns() / PieceType::kElements;
  PieceType loaded = first;
  // Bounds by warp, not by thread: encoding takes the whole warp.
  DC_NO_UNROLL
  for (int base = arch::warp_idx() * kWarpSize; base < num_pieces; base += arch::num_threads()) {
    const int idx = base + arch::lane_idx();
    const bool has_piece = idx < num_pieces;
    const int piece = first_piece + (has_piece ? idx : 0);
    if (base >= arch::num_threads()) {
      loaded.load(args.x + static_cast<size_t>(share.begin) * args.shape.hidden * sizeof(Bf16),
                  piece);
    }
    loaded.encode(args.round_scale, args.global_scale);
    if (has_piece) loaded.put(memory.stage, args.shape.row_bytes, piece);
  }
  arch::fence_proxy_async_shared();  // before the bulk copies that read them
}

// A lane: the copies for a peer, under way together with those of other lanes. The kernel awaits
// them at its end.
DC_DEVICE void copy_stage(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                          const LowLatencyShare& share, const BlockMemory& memory, int peer) {
  const World& world = args.world;
  const LowLatencyShape& shape = args.shape;
  if (((memory.masks[0] & memory.active) >> peer & 1u) == 0) return;
  uint8_t* slot = half.slot(peer, world.rank, share.begin);
  // pairs with: take_arrival in expand_rows and expand_scales — nothing but the words themselves.
  const auto copy = [&](uint32_t offset, uint32_t num_bytes) {
    arch::bulk_store(slot + offset, memory.stage + offset, num_bytes);
  };
  const bool has_scales = shape.num_scales > 0;
  const uint32_t element_bytes = has_scales ? 1 : sizeof(Bf16);
  copy(share.column_begin * element_bytes, share.num_columns() * element_bytes);
  if (has_scales) {
    copy(shape.row_bytes + share.column_begin / kScaleBlock * sizeof(float),
         share.num_columns() / kScaleBlock * sizeof(float));
  }
  arch::bulk_commit();
}

// The last warp: copies for all peers, or of rows for the first: more of them would hold up counts
// and routes.
template <DispatchRows kRows>
DC_DEVICE void send_stage(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                          const LowLatencyShare& share, const BlockMemory& memory) {
  const World& world = args.world;
  const int position = arch::lane_idx();
  if (arch::warp_idx() != arch::num_warps() - 1 || share.num_tokens() == 0) return;
  if constexpr (kRows == DispatchRows::kWhole) {
    if (position == 0) copy_stage(args, half, share, memory, source_at(world, memory.turn, 0));
  } else if (position < world.num_ranks) {
    const int peer = source_at(world, turn_of_block(world), position);
    copy_stage(args, half, share, memory, peer);
  }
}

// The warp that has sent the routes of the row: copies for the other peers.
DC_DEVICE void send_rest_of_stage(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                                  const LowLatencyShare& share, const BlockMemory& memory) {
  const int position = arch::lane_idx() + 1;
  if (position >= args.world.num_ranks) return;
  copy_stage(args, half, share, memory, source_at(args.world, memory.turn, position));
}

// The block moves its columns of tokens [begin, end), one piece a thread. With has_first, `first`
// is the piece that this thread moves first, which send_first_pieces has encoded and sent.
template <PayloadFormat kFormat>
DC_DEVICE void send_rows(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                         const LowLatencyShare& share, const BlockMemory& memory, int begin,
                         int end, const Piece<kFormat>& first, bool has_first) {
  using PieceType = Piece<kFormat>;
  const World& world = args.world;
  const int num_pieces = share.num_columns() / PieceType::kElements;
  const Divisor by_pieces = Divisor::make(num_pieces);
  const int first_piece = share.column_begin / PieceType::kElements;
  const int num_total = (end - begin) * num_pieces;
  // Bounds by warp, not by thread: encoding takes the whole warp.
  DC_NO_UNROLL
  for (int base = arch::warp_idx() * kWarpSize; base < num_total; base += arch::num_threads()) {
    const int idx = base + arch::lane_idx();
    const bool has_piece = idx < num_total;
    const Position position = Position::of(has_piece ? idx : 0, by_pieces, num_pieces);
    const int token = begin + position.row, piece = first_piece + position.column;
    PieceType loaded = first;
    const int first_step = has_first ? 1 : 0;
    if (!has_first) {
      loaded.load(args.x + static_cast<size_t>(token) * args.shape.hidden * sizeof(Bf16), piece);
      loaded.encode(args.round_scale, args.global_scale);
    }
    has_first = false;
    if (!has_piece) continue;
    const uint32_t mask = memory.masks[position.row] & memory.active;
    DC_NO_UNROLL
    for (int step = first_step; step < world.num_ranks; ++step) {
      // Each rank begins with another destination, so that none is hit by all at once.
      const int peer = source_at(world, memory.turn, step);
      if ((mask >> peer & 1u) == 0) continue;
      loaded.send(half.slot(peer, world.rank, token), args.shape.row_bytes, piece);
    }
  }
}

// One warp: the routes of its token, to every rank: the others learn that it does not come.
DC_DEVICE void send_routes(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                           const BlockMemory& memory, const TokenRouting& routing, int token_idx) {
  const World& world = args.world;
  const int num_topk = args.shape.num_topk, num_experts = args.shape.num_experts;
  const int lane = arch::lane_idx(), warp = arch::warp_idx();
  const int32_t* own = memory.own_experts + warp * num_topk;
  int32_t ordinals[2] = {0, 0};
  DC_UNROLL
  for (int part = 0; part < 2; ++part) {
    const int k = lane + part * kWarpSize, expert = routing.experts[part];
    if (k >= num_topk || expert < 0) continue;
    uint32_t ordinal = memory.counters[expert];
    // Tokens of the other warps that come before this one.
    DC_NO_UNROLL
    for (const int32_t* other = memory.own_experts; other < own; other += num_topk) {
      bool selects = false;
      DC_UNROLL_BY(4)
      for (int column = 0; column < num_topk; ++column) selects |= other[column] == expert;
      if (selects) ++ordinal;
    }
    bool is_repeat = false;
    DC_UNROLL_BY(4)
    for (int column = 0; column < k; ++column) is_repeat |= own[column] == expert;
    ordinals[part] = is_repeat ? Route::repeated(ordinal) : static_cast<int32_t>(ordinal);
  }
  int32_t row_ordinal = -1;  // lane r: on rank r
  if (args.out.is_compact && lane < world.num_ranks && (memory.masks[warp] >> lane & 1u) != 0) {
    row_ordinal = static_cast<int32_t>(memory.counters[num_experts + lane]);
    DC_NO_UNROLL
    for (int other = 0; other < warp; ++other)
      row_ordinal += static_cast<int32_t>(memory.masks[other] >> lane & 1u);
  }
  const int num_total = world.num_ranks * num_topk;
  DC_NO_UNROLL
  for (int base = 0; base < num_total; base += kWarpSize) {
    const int idx = min_of(base + lane, num_total - 1);
    const int peer = args.shape.by_topk.quotient(idx), k = idx - peer * num_topk;
    const int expert = TokenRouting::of(routing.experts, k);
    const int32_t ordinal = TokenRouting::of(ordinals, k);
    const float weight = TokenRouting::of(routing.weights, k);
    const int32_t my_row = arch::shfl(kFullMask, row_ordinal, peer);
    if (base + lane >= num_total || !is_active(memory, peer)) continue;
    const int local = expert - args.experts.first_expert(peer);
    const bool is_there = expert >= 0 && local >= 0 && local < args.experts.num_local_experts(peer);
    const Route route =
        is_there ? Route{local, ordinal, weight, my_row} : Route{-1, 0, 0.0f, my_row};
    // pairs with: take_arrival in find_places at the peer — nothing but the words themselves.
    arch::st_relaxed_sys(half.routes(peer, world.rank, arch::block_idx(), token_idx) + k,
                         route.pack());
  }
}

// The block, when its counters hold all tokens: what each rank, and each of its experts, will get.
DC_DEVICE void send_counts(const Context& context, const LowLatencyDispatchArgs& args,
                           const LowLatencyHalf& half, const BlockMemory& memory) {
  const World& world = args.world;
  const int num_experts = args.shape.num_experts;
  for (int idx = arch::thread_idx(); idx < num_experts + world.num_ranks;
       idx += arch::num_threads()) {
    const bool is_expert = idx < num_experts;
    const int peer = is_expert ? args.experts.rank_of(idx) : idx - num_experts;
    if (!is_active(memory, peer)) continue;
    const int place = is_expert ? 1 + idx - args.experts.first_expert(peer) : 0;
    // pairs with: await_counts at the peer — nothing but the word itself.
    arch::st_relaxed_sys(half.counts(peer, world.rank) + place,
                         Tagged::pack(context.generation, memory.counters[idx]));
  }
}

// What the send phase loads at its begin.
template <PayloadFormat kFormat>
struct SendInputs {
  LowLatencyShare share;
  Piece<kFormat> first;  // that this thread moves first
  TokenRouting routing;  // of this warp's first token
  StagedExperts staged;  // of the rank's first tokens

  DC_DEVICE static SendInputs load(const LowLatencyDispatchArgs& args,
                                   const LowLatencyShare& share) {
    SendInputs inputs{};
    inputs.share = share;
    const int num_warps = arch::num_warps(), num_tokens = min_of(share.num_tokens(), num_warps);
    const int num_pieces = share.num_columns() / Piece<kFormat>::kElements;
    if (arch::warp_idx() < num_tokens) {
      inputs.routing = TokenRouting::load(args, share.begin + arch::warp_idx());
    }
    if (arch::thread_idx() < num_tokens * num_pieces) {
      const Position position =
          Position::of(arch::thread_idx(), Divisor::make(num_pieces), num_pieces);
      inputs.first.load(args.x + static_cast<size_t>(share.begin + position.row) *
                                     args.shape.hidden * sizeof(Bf16),
                        share.column_begin / Piece<kFormat>::kElements + position.column);
    }
    inputs.staged.load(args, 0, min_of(args.num_tokens, num_staged_tokens(args)));
    return inputs;
  }
};

template <PayloadFormat kFormat, DispatchRows kRows>
DC_DEVICE bool dispatch_send(const Context& context, const LowLatencyDispatchArgs& args,
                             const LowLatencyHalf& half, const BlockMemory& memory,
                             const Beginning& begin, SendInputs<kFormat>& inputs) {
  constexpr bool kStaged = is_staged(kRows);
  const LowLatencyShare& share = inputs.share;
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  const int num_staged = min_of(args.num_tokens, num_staged_tokens(args));
  zero_counters(args, memory);
  inputs.staged.store(args, memory);
  if (warp < share.num_tokens()) inputs.routing.check(context, args, memory, share.begin + warp);
  if constexpr (kStaged) stage_row<kFormat>(args, share, memory, inputs.first);
  const bool ok = !has_credit_warp() ||
                  await_credit(context, half, memory, begin, args.signature, args.num_tokens);
  if (!block_agrees(ok)) return false;
  if constexpr (kStaged) {
    send_stage<kRows>(args, half, share, memory);
  } else {
    send_first_pieces<kFormat>(args, half, share, memory, inputs.first);
  }
  number_records(context, half, args.phases, begin);
  // The last block counts all tokens, for the counts; then every block those before its own.
  const bool is_last = arch::block_idx() == arch::num_blocks() - 1;
  bool is_staged = true;
  DC_NO_UNROLL
  for (int pass = is_last ? 0 : 1; pass < 2; ++pass) {
    const int num_counted = pass == 0 ? args.num_tokens : share.begin;
    if (pass == 1 && num_counted == 0) break;
    count_tokens(args, memory, 0, num_counted, is_staged ? num_staged : 0);
    arch::sync_block();
    if (pass == 1) break;
    send_counts(context, args, half, memory);
    arch::sync_block();
    note_in_block(context, TraceStep::kCounted);
    zero_counters(args, memory);
    arch::sync_block();
    is_staged = num_staged == args.num_tokens;
  }
  DC_NO_UNROLL
  for (int group = share.begin; group < share.end; group += num_warps) {
    const int group_end = min_of(group + num_warps, share.end), token = group + warp;
    const bool is_first = group == share.begin;
    if (!is_first) {
      if (token < group_end) {
        inputs.routing = TokenRouting::load(args, token);
        inputs.routing.check(context, args, memory, token);
      }
      arch::sync_block();
    }
    if (token < group_end) send_routes(args, half, memory, inputs.routing, token - share.begin);
    if constexpr (kRows == DispatchRows::kWhole) {
      if (warp == 0) send_rest_of_stage(args, half, share, memory);
    }
    if constexpr (kStaged) break;  // the row is under way, and there is no other
    send_rows<kFormat>(args, half, share, memory, group, group_end, inputs.first, is_first);
    if (group_end >= share.end) break;
    arch::sync_block();  // the counters have been read
    count_entries(args, memory.counters, memory.own_experts, group_end - group);
    arch::sync_block();
  }
  return true;
}

}  // namespace deep_comm
