// The receive phase of dispatch: every block takes what the blocks of its number sent, as it arrives, and copies each
// row to the places of its selections.
//
//   announcements and counts of all sources → first row of every (source, expert) → per token: routes → places → row
#pragma once

#include "device/low_latency/block.cuh"
#include "device/low_latency/scales.cuh"

namespace deep_comm {

// counters[source, 0]: rows of this rank by source, then [source, 1 + e] of local expert e; of both the first
// num_columns. None of one that is not in `sources`, and one that is given up is noted.
DC_DEVICE bool await_counts(const Context& context, const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                            const BlockMemory& memory, uint32_t sources, int num_local, int num_columns) {
  bool ok = true;
  // From the last thread on: the first warp has announcements to wait for.
  for (int idx = arch::num_threads() - 1 - arch::thread_idx(); idx < args.world.num_ranks * num_columns && ok;
       idx += arch::num_threads()) {
    const int source = idx / num_columns, place = idx % num_columns;
    uint32_t* counter = &memory.counters[source * (1 + num_local) + place];
    *counter = 0;
    if ((sources >> source & 1u) == 0) continue;
    ok = await_tagged_alone(context, half.counts(args.world.rank, source) + place,
                            {Stage::kCounts, Word::kTokenCount, source, -1}, counter);
    if (!ok && is_given_up(context, source)) {
      ok = true;
      arch::st_relaxed_cta(&memory.header->is_absent[source], 1u);
    }
  }
  return ok;
}

// With masks: block 0 finds out whose rows this operation places, and the other blocks do as it says. Else some could
// leave room for rows of a rank that falls silent, and others not. Returns false after a failure; *participants: a bit
// each.
DC_DEVICE bool agree_on_sources(const Context& context, const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                                const BlockMemory& memory, int num_local, uint32_t* participants) {
  const uint32_t active = memory.header->active;
  uint64_t* word = &half.state()->participants;
  bool ok = true;
  if (arch::block_idx() != 0) {
    uint32_t value = 0;
    if (arch::thread_idx() == 0) {
      // Block 0 may be about to give up several ranks, at one deadline.
      ok = await_tagged(context, word, {Stage::kParticipants, Word::kMask, context.world.rank, 0}, 0, &value, 4);
      memory.header->participants = value;
    }
    ok = block_agrees(memory, ok);
    *participants = memory.header->participants;
    return ok;
  }
  if (arch::thread_idx() < kMaxRanks) memory.header->is_absent[arch::thread_idx()] = 0;
  arch::sync_block();
  if (arch::warp_idx() == 0) {
    ok = await_announcements(context, half, memory, active, args.signature, args.out.wait_stats);
    const int source = arch::lane_idx();
    if (source < context.world.num_ranks && is_given_up(context, source)) {
      arch::st_relaxed_cta(&memory.header->is_absent[source], 1u);
    }
  }
  ok = await_counts(context, args, half, memory, active, num_local, 1 + num_local) && ok;
  if (!block_agrees(memory, ok)) return false;
  uint32_t present = 0;
  for (int source = 0; source < context.world.num_ranks; ++source) {
    if (memory.header->is_absent[source] == 0) present |= 1u << source;
  }
  *participants = present & active;
  // pairs with: the await above — the announcements and counts that this block has seen.
  if (arch::thread_idx() == 0) arch::st_release_gpu(word, Tagged::pack(context.generation, *participants));
  return true;
}

// Threads [0, num_columns): counts over the sources become first rows. Block 0 writes them out.
DC_DEVICE void place_sources(const LowLatencyDispatchArgs& args, const BlockMemory& memory, int num_local,
                             int num_columns) {
  const LowLatencyOutputs& out = args.out;
  const int num_ranks = args.world.num_ranks;
  const bool is_writing = arch::block_idx() == 0;
  for (int column = arch::thread_idx(); column < num_columns; column += arch::num_threads()) {
    const bool is_expert = column > 0, has_range = is_expert != out.is_compact;
    int64_t* ranges = out.layout_range + (is_expert ? static_cast<int64_t>(column - 1) * num_ranks : 0);
    uint32_t num_before = 0;
    for (int source = 0; source < num_ranks; ++source) {
      uint32_t* counter = &memory.counters[source * (1 + num_local) + column];
      const uint32_t count = *counter;
      *counter = num_before;
      if (is_writing && has_range) {
        arch::st_weak(ranges + source, static_cast<int64_t>(static_cast<uint64_t>(num_before) << 32 | count));
      }
      num_before += count;
    }
    if (!is_writing) continue;
    if (is_expert) {
      arch::st_weak(out.recv_count + column - 1, static_cast<int32_t>(num_before));
      if (out.cumulative_stats != nullptr) {
        int32_t* total = out.cumulative_stats + column - 1;
        arch::st_weak(total, arch::ld_weak(total) + static_cast<int32_t>(num_before));
      }
    } else if (out.is_compact) {
      arch::st_weak(out.num_recv, static_cast<int32_t>(num_before));
    }
  }
  if (is_writing && arch::thread_idx() < num_ranks) {
    arch::st_weak(out.recv_tokens + arch::thread_idx(), memory.header->num_tokens[arch::thread_idx()]);
  }
  if (is_writing && args.report != nullptr && arch::thread_idx() == 0) {
    int32_t most = 0;
    for (int source = 0; source < num_ranks; ++source) most = max_of(most, memory.header->num_tokens[source]);
    // Engine::wait_low_latency_num_tokens reads nothing but the word itself.
    arch::st_relaxed_sys(args.report, Tagged::pack(args.report_sequence, static_cast<uint32_t>(most)));
  }
}

// One warp: the places of a token's selections, into shared memory and, once a token, into the outputs.
DC_DEVICE bool find_places(const Context& context, const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                           const BlockMemory& memory, const Task& task, int num_local) {
  const LowLatencyOutputs& out = args.out;
  const LowLatencyShape& shape = args.shape;
  const int num_topk = shape.num_topk, warp = arch::warp_idx();
  const int num_slots = args.world.num_ranks * shape.num_max_tokens;
  Vec16* routes = half.routes(args.world.rank, task.source, arch::block_idx(), task.token_idx);
  const uint32_t* first_rows = memory.counters + task.source * (1 + num_local);
  const int64_t token_row = static_cast<int64_t>(task.source) * shape.num_max_tokens + task.token;
  int num_places = 0, compact_place = -1;
  bool ok = true;
  Route taken[2];  // selections lane and lane + 32
  DC_UNROLL
  for (int part = 0; part < 2; ++part) {
    const int base = part * kWarpSize, k = base + arch::lane_idx();
    Route& route = taken[part];
    route = {-1, 0, 0.0f, 0};
    if (base >= num_topk) continue;
    if (k < num_topk) {
      Vec16 words{};
      const bool has_come =
          take_arrival(context, routes + k, {Stage::kRows, Word::kRoute, task.source, arch::block_idx()}, &words);
      if (has_come) route = Route::unpack(words);
      ok = ok && (has_come || is_given_up(context, task.source));
    }
    const bool is_here = route.local_expert >= 0;
    // Rows to write: expert-major, one for every expert of the token; compact, one in all.
    const uint32_t here = arch::ballot(kFullMask, is_here && (out.is_compact || !route.is_repeated()));
    int place = -1;
    if (out.is_compact) {
      if (is_here) place = static_cast<int>(first_rows[0]) + route.row_ordinal;
      if (here != 0) compact_place = arch::shfl(kFullMask, place, arch::ffs(here) - 1);
    } else if (is_here) {
      place = route.local_expert * num_slots + static_cast<int>(first_rows[1 + route.local_expert]) + route.row();
      if (!route.is_repeated()) {
        memory.places[warp * num_topk + num_places + arch::popc(here & ((1u << arch::lane_idx()) - 1))] = place;
        if (task.is_leading) arch::st_weak(out.src_info + place, task.token);
      }
    }
    num_places += arch::popc(here);
    if (k >= num_topk || !task.is_leading) continue;
    if (!out.is_compact) arch::st_weak(out.places + token_row * num_topk + k, place);
    if (out.recv_weights != nullptr) arch::st_weak(out.recv_weights + token_row * num_topk + k, route.weight);
  }
  if (out.is_compact) {
    num_places = compact_place < 0 ? 0 : 1;
    memory.places[warp * num_topk] = compact_place;
    if (task.is_leading && arch::lane_idx() == 0) {
      arch::st_weak(out.places + token_row, compact_place);
      if (compact_place >= 0) arch::st_weak(out.src_info + compact_place, task.token);
    }
    DC_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int k = part * kWarpSize + arch::lane_idx();
      if (k >= num_topk || compact_place < 0 || !task.is_leading) continue;
      const int64_t position = static_cast<int64_t>(compact_place) * num_topk + k;
      arch::st_weak(out.compact_idx + position, taken[part].local_expert);
      if (out.compact_weights != nullptr) arch::st_weak(out.compact_weights + position, taken[part].weight);
    }
  }
  if (arch::lane_idx() == 0) memory.num_places[warp] = num_places;
  return ok;
}

// A thread's pieces of the rows of a block's tasks, some at a time: first looks are taken together.
struct RowPieces {
  static constexpr int kCount = 4;
  Vec16 vecs[kCount];
  Vec16* from[kCount];  // null: none
  int tasks[kCount];    // among the warps' tasks
  int columns[kCount];  // in 16 bytes

  // Piece numbers first, first + num_threads, … of num_tasks rows of max_vecs.
  DC_DEVICE void look(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half, const BlockMemory& memory,
                      int first, int num_tasks) {
    const int max_vecs = memory.header->max_vecs;
    const Divisor by_max_vecs = memory.header->by_max_vecs;
    DC_UNROLL
    for (int step = 0; step < kCount; ++step) {
      const int idx = first + step * arch::num_threads();
      from[step] = nullptr;
      if (idx >= num_tasks * max_vecs) continue;
      tasks[step] = by_max_vecs.quotient(idx);
      const int vec = idx - tasks[step] * max_vecs;
      const int source = source_of(memory.tasks[tasks[step]]), token = token_of(memory.tasks[tasks[step]]);
      if (vec >= memory.header->num_vecs[source]) continue;
      columns[step] = memory.header->first_vec[source] + vec;
      from[step] = reinterpret_cast<Vec16*>(half.slot(args.world.rank, source, token)) + columns[step];
      vecs[step] = arch::ld_relaxed_sys(from[step]);
    }
  }
};

// The block copies the rows of its warps' tokens to their places. `pieces`: the first look at the first of them.
template <PayloadFormat kFormat>
DC_DEVICE bool expand_rows(const Context& context, const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                           const BlockMemory& memory, RowPieces& pieces, int num_tasks) {
  const LowLatencyShape& shape = args.shape;
  const int num_total = num_tasks * memory.header->max_vecs;
  bool ok = true;
  for (int base = arch::thread_idx(); base < num_total && ok; base += arch::num_threads() * RowPieces::kCount) {
    if (base != arch::thread_idx()) pieces.look(args, half, memory, base, num_tasks);
    DC_UNROLL
    for (int step = 0; step < RowPieces::kCount; ++step) {
      if (pieces.from[step] == nullptr || !ok) continue;
      const int task = pieces.tasks[step];
      if (memory.num_places[task] == 0) continue;
      const WaitFor wait{Stage::kRows, Word::kRow, source_of(memory.tasks[task]), arch::block_idx()};
      if (!take_arrival(context, pieces.from[step], wait, &pieces.vecs[step])) {
        ok = is_given_up(context, wait.peer);  // combine sends nothing back for this row
        continue;
      }
      const Vec16 vec = decode<kFormat>(pieces.vecs[step]);
      for (int idx = 0; idx < memory.num_places[task]; ++idx) {
        const size_t place = memory.places[task * shape.num_topk + idx];
        uint8_t* row = args.out.recv_x + place * shape.row_bytes;
        arch::st_streaming(reinterpret_cast<Vec16*>(row) + pieces.columns[step], vec);
      }
    }
  }
  return ok;
}

// The same for their scales.
template <PayloadFormat kFormat>
DC_DEVICE bool expand_scales(const Context& context, const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                             const BlockMemory& memory, int num_tasks) {
  const LowLatencyShape& shape = args.shape;
  const ScaleOutputs<kFormat> outputs =
      ScaleOutputs<kFormat>::of(shape, args.out, args.world.num_ranks * shape.num_max_tokens);
  const int num_outputs = outputs.num_outputs;
  bool ok = true;
  // From the last thread on: the first ones have most pieces of rows.
  for (int base = arch::num_threads() - 1 - arch::thread_idx(); base < num_tasks * num_outputs && ok;
       base += arch::num_threads()) {
    const int task = base / num_outputs, output = base % num_outputs;
    if (memory.num_places[task] == 0) continue;
    const int source = source_of(memory.tasks[task]), token = token_of(memory.tasks[task]);
    const int vec = outputs.first_column(output) / Piece<kFormat>::kElements - memory.header->first_vec[source];
    if (vec < 0 || vec >= memory.header->num_vecs[source]) continue;
    uint32_t* scales = reinterpret_cast<uint32_t*>(half.slot(args.world.rank, source, token) + shape.row_bytes);
    const WaitFor wait{Stage::kRows, Word::kScale, source, arch::block_idx()};
    uint32_t value = 0;
    for (int idx = 0; idx < outputs.num_words(output) && ok; ++idx) {
      uint32_t bits = 0;
      ok = take_arrival(context, scales + outputs.first_word(output) + idx, wait, &bits) || is_given_up(context, source);
      value |= outputs.part(bits, idx);
    }
    for (int idx = 0; idx < memory.num_places[task] && ok; ++idx) {
      const int64_t place = memory.places[task * shape.num_topk + idx];
      arch::st_weak(static_cast<uint32_t*>(args.out.recv_scales) + outputs.position(place, output), value);
    }
  }
  return ok;
}

template <PayloadFormat kFormat>
DC_DEVICE void dispatch_receive(const Context& context, const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                                const BlockMemory& memory) {
  const World& world = args.world;
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  const int num_local = ExpertMap{args.shape.num_experts, world.num_ranks}.num_local_experts(world.rank);
  // Compact places need the counts of tokens alone; those of experts are for block 0 to write out.
  const int num_columns = args.out.is_compact && arch::block_idx() != 0 ? 1 : 1 + num_local;
  uint32_t sources = memory.header->active;
  if (context.can_shrink && !agree_on_sources(context, args, half, memory, num_local, &sources)) return;
  bool ok = true;
  if (warp == 0) {
    int64_t* wait_stats = context.can_shrink ? nullptr : args.out.wait_stats;  // agree_on_sources has counted
    ok = await_announcements(context, half, memory, sources, args.signature, wait_stats);
  }
  ok = await_counts(context, args, half, memory, sources, num_local, num_columns) && ok;
  if (!block_agrees(memory, ok)) return;
  place_sources(args, memory, num_local, num_columns);
  if (warp == num_warps - 1) {
    number_tasks(world, args.shape, memory, Piece<kFormat>::kElements);
    list_tasks(world, args.shape, memory, 0);
  }
  arch::sync_block();
  const int num_tasks = memory.header->first_task[world.num_ranks];
  for (int first = 0; first < num_tasks; first += num_warps) {
    const int num_now = min_of(num_warps, num_tasks - first);
    RowPieces pieces;
    pieces.look(args, half, memory, arch::thread_idx(), num_now);
    if (warp < num_now) {
      ok = find_places(context, args, half, memory, Task::find(world, args.shape, memory, first + warp), num_local);
    }
    if (!block_agrees(memory, ok)) return;
    if (args.shape.num_scales > 0) ok = expand_scales<kFormat>(context, args, half, memory, num_now);
    ok = ok && expand_rows<kFormat>(context, args, half, memory, pieces, num_now);
    if (!block_agrees(memory, ok)) return;  // places have been read
    if (first + num_warps >= num_tasks) break;
    if (warp == 0) list_tasks(world, args.shape, memory, first + num_warps);
    arch::sync_block();
  }
}

}  // namespace deep_comm
