// What the stages of a low-latency kernel share: the block's shared memory, its agreement to go on, how an operation
// begins, what ranks tell each other about it, the tasks of a block.
#pragma once

#include "device/low_latency/args.cuh"
#include "device/move/element.cuh"
#include "device/layout/expert_map.cuh"
#include "device/sync/arrival.cuh"
#include "device/sync/barrier.cuh"

namespace deep_comm {

// Division of many small numbers by one: exact for numerators up to 64 times the divisor.
struct Divisor {
  static constexpr int kShift = 40;
  uint64_t inverse;

  DC_DEVICE static Divisor make(int divisor) {
    return {((uint64_t{1} << kShift) + static_cast<uint64_t>(divisor) - 1) / static_cast<uint64_t>(divisor)};
  }
  DC_DEVICE int quotient(int numerator) const {
    return static_cast<int>(static_cast<uint64_t>(numerator) * inverse >> kShift);
  }
};

// Shared memory, in words of 4 bytes. A warp prepares one token at a time, then the whole block moves its row.
struct BlockMemory {
  struct Header {
    uint32_t has_failed[2];         // by parity of BlockMemory::num_agreements
    uint32_t active;                // ranks, a bit each, that this block found not masked when it began
    uint32_t participants;          // agree_on_sources
    uint32_t is_absent[kMaxRanks];  // with masks: given up while this block waited for its counts
    int32_t num_tokens[kMaxRanks];  // of each source
    int32_t first_task[kMaxRanks + 1];  // by position: see source_at
    int32_t first_vec[kMaxRanks];  // of a row of each source: this block's columns, in 16 bytes
    int32_t num_vecs[kMaxRanks];
    int32_t max_vecs;
    Divisor by_max_vecs;
  };
  Header* header;
  uint32_t* counters;   // [E + R] when sending, [R, 1 + L] when receiving
  uint32_t* masks;      // [warps] sending: destinations of the warp's token
  int32_t* num_places;  // [warps] receiving: places of the warp's row
  int32_t* tasks;       // [warps] pack_task, of the group that is worked on
  int32_t* places;      // [warps, K]
  float* weights;       // [warps, K] combine
  mutable uint32_t num_agreements;  // of this thread, equal in all of a block behind a barrier

  DC_HOST_DEVICE static size_t num_counters(const LowLatencyShape& shape, int num_ranks) {
    const int max_local = ceil_div(shape.num_experts, num_ranks);
    return max_of(shape.num_experts + num_ranks, num_ranks * (1 + max_local));
  }
  DC_HOST_DEVICE static size_t num_bytes(const LowLatencyShape& shape, int num_ranks, int num_warps) {
    return sizeof(Header) + 4 * (num_counters(shape, num_ranks) + num_warps * (3 + 2 * shape.num_topk));
  }
  DC_DEVICE static BlockMemory make(const LowLatencyShape& shape, int num_ranks) {
    BlockMemory memory{};
    const int num_warps = arch::num_warps();
    memory.header = reinterpret_cast<Header*>(arch::dynamic_smem());
    memory.counters = reinterpret_cast<uint32_t*>(memory.header + 1);
    memory.masks = memory.counters + num_counters(shape, num_ranks);
    memory.num_places = reinterpret_cast<int32_t*>(memory.masks + num_warps);
    memory.tasks = memory.num_places + num_warps;
    memory.places = memory.tasks + num_warps;
    memory.weights = reinterpret_cast<float*>(memory.places + num_warps * shape.num_topk);
    return memory;
  }
};

// A barrier of the block that also tells every thread whether one has given up; then none calls it again. A thread
// that is quick may fail in the next call before a slow one has looked at the word of this call: hence two words.
DC_DEVICE bool block_agrees(const BlockMemory& memory, bool ok) {
  uint32_t* has_failed = &memory.header->has_failed[memory.num_agreements++ & 1u];
  if (!ok) arch::st_relaxed_cta(has_failed, 1u);
  arch::sync_block();
  return arch::ld_relaxed_cta(has_failed) == 0u;
}

// The number of the operation this launch is about.
DC_DEVICE uint32_t operation_of(const LowLatencyHalf& words, const Phases& phases) {
  if (!phases.send) return arch::ld_weak(phases.ticket);
  return next_generation(arch::ld_relaxed_gpu(&words.state()->sequence[static_cast<int>(words.kind)]));
}

// Before the first barrier of the block: its shared words, and the number of the last operation that was sent in this
// half.
DC_DEVICE uint32_t begin_block(const Context& context, const LowLatencyHalf& half, const BlockMemory& memory) {
  const World& world = context.world;
  if (arch::warp_idx() == 0) {
    const int peer = arch::lane_idx();
    const bool is_there = peer < world.num_ranks;
    const bool is_active = is_there && !(context.can_shrink && peer != world.rank && is_masked(world, peer));
    const uint32_t active = arch::ballot(kFullMask, is_active);
    if (peer == 0) {
      memory.header->has_failed[0] = memory.header->has_failed[1] = 0;
      memory.header->active = active;
    }
  }
  return arch::ld_relaxed_gpu(&half.state()->sent[static_cast<int>(half.kind)][half.half]);
}

DC_DEVICE bool is_active(const BlockMemory& memory, int rank) { return (memory.header->active >> rank & 1u) != 0; }

// Every thread, behind a barrier of the block that follows operation_of. All that a launch does for the launches
// after it is done here, at its begin, when nothing waits for it: the last warp returns credit for what earlier
// launches have received, and the last block to come numbers the operation.
DC_DEVICE void begin_operation(const Context& context, const LowLatencyHalf& half, const Phases& phases) {
  if (arch::warp_idx() != arch::num_warps() - 1) return;
  const int kind = static_cast<int>(half.kind), num_ranks = context.world.num_ranks;
  LowLatencyState* state = half.state();
  if (arch::block_idx() == 0 && arch::lane_idx() < 2 * num_ranks) {
    const int of_half = arch::lane_idx() / num_ranks, peer = arch::lane_idx() % num_ranks;
    const uint32_t received = arch::ld_relaxed_gpu(&state->received[kind][of_half]);
    // pairs with: await_credit at the peer — reads and zeros of an earlier launch, which has ended: no release needed.
    arch::st_relaxed_sys(half.consumed(peer, of_half, context.world.rank), Tagged::pack(received, 0));
  }
  arch::sync_warp();
  if (arch::lane_idx() != 0) return;
  const Phase phase = phases.send ? Phase::kSend : Phase::kReceive;
  uint32_t* num_entered = &state->num_entered_blocks[kind][static_cast<int>(phase)];
  // acq_rel, pairs with itself: all blocks have read the state before the last one changes it.
  if (arch::atomic_add_acq_rel_gpu(num_entered, 1u) + 1 != static_cast<uint32_t>(arch::num_blocks())) return;
  arch::st_relaxed_gpu(num_entered, 0u);
  // Only later launches read these.
  if (phases.receive) arch::st_relaxed_gpu(&state->received[kind][half.half], context.generation);
  if (!phases.send) return;
  arch::st_relaxed_gpu(&state->sequence[kind], context.generation);
  arch::st_relaxed_gpu(&state->sent[kind][half.half], context.generation);
  if (phases.ticket != nullptr) arch::st_weak(phases.ticket, context.generation);
}

// One warp, lane r: whether peer r has read what the last operation in this half, `previous`, wrote into its memory.
// Block 0 then announces the operation.
//   unblocked by: begin_operation of the launch that follows the peer's receive phase two operations ago; at the
//   latest that is the one that sends this operation
DC_DEVICE bool await_credit(const Context& context, const LowLatencyHalf& half, const BlockMemory& memory,
                            uint32_t previous, uint32_t signature, int num_tokens) {
  const int peer = arch::lane_idx();
  if (peer >= context.world.num_ranks || !is_active(memory, peer)) return true;
  if (!arch::fault(Fault::kSkipCredit)) {
    const uint32_t wanted = previous;
    uint64_t raw = 0;
    const bool ok = await<Scope::kSys>(
        context, half.consumed(context.world.rank, peer), {Stage::kHalfCredit, Word::kConsumed, peer, -1},
        Tagged::pack(wanted, 0), [=](uint64_t word) { return Tagged::unpack(word).has_reached(wanted); }, &raw);
    if (!ok) return is_given_up(context, peer);  // what is written for it is read by nobody
  }
  if (arch::block_idx() == 0) {
    // pairs with: await_announcements at the peer — nothing but the word itself.
    arch::st_relaxed_sys(half.announced(peer, context.world.rank),
                         Tagged::pack(context.generation, signature << 16 | static_cast<uint32_t>(num_tokens)));
  }
  return true;
}

// One warp, lane r: source r has begun the same operation; one that is not in `sources` has no tokens. Block 0 counts
// the time for the statistics.
DC_DEVICE bool await_announcements(const Context& context, const LowLatencyHalf& half, const BlockMemory& memory,
                                   uint32_t sources, uint32_t signature, int64_t* wait_stats) {
  const int source = arch::lane_idx();
  if (source >= context.world.num_ranks) return true;
  memory.header->num_tokens[source] = 0;
  if ((sources >> source & 1u) == 0) return true;
  const bool is_timed = wait_stats != nullptr && arch::block_idx() == 0;
  const uint64_t start_ns = is_timed ? arch::globaltimer_ns() : 0;
  uint32_t value = 0;
  if (!await_tagged_alone(context, half.announced(context.world.rank, source),
                          {Stage::kAnnounced, Word::kAnnounced, source, -1}, &value)) {
    return is_given_up(context, source);
  }
  if (is_timed) {
    const int64_t waited_ns = static_cast<int64_t>(arch::globaltimer_ns() - start_ns);
    arch::st_weak(wait_stats + source, arch::ld_weak(wait_stats + source) + waited_ns);
  }
  if (value >> 16 != signature) {
    report_error(context, {ErrorKind::kConfigMismatch, {Stage::kAnnounced, Word::kOperation, source, -1}, value >> 16,
                           signature, 0, -1});
    abort_rank(context);
    return false;
  }
  memory.header->num_tokens[source] = static_cast<int32_t>(value & 0xffffu);
  return true;
}

// Each rank begins with another peer, so that none is hit by all at once.
DC_DEVICE int source_at(const World& world, int position) { return (world.rank + 1 + position) % world.num_ranks; }

// One warp: the tasks of the block, the tokens of its share of every source, when num_tokens is known. A barrier of
// the block makes them known.
DC_DEVICE void number_tasks(const World& world, const LowLatencyShape& shape, const BlockMemory& memory,
                            int vec_elements) {
  BlockMemory::Header* header = memory.header;
  const int position = arch::lane_idx();
  int num_tasks = 0, num_vecs = 1;
  if (position < world.num_ranks) {
    const int source = source_at(world, position);
    const LowLatencyShare share = LowLatencyShare::of(shape, header->num_tokens[source], arch::block_idx());
    num_tasks = share.num_tokens();
    num_vecs = share.num_columns() / vec_elements;
    header->first_vec[source] = share.column_begin / vec_elements;
    header->num_vecs[source] = num_vecs;
  }
  int end = num_tasks, max_vecs = max_of(num_vecs, 1);
  for (int delta = 1; delta < kWarpSize; delta *= 2) {
    const int before = arch::shfl_up(kFullMask, end, delta);
    if (position >= delta) end += before;
    max_vecs = max_of(max_vecs, arch::shfl_xor(kFullMask, max_vecs, delta));
  }
  if (position <= world.num_ranks) header->first_task[position] = end - num_tasks;
  if (position == 0) {
    header->max_vecs = max_vecs;
    header->by_max_vecs = Divisor::make(max_vecs);
  }
  arch::sync_warp();
}

// A warp's task as the whole block finds it in shared memory.
DC_DEVICE int32_t pack_task(int source, int token) { return source << 16 | token; }
DC_DEVICE int source_of(int32_t task) { return task >> 16; }
DC_DEVICE int token_of(int32_t task) { return task & 0xffff; }

struct Task {
  int source;
  int token_idx;  // in the block's share
  int token;
  bool is_leading;  // this block has its first columns

  DC_DEVICE static Task find(const World& world, const LowLatencyShape& shape, const BlockMemory& memory, int task) {
    int position = 0;
    while (position + 1 < world.num_ranks && task >= memory.header->first_task[position + 1]) ++position;
    const int source = source_at(world, position), token_idx = task - memory.header->first_task[position];
    const LowLatencyShare share =
        LowLatencyShare::of(shape, memory.header->num_tokens[source], arch::block_idx());
    return {source, token_idx, share.begin + token_idx, share.is_leading};
  }
};

// One warp: the tasks of a group, one a warp of the block.
DC_DEVICE void list_tasks(const World& world, const LowLatencyShape& shape, const BlockMemory& memory, int first) {
  const int num_now = min_of(arch::num_warps(), memory.header->first_task[world.num_ranks] - first);
  if (arch::lane_idx() >= num_now) return;
  const Task task = Task::find(world, shape, memory, first + arch::lane_idx());
  memory.tasks[arch::lane_idx()] = pack_task(task.source, task.token);
}

// A row and a column of a matrix that is walked through by one index. One row is the usual case, and costs nothing.
struct Position {
  int row;
  int column;

  DC_DEVICE static Position of(int idx, int num_rows, int num_columns) {
    if (num_rows == 1) return {0, idx};
    return {idx / num_columns, idx % num_columns};
  }
};

// The k-th selection of a token; -1 also for what lies out of range, which is reported.
DC_DEVICE int checked_expert(const Context& context, const void* topk_idx, int64_t position, int num_bytes,
                             int num_experts) {
  const int expert = load_expert(topk_idx, position, num_bytes);
  if (expert >= -1 && expert < num_experts) return expert;
  report_error(context, {ErrorKind::kExpertIndex, {Stage::kCheckArguments, Word::kTopkIdx, context.world.rank, -1},
                         static_cast<uint64_t>(static_cast<int64_t>(expert)), static_cast<uint64_t>(num_experts), 0,
                         position});
  return -1;
}

}  // namespace deep_comm
