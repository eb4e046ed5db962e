// What the stages of a low-latency kernel share: the block's shared memory, its agreement to go on, the life of an
// operation from its sequence number to its last block.
#pragma once

#include "device/low_latency/args.cuh"
#include "device/move/element.cuh"
#include "device/layout/expert_map.cuh"
#include "device/sync/await.cuh"
#include "device/sync/barrier.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

// Shared memory, in words of 4 bytes. A warp prepares one token at a time, then the whole block moves its row.
struct BlockMemory {
  struct Header {
    uint32_t exited;  // exit_block's
    uint32_t has_failed;
    int32_t num_tokens[kMaxRanks];  // of each source
    int32_t first_task[kMaxRanks + 1];
    int32_t first_vec[kMaxRanks];  // of a row of each source: this block's columns, in 16 bytes
    int32_t num_vecs[kMaxRanks];
    int32_t max_vecs;
  };
  Header* header;
  uint32_t* counters;   // [E + R] when sending, [R, 1 + L] when receiving
  uint32_t* masks;      // [warps] sending: destinations of the warp's token
  int32_t* num_places;  // [warps] receiving: places of the warp's row
  int32_t* tasks;       // [warps] pack_task
  int32_t* places;      // [warps, K]
  float* weights;       // [warps, K] combine

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

// A barrier of the block that also tells every thread whether one has given up. Sticky.
DC_DEVICE bool block_agrees(const BlockMemory& memory, bool ok) {
  if (!ok) arch::st_relaxed_cta(&memory.header->has_failed, 1u);
  arch::sync_block();
  return arch::ld_relaxed_cta(&memory.header->has_failed) == 0u;
}

// Threads [0, R): whether every peer has read what this half of its memory held two operations ago.
//   unblocked by: finish_operation of the peer's receive phase
DC_DEVICE bool await_credit(const Context& context, const LowLatencyHalf& half) {
  const int peer = arch::thread_idx();
  if (peer >= context.world.num_ranks || arch::fault(Fault::kSkipCredit)) return true;
  const uint32_t wanted = context.generation - 2;
  uint64_t raw = 0;
  return await<Scope::kSys>(
      context, half.consumed(context.world.rank, peer), {Stage::kHalfCredit, Word::kConsumed, peer, -1},
      Tagged::pack(wanted, 0), [=](uint64_t word) { return Tagged::unpack(word).has_reached(wanted); }, &raw);
}

// Threads [0, R), behind a barrier of the block: all of this block's share lies with its receivers.
DC_DEVICE void publish_landed(const Context& context, const LowLatencyHalf& half, uint32_t signature, int num_tokens) {
  const int peer = arch::thread_idx();
  if (peer >= context.world.num_ranks) return;
  // pairs with: await_landed at the peer — the rows, scales and routes that this block wrote for it.
  arch::st_release_sys(half.landed(peer, context.world.rank, arch::block_idx()),
                       Tagged::pack(context.generation, signature << 16 | static_cast<uint32_t>(num_tokens)));
}

// One lane: this block's rows of `source` have landed. Counts the time of block 0 for the statistics.
DC_DEVICE bool await_landed(const Context& context, const LowLatencyHalf& half, uint32_t signature, int source,
                            int64_t* wait_stats, int* num_tokens) {
  const bool is_timed = wait_stats != nullptr && arch::block_idx() == 0;
  const uint64_t start_ns = is_timed ? arch::globaltimer_ns() : 0;
  const WaitFor wait{Stage::kRows, Word::kLanded, source, arch::block_idx()};
  uint32_t value = 0;
  if (!await_tagged(context, half.landed(context.world.rank, source, arch::block_idx()), wait, 0, &value)) {
    return false;
  }
  if (is_timed) {
    const int64_t waited_ns = static_cast<int64_t>(arch::globaltimer_ns() - start_ns);
    arch::st_weak(wait_stats + source, arch::ld_weak(wait_stats + source) + waited_ns);
  }
  if (value >> 16 != signature) {
    report_error(context, {ErrorKind::kConfigMismatch, {Stage::kRows, Word::kOperation, source, -1}, value >> 16,
                           signature, 0, -1});
    abort_rank(context);
    return false;
  }
  *num_tokens = static_cast<int>(value & 0xffffu);
  return true;
}

// A warp takes the sources in turn.
DC_DEVICE bool await_sources(const Context& context, const LowLatencyHalf& half, const BlockMemory& memory,
                             uint32_t signature, int64_t* wait_stats) {
  bool ok = true;
  if (arch::lane_idx() == 0) {
    for (int source = arch::warp_idx(); source < context.world.num_ranks && ok; source += arch::num_warps()) {
      ok = await_landed(context, half, signature, source, wait_stats, &memory.header->num_tokens[source]);
    }
  }
  return ok;
}

// The tasks of a block: the tokens of its share of every source, by source. Every thread calls it when num_tokens is
// known to thread `source`; a barrier of the block makes it known to all.
DC_DEVICE void number_tasks(const LowLatencyShape& shape, const BlockMemory& memory, int num_ranks,
                            int element_bytes) {
  BlockMemory::Header* header = memory.header;
  const int source = arch::thread_idx();
  if (source >= kWarpSize) return;
  int num_tasks = 0, num_vecs = 1;
  if (source < num_ranks) {
    const LowLatencyShare share = LowLatencyShare::of(shape, header->num_tokens[source], arch::block_idx());
    num_tasks = share.num_tokens();
    num_vecs = share.num_columns() * element_bytes / 16;
    header->first_vec[source] = share.column_begin * element_bytes / 16;
    header->num_vecs[source] = num_vecs;
  }
  int end = num_tasks, max_vecs = max_of(num_vecs, 1);
  for (int delta = 1; delta < kWarpSize; delta *= 2) {
    const int before = arch::shfl_up(kFullMask, end, delta);
    if (source >= delta) end += before;
    max_vecs = max_of(max_vecs, arch::shfl_xor(kFullMask, max_vecs, delta));
  }
  if (source <= num_ranks) header->first_task[source] = end - num_tasks;
  if (source == 0) header->max_vecs = max_vecs;
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

  DC_DEVICE static Task find(const LowLatencyShape& shape, const BlockMemory& memory, int num_ranks, int task) {
    int source = 0;
    while (source + 1 < num_ranks && task >= memory.header->first_task[source + 1]) ++source;
    const int token_idx = task - memory.header->first_task[source];
    const LowLatencyShare share =
        LowLatencyShare::of(shape, memory.header->num_tokens[source], arch::block_idx());
    return {source, token_idx, share.begin + token_idx, share.is_leading};
  }
};

// The number of the operation this launch is about.
DC_DEVICE uint32_t operation_of(const LowLatencyHalf& words, const Phases& phases) {
  if (!phases.send) return arch::ld_weak(phases.ticket);
  return arch::ld_relaxed_gpu(&words.state()->sequence[static_cast<int>(words.kind)]) + 1;
}

// Every thread of every block, last.
DC_DEVICE void finish_operation(const Context& context, const LowLatencyHalf& half, const Phases& phases) {
  const int kind = static_cast<int>(half.kind);
  LowLatencyState* state = half.state();
  const Phase phase = phases.send ? Phase::kSend : Phase::kReceive;
  uint32_t* num_exited = &state->num_exited_blocks[kind][static_cast<int>(phase)];
  if (!exit_block(num_exited).is_last) return;
  const int peer = arch::thread_idx();
  if (phases.receive && peer < context.world.num_ranks) {
    // Also after a failure: a peer must not wait for a half that nobody will read.
    // pairs with: await_credit at the peer — all reads of what it wrote into this half.
    arch::st_release_sys(half.consumed(peer, context.world.rank), Tagged::pack(context.generation, 0));
  }
  if (peer != 0) return;
  arch::st_relaxed_gpu(num_exited, 0u);
  if (phases.send) {
    arch::st_relaxed_gpu(&state->sequence[kind], context.generation);
    if (phases.ticket != nullptr) arch::st_weak(phases.ticket, context.generation);
  }
}

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
