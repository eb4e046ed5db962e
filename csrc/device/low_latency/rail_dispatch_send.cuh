// The send phase of dispatch between nodes. Every token becomes one staged message, which is sent
// unchanged to the ranks that hold one of its experts: by stores to ranks that NVLink reaches (of
// this node, and of other nodes of the same host), by a put to every rank of another node, or only
// to the first one of each node, which forwards it.
//
//   block: first piece of x loaded | earlier tokens counted → row, scales
//          warp 0: routes, destinations → puts | copies
//   last block: counts of all tokens → a line for every rank
#pragma once

#include "device/low_latency/dispatch_count.cuh"
#include "device/low_latency/rail_block.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// The block that counts sends no tokens, unless it is the only one.
DC_DEVICE int num_sending_blocks() { return max_of(1, arch::num_blocks() - 1); }

DC_DEVICE int rail_expert(const LowLatencyRailDispatchArgs& args, int64_t position) {
  const int expert = load_expert(args.topk_idx, position, args.topk_idx_bytes);
  return expert < args.shape.num_experts ? expert : -1;
}

DC_DEVICE bool forwards_in_node(const LowLatencyRailDispatchArgs& args) {
  // Not if a rank may be masked: rows of other ranks would be lost with it.
  return !args.can_shrink && args.split.num_tokens >= args.reach.hand_on_tokens;
}

// Counts an entry: counters[e] tokens that select expert e, counters[E + r] those that are sent to
// rank r, counters[E + R + r] those of them that another rank forwards to it. For count_tokens.
struct RailCount {
  const LowLatencyRailDispatchArgs& args;
  const RailBlockMemory& memory;

  // All lanes.
  DC_DEVICE void operator()(const CountedEntry& entry) const {
    const LowLatencyGroup& group = args.reach.group;
    const int num_experts = args.shape.num_experts, rank = entry.rank;
    uint32_t* of_ranks = memory.counters + num_experts;
    const bool may_forward = forwards_in_node(args);
    bool is_known = false;  // the token goes to this node already
    if (may_forward) {
      const int node = entry.expert >= 0 ? group.node_of(rank) : -1;
      is_known = is_repeated(node * kWarpSize + EntryLanes::of(args.shape).token);
      if (entry.base > 0 && entry.expert >= 0) is_known |= is_known_before(entry, node);
    }
    if (entry.expert < 0) return;
    if (!entry.repeats.has_expert) {
      arch::atomic_add_relaxed_cta(&memory.counters[entry.expert], 1u);
    }
    if (entry.repeats.has_rank) return;
    arch::atomic_add_relaxed_cta(&of_ranks[rank], 1u);
    if (is_known && memory.reached[rank] == nullptr) {
      arch::atomic_add_relaxed_cta(&of_ranks[group.num_ranks + rank], 1u);
    }
  }

 private:
  // By an entry before those in lanes.
  DC_DEVICE bool is_known_before(const CountedEntry& entry, int node) const {
    const int64_t begin = static_cast<int64_t>(entry.token) * args.shape.num_topk;
    bool is_known = false;
    DC_NO_UNROLL
    for (int64_t other = begin; other < begin + entry.base; ++other) {
      const int expert = rail_expert(args, other);
      is_known |= expert >= 0 && args.reach.group.node_of(args.experts.rank_of(expert)) == node;
    }
    return is_known;
  }
};

// One warp, when the counters hold the tokens before: writes the routes of the token into its
// message. Notes the ranks that it is sent to directly, and their slots, in shared memory.
DC_DEVICE void stage_routes(const RailContext& context, const LowLatencyRailDispatchArgs& args,
                            const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory,
                            int token) {
  const int num_topk = args.shape.num_topk, num_experts = args.shape.num_experts;
  const LowLatencyGroup& group = args.reach.group;
  const LowLatencySlot slot = LowLatencySlot::of(args.shape);
  const ExpertMap& map = args.experts;
  Vec16* routes = buffer.own<Vec16>(buffer.slot_staged(token));
  uint32_t* words = buffer.own<uint32_t>(buffer.slot_staged(token) + slot.words_offset());
  const int64_t first = static_cast<int64_t>(token) * num_topk;
  int experts[2] = {-1, -1};
  const TokenRanks ranks = TokenRanks::make(num_topk, [&](int k, int part) {
    const int expert = load_expert(args.topk_idx, first + k, args.topk_idx_bytes);
    experts[part] = checked_expert(context, args, expert, first + k);
    return experts[part] < 0 ? -1 : map.rank_of(experts[part]);
  });
  const TokenRanks nodes = TokenRanks::make(num_topk, [&](int /*k*/, int part) {
    return ranks.ranks[part] < 0 ? -1 : group.node_of(ranks.ranks[part]);
  });
  const RepeatedEntries repeated = RepeatedEntries::find(experts, num_topk);
  // The first rank of a token on a node forwards it to the other ranks there. The slot of a rank is
  // noted at the rank's first entry.
  int num_destinations = 0;
  uint32_t first_words[2] = {1u, 1u};
  DC_UNROLL
  for (int part = 0; part < 2; ++part) {
    const int k = arch::lane_idx() + part * kWarpSize, expert = experts[part];
    const int rank = ranks.ranks[part];
    bool is_direct = false;
    int slot_idx = 0;
    uint32_t row_ordinal = 0;
    if (ranks.is_first[part]) {
      row_ordinal = memory.counters[num_experts + rank];
      const uint32_t num_forwarded = memory.counters[num_experts + group.num_ranks + rank];
      is_direct =
          nodes.is_first[part] || !forwards_in_node(args) || memory.reached[rank] != nullptr;
      slot_idx = is_direct ? static_cast<int>(row_ordinal - num_forwarded)
                           : args.shape.num_max_tokens - 1 - static_cast<int>(num_forwarded);
      first_words[part] = SlotWord{slot_idx, !is_direct}.pack();
    }
    // The slots of a masked rank are counted, but nothing is sent to it.
    is_direct = is_direct && is_active(context, memory, rank);
    const uint32_t direct = arch::ballot(kFullMask, is_direct);
    if (is_direct) {
      const int destination =
          num_destinations + arch::popc(direct & ((1u << arch::lane_idx()) - 1));
      memory.rows[destination] = rank;
      memory.slots[destination] = slot_idx;
    }
    num_destinations += arch::popc(direct);
    if (k >= num_topk) continue;
    arch::st_weak(words + k, first_words[part]);
    Route route{-1, 0, 0.0f, static_cast<int32_t>(row_ordinal)};
    if (expert >= 0) {
      const uint32_t ordinal = memory.counters[expert];
      route.local_expert = expert;  // global, as the source knows it
      route.ordinal = repeated.has[part] ? Route::repeated(ordinal) : static_cast<int32_t>(ordinal);
      if (args.topk_weights != nullptr) route.weight = arch::ld_nc(args.topk_weights + first + k);
    }
    arch::st_weak(routes + k, route.pack());
  }
  // Zeros follow the token in the message and in the slot: no receiver takes them.
  for (int word = num_topk + arch::lane_idx(); word < slot.num_padded_words(); word += kWarpSize) {
    arch::st_weak(words + word, word == num_topk ? static_cast<uint32_t>(token) + 1 : 0u);
  }
  if (arch::lane_idx() == 0) memory.header->num_destinations = num_destinations;
}

// The block: writes row and scales of a token into its message. `first`: the first piece of each
// thread, already loaded.
template <PayloadFormat kFormat>
DC_DEVICE void stage_row(const LowLatencyRailDispatchArgs& args, const LowLatencyRailBuffer& buffer,
                         int token, const Piece<kFormat>& first) {
  using PieceType = Piece<kFormat>;
  const LowLatencySlot slot = LowLatencySlot::of(args.shape);
  uint8_t* message = buffer.own<uint8_t>(buffer.slot_staged(token));
  const int num_pieces = args.shape.hidden / PieceType::kElements;
  // The bounds are those of whole warps: encoding needs all lanes.
  for (int base = arch::warp_idx() * kWarpSize; base < num_pieces; base += arch::num_threads()) {
    const int piece = base + arch::lane_idx();
    PieceType loaded = first;
    if (base != arch::warp_idx() * kWarpSize && piece < num_pieces) {
      loaded.load(args.x + static_cast<size_t>(token) * args.shape.hidden * sizeof(Bf16), piece);
    }
    if (!arch::fault(Fault::kPlainWords)) loaded.encode(args.round_scale, args.global_scale);
    if (piece < num_pieces) loaded.send(message + slot.row_offset(), args.shape.row_bytes, piece);
  }
  // Zeros follow the last scale in the message and in the slot: no receiver takes them.
  const int padding = (slot.num_bytes() - slot.end_offset()) / 4;
  if (arch::thread_idx() < padding) {
    arch::st_weak(reinterpret_cast<uint32_t*>(message + slot.end_offset()) + arch::thread_idx(),
                  0u);
  }
}

// The block, when the message is complete: sends it to all ranks that do not get it from another
// rank.
DC_DEVICE void send_message(const LowLatencyRailDispatchArgs& args,
                            const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory,
                            int token) {
  const LowLatencyGroup& group = args.reach.group;
  const int num_destinations = memory.header->num_destinations;
  const size_t staged = buffer.slot_staged(token), num_bytes = buffer.slot_bytes();
  // Puts first: their way is longer, and they do not wait for stores over NVLink.
  for (int idx = arch::warp_idx(); idx < num_destinations; idx += arch::num_warps()) {
    const int peer = memory.rows[idx];
    if (memory.reached[peer] != nullptr) continue;
    // pairs with: take_arrival in TakenRoutes, expand_rows and expand_scales at the peer — the
    // words themselves
    put_staged_warp(buffer, peer, group.data_qp(token), buffer.slot(group.rank, memory.slots[idx]),
                    staged, num_bytes);
  }
  const int num_vecs = static_cast<int>(num_bytes / sizeof(Vec16));
  for (int idx = 0; idx < num_destinations; ++idx) {
    const int peer = memory.rows[idx];
    if (memory.reached[peer] == nullptr) continue;
    if (arch::thread_idx() == 0) count_stored(group, peer, group.data_qp(token), num_bytes);
    Vec16* dst = memory.at<Vec16>(peer, buffer.slot(group.rank, memory.slots[idx]));
    for (int vec = arch::thread_idx(); vec < num_vecs; vec += arch::num_threads()) {
      // pairs with: the same calls of take_arrival
      arch::st_relaxed_sys(dst + vec, arch::ld_weak(buffer.own<Vec16>(staged) + vec));
    }
  }
}

// The block, when its counters hold all tokens: what each rank, and each of its experts, will get,
// together with the announcement of the operation.
DC_DEVICE void send_counts(const RailContext& context, const LowLatencyRailDispatchArgs& args,
                           const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory) {
  using Words = LowLatencyRailWords;
  const LowLatencyGroup& group = args.reach.group;
  const int num_experts = args.shape.num_experts, num_ranks = group.num_ranks;
  const ExpertMap& map = args.experts;
  for (int idx = arch::thread_idx(); idx < num_experts + 3 * num_ranks;
       idx += arch::num_threads()) {
    const bool is_expert = idx < num_experts;
    const int past = idx - num_experts;  // of the words for ranks
    const int of_rank = past < num_ranks ? 0 : past < 2 * num_ranks ? 1 : 2;
    const int peer = is_expert ? map.rank_of(idx) : past - of_rank * num_ranks;
    const int column = is_expert      ? Words::kExperts + idx - map.first_expert(peer)
                       : of_rank == 0 ? Words::kNumRows
                       : of_rank == 1 ? Words::kNumForwarded
                                      : Words::kAnnounced;
    const uint64_t word = column == Words::kAnnounced
                              ? announcement(context, args.signature, args.split.num_tokens)
                              : Tagged::pack(context.generation, memory.counters[idx]);
    if (!is_active(context, memory, peer)) continue;
    if (memory.reached[peer] != nullptr) {
      // pairs with: await_announcements and await_counts at the peer — nothing but the word itself
      arch::st_relaxed_sys(memory.at<uint64_t>(peer, buffer.counts(group.rank)) + column, word);
    } else {
      arch::st_weak(buffer.own<uint64_t>(buffer.counts_staged(peer)) + column, word);
    }
  }
  arch::sync_block();
  for (int position = arch::thread_idx(); position < num_ranks - group.num_near;
       position += arch::num_threads()) {
    const int peer = group.rank_at(position);
    if (!is_active(context, memory, peer)) continue;
    const size_t num_bytes = sizeof(uint64_t) * (Words::kExperts + map.num_local_experts(peer));
    if (memory.reached[peer] != nullptr) {
      count_stored(group, peer, group.word_qp(), num_bytes);
      continue;
    }
    // pairs with: await_announcements and await_counts at the peer — the words themselves
    put_staged(buffer, peer, group.word_qp(), buffer.counts(group.rank), buffer.counts_staged(peer),
               num_bytes);
  }
}

template <PayloadFormat kFormat>
DC_DEVICE bool dispatch_send(const RailContext& context, const LowLatencyRailDispatchArgs& args,
                             const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory,
                             uint32_t previous) {
  const int num_counters = args.shape.num_experts + 2 * args.reach.group.num_ranks;
  const int warp = arch::warp_idx();
  Piece<kFormat> first{};
  const auto load_first = [&](int token) {
    if (arch::thread_idx() < args.shape.hidden / Piece<kFormat>::kElements) {
      first.load(args.x + static_cast<size_t>(token) * args.shape.hidden * sizeof(Bf16),
                 arch::thread_idx());
    }
  };
  const int last_block = arch::num_blocks() - 1, num_tokens = args.split.num_tokens;
  const bool is_sending = arch::block_idx() < num_sending_blocks();
  int next = is_sending ? min_of(arch::block_idx(), num_tokens) : num_tokens;  // to be sent
  // A block with nothing to say counts nothing: it goes on to receive without another barrier.
  const bool counts = next < num_tokens || arch::block_idx() == last_block;
  const int num_before = counts ? next : 0;
  TokenBatch batch = TokenBatch::load(args, 0, num_before);
  if (next < num_tokens) load_first(next);
  for (int idx = arch::thread_idx(); idx < num_counters; idx += arch::num_threads())
    memory.counters[idx] = 0;
  bool ok = warp != arch::num_warps() - 1 || await_credit(context, buffer, memory, previous);
  if (!memory.agrees(ok)) return false;
  const RailCount count{args, memory};
  count_tokens(args, batch, 0, num_before, count);
  while (next < num_tokens) {
    arch::sync_block();
    if (warp == 0) stage_routes(context, args, buffer, memory, next);
    stage_row<kFormat>(args, buffer, next, first);
    arch::sync_block();
    const int sent = next;
    next = min_of(sent + num_sending_blocks(), num_tokens);
    batch = TokenBatch::load(args, sent, next);
    if (next < num_tokens) load_first(next);
    send_message(args, buffer, memory, sent);
    // Behind the barrier above: the routes have been staged.
    if (next < num_tokens || arch::block_idx() == last_block) {
      count_tokens(args, batch, sent, next, count);
    }
  }
  if (arch::block_idx() != last_block) return true;
  arch::sync_block();
  send_counts(context, args, buffer, memory);
  return true;
}

}  // namespace deep_comm
