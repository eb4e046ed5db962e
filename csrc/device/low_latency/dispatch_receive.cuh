// The receive phase of dispatch: every block takes what the blocks of its number sent, and copies each row to the
// places of its selections.
//
//   counts of all sources → first row of every (source, expert) → per token: routes → places → row and scales
#pragma once

#include "device/low_latency/block.cuh"

namespace deep_comm {

// counters[source, 0]: rows of this rank by source, then [source, 1 + e] of local expert e.
DC_DEVICE bool await_counts(const Context& context, const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                            const BlockMemory& memory, int num_local) {
  bool ok = true;
  for (int idx = arch::thread_idx(); idx < args.world.num_ranks * (1 + num_local) && ok; idx += arch::num_threads()) {
    const int source = idx / (1 + num_local), place = idx % (1 + num_local);
    ok = await_tagged(context, half.counts(args.world.rank, source) + place,
                      {Stage::kCounts, Word::kTokenCount, source, -1}, 0, &memory.counters[idx]);
  }
  return ok;
}

// Threads [0, 1 + L): counts over the sources become first rows. Block 0 writes them out.
DC_DEVICE void place_sources(const LowLatencyDispatchArgs& args, const BlockMemory& memory, int num_local) {
  const LowLatencyOutputs& out = args.out;
  const int num_ranks = args.world.num_ranks;
  const bool is_writing = arch::block_idx() == 0;
  for (int column = arch::thread_idx(); column <= num_local; column += arch::num_threads()) {
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
DC_DEVICE void find_places(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half, const BlockMemory& memory,
                           const Task& task, int num_local) {
  const LowLatencyOutputs& out = args.out;
  const LowLatencyShape& shape = args.shape;
  const int num_topk = shape.num_topk, warp = arch::warp_idx();
  const int num_slots = args.world.num_ranks * shape.num_max_tokens;
  const Route* routes = half.routes(args.world.rank, task.source, arch::block_idx(), task.token_idx);
  const uint32_t* first_rows = memory.counters + task.source * (1 + num_local);
  const int64_t token_row = static_cast<int64_t>(task.source) * shape.num_max_tokens + task.token;
  int num_places = 0, compact_place = -1;
  for (int base = 0; base < num_topk; base += kWarpSize) {
    const int k = base + arch::lane_idx();
    Route route{-1, 0, 0.0f, 0};
    if (k < num_topk) route = bit_cast<Route>(arch::ld_weak(reinterpret_cast<const Vec16*>(routes + k)));
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
    for (int k = arch::lane_idx(); k < num_topk && compact_place >= 0 && task.is_leading; k += kWarpSize) {
      const Route route = bit_cast<Route>(arch::ld_weak(reinterpret_cast<const Vec16*>(routes + k)));
      const int64_t position = static_cast<int64_t>(compact_place) * num_topk + k;
      arch::st_weak(out.compact_idx + position, route.local_expert);
      if (out.compact_weights != nullptr) arch::st_weak(out.compact_weights + position, route.weight);
    }
  }
  if (arch::lane_idx() == 0) {
    memory.num_places[warp] = num_places;
    memory.tasks[warp] = pack_task(task.source, task.token);
  }
}

// The block copies the rows of its warps' tokens to their places.
DC_DEVICE void expand_rows(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half, const BlockMemory& memory,
                           int num_tasks) {
  constexpr int kUnroll = 4;  // loads in flight before the first store
  const LowLatencyShape& shape = args.shape;
  const int max_vecs = memory.header->max_vecs, num_threads = arch::num_threads();
  for (int base = arch::thread_idx(); base < num_tasks * max_vecs; base += num_threads * kUnroll) {
    Vec16 vecs[kUnroll];
    int warps[kUnroll], columns[kUnroll];
    DC_UNROLL
    for (int step = 0; step < kUnroll; ++step) {
      const int idx = base + step * num_threads, warp = idx / max_vecs;
      warps[step] = -1;
      if (warp >= num_tasks || memory.num_places[warp] == 0) continue;
      const int source = source_of(memory.tasks[warp]), token = token_of(memory.tasks[warp]);
      if (idx % max_vecs >= memory.header->num_vecs[source]) continue;
      warps[step] = warp;
      columns[step] = memory.header->first_vec[source] + idx % max_vecs;
      const uint8_t* row = half.slot(args.world.rank, source, token);
      vecs[step] = arch::ld_weak(reinterpret_cast<const Vec16*>(row) + columns[step]);
    }
    DC_UNROLL
    for (int step = 0; step < kUnroll; ++step) {
      if (warps[step] < 0) continue;
      for (int idx = 0; idx < memory.num_places[warps[step]]; ++idx) {
        const size_t place = memory.places[warps[step] * shape.num_topk + idx];
        uint8_t* row = args.out.recv_x + place * shape.row_bytes;
        arch::st_streaming(reinterpret_cast<Vec16*>(row) + columns[step], vecs[step]);
      }
    }
  }
}

// The same for their scales, which lie by column in the output: [L, S, R*M], compact [S, R*M].
DC_DEVICE void expand_scales(const LowLatencyDispatchArgs& args, const LowLatencyHalf& half, const BlockMemory& memory,
                             int num_tasks) {
  const LowLatencyShape& shape = args.shape;
  const int per_output = args.out.use_ue8m0 ? 4 : 1;
  const int num_outputs = ceil_div(shape.num_scales, per_output);
  const int num_slots = args.world.num_ranks * shape.num_max_tokens;
  for (int base = arch::thread_idx(); base < num_tasks * num_outputs; base += arch::num_threads()) {
    const int warp = base / num_outputs, output = base % num_outputs;
    if (memory.num_places[warp] == 0) continue;
    const int source = source_of(memory.tasks[warp]), token = token_of(memory.tasks[warp]);
    // FP8: a vector is 16 columns.
    const int vec = output * per_output * kScaleBlock / 16 - memory.header->first_vec[source];
    if (vec < 0 || vec >= memory.header->num_vecs[source]) continue;
    const float* scales = reinterpret_cast<const float*>(half.slot(args.world.rank, source, token) + shape.row_bytes);
    uint32_t value = 0;
    if (args.out.use_ue8m0) {
      for (int idx = 0; idx < 4 && 4 * output + idx < shape.num_scales; ++idx) {
        const uint32_t bits = bit_cast<uint32_t>(arch::ld_weak(scales + 4 * output + idx));
        value |= (bits >> 23 & 0xffu) << (8 * idx);
      }
    } else {
      value = bit_cast<uint32_t>(arch::ld_weak(scales + output));
    }
    for (int idx = 0; idx < memory.num_places[warp]; ++idx) {
      const int64_t place = memory.places[warp * shape.num_topk + idx];
      const int64_t position = (place / num_slots * num_outputs + output) * num_slots + place % num_slots;
      arch::st_weak(static_cast<uint32_t*>(args.out.recv_scales) + position, value);
    }
  }
}

DC_DEVICE void dispatch_receive(const Context& context, const LowLatencyDispatchArgs& args, const LowLatencyHalf& half,
                                const BlockMemory& memory) {
  const int num_ranks = args.world.num_ranks, num_warps = arch::num_warps(), warp = arch::warp_idx();
  const int num_local = ExpertMap{args.shape.num_experts, num_ranks}.num_local_experts(args.world.rank);
  const bool has_counts = await_counts(context, args, half, memory, num_local);
  const bool has_rows = await_sources(context, half, memory, args.signature, args.out.wait_stats);
  if (!block_agrees(memory, has_counts && has_rows)) return;
  place_sources(args, memory, num_local);
  number_tasks(args.shape, memory, num_ranks, args.shape.row_bytes / args.shape.hidden);
  arch::sync_block();
  const int num_tasks = memory.header->first_task[num_ranks];
  for (int first = 0; first < num_tasks; first += num_warps) {
    const int num_now = min_of(num_warps, num_tasks - first);
    if (warp < num_now) {
      find_places(args, half, memory, Task::find(args.shape, memory, num_ranks, first + warp), num_local);
    }
    arch::sync_block();
    expand_rows(args, half, memory, num_now);
    if (args.shape.num_scales > 0) expand_scales(args, half, memory, num_now);
    arch::sync_block();  // places have been read
  }
}

}  // namespace deep_comm
