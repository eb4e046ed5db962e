// The receive phase of combine: the source adds the rows that are returned for its tokens.
#pragma once

#include "device/low_latency/combine_send.cuh"

namespace deep_comm {

// The block adds the ranks' rows of tokens [begin, end) and writes the results. A thread polls
// eight slots at a time: one piece from up to eight ranks or, if there are at most four ranks, two
// pieces, the second of them in the upper four.
DC_DEVICE bool add_ranks(const Context& context, const LowLatencyCombineArgs& args,
                         const LowLatencyBuffer& buffer, const LowLatencyShare& share,
                         const BlockMemory& memory, int begin, int end) {
  using Type = Numeric<Dtype::kBfloat16>;
  constexpr int kHalf = kMaxRanks / 2;
  const int first_vec = share.column_begin / Type::kPerVec,
            num_vecs = share.num_columns() / Type::kPerVec;
  const Divisor by_vecs = Divisor::make(num_vecs);
  const int num_total = (end - begin) * num_vecs, num_threads = arch::num_threads();
  const bool has_pairs = args.world.num_ranks <= kHalf;
  DC_NO_UNROLL
  for (int base = arch::thread_idx(); base < num_total;
       base += has_pairs ? 2 * num_threads : num_threads) {
    Vec16* results[2] = {nullptr, nullptr};
    Arrivals<kMaxRanks> arrivals;
    uint32_t wanted = 0;
    DC_UNROLL
    for (int piece = 0; piece < 2; ++piece) {
      const int idx = has_pairs ? base + piece * num_threads : base;
      if (idx >= num_total) continue;
      const Position position = Position::of(idx, by_vecs, num_vecs);
      const int token = begin + position.row, vec = first_vec + position.column;
      results[piece] = reinterpret_cast<Vec16*>(args.combined_x) +
                       static_cast<size_t>(token) * (args.shape.hidden / Type::kPerVec) + vec;
      const uint32_t mask = memory.masks[position.row] & memory.active;
      wanted |= has_pairs ? mask << (piece * kHalf) : mask;
      uint8_t* row = buffer.combine_row(args.world.rank, has_pairs ? 0 : piece * kHalf, token);
      DC_UNROLL
      for (int peer = 0; peer < kHalf; ++peer) {
        arrivals.from[piece * kHalf + peer] = reinterpret_cast<Vec16*>(row) + vec;
        row += args.shape.stride(buffer.kind);
      }
    }
    arrivals.want(wanted);
    arrivals.look();
    const auto wait_of = [=](int idx) {
      return WaitFor{Stage::kRows, Word::kRow, has_pairs ? idx % kHalf : idx, arch::block_idx()};
    };
    if (!await_arrivals(context, arrivals, wait_of)) return false;
    float sum[Type::kPerVec] = {};
    DC_UNROLL
    for (int idx = 0; idx < kMaxRanks; ++idx) {
      if (idx == kHalf && has_pairs) {
        arch::st_streaming(results[0], Type::round(sum));
        DC_UNROLL
        for (float& element : sum) element = 0.0f;
      }
      if (!arrivals.is_wanted(idx)) continue;
      Type::add(sum, arrivals.vecs[idx]);
      arrivals.clear(idx);
    }
    if (results[1] != nullptr) arch::st_streaming(results[1], Type::round(sum));
  }
  return true;
}

// The same for rows in LogFMT.
DC_DEVICE bool add_log_ranks(const Context& context, const LowLatencyCombineArgs& args,
                             const LowLatencyBuffer& buffer, const LowLatencyShare& share,
                             const BlockMemory& memory, int begin, int end) {
  using Type = Numeric<Dtype::kBfloat16>;
  constexpr int kElements = LogPiece::kElements;
  const int first_piece = share.column_begin / kElements,
            num_pieces = share.num_columns() / kElements;
  const Divisor by_pieces = Divisor::make(num_pieces);
  for (int idx = arch::thread_idx(); idx < (end - begin) * num_pieces; idx += arch::num_threads()) {
    const Position position = Position::of(idx, by_pieces, num_pieces);
    const int token = begin + position.row, piece_idx = first_piece + position.column;
    float sum[kElements] = {};
    for (int peer = 0; peer < args.world.num_ranks; ++peer) {
      if (((memory.masks[position.row] & memory.active) >> peer & 1u) == 0) continue;
      const WaitFor wait{Stage::kRows, Word::kRow, peer, arch::block_idx()};
      uint8_t* row = buffer.combine_row(args.world.rank, peer, token);
      uint32_t* last = log_last(row, args.shape.hidden, piece_idx);
      // All first looks before any wait: each is a trip to memory.
      LogPiece piece{arch::ld_relaxed_sys(log_codes(row, piece_idx)),
                     {arch::ld_relaxed_sys(last), arch::ld_relaxed_sys(last + 1)}};
      if (!take_arrival(context, log_codes(row, piece_idx), wait, &piece.codes) ||
          !take_arrival(context, last, wait, &piece.last[0]) ||
          !take_arrival(context, last + 1, wait, &piece.last[1])) {
        if (!is_given_up(context, peer)) return false;
        continue;
      }
      float values[kElements];
      piece.decode(values);
      DC_UNROLL
      for (int element = 0; element < kElements; ++element) sum[element] += values[element];
    }
    uint8_t* dst = args.combined_x + static_cast<size_t>(token) * args.shape.hidden * sizeof(Bf16);
    DC_UNROLL
    for (int part = 0; part < kElements / Type::kPerVec; ++part) {
      arch::st_streaming(
          reinterpret_cast<Vec16*>(dst) + kElements / Type::kPerVec * piece_idx + part,
          Type::round(sum + part * Type::kPerVec));
    }
  }
  return true;
}

// Source, one warp: notes the top-k entries of a token, their ranks and weights, k ascending.
DC_DEVICE void find_topk_rows(const LowLatencyCombineArgs& args, const BlockMemory& memory,
                              int token) {
  const int num_topk = args.shape.num_topk, warp = arch::warp_idx();
  int num_rows = 0;
  for (int base = 0; base < num_topk; base += kWarpSize) {
    const int k = base + arch::lane_idx();
    const int64_t position = static_cast<int64_t>(token) * num_topk + k;
    const int expert =
        k < num_topk ? load_expert(args.topk_idx, position, args.topk_idx_bytes) : -1;
    const bool is_valid = expert >= 0 && expert < args.shape.num_experts;
    const int rank = is_valid ? args.experts.rank_of(expert) : 0;
    const bool is_selected = is_valid && is_active(memory, rank);
    const uint32_t selected = arch::ballot(kFullMask, is_selected);
    if (is_selected) {
      const int row =
          warp * num_topk + num_rows + arch::popc(selected & ((1u << arch::lane_idx()) - 1));
      memory.rows[row] = k;
      memory.row_experts[row] = rank;
      memory.weights[row] = arch::ld_nc(args.topk_weights + position);
    }
    num_rows += arch::popc(selected);
  }
  if (arch::lane_idx() == 0) memory.num_rows[warp] = num_rows;
}

// The block weights and adds the rows of tokens [begin, end) and writes the results.
DC_DEVICE bool add_topk_rows(const Context& context, const LowLatencyCombineArgs& args,
                             const LowLatencyBuffer& buffer, const LowLatencyShare& share,
                             const BlockMemory& memory, int begin, int end) {
  using Type = Numeric<Dtype::kBfloat16>;
  constexpr int kAhead = 4;
  const int num_topk = args.shape.num_topk;
  const int first_vec = share.column_begin / Type::kPerVec,
            num_vecs = share.num_columns() / Type::kPerVec;
  const Divisor by_vecs = Divisor::make(num_vecs);
  DC_NO_UNROLL
  for (int idx = arch::thread_idx(); idx < (end - begin) * num_vecs; idx += arch::num_threads()) {
    const Position position = Position::of(idx, by_vecs, num_vecs);
    const int warp = position.row, token = begin + warp, vec = first_vec + position.column;
    const int32_t* entries = memory.rows + warp * num_topk;
    const int32_t* ranks = memory.row_experts + warp * num_topk;
    const float* weights = memory.weights + warp * num_topk;
    const int num_rows = memory.num_rows[warp];
    float sum[Type::kPerVec] = {};
    DC_NO_UNROLL
    for (int first = 0; first < num_rows; first += kAhead) {
      Arrivals<kAhead> arrivals;
      arrivals.want((1u << min_of(kAhead, num_rows - first)) - 1);
      DC_UNROLL
      for (int step = 0; step < kAhead; ++step) {
        if (!arrivals.is_wanted(step)) continue;
        const int sender = gather_sender(args.can_shrink, ranks[first + step]);
        arrivals.from[step] = reinterpret_cast<Vec16*>(buffer.gather_row(
                                  args.world.rank, sender, token, entries[first + step])) +
                              vec;
      }
      arrivals.look();
      const bool ok = await_arrivals(context, arrivals, [&](int step) {
        return WaitFor{Stage::kRows, Word::kRow, ranks[first + step], arch::block_idx()};
      });
      if (!ok) return false;
      DC_UNROLL
      for (int step = 0; step < kAhead; ++step) {
        if (!arrivals.is_wanted(step)) continue;
        Type::add_weighted(sum, arrivals.vecs[step], weights[first + step]);
        arrivals.clear(step);
      }
    }
    uint8_t* dst = args.combined_x + static_cast<size_t>(token) * args.shape.hidden * sizeof(Bf16);
    arch::st_streaming(reinterpret_cast<Vec16*>(dst) + vec, Type::round(sum));
  }
  return true;
}

template <CombineRows kRows, bool kLogFmt>
DC_DEVICE void combine_receive(const Context& context, const LowLatencyCombineArgs& args,
                               const LowLatencyBuffer& buffer, const BlockMemory& memory,
                               CombineInputs& inputs) {
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  const LowLatencyShare& share = inputs.share;
  bool ok = true;
  // Rows need no announcement. It is enough if one block finds a rank that runs another operation,
  // or none.
  if (arch::block_idx() == 0 && warp == num_warps - 1) {
    ok = await_announcements(context, buffer, memory, memory.active, args.signature,
                             args.wait_stats);
  }
  DC_NO_UNROLL
  for (int group = share.begin; group < share.end; group += num_warps) {
    const int group_end = min_of(group + num_warps, share.end);
    if (group + warp < group_end) {
      if constexpr (kRows == CombineRows::kSelections) {
        find_topk_rows(args, memory, group + warp);
      } else {
        if (group != share.begin) inputs.load_expert(args, group + warp);
        const uint32_t mask = inputs.ranks(args, group + warp);
        if (arch::lane_idx() == 0) memory.masks[warp] = mask;
      }
    }
    if (!block_agrees(ok)) return;
    if constexpr (kRows == CombineRows::kSelections) {
      ok = add_topk_rows(context, args, buffer, share, memory, group, group_end);
    } else if constexpr (kLogFmt) {
      ok = add_log_ranks(context, args, buffer, share, memory, group, group_end);
    } else {
      ok = add_ranks(context, args, buffer, share, memory, group, group_end);
    }
    if (group_end >= share.end) break;
    if (!block_agrees(ok)) return;  // all threads have read what the warps have noted
  }
  if (ok) note_in_warp(context, TraceStep::kReceived);
}

}  // namespace deep_comm
