// What the phases of a low-latency kernel share: the block's shared memory, the begin of an
// operation, the words that ranks exchange about it, the tasks of a block.
#pragma once

#include "device/layout/expert_map.cuh"
#include "device/low_latency/args.cuh"
#include "device/move/element.cuh"
#include "device/sync/arrival.cuh"
#include "device/sync/barrier.cuh"

namespace deep_comm {

// Where the row of a received token arrives.
struct alignas(16) TaskRow {
  uint64_t slot;      // from the buffer's start
  int32_t first_vec;  // this block's columns, in 16 bytes
  int32_t num_vecs;
};

// Shared memory, in words of 4 bytes. A warp prepares one token at a time, then the whole block
// moves its row. The send phase and the receive phase use separate parts, so no barrier is needed
// between them.
struct BlockMemory {
  struct alignas(16) Header {
    uint32_t active;                 // find_active
    uint32_t participants;           // agree_on_sources
    uint32_t is_absent[kMaxRanks];   // with masks: given up while this block waited for its counts
    int32_t num_tokens[kMaxRanks];   // of each source
    int32_t first_token[kMaxRanks];  // of this block's share of them
    int32_t first_task[kMaxRanks + 1];  // by position: see peer_at
    int32_t first_vec[kMaxRanks];  // of a row of each source: this block's columns, in 16 bytes
    int32_t num_vecs[kMaxRanks];
    int32_t max_vecs;
    Divisor by_max_vecs;
  };
  Header* header;
  TaskRow* task_rows;     // [warps] dispatch: of tasks
  uint32_t* counters;     // [E + R] sending: tokens by expert, by rank
  uint32_t* masks;        // [warps] at the source: ranks of the warp's token
  int32_t* num_rows;      // [warps] number of rows of the warp's token
  int32_t* tasks;         // [warps] pack_task, of the current group
  int32_t* own_experts;   // [warps, K] at the source: of the warps' tokens
  int32_t* own_ordinals;  // [warps, K] Route::ordinal of each
  int32_t* rows;          // [warps, K]
  int32_t* row_experts;   // [warps, K] local expert of a row; for add_topk_rows: its rank
  float* weights;         // [warps, K] of own_experts; combine: of rows
  uint32_t* recv_counts;  // [R, 1 + L] receiving: rows of a source: all, by local expert
  uint8_t* stage;         // a slot, in kernels that stage rows: laid out as it is sent
  // in registers
  int rotation;     // see peer_at
  uint32_t active;  // ranks, a bit each, that this block found not masked when it began

  DC_HOST_DEVICE static int num_recv_counts(const LowLatencyShape& shape, int num_ranks) {
    return shape.num_experts + 2 * num_ranks;  // at least R * (1 + ceil(E / R)), and no division
  }
  DC_HOST_DEVICE static size_t num_bytes(const LowLatencyShape& shape, int num_ranks,
                                         int num_warps) {
    return sizeof(Header) + 4 * (shape.num_experts + num_ranks + num_recv_counts(shape, num_ranks) +
                                 num_warps * (3 + sizeof(TaskRow) / 4 + 5 * shape.num_topk));
  }
  // First byte of the stage, and the end of it.
  DC_HOST_DEVICE static size_t stage_start(const LowLatencyShape& shape, int num_ranks,
                                           int num_warps) {
    return align_up<size_t>(num_bytes(shape, num_ranks, num_warps), kLineBytes);
  }
  DC_HOST_DEVICE static size_t num_bytes_with_stage(const LowLatencyShape& shape, int num_ranks,
                                                    int num_warps) {
    return stage_start(shape, num_ranks, num_warps) + shape.slot_bytes();
  }
  DC_DEVICE static BlockMemory make(const LowLatencyShape& shape, int num_ranks, int rotation) {
    BlockMemory memory{};
    memory.rotation = rotation;
    const int num_warps = arch::num_warps(), num_entries = num_warps * shape.num_topk;
    memory.header = reinterpret_cast<Header*>(arch::dynamic_smem());
    memory.task_rows = reinterpret_cast<TaskRow*>(memory.header + 1);
    memory.counters = reinterpret_cast<uint32_t*>(memory.task_rows + num_warps);
    memory.masks = memory.counters + shape.num_experts + num_ranks;
    memory.num_rows = reinterpret_cast<int32_t*>(memory.masks + num_warps);
    memory.tasks = memory.num_rows + num_warps;
    memory.own_experts = memory.tasks + num_warps;
    memory.own_ordinals = memory.own_experts + num_entries;
    memory.rows = memory.own_ordinals + num_entries;
    memory.row_experts = memory.rows + num_entries;
    memory.weights = reinterpret_cast<float*>(memory.row_experts + num_entries);
    memory.recv_counts = reinterpret_cast<uint32_t*>(memory.weights + num_entries);
    memory.stage = arch::dynamic_smem() + stage_start(shape, num_ranks, num_warps);
    return memory;
  }
};

// A barrier of the block that also tells every thread whether any thread has given up.
DC_DEVICE bool block_agrees(bool ok) { return !arch::sync_block_any(!ok); }

// The warp that handles credit. It is not one of the first warps, which have tokens, if there are
// others.
DC_DEVICE bool has_credit_warp() { return arch::warp_idx() == max_of(0, arch::num_warps() - 2); }

// The block that tells the peers how many rows they will get. It has the fewest tokens.
DC_DEVICE bool is_counting_block() { return arch::block_idx() == arch::num_blocks() - 1; }

// What a launch reads first: one trip to memory, at the same time as its inputs.
struct LaunchState {
  LowLatencyRecord record;
  uint32_t ticket;  // of a receive phase launched by itself
  uint64_t credit;  // lane [buffer, peer] of the credit warp
  // lane [buffer, peer] of the last warp of block 0: the credit to return to the peer
  uint32_t received;

  DC_DEVICE static LaunchState load(const LowLatencyBuffer& words, const Phases& phases) {
    const int num_ranks = words.world.num_ranks, lane = arch::lane_idx();
    const int kind = static_cast<int>(words.kind);
    LaunchState launch{};
    if (phases.send) {
      const Vec16 vec =
          arch::ld_weak(reinterpret_cast<const Vec16*>(words.record(arch::block_idx())));
      launch.record = {vec.words[0], {vec.words[1], vec.words[2]}, 0};
    } else {
      launch.ticket = arch::ld_weak(phases.ticket);
    }
    if (lane >= 2 * num_ranks) return launch;
    const int buffer_idx = lane < num_ranks ? 0 : 1, peer = lane - buffer_idx * num_ranks;
    // pairs with: return_credit at the peer; see await_credit
    if (has_credit_warp())
      launch.credit = arch::ld_acquire_sys(words.consumed(words.world.rank, buffer_idx, peer));
    if (arch::block_idx() == 0 && arch::warp_idx() == arch::num_warps() - 1) {
      launch.received = arch::ld_weak(&words.state()->received[kind][buffer_idx]);
    }
    return launch;
  }
  // The number of the operation that this launch runs.
  DC_DEVICE uint32_t operation(const Phases& phases) const {
    return phases.send ? next_generation(record.sequence) : ticket;
  }
};

// Sets memory->active, and with masks that no rank is absent.
DC_DEVICE void find_active(const Context& context, BlockMemory* memory) {
  const World& world = context.world;
  memory->active = (1u << world.num_ranks) - 1;
  if (!context.can_shrink) return;
  if (arch::warp_idx() == 0) {
    const int peer = arch::lane_idx();
    const bool is_there = peer < world.num_ranks;
    const bool is_active = is_there && (peer == world.rank || !is_masked(world, peer));
    const uint32_t active = arch::ballot(kFullMask, is_active);
    if (peer == 0) memory->header->active = active;
    if (is_there) memory->header->is_absent[peer] = 0;
  }
  arch::sync_block();
  memory->active = memory->header->active;
}

DC_DEVICE bool is_active(const BlockMemory& memory, int rank) {
  return (memory.active >> rank & 1u) != 0;
}

// Every thread, at the beginning of a launch: the last warp of block 0 returns credit for what
// earlier launches have received. Here nothing waits for it.
DC_DEVICE void return_credit(const Context& context, const LowLatencyBuffer& buffer,
                             const Phases& phases, const LaunchState& launch) {
  if (arch::block_idx() != 0 || arch::warp_idx() != arch::num_warps() - 1) return;
  const int num_ranks = context.world.num_ranks, lane = arch::lane_idx();
  if (lane < 2 * num_ranks) {
    const int buffer_idx = lane < num_ranks ? 0 : 1, peer = lane - buffer_idx * num_ranks;
    const uint32_t received =
        arch::fault(Fault::kEarlyCredit) ? context.generation : launch.received;
    // pairs with: await_credit at the peer — reads and zeros of an earlier launch, which has ended:
    // no release needed
    arch::st_relaxed_sys(buffer.consumed(peer, buffer_idx, context.world.rank),
                         Tagged::pack(received, 0));
  }
  arch::sync_warp();  // all lanes have loaded it
  // Only later launches read this.
  if (phases.receive && lane == 0) {
    arch::st_weak(&buffer.state()->received[static_cast<int>(buffer.kind)][buffer.buffer_idx],
                  context.generation);
  }
}

// The last warp of a block that sends, after a barrier: all of the block has loaded its record.
DC_DEVICE void number_records(const Context& context, const LowLatencyBuffer& buffer,
                              const Phases& phases, const LaunchState& launch) {
  if (arch::warp_idx() != arch::num_warps() - 1) return;
  Vec16 record{};
  record.words[0] = context.generation;
  record.words[1] = buffer.buffer_idx == 0 ? context.generation : launch.record.sent[0];
  record.words[2] = buffer.buffer_idx == 1 ? context.generation : launch.record.sent[1];
  for (int block = arch::block_idx() + arch::lane_idx() * arch::num_blocks();
       block < kMaxLowLatencyBlocks; block += kWarpSize * arch::num_blocks()) {
    arch::st_weak(reinterpret_cast<Vec16*>(buffer.record(block)), record);
  }
  if (arch::block_idx() == 0 && arch::lane_idx() == 0 && phases.ticket != nullptr) {
    arch::st_weak(phases.ticket, context.generation);
  }
}

// One warp, lane r: waits until peer r has read what the last operation in this buffer wrote into
// its memory. Block 0 then announces the operation.
//   unblocked by: return_credit of the launch that follows the peer's receive phase two operations
//   ago; at the latest that is the one that sends this operation
DC_DEVICE bool await_credit(const Context& context, const LowLatencyBuffer& buffer,
                            const BlockMemory& memory, const LaunchState& launch,
                            uint32_t signature, int num_tokens) {
  const int peer = arch::lane_idx(), num_ranks = context.world.num_ranks;
  const uint64_t seen = arch::shfl(kFullMask, launch.credit,
                                   buffer.buffer_idx * num_ranks + min_of(peer, num_ranks - 1));
  if (peer >= num_ranks || !is_active(memory, peer)) return true;
  const uint32_t wanted = buffer.buffer_idx == 0 ? launch.record.sent[0] : launch.record.sent[1];
  if (!arch::fault(Fault::kSkipCredit) && !Tagged::unpack(seen).has_reached(wanted)) {
    uint64_t raw = 0;
    const bool ok = await<Scope::kSys>(
        context, buffer.consumed(context.world.rank, peer),
        {Stage::kBufferCredit, Word::kConsumed, peer, -1}, Tagged::pack(wanted, 0),
        [=](uint64_t word) { return Tagged::unpack(word).has_reached(wanted); }, &raw);
    if (!ok) return is_given_up(context, peer);  // nobody reads what is written for it
  }
  if (arch::block_idx() == 0) {
    // pairs with: await_announcements at the peer — nothing but the word itself
    arch::st_relaxed_sys(
        buffer.announced(peer, context.world.rank),
        Tagged::pack(context.generation, signature << 16 | static_cast<uint32_t>(num_tokens)));
  }
  return true;
}

// `announced`: signature << 16 | tokens. Reports it if it is of another operation.
DC_DEVICE bool is_same_operation(const Context& context, int source, uint32_t announced,
                                 uint32_t signature) {
  if (announced >> 16 == signature) return true;
  report_error(context, {ErrorKind::kConfigMismatch,
                         {Stage::kAnnounced, Word::kOperation, source, -1},
                         announced >> 16,
                         signature,
                         0,
                         -1});
  abort_rank(context);
  return false;
}

// What a dispatch says of a column: of all rows that this rank gets in the first, of those of
// expert column - 1 in the others.
DC_DEVICE void write_received(const LowLatencyOutputs& out, int column, int32_t num_rows) {
  if (column > 0) {
    arch::st_weak(out.recv_count + column - 1, num_rows);
    if (out.cumulative_stats != nullptr) {
      int32_t* total = out.cumulative_stats + column - 1;
      arch::st_weak(total, arch::ld_weak(total) + num_rows);
    }
  } else if (out.is_compact) {
    arch::st_weak(out.num_recv, num_rows);
  }
}

// The block: compact rows past the received ones select no expert of this rank.
DC_DEVICE void write_unused_rows(const LowLatencyOutputs& out, const LowLatencyShape& shape,
                                 int num_ranks, int num_received) {
  if (!out.is_compact) return;
  const int end = num_ranks * shape.num_max_tokens * shape.num_topk;
  for (int idx = num_received * shape.num_topk + arch::thread_idx(); idx < end;
       idx += arch::num_threads()) {
    arch::st_weak(out.compact_idx + idx, out.other_idx);
    if (out.compact_weights != nullptr) arch::st_weak(out.compact_weights + idx, 0.0f);
  }
}

// One warp, lane r: waits until source r has begun the same operation. A rank that is not in
// `sources` has no tokens. Block 0 measures the time for the statistics.
DC_DEVICE bool await_announcements(const Context& context, const LowLatencyBuffer& buffer,
                                   const BlockMemory& memory, uint32_t sources, uint32_t signature,
                                   int64_t* wait_stats) {
  const int source = arch::lane_idx();
  if (source >= context.world.num_ranks) return true;
  memory.header->num_tokens[source] = 0;
  if ((sources >> source & 1u) == 0) return true;
  const bool is_timed = wait_stats != nullptr && arch::block_idx() == 0;
  const uint64_t start_ns = is_timed ? arch::globaltimer_ns() : 0;
  uint32_t value = 0;
  if (!await_tagged_alone(context, buffer.announced(context.world.rank, source),
                          {Stage::kAnnounced, Word::kAnnounced, source, -1}, &value)) {
    return is_given_up(context, source);
  }
  if (is_timed) {
    const int64_t waited_ns = static_cast<int64_t>(arch::globaltimer_ns() - start_ns);
    arch::st_weak(wait_stats + source, arch::ld_weak(wait_stats + source) + waited_ns);
  }
  if (!is_same_operation(context, source, value, signature)) return false;
  memory.header->num_tokens[source] = static_cast<int32_t>(value & 0xffffu);
  return true;
}

// The peer at a position of this rank's order. Every rank begins with another peer, so that not all
// of them write to one rank at once. A rank itself is second in its order: what it loads and stores
// for itself takes no time while its links are busy, but would wait for everything else if it came
// last. position < num_ranks. Computed without a remainder, which is a subroutine. `rotation`:
// block_rotation, or 0 where a rotation gains less than its instructions cost.
DC_DEVICE int peer_at(const World& world, int rotation, int position) {
  int step = position > 1 ? position : position == 0 && world.num_ranks > 1 ? 1 : 0;
  if (rotation > 0 && step > 0) {
    step += rotation;
    if (step >= world.num_ranks) step -= world.num_ranks - 1;
  }
  const int source = world.rank + step;
  return source < world.num_ranks ? source : source - world.num_ranks;
}

// With this rotation neighbouring blocks begin with different peers. So all links of a rank are
// busy at the same time, and no rank is the target of all others, even if some ranks are ahead.
DC_DEVICE int block_rotation(const World& world) {
  const int num_others = max_of(world.num_ranks - 1, 1), block = arch::block_idx();
  return block - Divisor::make(num_others).quotient(block) * num_others;
}

// A warp's task, packed for shared memory.
DC_DEVICE int32_t pack_task(int source, int token) { return source << 16 | token; }
DC_DEVICE int source_of(int32_t task) { return task >> 16; }
DC_DEVICE int token_of(int32_t task) { return task & 0xffff; }

// Task number `task` of this block, over all sources.
DC_DEVICE int32_t find_task(const World& world, const BlockMemory& memory, int task) {
  int position = 0;
  while (position + 1 < world.num_ranks && task >= memory.header->first_task[position + 1])
    ++position;
  const int source = peer_at(world, memory.rotation, position);
  return pack_task(source,
                   memory.header->first_token[source] + task - memory.header->first_task[position]);
}

// A block's tasks are the tokens of its share of every source. They are numbered in the registers
// of a warp: lane p has peer_at(p).
struct TaskNumbering {
  LowLatencyShare share;
  int first_task;
  int num_tasks;  // of all sources
  int rotation;   // see peer_at

  // If every source has as many tokens as this rank: `share` is this block's of each.
  DC_DEVICE static TaskNumbering forecast(const World& world, const LowLatencyShare& share,
                                          int rotation) {
    const int each = share.num_tokens();
    return {share, arch::lane_idx() * each, world.num_ranks * each, rotation};
  }
  // One warp, for the block.
  DC_DEVICE void note(const World& world, const BlockMemory& memory, int vec_elements) const {
    BlockMemory::Header* header = memory.header;
    const int position = arch::lane_idx(), source = peer_at(world, rotation, position);
    const int num_vecs = share.num_columns() / vec_elements;
    const int max_vecs = arch::reduce_max(kFullMask, max_of(num_vecs, 1));
    if (position < world.num_ranks) {
      header->first_token[source] = share.begin;
      header->first_vec[source] = share.column_begin / vec_elements;
      header->num_vecs[source] = num_vecs;
      header->first_task[position] = first_task;
    }
    if (position == 0) {
      header->first_task[world.num_ranks] = num_tasks;
      header->max_vecs = max_vecs;
      header->by_max_vecs = Divisor::make(max_vecs);
    }
  }
  // A whole warp: the task of number `task`, which is below num_tasks.
  DC_DEVICE int32_t find(const World& world, int task) const {
    const bool is_before = arch::lane_idx() < world.num_ranks && first_task <= task;
    // Several sources may begin with the same task: all but the last of them have none.
    const int position = arch::popc(arch::ballot(kFullMask, is_before)) - 1;
    const int token = task - arch::shfl(kFullMask, first_task, position) +
                      arch::shfl(kFullMask, share.begin, position);
    return pack_task(peer_at(world, rotation, position), token);
  }
};

// One warp: the tasks by the sources' numbers of tokens, which are seldom different. num_tokens:
// lane p, of peer_at(p).
DC_DEVICE_COLD TaskNumbering number_tasks(const World& world, const LowLatencyShape& shape,
                                          int rotation, int num_tokens) {
  const int position = arch::lane_idx();
  const LowLatencySplit split =
      LowLatencySplit::make(shape, position < world.num_ranks ? num_tokens : 0);
  const LowLatencyShare share = LowLatencyShare::of(shape, split, arch::block_idx());
  int end = share.num_tokens();
  DC_UNROLL
  for (int delta = 1; delta < kMaxRanks; delta *= 2) {
    const int before = arch::shfl_up(kFullMask, end, delta);
    if (position >= delta) end += before;
  }
  return {share, end - share.num_tokens(), arch::shfl(kFullMask, end, world.num_ranks - 1),
          rotation};
}

// One rounding: the sender whose part of the buffer holds a rank's rows. See gather_row.
DC_DEVICE int gather_sender(bool can_shrink, int rank) {
  return can_shrink && !arch::fault(Fault::kSharedRows) ? rank : 0;
}

// A row and a column of a matrix whose elements are processed by one index.
struct Position {
  int row;
  int column;

  DC_DEVICE static Position of(int idx, const Divisor& by_columns, int num_columns) {
    const int row = by_columns.quotient(idx);
    return {row, idx - row * num_columns};
  }
};

// Whether a lower lane has the same value. All lanes.
DC_DEVICE bool is_repeated(int value) {
  const uint32_t lower = (1u << arch::lane_idx()) - 1;
  return (arch::match_any(kFullMask, value) & lower) != 0;
}

// The same for a token with entries lane and lane + 32, of which it has num_topk: whether an earlier
// entry has the same value.
struct RepeatedEntries {
  bool has[2];

  DC_DEVICE static RepeatedEntries find(const int (&values)[2], int num_topk) {
    RepeatedEntries repeated{is_repeated(values[0]), false};
    if (num_topk <= kWarpSize) return repeated;
    repeated.has[1] = is_repeated(values[1]);
    DC_NO_UNROLL
    for (int lane = 0; lane < kWarpSize; ++lane) {
      repeated.has[1] |= arch::shfl(kFullMask, values[0], lane) == values[1];
    }
    return repeated;
  }
};

// The bit of an expert's rank. A warp combines those of a token's entries.
DC_DEVICE uint32_t rank_bit(const ExpertMap& experts, int expert) {
  return expert >= 0 && expert < experts.num_experts ? 1u << experts.rank_of(expert) : 0u;
}

// An entry of topk_idx, at `position`, that names no expert.
template <class Args>
DC_DEVICE_COLD void report_expert(Context context, const Args& args, int64_t position) {
  report_error(
      context,
      {ErrorKind::kExpertIndex,
       {Stage::kCheckArguments, Word::kTopkIdx, context.world.rank, args.shape.num_topk},
       static_cast<uint64_t>(load_given_expert(args.topk_idx, position, args.topk_idx_bytes)),
       static_cast<uint64_t>(args.shape.num_experts),
       0,
       position});
}

// An expert index as it was loaded; -1 and a report for one that is out of range.
template <class Args>
DC_DEVICE int checked_expert(const Context& context, const Args& args, int expert,
                             int64_t position) {
  if (expert >= -1 && expert < args.shape.num_experts) return expert;
  report_expert(context, args, position);
  return -1;
}

}  // namespace deep_comm
