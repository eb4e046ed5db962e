// What the phases of a low-latency kernel between nodes share: shared memory, how a word or a piece
// of payload is sent to another rank, the begin of an operation, the tasks of a block.
#pragma once

#include "device/layout/expert_map.cuh"
#include "device/layout/prefix_sum.cuh"
#include "device/low_latency/block.cuh"
#include "device/low_latency/rail_mask.cuh"

namespace deep_comm {

// Shared memory, in words of 4 bytes.
struct RailBlockMemory {
  struct Header {
    uint32_t has_failed[2];  // by parity of num_agreements
    int32_t num_destinations;
  };
  uint8_t** reached;  // [R] segments, or null: see reached_segment
  Header* header;
  uint32_t* counters;  // [E + 2 R] when sending, [R, 1 + L] when receiving
  // [R] receiving: tokens of each source; combine sending: rows that came directly from it
  int32_t* num_tokens;
  int32_t* num_forwarded;  // [R] rows of each source that another rank forwards
  int32_t* first_task;     // [2, R + 1] by pass and position: see LowLatencyGroup::rank_at
  int32_t* tasks;          // [warps] pack_task(source, slot)
  int32_t* returns;        // [warps] combine: packed ReturnAddress of the warp's task
  int32_t* num_forwards;   // [warps] ranks that the warp's message is forwarded to
  int32_t* forwards;       // [warps, kMaxRanks] local rank << 16 | slot
  // [warps] rows of the warp's message here; at the source: rows that are returned for its token
  int32_t* num_rows;
  int32_t* rows;   // [warps, K] at the source: the ranks that return them
  float* weights;  // [warps, K]
  int32_t* slots;  // [K] sending: rows[0 … K-1] are destinations, these are the slots there
  // Sets of ranks, with masks. active: ranks that this block found not masked when it began.
  // sources: while dispatch receives, the ranks whose rows it receives.
  uint32_t* active;
  uint32_t* sources;
  // of this thread; equal in all threads of a block after a barrier
  mutable uint32_t num_agreements;

  DC_HOST_DEVICE static size_t num_counters(const LowLatencyShape& shape, int num_ranks) {
    const int max_local = ceil_div(shape.num_experts, num_ranks);
    return max_of(shape.num_experts + 2 * num_ranks, num_ranks * (1 + max_local));
  }
  DC_HOST_DEVICE static size_t num_bytes(const LowLatencyShape& shape, int num_ranks,
                                         int num_warps) {
    return sizeof(uint8_t*) * num_ranks + sizeof(Header) +
           4 * (num_counters(shape, num_ranks) + 4 * num_ranks + 2 +
                num_warps * (4 + kMaxRanks + 2 * shape.num_topk) + shape.num_topk +
                2 * num_set_words(num_ranks));
  }
  DC_DEVICE static RailBlockMemory make(const LowLatencyShape& shape, int num_ranks) {
    RailBlockMemory memory{};
    const int num_warps = arch::num_warps();
    memory.reached = reinterpret_cast<uint8_t**>(arch::dynamic_smem());
    memory.header = reinterpret_cast<Header*>(memory.reached + num_ranks);
    memory.counters = reinterpret_cast<uint32_t*>(memory.header + 1);
    memory.num_tokens =
        reinterpret_cast<int32_t*>(memory.counters + num_counters(shape, num_ranks));
    memory.num_forwarded = memory.num_tokens + num_ranks;
    memory.first_task = memory.num_forwarded + num_ranks;
    memory.tasks = memory.first_task + 2 * (num_ranks + 1);
    memory.returns = memory.tasks + num_warps;
    memory.num_forwards = memory.returns + num_warps;
    memory.forwards = memory.num_forwards + num_warps;
    memory.num_rows = memory.forwards + num_warps * kMaxRanks;
    memory.rows = memory.num_rows + num_warps;
    memory.weights = reinterpret_cast<float*>(memory.rows + num_warps * shape.num_topk);
    memory.slots = reinterpret_cast<int32_t*>(memory.weights + num_warps * shape.num_topk);
    memory.active = reinterpret_cast<uint32_t*>(memory.slots + shape.num_topk);
    memory.sources = memory.active + num_set_words(num_ranks);
    return memory;
  }
  // An address in another rank's segment that this rank's stores reach.
  template <class T>
  DC_DEVICE T* at(int rank, size_t offset) const {
    return reinterpret_cast<T*>(reached[rank] + offset);
  }
  // Like block_agrees.
  DC_DEVICE bool agrees(bool ok) const {
    uint32_t* has_failed = &header->has_failed[num_agreements++ & 1u];
    if (!ok) arch::st_relaxed_cta(has_failed, 1u);
    arch::sync_block();
    return arch::ld_relaxed_cta(has_failed) == 0u;
  }
};

DC_DEVICE bool is_active(const RailContext& context, const RailBlockMemory& memory, int rank) {
  return !context.can_shrink || is_in_set(memory.active, rank);
}

// ---- to another rank ----------------------------------------------------------------------------

DC_DEVICE void send_word(const LowLatencyRailBuffer& buffer, int peer, size_t offset,
                         uint64_t value) {
  send_word(buffer.world, buffer.group, peer, offset, value);
}

// One thread: what is stored at a rank of another node is counted as if it had been put.
DC_DEVICE void count_stored(const LowLatencyGroup& group, int peer, int qp, size_t num_bytes) {
  if (!group.is_near(peer)) arch::rail_count(group.port, group.first_peer + peer, qp, num_bytes);
}

// One thread: puts staged data at a rank of another node. This thread, or threads before a barrier
// that it has passed, have written the data. No word is sent after it: the data's own words show
// that they have arrived.
DC_DEVICE void put_staged(const LowLatencyRailBuffer& buffer, int peer, int qp, size_t offset,
                          size_t staged, size_t num_bytes) {
  const LowLatencyGroup& group = buffer.group;
  // Orders the staged words before the NIC's reads of them.
  if (!arch::fault(Fault::kSkipRailFence)) arch::fence_acq_rel_sys();
  arch::rail_put(group.port, group.first_peer + peer, qp, offset, buffer.own<uint8_t>(staged),
                 static_cast<uint32_t>(num_bytes));
}

// The same by a whole warp.
DC_DEVICE void put_staged_warp(const LowLatencyRailBuffer& buffer, int peer, int qp, size_t offset,
                               size_t staged, size_t num_bytes) {
  const LowLatencyGroup& group = buffer.group;
  if (!arch::fault(Fault::kSkipRailFence)) arch::fence_acq_rel_sys();
  arch::rail_put_warp(group.port, group.first_peer + peer, qp, offset, buffer.own<uint8_t>(staged),
                      static_cast<uint32_t>(num_bytes));
}

// ---- begin of an operation ----------------------------------------------------------------------

DC_DEVICE uint32_t operation_of(const LowLatencyRailBuffer& buffer, const Phases& phases) {
  if (!phases.send) return arch::ld_weak(phases.ticket);
  return next_generation(
      arch::ld_relaxed_gpu(&buffer.rail_state()->sequence[static_cast<int>(buffer.kind)]));
}

// Before the first barrier of the block. Returns the number of the last operation that was sent in
// this buffer.
DC_DEVICE uint32_t begin_block(const RailContext& context, const LowLatencyRailBuffer& buffer,
                               const RailBlockMemory& memory) {
  if (context.can_shrink && arch::warp_idx() == 0) {
    make_set(memory.active, buffer.group.num_ranks,
             [&](int rank) { return rank == buffer.group.rank || !is_masked(context, rank); });
    if (arch::lane_idx() == 0) copy_set(memory.sources, memory.active, buffer.group.num_ranks);
  }
  for (int rank = arch::thread_idx(); rank < buffer.group.num_ranks; rank += arch::num_threads())
    memory.reached[rank] = reached_segment(buffer.world, buffer.group, rank);
  if (arch::thread_idx() == 0) memory.header->has_failed[0] = memory.header->has_failed[1] = 0;
  return arch::ld_relaxed_gpu(
      &buffer.rail_state()->sent[static_cast<int>(buffer.kind)][buffer.buffer_idx]);
}

// One warp: tells all ranks what earlier launches have received, unless they have been told.
DC_DEVICE void return_credit(const RailContext& context, const LowLatencyRailBuffer& buffer,
                             const RailBlockMemory& memory) {
  const int kind = static_cast<int>(buffer.kind);
  const int num_ranks = buffer.group.num_ranks;
  for (int buffer_idx = 0; buffer_idx < 2; ++buffer_idx) {
    uint32_t* credited = &buffer.rail_state()->credited[kind][buffer_idx];
    const uint32_t received =
        arch::fault(Fault::kEarlyRailCredit)
            ? context.generation
            : arch::ld_relaxed_gpu(&buffer.rail_state()->received[kind][buffer_idx]);
    const bool is_new = arch::ld_relaxed_gpu(credited) != received;
    arch::sync_warp();  // all lanes have read what one lane will write
    if (!is_new) continue;
    for (int position = arch::lane_idx(); position < num_ranks; position += kWarpSize) {
      const int peer = buffer.group.rank_at(position);
      if (!is_active(context, memory, peer)) continue;
      // pairs with: await_credit at the peer — reads and zeros of an earlier launch, which has
      // ended: no release needed
      send_word(buffer, peer, buffer.consumed(buffer_idx, buffer.group.rank),
                Tagged::pack(received, 0));
    }
    if (arch::lane_idx() == 0) arch::st_relaxed_gpu(credited, received);
  }
}

// All that a launch does for the launches after it. The last block that calls it numbers the
// operation.
DC_DEVICE void begin_operation(const RailContext& context, const LowLatencyRailBuffer& buffer,
                               const RailBlockMemory& memory, const Phases& phases) {
  if (arch::warp_idx() != arch::num_warps() - 1) return;
  const int kind = static_cast<int>(buffer.kind);
  LowLatencyRailState* state = buffer.rail_state();
  if (arch::block_idx() == 0) return_credit(context, buffer, memory);
  if (arch::lane_idx() != 0) return;
  const Phase phase = phases.send ? Phase::kSend : Phase::kReceive;
  uint32_t* num_entered = &state->num_entered_blocks[kind][static_cast<int>(phase)];
  // acq_rel, pairs with itself: all blocks have read the state before the last one changes it
  // order-proof: orders loads of words, which the simulation does not report if they could be late
  if (arch::atomic_add_acq_rel_gpu(num_entered, 1u) + 1 !=
      static_cast<uint32_t>(arch::num_blocks()))
    return;
  arch::st_relaxed_gpu(num_entered, 0u);
  // Only later launches read these.
  if (phases.receive)
    arch::st_relaxed_gpu(&state->received[kind][buffer.buffer_idx], context.generation);
  if (!phases.send) return;
  arch::st_relaxed_gpu(&state->sequence[kind], context.generation);
  arch::st_relaxed_gpu(&state->sent[kind][buffer.buffer_idx], context.generation);
  if (phases.ticket != nullptr) arch::st_weak(phases.ticket, context.generation);
}

// One warp: waits until all peers have read what the last operation in this buffer, `previous`,
// wrote into their memory. Then nothing of it is in flight any more: its staging may be filled
// again, and its slots at the peers are zero.
//   unblocked by: begin_operation of the launch that follows the peer's receive phase two
//   operations ago; at the latest that is the one that sends this operation
DC_DEVICE bool await_credit(const RailContext& context, const LowLatencyRailBuffer& buffer,
                            const RailBlockMemory& memory, uint32_t previous) {
  if (arch::fault(Fault::kSkipRailCredit)) return true;
  bool ok = true;
  for (int peer = arch::lane_idx(); peer < buffer.group.num_ranks && ok; peer += kWarpSize) {
    if (!is_active(context, memory, peer)) continue;
    uint64_t raw = 0;
    ok = await<Scope::kSys>(
        context, buffer.own<uint64_t>(buffer.consumed(peer)),
        {Stage::kBufferCredit, Word::kConsumed, peer, -1}, Tagged::pack(previous, 0),
        [=](uint64_t word) { return Tagged::unpack(word).has_reached(previous); }, &raw);
    ok = ok || is_given_up(context, peer);  // nobody reads what is written for it
  }
  return ok;
}

DC_DEVICE uint64_t announcement(const Context& context, uint32_t signature, int num_tokens) {
  return Tagged::pack(context.generation, signature << 16 | static_cast<uint32_t>(num_tokens));
}

// One warp: waits until all sources have begun the same operation, and writes their numbers of
// tokens, by source, to num_tokens. Only for the set `sources` (null: all); other ranks, and those
// that are given up meanwhile, have no tokens. Block 0 measures the time for the statistics.
DC_DEVICE bool await_announcements(const RailContext& context, const LowLatencyRailBuffer& buffer,
                                   const uint32_t* sources, uint32_t signature, int64_t* wait_stats,
                                   int32_t* num_tokens) {
  bool ok = true;
  for (int source = arch::lane_idx(); source < buffer.group.num_ranks && ok; source += kWarpSize) {
    num_tokens[source] = 0;
    if (sources != nullptr && !is_in_set(sources, source)) continue;
    const bool is_timed = wait_stats != nullptr && arch::block_idx() == 0;
    const uint64_t start_ns = is_timed ? arch::globaltimer_ns() : 0;
    uint32_t value = 0;
    ok = await_tagged_alone(context, buffer.own<uint64_t>(buffer.announced(source)),
                            {Stage::kAnnounced, Word::kAnnounced, source, -1}, &value);
    if (!ok) {
      ok = is_given_up(context, source);
      continue;
    }
    if (is_timed) {
      const int64_t waited_ns = static_cast<int64_t>(arch::globaltimer_ns() - start_ns);
      arch::st_weak(wait_stats + source, arch::ld_weak(wait_stats + source) + waited_ns);
    }
    ok = is_same_operation(context, source, value, signature);
    num_tokens[source] = static_cast<int32_t>(value & 0xffffu);
  }
  return ok;
}

// ---- tasks: received rows, distributed over the blocks one by one -------------------------------

// One warp: numbers the rows of all sources, num_rows(source) of each. A barrier of the block
// follows.
template <class NumRows>
DC_DEVICE void number_tasks(const LowLatencyGroup& group, int32_t* first_task, NumRows num_rows) {
  int total = 0;
  for (int base = 0; base < group.num_ranks; base += kWarpSize) {
    const int position = base + arch::lane_idx();
    const int own = position < group.num_ranks ? num_rows(group.rank_at(position)) : 0;
    const int end = prefix_sum(own);
    if (position < group.num_ranks) first_task[position] = total + end - own;
    total += arch::shfl(kFullMask, end, kWarpSize - 1);
  }
  if (arch::lane_idx() == 0) first_task[group.num_ranks] = total;
}

struct BlockTasks {
  const int32_t* first_task;
  int count;

  DC_DEVICE static BlockTasks of(const LowLatencyGroup& group, const int32_t* first_task) {
    const int total = first_task[group.num_ranks];
    return {first_task, max_of(0, ceil_div(total - arch::block_idx(), arch::num_blocks()))};
  }
  // pack_task(source, index among its rows) of this block's task number idx.
  DC_DEVICE int32_t find(const LowLatencyGroup& group, int idx) const {
    const int task = arch::block_idx() + idx * arch::num_blocks();
    int low = 0, high = group.num_ranks;  // first_task[low] <= task < first_task[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_task[middle] <= task ? low : high) = middle;
    }
    return pack_task(group.rank_at(low), task - first_task[low]);
  }
};

// The slot of a source's row number idx. Direct rows come first.
DC_DEVICE int slot_of(const LowLatencyShape& shape, int idx, int num_direct) {
  return idx < num_direct ? idx : shape.num_max_tokens - 1 - (idx - num_direct);
}

// A warp's view of a token's top-k entries, by lane: entries lane and lane + 32.
struct TokenRanks {
  int ranks[2];      // -1: none
  bool is_first[2];  // no earlier entry has this rank

  // rank_of(k) for k < num_topk.
  template <class RankOf>
  DC_DEVICE static TokenRanks make(int num_topk, RankOf rank_of) {
    TokenRanks token{};
    DC_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int k = arch::lane_idx() + part * kWarpSize;
      token.ranks[part] = k < num_topk ? rank_of(k, part) : -1;
    }
    const RepeatedEntries repeated = RepeatedEntries::find(token.ranks, num_topk);
    DC_UNROLL
    for (int part = 0; part < 2; ++part) {
      token.is_first[part] = token.ranks[part] >= 0 && !repeated.has[part];
    }
    return token;
  }
  // A whole warp: the rank of entry k.
  DC_DEVICE int rank(int k) const {
    const int low = arch::shfl(kFullMask, ranks[0], k % kWarpSize);
    const int high = arch::shfl(kFullMask, ranks[1], k % kWarpSize);
    return k < kWarpSize ? low : high;
  }
  // A whole warp: whether entry k is the first of its rank.
  DC_DEVICE bool is_first_of(int k) const {
    const uint32_t low = arch::ballot(kFullMask, is_first[0]),
                   high = arch::ballot(kFullMask, is_first[1]);
    return ((k < kWarpSize ? low : high) >> k % kWarpSize & 1u) != 0;
  }
  // A whole warp: how many ranks of the token precede that of entry lane + part * 32.
  DC_DEVICE int order(int part) const {
    int order = 0;
    DC_UNROLL
    for (int other = 0; other < 2; ++other) {
      DC_NO_UNROLL
      for (uint32_t firsts = arch::ballot(kFullMask, is_first[other]); firsts != 0;
           firsts &= firsts - 1) {
        const int rank = arch::shfl(kFullMask, ranks[other], arch::ffs(firsts) - 1);
        if (rank < ranks[part]) ++order;
      }
    }
    return order;
  }
  // A whole warp: the number of ranks, and of ranks below `rank`.
  DC_DEVICE int count() const { return before(0x7fffffff); }
  DC_DEVICE int before(int rank) const {
    return arch::popc(arch::ballot(kFullMask, is_first[0] && ranks[0] < rank)) +
           arch::popc(arch::ballot(kFullMask, is_first[1] && ranks[1] < rank));
  }
};

}  // namespace deep_comm
