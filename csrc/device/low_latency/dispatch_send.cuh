// The send phase of dispatch. dispatch_send, at the end, takes a token through these steps:
//
//   1 load      SendInputs: everything a block reads first, in one trip to memory
//   2 route     TokenRouting::check: the token's experts, and the ranks that hold them
//   3 stage     stage_row: few tokens; the row, encoded, in shared memory
//   4 credit    await_credit (block.cuh): the peers have read the buffer
//   5 begin     send_stage or send_first_pieces: the first peer's row, to keep its link busy
//   6 count     count_and_send: counts to all peers (last block); ordinals of its own tokens
//   7 routes    send_routes: where the token belongs, to all peers
//   8 rows      send_rest_of_stage or send_rows: the rows of the other peers
//
// Routes are sent before most rows. They are short, and the receiver looks up output rows while
// payload is still on the links. No store waits for another: each word tells by itself that it has
// arrived (sync/arrival.cuh).
#pragma once

#include "device/low_latency/block.cuh"

namespace deep_comm {

// ---- 2: route -----------------------------------------------------------------------------------

// The token of one warp: its top-k entries by lane.
struct TokenRouting {
  RawExperts<2> raw;  // of entries lane and lane + 32
  int experts[2];     // the same after check; -1: none
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
  // Reports an index out of range. Notes the experts, and a mask of their ranks, for the block.
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
          checked_expert(context, args, raw.get(part), static_cast<int64_t>(token) * num_topk + k,
                         num_topk, args.shape.num_experts);
      memory.own_experts[warp * num_topk + k] = experts[part];
      mask |= rank_bit(args.experts, experts[part]);
    }
    mask = warp_or(mask);
    if (arch::lane_idx() == 0) memory.masks[warp] = mask;
  }
  // The whole warp: the value of entry k.
  template <class T>
  DC_DEVICE static T of(const T (&values)[2], int k) {
    const T low = arch::shfl(kFullMask, values[0], k % kWarpSize);
    const T high = arch::shfl(kFullMask, values[1], k % kWarpSize);
    return k < kWarpSize ? low : high;
  }
};

// ---- 1: load ------------------------------------------------------------------------------------

// Tokens whose experts fit into BlockMemory::expert_batch.
DC_DEVICE int num_batch_tokens(const LowLatencyDispatchArgs& args) {
  return args.shape.by_topk.quotient(BlockMemory::batch_size(arch::num_warps()));
}

// A thread's part of the experts of tokens [begin, end), at most num_batch_tokens of them.
struct ExpertBatch {
  RawExperts<BlockMemory::kExpertsPerThread> raw;

  DC_DEVICE void load(const LowLatencyDispatchArgs& args, int begin, int end) {
    const int64_t num_topk = args.shape.num_topk;
    raw.load(args.topk_idx, begin * num_topk + arch::thread_idx(), arch::num_threads(),
             end * num_topk, args.topk_idx_bytes);
  }
  DC_DEVICE void store(const LowLatencyDispatchArgs& args, const BlockMemory& memory) const {
    DC_UNROLL
    for (int step = 0; step < BlockMemory::kExpertsPerThread; ++step) {
      const int expert = raw.get(step);
      const bool is_valid = expert >= 0 && expert < args.shape.num_experts;
      memory.expert_batch[arch::thread_idx() + step * arch::num_threads()] = is_valid ? expert : -1;
    }
  }
};

// What the send phase loads before it does anything with one of the values.
template <PayloadFormat kFormat>
struct SendInputs {
  LowLatencyShare share;
  Piece<kFormat> first;  // the piece of x that this thread sends first
  TokenRouting routing;  // of this warp's first token
  ExpertBatch batch;     // of this rank's first tokens, to be counted

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
    inputs.batch.load(args, 0, min_of(args.num_tokens, num_batch_tokens(args)));
    return inputs;
  }
};

// ---- 3 and 5, staged rows: bulk copies from shared memory ---------------------------------------

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

// ---- 5, other rows: stores of threads -----------------------------------------------------------

// Every thread encodes its first piece and sends it to the first peer, to give the link work while
// the block counts. More pieces would delay counts and routes.
template <PayloadFormat kFormat>
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
  const Position position = Position::of(idx, Divisor::make(num_pieces), num_pieces);
  if (((memory.masks[position.row] & memory.active) >> peer & 1u) == 0) return;
  first.send(buffer.slot(peer, world.rank, share.begin + position.row), args.shape.row_bytes,
             share.column_begin / Piece<kFormat>::kElements + position.column);
}

// ---- 6: count -----------------------------------------------------------------------------------

DC_DEVICE void zero_counters(const LowLatencyDispatchArgs& args, const BlockMemory& memory) {
  DC_NO_UNROLL
  for (int idx = arch::thread_idx(); idx < args.shape.num_experts + args.world.num_ranks;
       idx += arch::num_threads()) {
    memory.counters[idx] = 0;
  }
}

// The block counts whole tokens. counters[e]: those that select expert e. counters[E + r], compact
// only: those that are sent to rank r.
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
    // Among this token's entries: an earlier one has the same expert; none has the same rank.
    bool is_repeat = false, is_first = args.out.is_compact;
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

// The block counts tokens [0, num_tokens), batch by batch. The first num_loaded of them are in
// expert_batch. The caller has a barrier of the block before it and after it.
DC_DEVICE void count_tokens(const LowLatencyDispatchArgs& args, const BlockMemory& memory,
                            int num_tokens, int num_loaded) {
  int begin = 0;
  DC_NO_UNROLL
  while (begin < num_tokens) {
    if (num_loaded == 0) {
      num_loaded = num_batch_tokens(args);
      ExpertBatch batch;
      batch.load(args, begin, min_of(num_tokens, begin + num_loaded));
      batch.store(args, memory);
      arch::sync_block();
    }
    count_entries(args, memory.counters, memory.expert_batch,
                  min_of(num_tokens - begin, num_loaded));
    begin += num_loaded;
    num_loaded = 0;
    if (begin < num_tokens) arch::sync_block();  // the batch has been read
  }
}

// The block, when its counters hold all tokens: what each rank, and each of its experts, will get.
DC_DEVICE void send_counts(const Context& context, const LowLatencyDispatchArgs& args,
                           const LowLatencyBuffer& buffer, const BlockMemory& memory) {
  const World& world = args.world;
  const int num_experts = args.shape.num_experts;
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
}

// Two rounds: the last block counts all tokens of this rank and sends the counts; then every block
// counts the tokens before its share, where the ordinals of its own tokens begin. Both rounds share
// one loop body: a launch fetches its code anew, so it should be fetched once.
DC_DEVICE void count_and_send(const Context& context, const LowLatencyDispatchArgs& args,
                              const LowLatencyBuffer& buffer, const LowLatencyShare& share,
                              const BlockMemory& memory, int num_loaded) {
  constexpr int kAllTokens = 0, kTokensBefore = 1;
  const bool is_last_block = arch::block_idx() == arch::num_blocks() - 1;
  bool has_first_batch = true;  // expert_batch still holds the first num_loaded tokens
  DC_NO_UNROLL
  for (int round = is_last_block ? kAllTokens : kTokensBefore; round <= kTokensBefore; ++round) {
    const int num_counted = round == kAllTokens ? args.num_tokens : share.begin;
    if (round == kTokensBefore && num_counted == 0) return;
    count_tokens(args, memory, num_counted, has_first_batch ? num_loaded : 0);
    arch::sync_block();
    if (round == kTokensBefore) return;
    send_counts(context, args, buffer, memory);
    note_in_block(context, TraceStep::kCounted);
    zero_counters(args, memory);  // each thread those that it has sent
    arch::sync_block();
    has_first_batch = num_loaded == args.num_tokens;
  }
}

// ---- 7: routes ----------------------------------------------------------------------------------

// One warp sends the routes of its token to every rank. A rank that the token does not go to learns
// that from them.
DC_DEVICE void send_routes(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
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
    // Tokens of other warps of the block that come before this one.
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
template <PayloadFormat kFormat>
DC_DEVICE void send_rows(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                         const LowLatencyShare& share, const BlockMemory& memory, int begin,
                         int end, const Piece<kFormat>& first, bool has_first) {
  using PieceType = Piece<kFormat>;
  const World& world = args.world;
  const int num_pieces = share.num_columns() / PieceType::kElements;
  const Divisor by_pieces = Divisor::make(num_pieces);
  const int first_piece = share.column_begin / PieceType::kElements;
  const int num_total = (end - begin) * num_pieces;
  // The bounds are those of whole warps: encoding needs all lanes.
  DC_NO_UNROLL
  for (int base = arch::warp_idx() * kWarpSize; base < num_total; base += arch::num_threads()) {
    const int idx = base + arch::lane_idx();
    const bool has_piece = idx < num_total;
    const Position position = Position::of(has_piece ? idx : 0, by_pieces, num_pieces);
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

template <PayloadFormat kFormat, DispatchRows kRows>
DC_DEVICE bool dispatch_send(const Context& context, const LowLatencyDispatchArgs& args,
                             const LowLatencyBuffer& buffer, const BlockMemory& memory,
                             const LaunchState& launch, SendInputs<kFormat>& inputs) {
  constexpr bool kUsesStage = uses_stage(kRows);
  const LowLatencyShare& share = inputs.share;
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  const int num_loaded = min_of(args.num_tokens, num_batch_tokens(args));
  zero_counters(args, memory);
  inputs.batch.store(args, memory);
  if (warp < share.num_tokens()) inputs.routing.check(context, args, memory, share.begin + warp);
  if constexpr (kUsesStage) stage_row<kFormat>(args, share, memory, inputs.first);
  const bool ok = !has_credit_warp() ||
                  await_credit(context, buffer, memory, launch, args.signature, args.num_tokens);
  if (!block_agrees(ok)) return false;
  if constexpr (kUsesStage) {
    send_stage<kRows>(args, buffer, share, memory);
  } else {
    send_first_pieces<kFormat>(args, buffer, share, memory, inputs.first);
  }
  number_records(context, buffer, args.phases, launch);
  count_and_send(context, args, buffer, share, memory, num_loaded);
  // Groups of a token per warp. With a stage there is one token, hence one group.
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
    if (token < group_end) send_routes(args, buffer, memory, inputs.routing, token - share.begin);
    if constexpr (kRows == DispatchRows::kWhole) {
      if (warp == 0) send_rest_of_stage(args, buffer, share, memory);
    }
    if constexpr (kUsesStage) break;
    send_rows<kFormat>(args, buffer, share, memory, group, group_end, inputs.first, is_first);
    if (group_end >= share.end) break;
    arch::sync_block();  // the counters have been read
    count_entries(args, memory.counters, memory.own_experts, group_end - group);
    arch::sync_block();
  }
  return true;
}

}  // namespace deep_comm
