// The receive phase of dispatch for one token after the other: awaits its routes, finds its output
// rows, and copies its row and scales there as they arrive.
#pragma once

#include "device/low_latency/block.cuh"
#include "device/low_latency/scales.cuh"

namespace deep_comm {

// The number of rows from sources before `source`. column 0: of all rows, column 1 + e: of local
// expert e.
DC_DEVICE int32_t first_row(const BlockMemory& memory, int num_local, int source, int column) {
  uint32_t num_before = 0;
  DC_NO_UNROLL
  for (int before = 0; before < source; ++before)
    num_before += memory.recv_counts[before * (1 + num_local) + column];
  return static_cast<int32_t>(num_before);
}

// One warp: finds the output rows of its task's token. They are noted in shared memory and, by one
// block per token, in the outputs. `routes`: of the token; `first`: the first look at this lane's.
DC_DEVICE bool find_output_rows(const Context& context, const LowLatencyDispatchArgs& args,
                                const BlockMemory& memory, Vec16* routes, const Vec16& first,
                                int num_local) {
  const LowLatencyOutputs& out = args.out;
  const LowLatencyShape& shape = args.shape;
  const int num_topk = shape.num_topk, lane = arch::lane_idx(), warp = arch::warp_idx();
  const int num_slots = args.world.num_ranks * shape.num_max_tokens;
  const int source = source_of(memory.tasks[warp]), token = token_of(memory.tasks[warp]);
  const bool is_leading = memory.task_rows[warp].first_vec == 0;  // has its first columns
  const int64_t token_row = static_cast<int64_t>(source) * shape.num_max_tokens + token;
  int32_t* rows = memory.rows + warp * num_topk;
  int num_rows = 0;
  bool ok = true;
  DC_NO_UNROLL
  for (int base = 0; base < num_topk; base += kWarpSize) {
    const int k = base + lane;
    Route route{-1, 0, 0.0f, -1};
    if (k < num_topk) {
      Vec16 words = first;
      if (base > 0) words = arch::ld_relaxed_sys(routes + k);
      const WaitFor wait{Stage::kRows, Word::kRoute, source, arch::block_idx()};
      const bool arrived = take_arrival(context, routes + k, wait, &words);
      if (arrived) route = Route::unpack(words);
      ok = ok && (arrived || is_given_up(context, source));
    }
    const bool is_here = route.local_expert >= 0;
    int row = -1;
    if (out.is_compact) {
      if (route.row_ordinal >= 0) row = first_row(memory, num_local, source, 0) + route.row_ordinal;
    } else if (is_here) {
      row = route.local_expert * num_slots +
            first_row(memory, num_local, source, 1 + route.local_expert) + route.row();
    }
    // Rows to write: compact, one per token, which every top-k entry names; otherwise one per
    // expert.
    const bool is_row = out.is_compact ? k == 0 && row >= 0 : is_here && !route.is_repeated();
    const uint32_t writers = arch::ballot(kFullMask, is_row);
    if (is_row) {
      const int idx = num_rows + arch::popc(writers & ((1u << lane) - 1));
      rows[idx] = row;
      memory.row_experts[warp * num_topk + idx] = out.is_compact ? 0 : route.local_expert;
      if (is_leading) arch::st_weak(out.src_info + row, token);
    }
    num_rows += arch::popc(writers);
    if (k >= num_topk || !is_leading) continue;
    if (!out.is_compact) {
      arch::st_weak(out.recv_rows + token_row * num_topk + k, row);
    } else {
      if (k == 0) arch::st_weak(out.recv_rows + token_row, row);
      const int64_t position = static_cast<int64_t>(row) * num_topk + k;
      if (row >= 0) {
        arch::st_weak(out.compact_idx + position, out.idx_of(route.local_expert));
        if (out.compact_weights != nullptr)
          arch::st_weak(out.compact_weights + position, route.weight);
      }
    }
    if (out.recv_weights != nullptr)
      arch::st_weak(out.recv_weights + token_row * num_topk + k, route.weight);
  }
  if (lane == 0) memory.num_rows[warp] = num_rows;
  return ok;
}

// A thread's pieces of the rows of a group of tasks.
struct RowPieces {
  static constexpr int kCount = 4;  // enough for a token from each of four ranks
  Arrivals<kCount> arrivals;
  int tasks[kCount];    // index of the warp
  int columns[kCount];  // in vectors of 16 bytes

  // Piece numbers first, first + num_threads, … of num_tasks rows of max_vecs. Polls each once.
  DC_DEVICE void look(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                      const BlockMemory& memory, int first, int num_tasks) {
    const int max_vecs = memory.header->max_vecs, num_total = num_tasks * max_vecs;
    const Divisor by_max_vecs = memory.header->by_max_vecs;
    uint8_t* start = buffer.slot(args.world.rank, 0, 0);
    uint32_t wanted = 0;
    DC_UNROLL
    for (int step = 0; step < kCount; ++step) {
      const int idx = first + step * arch::num_threads();
      if (idx >= num_total) continue;
      const Position position = Position::of(idx, by_max_vecs, max_vecs);
      const TaskRow row = memory.task_rows[position.row];
      if (position.column >= row.num_vecs) continue;
      tasks[step] = position.row;
      columns[step] = row.first_vec + position.column;
      arrivals.from[step] = reinterpret_cast<Vec16*>(start + row.slot) + columns[step];
      wanted |= 1u << step;
    }
    arrivals.want(wanted);
    arrivals.look();
  }
  // When the output rows are known: rows that are not sent here are not awaited.
  DC_DEVICE void forget_others(const BlockMemory& memory) {
    DC_UNROLL
    for (int step = 0; step < kCount; ++step) {
      if (arrivals.is_wanted(step) && memory.num_rows[tasks[step]] == 0) arrivals.forget(step);
    }
  }
  // Drops the first.
  DC_DEVICE void shift() {
    arrivals.shift();
    DC_UNROLL
    for (int step = 1; step < kCount; ++step) {
      tasks[step - 1] = tasks[step];
      columns[step - 1] = columns[step];
    }
  }
};

// The block copies the rows of its warps' tokens to their output rows. `pieces`: the first look at
// this thread's first pieces.
template <PayloadFormat kFormat>
DC_DEVICE bool expand_rows(const Context& context, const LowLatencyDispatchArgs& args,
                           const LowLatencyBuffer& buffer, const BlockMemory& memory,
                           RowPieces& pieces, int num_tasks) {
  const LowLatencyShape& shape = args.shape;
  const int num_total = num_tasks * memory.header->max_vecs;
  DC_NO_UNROLL
  for (int base = arch::thread_idx(); base < num_total;
       base += arch::num_threads() * RowPieces::kCount) {
    if (base != arch::thread_idx()) pieces.look(args, buffer, memory, base, num_tasks);
    pieces.forget_others(memory);
    // combine returns nothing to a source that is given up.
    const bool ok = await_arrivals(context, pieces.arrivals, [&](int step) {
      return WaitFor{Stage::kRows, Word::kRow, source_of(memory.tasks[pieces.tasks[step]]),
                     arch::block_idx()};
    });
    if (!ok) return false;
    // Rolled: a launch fetches its code anew, which takes longer than to run it.
    DC_NO_UNROLL
    for (; pieces.arrivals.wanted != 0; pieces.shift()) {
      if (!pieces.arrivals.is_wanted(0)) continue;
      const Vec16 vec = decode<kFormat>(pieces.arrivals.vecs[0]);
      const int task = pieces.tasks[0], num_rows = memory.num_rows[task];
      const int32_t* rows = memory.rows + task * shape.num_topk;
      DC_NO_UNROLL
      for (int idx = 0; idx < num_rows; ++idx) {
        uint8_t* row = args.out.recv_x + static_cast<size_t>(rows[idx]) * shape.row_bytes;
        arch::st_streaming(reinterpret_cast<Vec16*>(row) + pieces.columns[0], vec);
      }
      pieces.arrivals.clear(0);
    }
  }
  return true;
}

// A thread's output of scales of a group of tasks.
template <PayloadFormat kFormat>
struct ScalePiece {
  int max_outputs;  // of this block's columns of a row
  int task;         // index of the warp; -1: none
  int output;       // index in the row
  uint32_t* words;  // words of the message that form the output
  uint32_t bits;    // the first word

  // From the last thread on: the first threads have most pieces of rows.
  DC_DEVICE static int first() { return arch::num_threads() - 1 - arch::thread_idx(); }

  // Piece number `idx` of num_tasks rows. Polls it once.
  DC_DEVICE void look(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                      const BlockMemory& memory, const ScaleOutputs<kFormat>& outputs, int idx,
                      int num_tasks) {
    const int vecs_per_output = outputs.first_column(1) / Piece<kFormat>::kElements;
    const int shift = arch::ffs(vecs_per_output) - 1;  // a power of two
    // This block's outputs of a row are consecutive: those of its columns.
    max_outputs = (memory.header->max_vecs + vecs_per_output - 1) >> shift;
    task = -1;
    if (idx >= num_tasks * max_outputs) return;
    const Position position = Position::of(idx, Divisor::make(max_outputs), max_outputs);
    const TaskRow row = memory.task_rows[position.row];
    if (position.column * vecs_per_output >= row.num_vecs) return;
    task = position.row;
    output = (row.first_vec >> shift) + position.column;
    words = reinterpret_cast<uint32_t*>(buffer.slot(args.world.rank, 0, 0) + row.slot +
                                        args.shape.row_bytes) +
            outputs.first_word(output);
    bits = arch::ld_relaxed_sys(words);
  }
};

// The same for the scales. `piece`: the first look at this thread's first output.
template <PayloadFormat kFormat>
DC_DEVICE bool expand_scales(const Context& context, const LowLatencyDispatchArgs& args,
                             const LowLatencyBuffer& buffer, const BlockMemory& memory,
                             const ScaleOutputs<kFormat>& outputs, ScalePiece<kFormat>& piece,
                             int num_tasks) {
  const LowLatencyShape& shape = args.shape;
  bool ok = true;
  DC_NO_UNROLL
  for (int base = piece.first(); base < num_tasks * piece.max_outputs && ok;
       base += arch::num_threads()) {
    if (base != piece.first()) piece.look(args, buffer, memory, outputs, base, num_tasks);
    if (piece.task < 0 || memory.num_rows[piece.task] == 0) continue;
    const WaitFor wait{Stage::kRows, Word::kScale, source_of(memory.tasks[piece.task]),
                       arch::block_idx()};
    uint32_t value = 0;
    DC_NO_UNROLL
    for (int idx = 0; idx < outputs.num_words(piece.output) && ok; ++idx) {
      uint32_t bits = idx == 0 ? piece.bits : 0;
      ok = take_arrival(context, piece.words + idx, wait, &bits) || is_given_up(context, wait.peer);
      value |= outputs.part(bits, idx);
    }
    const int first = piece.task * shape.num_topk;
    DC_NO_UNROLL
    for (int idx = first; idx < first + memory.num_rows[piece.task] && ok; ++idx) {
      const int group = memory.row_experts[idx], row = memory.rows[idx] - group * outputs.num_slots;
      arch::st_weak(
          static_cast<uint32_t*>(args.out.recv_scales) + outputs.position(group, row, piece.output),
          value);
    }
  }
  return ok;
}

}  // namespace deep_comm
