// combine for decoding in a group of several nodes: every expert rank returns its rows directly to
// the ranks that own the tokens, where they are added. Arguments, sums and their order are those of
// low_latency_combine; recv_rows and recv_weights are by slot.
//
// grid   B blocks; received rows, and at the source tokens (LowLatencyShare), are distributed over
//        them
// words  as in low_latency_rail_dispatch, with returned rows; weight · owner: expert's rank ·
//        written by the source, whole messages of K · number in the word
// before the operation's dispatch has been received on this rank
// waits  buffer_credit: as in dispatch; weights: unblocked by the source's send phase; rows: by the
//        expert rank's; with masks each wait also ends when its peer is given up: see
//        rail_mask.cuh
// not promised: nothing; the result depends neither on B nor on the nodes' boundaries
#pragma once

#include "device/low_latency/combine.cuh"
#include "device/low_latency/rail_block.cuh"

namespace deep_comm {

// The rows at a token's source that its answers are written to.
template <CombineRows kRows>
DC_DEVICE ReturnRows return_rows(const LowLatencyRailCombineArgs& args) {
  return {args.can_shrink && !arch::fault(Fault::kSharedRows), args.reach.group.num_ranks,
          args.shape.num_topk, kRows == CombineRows::kSelections};
}

// One warp: the ranks of a token's experts.
DC_DEVICE TokenRanks find_ranks(const LowLatencyRailCombineArgs& args, int token) {
  const ExpertMap& map = args.experts;
  return TokenRanks::make(args.shape.num_topk, [&](int k, int /*part*/) {
    const int64_t position = static_cast<int64_t>(token) * args.shape.num_topk + k;
    const int expert = load_expert(args.topk_idx, position, args.topk_idx_bytes);
    return expert >= 0 && expert < args.shape.num_experts ? map.rank_of(expert) : -1;
  });
}

// Source, a warp per token: sends all its weights to every rank that has one of its experts. The
// staging of two operations ago is free: its rows have been returned, and no rank sends those
// before it has read all weights of a token.
DC_DEVICE void send_weights(const RailContext& context, const LowLatencyRailCombineArgs& args,
                            const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory) {
  const LowLatencyGroup& group = args.reach.group;
  const int num_topk = args.shape.num_topk, num_warps = arch::num_warps();
  for (int token = arch::block_idx() * num_warps + arch::warp_idx(); token < args.split.num_tokens;
       token += arch::num_blocks() * num_warps) {
    const TokenRanks ranks = find_ranks(args, token);
    const size_t offset = buffer.weights(group.rank, token), staged = buffer.weights_staged(token);
    for (int k = arch::lane_idx(); k < num_topk; k += kWarpSize) {
      const float weight =
          arch::ld_nc(args.topk_weights + static_cast<int64_t>(token) * num_topk + k);
      arch::st_weak(buffer.own<uint64_t>(staged) + k,
                    Tagged::pack(context.generation, bit_cast<uint32_t>(weight)));
    }
    arch::sync_warp();
    DC_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int peer = ranks.ranks[part];
      if (!ranks.is_first[part] || memory.reached[peer] != nullptr ||
          !is_active(context, memory, peer))
        continue;
      // pairs with: find_summands at the peer — the words themselves
      put_staged(buffer, peer, group.data_qp(token), offset, staged, sizeof(uint64_t) * num_topk);
    }
    for (int first = 0; first < num_topk; ++first) {
      const int peer = ranks.rank(first);
      if (!ranks.is_first_of(first) || memory.reached[peer] == nullptr ||
          !is_active(context, memory, peer))
        continue;
      if (arch::lane_idx() == 0)
        count_stored(group, peer, group.data_qp(token), sizeof(uint64_t) * num_topk);
      for (int k = arch::lane_idx(); k < num_topk; k += kWarpSize) {
        // pairs with: find_summands at the peer — nothing but the word itself
        arch::st_relaxed_sys(memory.at<uint64_t>(peer, offset) + k,
                             arch::ld_weak(buffer.own<uint64_t>(staged) + k));
      }
    }
  }
}

// One warp: the rows of its task's token on this rank, and their weights, k ascending.
template <CombineRows kRows>
DC_DEVICE bool find_summands(const RailContext& context, const LowLatencyRailCombineArgs& args,
                             const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory) {
  const LowLatencyShape& shape = args.shape;
  const int num_topk = shape.num_topk, warp = arch::warp_idx();
  const int num_columns = kRows == CombineRows::kReduced ? 1 : num_topk;
  const int source = source_of(memory.tasks[warp]);
  const int64_t slot =
      static_cast<int64_t>(source) * shape.num_max_tokens + token_of(memory.tasks[warp]);
  const int32_t packed = arch::ld_nc(args.return_addresses + slot);
  const bool is_answered = is_active(context, memory, source);
  const bool awaits_weights =
      kRows == CombineRows::kSums && args.recv_weights == nullptr && is_answered;
  const uint64_t* weights =
      buffer.own<uint64_t>(buffer.weights(source, ReturnAddress::unpack(packed).token));
  int num_rows = 0;
  bool ok = true, has_all = is_answered;
  for (int base = 0; base < num_columns && has_all; base += kWarpSize) {
    const int k = base + arch::lane_idx();
    const bool is_column = k < num_columns;
    const int row = is_column ? arch::ld_nc(args.recv_rows + slot * num_columns + k) : -1;
    uint32_t bits = 0;
    // All of them, also those for other ranks: none may arrive later than the credit for them.
    if (is_column && awaits_weights) {
      ok = await_tagged_alone(context, weights + k,
                              {Stage::kWeights, Word::kWeight, source, arch::block_idx()}, &bits);
      has_all = has_all && ok;
      ok = ok || is_given_up(context, source);
    }
    const uint32_t here = arch::ballot(kFullMask, row >= 0);
    if (row >= 0) {
      const int position =
          warp * num_topk + num_rows + arch::popc(here & ((1u << arch::lane_idx()) - 1));
      float weight = 1.0f;
      if (kRows == CombineRows::kSelections) {
        // the source applies the weights; it needs to know which entry this is
        weight = bit_cast<float>(k);
      } else if (awaits_weights) {
        weight = bit_cast<float>(bits);
      } else if (kRows == CombineRows::kSums) {
        weight = arch::ld_nc(args.recv_weights + slot * num_topk + k);
      }
      memory.rows[position] = row;
      memory.weights[position] = weight;
    }
    num_rows += arch::popc(here);
    has_all = arch::all(kFullMask, has_all);
  }
  if (arch::lane_idx() == 0) {
    memory.num_rows[warp] = has_all ? num_rows : 0;  // 0: nothing to return
    memory.returns[warp] = packed;
  }
  return ok;
}

// Where a task's row is stored or staged. `entry`: with one rounding its top-k entry.
template <CombineRows kRows>
DC_DEVICE uint8_t* row_target(const LowLatencyRailCombineArgs& args,
                              const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory,
                              int task, int entry) {
  const int32_t packed = memory.tasks[task];
  constexpr bool kByEntry = kRows == CombineRows::kSelections;
  const ReturnAddress to = ReturnAddress::unpack(memory.returns[task]);
  const ReturnRows layout = return_rows<kRows>(args);
  if (memory.reached[source_of(packed)] != nullptr) {
    return memory.at<uint8_t>(source_of(packed), buffer.row(layout, to.token, args.reach.group.rank,
                                                            kByEntry ? entry : to.order));
  }
  return buffer.own<uint8_t>(buffer.row_staged(source_of(packed), token_of(packed),
                                               kByEntry ? entry : 0,
                                               kByEntry ? args.shape.num_topk : 1));
}

// The block adds the rows of its warps' tasks. is_reached: of tasks whose sources its own stores
// reach, and stores the sums there; otherwise of the other tasks, and stages the sums. With one
// rounding every row is stored by itself.
template <CombineRows kRows, bool kLogFmt>
DC_DEVICE void store_sums(const LowLatencyRailCombineArgs& args, const LowLatencyRailBuffer& buffer,
                          const RailBlockMemory& memory, const Divisor& by_vecs, int num_tasks,
                          bool is_reached) {
  using Type = Numeric<Dtype::kBfloat16>;
  constexpr int kVecs = kLogFmt ? LogPiece::kElements / Type::kPerVec : 1;  // of a thread
  const int num_vecs = args.shape.hidden / Type::kPerVec;
  for (int idx = kVecs * arch::thread_idx(); idx < num_tasks * num_vecs;
       idx += kVecs * arch::num_threads()) {
    const int task = by_vecs.quotient(idx), column = idx - task * num_vecs;
    if ((memory.reached[source_of(memory.tasks[task])] != nullptr) != is_reached) continue;
    if (memory.num_rows[task] == 0) continue;
    if constexpr (kRows == CombineRows::kSelections) {
      for (int row = task * args.shape.num_topk;
           row < task * args.shape.num_topk + memory.num_rows[task]; ++row) {
        const uint8_t* src =
            args.x + static_cast<size_t>(memory.rows[row]) * args.shape.hidden * sizeof(Bf16);
        send_piece(
            row_target<kRows>(args, buffer, memory, task, bit_cast<int32_t>(memory.weights[row])),
            column, arch::ld_nc(reinterpret_cast<const Vec16*>(src) + column));
      }
      continue;
    }
    uint8_t* row = row_target<kRows>(args, buffer, memory, task, 0);
    float sum[kVecs * Type::kPerVec] = {};
    sum_rows<kVecs>(args, memory, task, column, sum);
    if constexpr (kLogFmt) {
      const LogPiece piece = LogPiece::encode(sum);
      // pairs with: take_arrival in add_rows — nothing but the words themselves
      arch::st_relaxed_sys(log_codes(row, column / kVecs), piece.codes);
      arch::st_relaxed_sys(log_last(row, args.shape.hidden, column / kVecs), piece.last[0]);
      arch::st_relaxed_sys(log_last(row, args.shape.hidden, column / kVecs) + 1, piece.last[1]);
    } else {
      send_piece(row, column, Type::round(sum));
    }
  }
}

// A warp, when the staged rows of its task are complete: puts them. Rows that were stored are only
// counted.
template <CombineRows kRows, bool kLogFmt>
DC_DEVICE void put_rows(const LowLatencyRailCombineArgs& args, const LowLatencyRailBuffer& buffer,
                        const RailBlockMemory& memory) {
  constexpr bool kByEntry = kRows == CombineRows::kSelections;
  const LowLatencyGroup& group = args.reach.group;
  const int warp = arch::warp_idx(), num_topk = args.shape.num_topk;
  const int source = source_of(memory.tasks[warp]), slot = token_of(memory.tasks[warp]);
  if (memory.num_rows[warp] == 0) return;
  const ReturnRows layout = return_rows<kRows>(args);
  const ReturnAddress to = ReturnAddress::unpack(memory.returns[warp]);
  // Codes of 16 elements are 16 bytes, and 8 more after those of the row.
  const size_t num_bytes = kLogFmt ? buffer.row_bytes() / 4 * 3 : buffer.row_bytes();
  const int num_rows = kByEntry ? memory.num_rows[warp] : 1;
  if (memory.reached[source] != nullptr) {
    if (arch::lane_idx() == 0)
      count_stored(group, source, group.data_qp(to.token), num_rows * num_bytes);
    return;
  }
  for (int idx = 0; idx < num_rows; ++idx) {
    const int entry = kByEntry ? bit_cast<int32_t>(memory.weights[warp * num_topk + idx]) : 0;
    // pairs with: take_arrival in add_rows at the source — the words themselves
    put_staged_warp(buffer, source, group.data_qp(to.token),
                    buffer.row(layout, to.token, group.rank, kByEntry ? entry : to.order),
                    buffer.row_staged(source, slot, entry, kByEntry ? num_topk : 1), num_bytes);
  }
}

template <CombineRows kRows, bool kLogFmt>
DC_DEVICE bool combine_send(const RailContext& context, const LowLatencyRailCombineArgs& args,
                            const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory,
                            uint32_t previous) {
  const LowLatencyGroup& group = args.reach.group;
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  // First, because peers wait for the weights.
  if (kRows == CombineRows::kSums && args.recv_weights == nullptr)
    send_weights(context, args, buffer, memory);
  bool ok = true;
  if (warp == max_of(0, num_warps - 2)) {
    ok = await_credit(context, buffer, memory, previous);
    if (arch::block_idx() == 0 && arch::all(kFullMask, ok)) {
      for (int position = arch::lane_idx(); position < group.num_ranks; position += kWarpSize) {
        const int peer = group.rank_at(position);
        if (!is_active(context, memory, peer)) continue;
        // pairs with: await_announcements at the peer — nothing but the word itself
        send_word(buffer, peer, buffer.announced(group.rank),
                  announcement(context, args.signature, args.split.num_tokens));
      }
    }
  }
  if (warp == 0) {
    number_tasks(group, memory.first_task, [&](int source) {
      const int num_rows = arch::ld_nc(args.num_rows + source);
      memory.num_tokens[source] = num_rows - arch::ld_nc(args.num_rows + group.num_ranks + source);
      return num_rows;
    });
  }
  if (!memory.agrees(ok)) return false;
  const BlockTasks tasks = BlockTasks::of(group, memory.first_task);
  const Divisor by_vecs = Divisor::make(args.shape.hidden / Numeric<Dtype::kBfloat16>::kPerVec);
  for (int first = 0; first < tasks.count; first += num_warps) {
    const int num_now = min_of(num_warps, tasks.count - first);
    if (warp < num_now) {
      if (arch::lane_idx() == 0) {
        const int32_t task = tasks.find(group, first + warp);
        const int source = source_of(task);
        memory.tasks[warp] =
            pack_task(source, slot_of(args.shape, token_of(task), memory.num_tokens[source]));
      }
      arch::sync_warp();
      ok = find_summands<kRows>(context, args, buffer, memory);
    }
    if (!memory.agrees(ok)) return false;
    // Puts first: their way is longer, and they do not wait for stores over NVLink.
    store_sums<kRows, kLogFmt>(args, buffer, memory, by_vecs, num_now, false);
    arch::sync_block();
    if (warp < num_now) put_rows<kRows, kLogFmt>(args, buffer, memory);
    store_sums<kRows, kLogFmt>(args, buffer, memory, by_vecs, num_now, true);
    arch::sync_block();  // all threads have read rows and weights
  }
  return true;
}

inline constexpr int kNoRow = -1;  // of a masked rank

// Source, one warp: the rows that are returned for its token: the ranks that send them, and with
// one rounding the top-k entries and weights.
template <CombineRows kRows>
DC_DEVICE void find_returned_rows(const RailContext& context, const LowLatencyRailCombineArgs& args,
                                  const RailBlockMemory& memory, int token) {
  const int num_topk = args.shape.num_topk, warp = arch::warp_idx();
  const TokenRanks ranks = find_ranks(args, token);
  int num_rows = 0;
  DC_UNROLL
  for (int part = 0; part < 2; ++part) {
    if (part * kWarpSize >= num_topk) break;
    const int k = part * kWarpSize + arch::lane_idx();
    if (kRows == CombineRows::kSelections) {
      const bool is_selected =
          ranks.ranks[part] >= 0 && is_active(context, memory, ranks.ranks[part]);
      const uint32_t selected = arch::ballot(kFullMask, is_selected);
      if (is_selected) {
        const int row =
            warp * num_topk + num_rows + arch::popc(selected & ((1u << arch::lane_idx()) - 1));
        memory.rows[row] = ranks.ranks[part] << 8 | k;
        memory.weights[row] =
            arch::ld_nc(args.topk_weights + static_cast<int64_t>(token) * num_topk + k);
      }
      num_rows += arch::popc(selected);
    } else {
      const int order = ranks.order(part);
      if (!ranks.is_first[part]) continue;
      memory.rows[warp * num_topk + order] =
          is_active(context, memory, ranks.ranks[part]) ? ranks.ranks[part] << 8 | order : kNoRow;
    }
  }
  if (kRows != CombineRows::kSelections) num_rows = ranks.count();
  if (arch::lane_idx() == 0) memory.num_rows[warp] = num_rows;
}

// One piece of a returned row: 8 elements, with LogFMT 16. A thread polls all pieces that it adds
// before it waits for one.
template <CombineRows kRows, bool kLogFmt>
struct ReturnedPiece {
  Vec16 vec;         // LogFMT: codes
  uint32_t last[2];  // only with LogFMT

  DC_DEVICE void look(uint8_t* row, int hidden, int piece_idx) {
    vec = arch::ld_relaxed_sys(reinterpret_cast<Vec16*>(row) + piece_idx);
    if constexpr (kLogFmt) {
      last[0] = arch::ld_relaxed_sys(log_last(row, hidden, piece_idx));
      last[1] = arch::ld_relaxed_sys(log_last(row, hidden, piece_idx) + 1);
    }
  }
  DC_DEVICE bool take(const RailContext& context, uint8_t* row, int hidden, int piece_idx,
                      int peer) {
    const WaitFor wait{Stage::kRows, Word::kRow, peer, arch::block_idx()};
    if (!take_arrival(context, reinterpret_cast<Vec16*>(row) + piece_idx, wait, &vec)) return false;
    if constexpr (!kLogFmt) return true;
    return take_arrival(context, log_last(row, hidden, piece_idx), wait, &last[0]) &&
           take_arrival(context, log_last(row, hidden, piece_idx) + 1, wait, &last[1]);
  }
  DC_DEVICE void add(float* sum, float weight) const {
    if constexpr (kLogFmt) {
      float values[LogPiece::kElements];
      LogPiece{vec, {last[0], last[1]}}.decode(values);
      DC_UNROLL
      for (int element = 0; element < LogPiece::kElements; ++element)
        sum[element] += values[element];
    } else if constexpr (kRows == CombineRows::kSelections) {
      Numeric<Dtype::kBfloat16>::add_weighted(sum, vec, weight);
    } else {
      Numeric<Dtype::kBfloat16>::add(sum, vec);
    }
  }
};

// The block adds the rows of tokens [begin, end) and writes the results.
template <CombineRows kRows, bool kLogFmt>
DC_DEVICE bool add_rows(const RailContext& context, const LowLatencyRailCombineArgs& args,
                        const LowLatencyRailBuffer& buffer, const LowLatencyShare& share,
                        const RailBlockMemory& memory, int begin, int end) {
  using Type = Numeric<Dtype::kBfloat16>;
  constexpr int kElements = kLogFmt ? LogPiece::kElements : Type::kPerVec;
  constexpr int kAhead = kLogFmt ? 4 : 8;  // rows whose first looks are in flight together
  const int first_piece = share.column_begin / kElements,
            num_pieces = share.num_columns() / kElements;
  const Divisor by_pieces = Divisor::make(num_pieces);
  for (int idx = arch::thread_idx(); idx < (end - begin) * num_pieces; idx += arch::num_threads()) {
    const Position position = Position::of(idx, by_pieces, num_pieces);
    const int token = begin + position.row, piece_idx = first_piece + position.column;
    float sum[kElements] = {};
    const int end_row = position.row * args.shape.num_topk + memory.num_rows[position.row];
    const ReturnRows layout = return_rows<kRows>(args);
    const auto row_of = [&](int row) {
      const int packed = memory.rows[row];
      return buffer.own<uint8_t>(buffer.row(layout, token, packed >> 8, packed & 0xff));
    };
    for (int first = position.row * args.shape.num_topk; first < end_row; first += kAhead) {
      ReturnedPiece<kRows, kLogFmt> pieces[kAhead];
      DC_UNROLL
      for (int step = 0; step < kAhead; ++step) {
        if (first + step < end_row && memory.rows[first + step] != kNoRow)
          pieces[step].look(row_of(first + step), args.shape.hidden, piece_idx);
      }
      DC_UNROLL
      for (int step = 0; step < kAhead; ++step) {
        const int row = first + step;
        if (row >= end_row || memory.rows[row] == kNoRow) continue;
        const int peer = memory.rows[row] >> 8;
        if (!pieces[step].take(context, row_of(row), args.shape.hidden, piece_idx, peer)) {
          if (!is_given_up(context, peer)) return false;
          continue;
        }
        pieces[step].add(sum, memory.weights[row]);
      }
    }
    Vec16* dst = reinterpret_cast<Vec16*>(args.combined_x + static_cast<size_t>(token) *
                                                                args.shape.hidden * sizeof(Bf16));
    DC_UNROLL
    for (int part = 0; part < kElements / Type::kPerVec; ++part) {
      arch::st_streaming(dst + kElements / Type::kPerVec * piece_idx + part,
                         Type::round(sum + part * Type::kPerVec));
    }
  }
  return true;
}

template <CombineRows kRows, bool kLogFmt>
DC_DEVICE void combine_receive(const RailContext& context, const LowLatencyRailCombineArgs& args,
                               const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory) {
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  const LowLatencyShare share = LowLatencyShare::of(args.shape, args.split, arch::block_idx());
  // A peer that waits for another rank's weights is not silent. So waits for its rows last longer,
  // and the waits for announcements find out which rank is missing.
  RailContext patient = context;
  if (!context.can_shrink) patient.patience = 2;  // with masks, a rank that waits says so
  bool ok = true;
  // Rows need no announcement. It is enough if one block finds a rank that runs another operation,
  // or none.
  if (arch::block_idx() == 0 && warp == num_warps - 1) {
    ok = await_announcements(context, buffer, context.can_shrink ? memory.active : nullptr,
                             args.signature, args.wait_stats, memory.num_tokens);
  }
  for (int group = share.begin; group < share.end; group += num_warps) {
    const int group_end = min_of(group + num_warps, share.end);
    if (group + warp < group_end) find_returned_rows<kRows>(context, args, memory, group + warp);
    if (!memory.agrees(ok)) return;
    ok = add_rows<kRows, kLogFmt>(patient, args, buffer, share, memory, group, group_end);
    if (!memory.agrees(ok)) return;  // all threads have read what the warps have noted
  }
}

template <CombineRows kRows, bool kLogFmt>
DC_DEVICE void low_latency_rail_combine(const LowLatencyRailCombineArgs& args) {
  const RailReach& reach = args.reach;
  LowLatencyRailBuffer buffer{
      args.world, reach.group, reach.words, reach.region, args.shape, LowLatencyKind::kCombine, 0};
  const RailContext context = rail_context(args.world, reach, Kernel::kLowLatencyCombine,
                                           operation_of(buffer, args.phases), args.can_shrink);
  buffer.buffer_idx = static_cast<int>(context.generation & 1u);
  const RailBlockMemory memory = RailBlockMemory::make(args.shape, reach.group.num_ranks);
  const uint32_t previous = begin_block(context, buffer, memory);
  arch::sync_block();
  begin_operation(context, buffer, memory, args.phases);
  bool ok = true;
  if (args.phases.send) ok = combine_send<kRows, kLogFmt>(context, args, buffer, memory, previous);
  if (args.phases.receive && ok) combine_receive<kRows, kLogFmt>(context, args, buffer, memory);
}

}  // namespace deep_comm
