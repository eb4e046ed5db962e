// The send phase of dispatch. dispatch_send, at the end, takes a token through these steps:
//
//   1 load      SendInputs: everything a block reads first, in one trip to memory
//   2 route     TokenRouting::check: the token's experts, and the ranks that hold them
//   3 count     count_tokens: the tokens before those of the block, by expert and by rank
//   4 stage     stage_row: few tokens; the row, encoded, in shared memory
//   5 credit    await_credit (block.cuh): the peers have read the buffer
//   6 begin     send_stage or send_first_pieces: the first peer's row, to keep its link busy
//   7 routes    find_ordinals; the last block: send_counts, to all peers; send_routes: where the
//               token belongs, to all peers
//   8 rows      send_rest_of_stage or send_rows: the rows of the other peers
//
// Routes are sent before most rows. They are short, and the receiver looks up output rows while
// payload is still on the links. No store waits for another: each word tells by itself that it has
// arrived (sync/arrival.cuh).
#pragma once

#include "device/low_latency/block.cuh"

namespace deep_comm {

// ---- 2: route -----------------------------------------------------------------------------------

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

// ---- 1: load ------------------------------------------------------------------------------------

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

// The tokens that a block counts: those before its own. The last block counts for all, so it adds its
// own later.
DC_DEVICE int num_counted_tokens(const LowLatencyDispatchArgs& args, const LowLatencyShare& share) {
  return is_counting_block() ? args.split.num_tokens - share.num_tokens() : share.begin;
}

// The token of the block, and the column, of one of its pieces, of which each token has num_pieces.
template <DispatchRows kRows>
DC_DEVICE Position position_of_piece(int idx, int num_pieces) {
  if constexpr (kRows != DispatchRows::kMany) return {0, idx};
  return Position::of(idx, Divisor::make(num_pieces), num_pieces);
}

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

// ---- 3: count -----------------------------------------------------------------------------------

// Before a barrier of the block: counters[e], tokens that select expert e; counters[E + r], compact
// only: those that are sent to rank r.
DC_DEVICE void zero_counters(const LowLatencyDispatchArgs& args, const BlockMemory& memory) {
  DC_NO_UNROLL
  for (int idx = arch::thread_idx(); idx < args.shape.num_experts + args.world.num_ranks;
       idx += arch::num_threads()) {
    memory.counters[idx] = 0;
  }
}

// One warp: counts the tokens whose entries its lanes have. `raw`: of this lane, if has_token.
DC_DEVICE void count_entries(const LowLatencyDispatchArgs& args, const BlockMemory& memory,
                             const EntryLanes& lanes, int token, bool has_token,
                             const RawExpert& raw) {
  const int num_topk = args.shape.num_topk;
  const int64_t begin = static_cast<int64_t>(token) * num_topk;
  DC_NO_UNROLL
  for (int base = 0; base < num_topk; base += kWarpSize) {
    const int k = base + lanes.k;
    int expert = has_token && base == 0 ? raw.value(args.topk_idx_bytes) : -1;
    if (base > 0 && has_token && k < num_topk)
      expert = load_expert(args.topk_idx, begin + k, args.topk_idx_bytes);
    if (expert >= args.shape.num_experts) expert = -1;
    const int rank = expert >= 0 ? args.experts.rank_of(expert) : -1;
    // Among this token's entries: an earlier one has the same expert, the same rank.
    bool has_expert = is_repeated(expert * kWarpSize + lanes.token);
    bool has_rank = is_repeated(rank * kWarpSize + lanes.token);
    DC_NO_UNROLL
    for (int other = 0; other < base; ++other) {
      const int earlier = load_expert(args.topk_idx, begin + other, args.topk_idx_bytes);
      has_expert |= earlier == expert;
      has_rank |= rank_bit(args.experts, earlier) == rank_bit(args.experts, expert);
    }
    if (expert < 0) continue;
    if (!has_expert) arch::atomic_add_relaxed_cta(&memory.counters[expert], 1u);
    if (!has_rank && args.out.is_compact)
      arch::atomic_add_relaxed_cta(&memory.counters[args.shape.num_experts + rank], 1u);
  }
}

// The block counts tokens [0, num_tokens). `batch`: of the first of them. The caller has a barrier of
// the block after it.
DC_DEVICE void count_tokens(const LowLatencyDispatchArgs& args, const BlockMemory& memory,
                            TokenBatch& batch, int num_tokens) {
  const EntryLanes lanes = EntryLanes::of(args.shape);
  DC_NO_UNROLL
  for (int begin = 0; begin < num_tokens;
       begin += lanes.num_tokens * arch::num_warps() * TokenBatch::kTurns) {
    if (begin > 0) batch = TokenBatch::load(args, begin, num_tokens);
    DC_NO_UNROLL
    for (int turn = 0; turn < TokenBatch::kTurns; ++turn) {
      const int first = begin + lanes.first(turn), token = first + lanes.token;
      if (first >= num_tokens) break;
      count_entries(args, memory, lanes, token,
                    lanes.token < lanes.num_tokens && token < num_tokens, batch.raw[0]);
      // A loop that is unrolled would be fetched as often.
      DC_UNROLL
      for (int next = 1; next < TokenBatch::kTurns; ++next) batch.raw[next - 1] = batch.raw[next];
    }
  }
}

// ---- 4 and 6, staged rows: bulk copies from shared memory ---------------------------------------

// A block with at most one token encodes the token's columns into shared memory. The bulk-copy
// engine sends them from there, so no later load of the block waits behind stores to busy links.
// The caller follows it with a barrier of the block.
// `first`: as SendInputs has loaded it.
template <PayloadFormat kFormat>
DC_DEVICE void stage_row(const LowLatencyDispatchArgs& args, const LowLatencyShare& share,
                         const BlockMemory& memory, const Piece<kFormat>& first) {
  using PieceType = Piece<kFormat>;
  const int first_piece = share.column_begin / PieceType::kElements;
  const int num_pieces = share.num_tokens() * share.num_columns() / PieceType::kElements;
  PieceType loaded = first;
  // The bounds are those of whole warps: encoding needs all lanes.
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
  // Before the bulk copies that read them.
  arch::fence_proxy_async_shared();
}

// One lane copies the stage to a peer, while other lanes copy it to others. The kernel waits for
// the copies at its end.
DC_DEVICE void copy_stage(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                          const LowLatencyShare& share, const BlockMemory& memory, int peer) {
  const World& world = args.world;
  const LowLatencyShape& shape = args.shape;
  if (((memory.masks[0] & memory.active) >> peer & 1u) == 0) return;
  uint8_t* slot = buffer.slot(peer, world.rank, share.begin);
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

// The last warp. Strips are copied to all peers. Whole rows go to the first peer only: more of them
// would delay counts and routes.
template <DispatchRows kRows>
DC_DEVICE void send_stage(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                          const LowLatencyShare& share, const BlockMemory& memory) {
  const World& world = args.world;
  const int peer_order = arch::lane_idx();
  if (arch::warp_idx() != arch::num_warps() - 1 || share.num_tokens() == 0) return;
  if constexpr (kRows == DispatchRows::kWhole) {
    if (peer_order == 0)
      copy_stage(args, buffer, share, memory, peer_at(world, memory.rotation, 0));
  } else if (peer_order < world.num_ranks) {
    const int peer = peer_at(world, block_rotation(world), peer_order);
    copy_stage(args, buffer, share, memory, peer);
  }
}

// ---- 6, other rows: stores of threads -----------------------------------------------------------

// Every thread encodes its first piece and sends it to the first peer, to give the link work while
// the block counts. More pieces would delay counts and routes.
template <PayloadFormat kFormat, DispatchRows kRows>
DC_DEVICE void send_first_pieces(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                                 const LowLatencyShare& share, const BlockMemory& memory,
                                 Piece<kFormat>& first) {
  const World& world = args.world;
  const int num_pieces = share.num_columns() / Piece<kFormat>::kElements;
  const int num_total = min_of(share.num_tokens(), arch::num_warps()) * num_pieces;
  // As in send_rows: encoding needs all lanes.
  if (arch::warp_idx() * kWarpSize >= num_total) return;
  first.encode(args.round_scale, args.global_scale);
  const int idx = arch::thread_idx(), peer = peer_at(world, memory.rotation, 0);
  if (idx >= num_total) return;
  const Position position = position_of_piece<kRows>(idx, num_pieces);
  if (((memory.masks[position.row] & memory.active) >> peer & 1u) == 0) return;
  first.send(buffer.slot(peer, world.rank, share.begin + position.row), args.shape.row_bytes,
             share.column_begin / Piece<kFormat>::kElements + position.column);
}

// ---- 7: routes ----------------------------------------------------------------------------------

// One warp, when the counters hold the tokens before those of the block's group: the ordinals of its
// token's entries, into shared memory. Returns, in lane r, the token's ordinal on rank r, or -1.
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

// ---- 8: rows ------------------------------------------------------------------------------------

// Whole rows, the warp that has sent the routes: copies for the other peers.
DC_DEVICE void send_rest_of_stage(const LowLatencyDispatchArgs& args,
                                  const LowLatencyBuffer& buffer, const LowLatencyShare& share,
                                  const BlockMemory& memory) {
  const int peer_order = arch::lane_idx() + 1;
  if (peer_order >= args.world.num_ranks) return;
  copy_stage(args, buffer, share, memory, peer_at(args.world, memory.rotation, peer_order));
}

// The block sends its columns of tokens [begin, end), one piece per thread at a time. With
// has_first this thread has loaded and encoded its first piece (`first`) and sent it to the first
// peer.
template <PayloadFormat kFormat, DispatchRows kRows>
DC_DEVICE void send_rows(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                         const LowLatencyShare& share, const BlockMemory& memory, int begin,
                         int end, const Piece<kFormat>& first, bool has_first) {
  using PieceType = Piece<kFormat>;
  const World& world = args.world;
  const int num_pieces = share.num_columns() / PieceType::kElements;
  const int first_piece = share.column_begin / PieceType::kElements;
  const int num_total = (end - begin) * num_pieces;
  // The bounds are those of whole warps: encoding needs all lanes.
  DC_NO_UNROLL
  for (int base = arch::warp_idx() * kWarpSize; base < num_total; base += arch::num_threads()) {
    const int idx = base + arch::lane_idx();
    const bool has_piece = idx < num_total;
    const Position position = position_of_piece<kRows>(has_piece ? idx : 0, num_pieces);
    const int token = begin + position.row, piece = first_piece + position.column;
    PieceType loaded = first;
    const int first_peer = has_first ? 1 : 0;
    if (!has_first) {
      loaded.load(args.x + static_cast<size_t>(token) * args.shape.hidden * sizeof(Bf16), piece);
      loaded.encode(args.round_scale, args.global_scale);
    }
    has_first = false;
    if (!has_piece) continue;
    const uint32_t mask = memory.masks[position.row] & memory.active;
    DC_NO_UNROLL
    for (int peer_order = first_peer; peer_order < world.num_ranks; ++peer_order) {
      const int peer = peer_at(world, memory.rotation, peer_order);
      if ((mask >> peer & 1u) == 0) continue;
      loaded.send(buffer.slot(peer, world.rank, token), args.shape.row_bytes, piece);
    }
  }
}

// ---- the phase ----------------------------------------------------------------------------------

// After a barrier that follows zero_counters.
template <PayloadFormat kFormat, DispatchRows kRows>
DC_DEVICE bool dispatch_send(const Context& context, const LowLatencyDispatchArgs& args,
                             const LowLatencyBuffer& buffer, const BlockMemory& memory,
                             const LaunchState& launch, SendInputs<kFormat, kRows>& inputs) {
  constexpr bool kUsesStage = uses_stage(kRows), kHasGroups = kRows == DispatchRows::kMany;
  const LowLatencyShare& share = inputs.share;
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  if (warp < share.num_tokens()) inputs.routing.check(context, args, memory, share.begin + warp);
  count_tokens(args, memory, inputs.batch, num_counted_tokens(args, share));
  if constexpr (kUsesStage) stage_row<kFormat>(args, share, memory, inputs.first);
  const bool ok = !has_credit_warp() || await_credit(context, buffer, memory, launch,
                                                     args.signature, args.split.num_tokens);
  if (!block_agrees(ok)) return false;
  if constexpr (kUsesStage) {
    send_stage<kRows>(args, buffer, share, memory);
  } else {
    send_first_pieces<kFormat, kRows>(args, buffer, share, memory, inputs.first);
  }
  number_records(context, buffer, args.phases, launch);
  // Groups of a token per warp; one of them may be empty. All kernels but one are for at most one
  // token a block.
  int group = share.begin;
  DC_NO_UNROLL
  do {
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
    if (kHasGroups) arch::sync_block();  // the counters have been read
    if (!is_last || is_counting_block()) {
      arch::sync_warp();
      if (has_token) count_own(args, memory, row_ordinal);
      arch::sync_block();
      if (is_last) send_counts(context, args, buffer, memory);
    }
    if (has_token) send_routes(args, buffer, memory, row_ordinal, token - share.begin);
    if constexpr (kRows == DispatchRows::kWhole) {
      if (warp == 0) send_rest_of_stage(args, buffer, share, memory);
    }
    if constexpr (!kUsesStage) {
      send_rows<kFormat, kRows>(args, buffer, share, memory, group, group_end, inputs.first,
                                is_first);
    }
    if (is_last) break;
    arch::sync_block();  // routes and masks have been read
    group += num_warps;
  } while (true);
  return true;
}

}  // namespace deep_comm
