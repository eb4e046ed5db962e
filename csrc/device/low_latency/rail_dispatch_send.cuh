// The send phase of dispatch between nodes: every token becomes one staged message, which goes as it is to every rank
// that holds one of its experts: by one put a rank of another node, by stores over NVLink within.
//
//   block: first piece of x loaded | earlier tokens counted → row, scales; warp 0: routes, destinations → puts | copies
//   last block: counts of all tokens → a line for every rank
#pragma once

#include "device/low_latency/rail_block.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// The block that counts sends no tokens, if there is another.
DC_DEVICE int num_sending_blocks() { return max_of(1, arch::num_blocks() - 1); }

DC_DEVICE int rail_expert(const LowLatencyRailDispatchArgs& args, int64_t position) {
  const int expert = load_expert(args.topk_idx, position, args.topk_idx_bytes);
  return expert < args.shape.num_experts ? expert : -1;
}

// The block counts tokens [begin, end): counters[e] that select expert e, counters[E + r] that go to rank r.
DC_DEVICE void count_tokens(const LowLatencyRailDispatchArgs& args, uint32_t* counters, int begin, int end) {
  const int num_topk = args.shape.num_topk, num_experts = args.shape.num_experts;
  const ExpertMap map{num_experts, args.reach.group.num_ranks};
  for (int64_t idx = static_cast<int64_t>(begin) * num_topk + arch::thread_idx();
       idx < static_cast<int64_t>(end) * num_topk; idx += arch::num_threads()) {
    const int expert = rail_expert(args, idx);
    if (expert < 0) continue;
    const int rank = map.rank_of(expert);
    bool is_repeat = false, is_first = true;  // of this token's on that expert, on that rank
    for (int64_t other = idx / num_topk * num_topk; other < idx; ++other) {
      const int other_expert = rail_expert(args, other);
      is_repeat |= other_expert == expert;
      is_first = is_first && (other_expert < 0 || map.rank_of(other_expert) != rank);
    }
    if (!is_repeat) arch::atomic_add_relaxed_cta(&counters[expert], 1u);
    if (is_first) arch::atomic_add_relaxed_cta(&counters[num_experts + rank], 1u);
  }
}

// One warp, when the counters hold the tokens before: the routes of the token into its message, its destinations and
// their slots into shared memory.
DC_DEVICE void stage_routes(const Context& context, const LowLatencyRailDispatchArgs& args,
                            const LowLatencyRailHalf& half, const RailBlockMemory& memory, int token) {
  const int num_topk = args.shape.num_topk, num_experts = args.shape.num_experts;
  const ExpertMap map{num_experts, args.reach.group.num_ranks};
  Vec16* routes = half.own<Vec16>(half.slot_staged(token));
  const int64_t first = static_cast<int64_t>(token) * num_topk;
  int experts[2] = {-1, -1};
  const TokenRanks ranks = TokenRanks::make(num_topk, [&](int k, int part) {
    experts[part] = checked_expert(context, args.topk_idx, first + k, args.topk_idx_bytes, num_experts);
    return experts[part] < 0 ? -1 : map.rank_of(experts[part]);
  });
  int num_destinations = 0;
  DC_UNROLL
  for (int part = 0; part < 2; ++part) {
    const int k = arch::lane_idx() + part * kWarpSize, expert = experts[part];
    const uint32_t firsts = arch::ballot(kFullMask, ranks.is_first[part]);
    if (ranks.is_first[part]) {
      const int destination = num_destinations + arch::popc(firsts & ((1u << arch::lane_idx()) - 1));
      memory.places[destination] = ranks.ranks[part];
      memory.slots[destination] = static_cast<int32_t>(memory.counters[num_experts + ranks.ranks[part]]);
    }
    num_destinations += arch::popc(firsts);
    if (k >= num_topk) continue;
    Route route{-1, 0, 0.0f, token};
    if (expert >= 0) {
      bool is_repeat = false;
      for (int column = 0; column < k; ++column) is_repeat |= rail_expert(args, first + column) == expert;
      const uint32_t ordinal = memory.counters[expert];
      route.local_expert = expert;  // as the source knows it
      route.ordinal = is_repeat ? Route::repeated(ordinal) : static_cast<int32_t>(ordinal);
      if (args.topk_weights != nullptr) route.weight = arch::ld_nc(args.topk_weights + first + k);
    }
    arch::st_weak(routes + k, route.pack());
  }
  if (arch::lane_idx() == 0) memory.header->num_destinations = num_destinations;
}

// The block: row and scales of a token into its message. `first`: what is loaded already of each thread's first piece.
template <PayloadFormat kFormat>
DC_DEVICE void stage_row(const LowLatencyRailDispatchArgs& args, const LowLatencyRailHalf& half, int token,
                         const Piece<kFormat>& first) {
  using PieceType = Piece<kFormat>;
  const LowLatencySlot slot = LowLatencySlot::of(args.shape);
  uint8_t* message = half.own<uint8_t>(half.slot_staged(token));
  const int num_pieces = args.shape.hidden / PieceType::kElements;
  // Bounds by warp, not by thread: encoding takes the whole warp.
  for (int base = arch::warp_idx() * kWarpSize; base < num_pieces; base += arch::num_threads()) {
    const int piece = base + arch::lane_idx();
    PieceType loaded = first;
    if (base != arch::warp_idx() * kWarpSize && piece < num_pieces) {
      loaded.load(args.x + static_cast<size_t>(token) * args.shape.hidden * sizeof(Bf16), piece);
    }
    loaded.encode(args.round_scale, args.global_scale);
    if (piece < num_pieces) loaded.send(message + slot.row_offset(), args.shape.row_bytes, piece);
  }
  // Behind the last scale lie zeros on both sides: nobody takes them away.
  const int padding = (slot.num_bytes() - slot.end_offset()) / 4;
  if (arch::thread_idx() < padding) {
    arch::st_weak(reinterpret_cast<uint32_t*>(message + slot.end_offset()) + arch::thread_idx(), 0u);
  }
}

// The block, when the message is complete: to all its destinations.
DC_DEVICE void send_message(const LowLatencyRailDispatchArgs& args, const LowLatencyRailHalf& half,
                            const RailBlockMemory& memory, int token) {
  const LowLatencyGroup& group = args.reach.group;
  const int num_destinations = memory.header->num_destinations;
  const size_t staged = half.slot_staged(token), num_bytes = half.slot_bytes();
  if (arch::warp_idx() == 0) {
    for (int idx = arch::lane_idx(); idx < num_destinations; idx += kWarpSize) {
      const int peer = memory.places[idx];
      if (group.is_near(peer)) continue;
      // pairs with: take_arrival in find_places, expand_rows and expand_scales at the peer — the words themselves.
      put_staged(half, peer, group.data_qp(token), half.slot(group.rank, memory.slots[idx]), staged, num_bytes);
    }
    if (arch::num_warps() > 1) return;
  }
  const int num_movers = arch::num_warps() > 1 ? arch::num_threads() - kWarpSize : arch::num_threads();
  const int mover = arch::thread_idx() - (arch::num_threads() - num_movers);
  const int num_vecs = static_cast<int>(num_bytes / sizeof(Vec16));
  for (int idx = 0; idx < num_destinations; ++idx) {
    const int peer = memory.places[idx];
    if (!group.is_near(peer)) continue;
    Vec16* dst = half.near<Vec16>(peer, half.slot(group.rank, memory.slots[idx]));
    for (int vec = mover; vec < num_vecs; vec += num_movers) {
      // pairs with: the same takes of arrivals.
      arch::st_relaxed_sys(dst + vec, arch::ld_weak(half.own<Vec16>(staged) + vec));
    }
  }
}

// The block, when its counters hold all tokens: what each rank, and each of its experts, will get, with the
// announcement of the operation before it.
DC_DEVICE void send_counts(const Context& context, const LowLatencyRailDispatchArgs& args,
                           const LowLatencyRailHalf& half, const RailBlockMemory& memory) {
  using Words = LowLatencyRailWords;
  const LowLatencyGroup& group = args.reach.group;
  const int num_experts = args.shape.num_experts, num_ranks = group.num_ranks;
  const ExpertMap map{num_experts, num_ranks};
  for (int idx = arch::thread_idx(); idx < num_experts + 2 * num_ranks; idx += arch::num_threads()) {
    const bool is_expert = idx < num_experts, is_rows = !is_expert && idx < num_experts + num_ranks;
    const int peer = is_expert ? map.rank_of(idx) : (idx - num_experts) % num_ranks;
    const int place = is_expert ? Words::kExperts + idx - map.first_expert(peer)
                      : is_rows ? Words::kNumRows
                                : Words::kAnnounced;
    const uint64_t word = place == Words::kAnnounced ? announcement(context, args.signature, args.num_tokens)
                                                     : Tagged::pack(context.generation, memory.counters[idx]);
    if (group.is_near(peer)) {
      // pairs with: await_announcements and await_counts at the peer — nothing but the word itself.
      arch::st_relaxed_sys(half.near<uint64_t>(peer, half.counts(group.rank)) + place, word);
    } else {
      arch::st_weak(half.own<uint64_t>(half.counts_staged(peer)) + place, word);
    }
  }
  arch::sync_block();
  for (int position = arch::thread_idx(); position < num_ranks - group.num_near; position += arch::num_threads()) {
    const int peer = group.rank_at(position);
    // pairs with: await_announcements and await_counts at the peer — the words themselves.
    put_staged(half, peer, group.word_qp(), half.counts(group.rank), half.counts_staged(peer),
               sizeof(uint64_t) * (Words::kExperts + map.num_local_experts(peer)));
  }
}

template <PayloadFormat kFormat>
DC_DEVICE bool dispatch_send(const Context& context, const LowLatencyRailDispatchArgs& args,
                             const LowLatencyRailHalf& half, const RailBlockMemory& memory, uint32_t previous) {
  const int num_counters = args.shape.num_experts + args.reach.group.num_ranks;
  const int warp = arch::warp_idx();
  Piece<kFormat> first{};
  const auto load_first = [&](int token) {
    if (arch::thread_idx() < args.shape.hidden / Piece<kFormat>::kElements) {
      first.load(args.x + static_cast<size_t>(token) * args.shape.hidden * sizeof(Bf16), arch::thread_idx());
    }
  };
  if (arch::block_idx() < args.num_tokens) load_first(arch::block_idx());
  for (int idx = arch::thread_idx(); idx < num_counters; idx += arch::num_threads()) memory.counters[idx] = 0;
  bool ok = warp != arch::num_warps() - 1 || await_credit(context, half, previous);
  if (!memory.agrees(ok)) return false;
  const int last_block = arch::num_blocks() - 1;
  int num_counted = 0;  // tokens that the counters hold
  if (arch::block_idx() < num_sending_blocks()) {
    for (int token = arch::block_idx(); token < args.num_tokens; token += num_sending_blocks()) {
      if (token != arch::block_idx()) load_first(token);
      count_tokens(args, memory.counters, num_counted, token);
      num_counted = token;
      arch::sync_block();
      if (warp == 0) stage_routes(context, args, half, memory, token);
      stage_row<kFormat>(args, half, token, first);
      arch::sync_block();
      send_message(args, half, memory, token);
      arch::sync_block();  // destinations have been read
    }
  }
  if (arch::block_idx() != last_block) return true;
  count_tokens(args, memory.counters, num_counted, args.num_tokens);
  arch::sync_block();
  send_counts(context, args, half, memory);
  return true;
}

}  // namespace deep_comm
