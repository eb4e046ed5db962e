// The send phase of combine, at the expert's rank. combine_send, at the end, takes a received token
// through these steps. The token of a warp is its task:
//
//   1 forecast  TaskForecast: the warp's first task, if all ranks have as many tokens as this one
//   2 load      CombineInputs: everything a block reads first, in one trip to memory
//   3 weights   send_weights: as a source, the weights of its own tokens, to the expert ranks
//   4 tasks     check_forecast: the block's tasks, by the sources' real numbers of tokens
//   5 credit    await_credit (block.cuh): the sources have read the buffer
//   6 rows      find_summands: the rows of x that belong to the token, and their weights
//   7 send      send_sums: the rows weighted and added, one row back to the source; or
//               send_reduced: the row that the caller has reduced (as LogFMT it goes through
//               send_sums); or
//               send_topk_rows: every row as it is (one rounding)
#pragma once

#include "device/low_latency/block.cuh"
#include "device/move/logfmt.cuh"
#include "device/move/reduce.cuh"

namespace deep_comm {

// ---- 1: forecast --------------------------------------------------------------------------------

// A warp's first task if every source has as many tokens as this rank, which is the usual case. It
// follows from the arguments alone, so its rows can be loaded together with the numbers of tokens.
struct TaskForecast {
  TaskNumbering numbering;
  int32_t task;
  bool has_task;

  DC_DEVICE static TaskForecast make(const World& world, const LowLatencyShare& share,
                                     int rotation) {
    TaskForecast forecast{TaskNumbering::forecast(world, share, rotation), 0, false};
    forecast.has_task = arch::warp_idx() < forecast.numbering.num_tasks;
    if (forecast.has_task) forecast.task = forecast.numbering.find(world, arch::warp_idx());
    return forecast;
  }
};

// ---- 2: load ------------------------------------------------------------------------------------

// A row of a task's token in x, and the weight that came with dispatch: of top-k entry k, by lane.
struct RawSummand {
  int row;
  float weight;

  template <CombineRows kRows>
  DC_DEVICE static RawSummand load(const LowLatencyCombineArgs& args, int32_t task, int k) {
    const int num_columns = kRows == CombineRows::kReduced ? 1 : args.shape.num_topk;
    RawSummand raw{-1, 1.0f};
    if (k >= num_columns) return raw;
    const int64_t slot =
        static_cast<int64_t>(source_of(task)) * args.shape.num_max_tokens + token_of(task);
    const int64_t position = slot * num_columns + k;
    raw.row = arch::ld_nc(args.recv_rows + position);
    // Loads the weight together with the row, so both share one memory latency.
    if (kRows == CombineRows::kSums && args.recv_weights != nullptr) {
      raw.weight = arch::ld_nc(args.recv_weights + position);
    }
    return raw;
  }
};

// What a launch loads first.
struct CombineInputs {
  LowLatencyShare share;
  int num_tokens;      // lane p: of peer_at(p)
  RawExpert expert;    // of this warp's first token: entry k in lane k
  RawSummand summand;  // of the forecast task

  template <CombineRows kRows>
  DC_DEVICE static CombineInputs load(const LowLatencyCombineArgs& args,
                                      const LowLatencyShare& share, const TaskForecast& forecast) {
    CombineInputs inputs{share, 0, {}, {-1, 1.0f}};
    const int lane = arch::lane_idx(), token = inputs.share.begin + arch::warp_idx();
    if (args.phases.send && lane < args.world.num_ranks) {
      inputs.num_tokens =
          arch::ld_nc(args.recv_tokens + peer_at(args.world, forecast.numbering.rotation, lane));
    }
    if (forecast.has_task) inputs.summand = RawSummand::load<kRows>(args, forecast.task, lane);
    if (kRows != CombineRows::kSelections && args.phases.receive && token < inputs.share.end) {
      inputs.load_expert(args, token);
    }
    return inputs;
  }
  DC_DEVICE void load_expert(const LowLatencyCombineArgs& args, int token) {
    if (arch::lane_idx() >= args.shape.num_topk) return;
    const int64_t begin = static_cast<int64_t>(token) * args.shape.num_topk;
    expert = RawExpert::load(args.topk_idx, begin + arch::lane_idx(), args.topk_idx_bytes);
  }
  // One warp: the ranks that hold the experts of the token whose first entries are loaded.
  DC_DEVICE uint32_t ranks(const LowLatencyCombineArgs& args, int token) const {
    RawExpert entry = expert;
    uint32_t mask = 0;
    DC_NO_UNROLL
    for (int k = arch::lane_idx(); k < args.shape.num_topk; k += kWarpSize) {
      if (k >= kWarpSize) {
        entry =
            RawExpert::load(args.topk_idx, static_cast<int64_t>(token) * args.shape.num_topk + k,
                            args.topk_idx_bytes);
      }
      mask |= rank_bit(args.experts, entry.value(args.topk_idx_bytes));
    }
    return arch::reduce_or(kFullMask, mask);
  }
};

// ---- 3: weights ---------------------------------------------------------------------------------

// As a source: every weight to the rank of its expert.
DC_DEVICE void send_weights(const Context& context, const LowLatencyCombineArgs& args,
                            const LowLatencyBuffer& buffer, const BlockMemory& memory,
                            const LowLatencyShare& share) {
  const int num_topk = args.shape.num_topk;
  if (!share.is_leading) return;
  DC_NO_UNROLL
  for (int idx = arch::thread_idx(); idx < share.num_tokens() * num_topk;
       idx += arch::num_threads()) {
    const int64_t position = static_cast<int64_t>(share.begin) * num_topk + idx;
    const int expert = load_expert(args.topk_idx, position, args.topk_idx_bytes);
    if (expert < 0 || expert >= args.shape.num_experts) continue;
    const int peer = args.experts.rank_of(expert);
    if (!is_active(memory, peer)) continue;
    // pairs with: find_summands at the expert's rank — nothing but the word itself.
    arch::st_relaxed_sys(
        buffer.weights(peer, args.world.rank, share.begin) + idx,
        Tagged::pack(context.generation,
                     bit_cast<uint32_t>(arch::ld_nc(args.topk_weights + position))));
  }
}

// ---- 4: tasks -----------------------------------------------------------------------------------

// One warp: numbers the tasks by the tokens that dispatch has received; a masked source has none.
// Returns true if they are as forecast, and so is the warp's first task.
DC_DEVICE bool check_forecast(const LowLatencyCombineArgs& args, const BlockMemory& memory,
                              const CombineInputs& inputs, TaskNumbering* numbering) {
  const bool is_source = arch::lane_idx() < args.world.num_ranks;
  const bool has_tokens =
      is_source && is_active(memory, peer_at(args.world, memory.rotation, arch::lane_idx()));
  const int num_tokens = has_tokens ? inputs.num_tokens : 0;
  const bool is_forecast = arch::all(kFullMask, !is_source || num_tokens == args.split.num_tokens);
  if (!is_forecast) *numbering = number_tasks(args.world, args.shape, memory.rotation, num_tokens);
  return is_forecast;
}

// ---- 6: rows ------------------------------------------------------------------------------------

// One warp: the rows of its task's token on this rank and their weights, k ascending, into shared
// memory. `raw`: what is loaded already, of entries k < 32.
template <CombineRows kRows>
DC_DEVICE bool find_summands(const Context& context, const LowLatencyCombineArgs& args,
                             const LowLatencyBuffer& buffer, const BlockMemory& memory,
                             int32_t task, RawSummand raw) {
  const LowLatencyShape& shape = args.shape;
  const int num_topk = shape.num_topk, warp = arch::warp_idx(),
            num_columns = kRows == CombineRows::kReduced ? 1 : num_topk;
  const int source = source_of(task), token = token_of(task);
  int num_rows = 0;
  bool ok = true;
  DC_NO_UNROLL
  for (int base = 0; base < num_columns; base += kWarpSize) {
    const int k = base + arch::lane_idx();
    if (base > 0) raw = RawSummand::load<kRows>(args, task, k);
    const uint32_t here = arch::ballot(kFullMask, raw.row >= 0);
    if (raw.row >= 0) {
      const int position =
          warp * num_topk + num_rows + arch::popc(here & ((1u << arch::lane_idx()) - 1));
      float weight = raw.weight;
      if (kRows == CombineRows::kSelections) {
        weight = bit_cast<float>(k);  // the source applies the weight; this field carries k instead
      } else if (kRows == CombineRows::kSums && args.recv_weights == nullptr) {
        uint32_t bits = 0;
        const WaitFor wait{Stage::kWeights, Word::kWeight, source, arch::block_idx()};
        const bool arrived = await_tagged_alone(
            context, buffer.weights(args.world.rank, source, token) + k, wait, &bits);
        ok = ok && (arrived || is_given_up(context, source));
        weight = bit_cast<float>(bits);
      }
      memory.rows[position] = raw.row;
      memory.weights[position] = weight;
    }
    num_rows += arch::popc(here);
  }
  if (arch::lane_idx() == 0) {
    memory.num_rows[warp] = num_rows;
    memory.tasks[warp] = task;
  }
  return ok;
}

// ---- 7: send ------------------------------------------------------------------------------------

// Zero means "not arrived", so a pair of +0.0 is sent as two −0.0. Sums begin at +0.0, which makes
// the sign irrelevant to them.
DC_DEVICE void send_piece(uint8_t* row, int column, Vec16 vec) {
  DC_UNROLL
  for (int word = 0; word < 4; ++word) {
    if (vec.words[word] == 0) vec.words[word] = 0x80008000u;
  }
  // pairs with: await_arrivals in add_ranks and add_topk_rows, take_arrival in the rail's add_rows —
  // nothing but the words themselves.
  arch::st_relaxed_sys(reinterpret_cast<Vec16*>(row) + column, vec);
}

// Adds weight * row over a task's rows, k ascending: kVecs vectors of 16 bytes from `column` on.
template <int kVecs, class Memory>
DC_DEVICE void sum_rows(const LowLatencyCombineArgs& args, const Memory& memory, int warp,
                        int column, float* sum) {
  constexpr int kAhead = 4 / kVecs;  // rows whose loads are in flight together
  constexpr int kPerVec = Numeric<Dtype::kBfloat16>::kPerVec;
  const size_t row_bytes = args.shape.hidden * sizeof(Bf16);
  const int num_rows = memory.num_rows[warp];
  const int32_t* rows = memory.rows + warp * args.shape.num_topk;
  const float* weights = memory.weights + warp * args.shape.num_topk;
  DC_NO_UNROLL
  for (int first = 0; first < num_rows; first += kAhead) {
    Vec16 vecs[kAhead][kVecs];
    DC_UNROLL
    for (int step = 0; step < kAhead; ++step) {
      if (first + step >= num_rows) continue;
      const uint8_t* row = args.x + static_cast<size_t>(rows[first + step]) * row_bytes;
      DC_UNROLL
      for (int vec = 0; vec < kVecs; ++vec) {
        vecs[step][vec] = arch::ld_nc(reinterpret_cast<const Vec16*>(row) + column + vec);
      }
    }
    DC_UNROLL
    for (int step = 0; step < kAhead; ++step) {
      if (first + step >= num_rows) continue;
      DC_UNROLL
      for (int vec = 0; vec < kVecs; ++vec) {
        Numeric<Dtype::kBfloat16>::add_weighted(sum + vec * kPerVec, vecs[step][vec],
                                                weights[first + step]);
      }
    }
  }
}

// Where piece number `piece` of a row in LogFMT lies: the codes of the whole row come first, then
// the last words of all pieces.
DC_DEVICE Vec16* log_codes(uint8_t* row, int piece) {
  return reinterpret_cast<Vec16*>(row) + piece;
}
DC_DEVICE uint32_t* log_last(uint8_t* row, int hidden, int piece) {
  return reinterpret_cast<uint32_t*>(row + hidden) + 2 * piece;
}

// The block adds the rows of its warps' tokens and sends the sums to their sources.
template <bool kLogFmt>
DC_DEVICE void send_sums(const LowLatencyCombineArgs& args, const LowLatencyBuffer& buffer,
                         const BlockMemory& memory, int num_tasks) {
  using Type = Numeric<Dtype::kBfloat16>;
  constexpr int kVecs = kLogFmt ? LogPiece::kElements / Type::kPerVec : 1;  // of a thread
  const int max_vecs = memory.header->max_vecs;
  const Divisor by_max_vecs = memory.header->by_max_vecs;
  DC_NO_UNROLL
  for (int idx = kVecs * arch::thread_idx(); idx < num_tasks * max_vecs;
       idx += kVecs * arch::num_threads()) {
    const int warp = by_max_vecs.quotient(idx), vec = idx - warp * max_vecs;
    const int source = source_of(memory.tasks[warp]), token = token_of(memory.tasks[warp]);
    if (memory.num_rows[warp] == 0 || vec >= memory.header->num_vecs[source]) continue;
    const int column = memory.header->first_vec[source] + vec;
    uint8_t* row = buffer.combine_row(source, args.world.rank, token);
    float sum[kVecs * Type::kPerVec] = {};
    sum_rows<kVecs>(args, memory, warp, column, sum);
    if constexpr (kLogFmt) {
      const LogPiece piece = LogPiece::encode(sum);
      // pairs with: take_arrival in add_log_ranks — nothing but the words themselves.
      arch::st_relaxed_sys(log_codes(row, column / kVecs), piece.codes);
      arch::st_relaxed_sys(log_last(row, args.shape.hidden, column / kVecs), piece.last[0]);
      arch::st_relaxed_sys(log_last(row, args.shape.hidden, column / kVecs) + 1, piece.last[1]);
    } else {
      send_piece(row, column, Type::round(sum));
    }
  }
}

// The block sends the rows of its warps' tokens, which the caller has reduced, to their sources. A
// thread loads its next vector before it stores one: a load behind stores to busy links is late.
DC_DEVICE void send_reduced(const LowLatencyCombineArgs& args, const LowLatencyBuffer& buffer,
                            const BlockMemory& memory, int num_tasks) {
  const int max_vecs = memory.header->max_vecs, num_total = num_tasks * max_vecs;
  const Divisor by_max_vecs = memory.header->by_max_vecs;
  const size_t row_bytes = args.shape.hidden * sizeof(Bf16);
  uint8_t* to = nullptr;
  Vec16 vec{};
  DC_NO_UNROLL
  for (int idx = arch::thread_idx(); idx < num_total + arch::num_threads();
       idx += arch::num_threads()) {
    uint8_t* next_to = nullptr;
    Vec16 next{};
    if (idx < num_total) {
      const Position position = Position::of(idx, by_max_vecs, max_vecs);
      const int warp = position.row, source = source_of(memory.tasks[warp]);
      if (memory.num_rows[warp] > 0 && position.column < memory.header->num_vecs[source]) {
        const size_t offset =
            static_cast<size_t>(memory.header->first_vec[source] + position.column) * sizeof(Vec16);
        const size_t row = memory.rows[warp * args.shape.num_topk];
        next_to =
            buffer.combine_row(source, args.world.rank, token_of(memory.tasks[warp])) + offset;
        next = arch::ld_nc(reinterpret_cast<const Vec16*>(args.x + row * row_bytes + offset));
      }
    }
    if (to != nullptr) send_piece(to, 0, vec);
    to = next_to;
    vec = next;
  }
}

// The block sends every row of its warps' tokens to their sources.
DC_DEVICE void send_topk_rows(const LowLatencyCombineArgs& args, const LowLatencyBuffer& buffer,
                              const BlockMemory& memory, int num_tasks) {
  const LowLatencyShape& shape = args.shape;
  const int max_vecs = memory.header->max_vecs;
  const Divisor by_max_vecs = memory.header->by_max_vecs;
  const int sender = gather_sender(args.can_shrink, args.world.rank);
  for (int idx = arch::thread_idx(); idx < num_tasks * max_vecs; idx += arch::num_threads()) {
    const int warp = by_max_vecs.quotient(idx), vec = idx - warp * max_vecs;
    const int source = source_of(memory.tasks[warp]), token = token_of(memory.tasks[warp]);
    if (vec >= memory.header->num_vecs[source]) continue;
    const int column = memory.header->first_vec[source] + vec;
    for (int row = warp * shape.num_topk; row < warp * shape.num_topk + memory.num_rows[warp];
         ++row) {
      const uint8_t* src =
          args.x + static_cast<size_t>(memory.rows[row]) * shape.hidden * sizeof(Bf16);
      send_piece(buffer.gather_row(source, sender, token, bit_cast<int32_t>(memory.weights[row])),
                 column, arch::ld_nc(reinterpret_cast<const Vec16*>(src) + column));
    }
  }
}

// ---- the phase ----------------------------------------------------------------------------------

template <CombineRows kRows, bool kLogFmt>
DC_DEVICE bool combine_send(const Context& context, const LowLatencyCombineArgs& args,
                            const LowLatencyBuffer& buffer, const BlockMemory& memory,
                            const LaunchState& launch, const TaskForecast& forecast,
                            const CombineInputs& inputs) {
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  // First, since peers wait for the weights. The words are free: this rank has received the rows of
  // two operations ago, which were sent after those weights had been read.
  if (kRows == CombineRows::kSums && args.recv_weights == nullptr)
    send_weights(context, args, buffer, memory, inputs.share);
  TaskNumbering numbering = forecast.numbering;
  const bool is_forecast = check_forecast(args, memory, inputs, &numbering);
  if (warp == 0) numbering.note(args.world, memory, Piece<PayloadFormat::kBfloat16>::kElements);
  const int num_tasks = numbering.num_tasks;
  bool ok = !has_credit_warp() ||
            await_credit(context, buffer, memory, launch, args.signature, args.split.num_tokens);
  // Groups of a task per warp; the first may be empty.
  DC_NO_UNROLL
  for (int first = 0;; first += num_warps) {
    const int num_now = min_of(num_warps, num_tasks - first);
    if (warp < num_now) {
      int32_t task = forecast.task;
      RawSummand summand = inputs.summand;
      if (!is_forecast || first > 0) {
        task = numbering.find(args.world, first + warp);
        summand = RawSummand::load<kRows>(args, task, arch::lane_idx());
      }
      ok = find_summands<kRows>(context, args, buffer, memory, task, summand) && ok;
    }
    if (!block_agrees(ok)) return false;
    if (first == 0) number_records(context, buffer, args.phases, launch);
    if constexpr (kRows == CombineRows::kSelections) {
      send_topk_rows(args, buffer, memory, num_now);
    } else if constexpr (kRows == CombineRows::kReduced && !kLogFmt) {
      send_reduced(args, buffer, memory, num_now);
    } else {
      send_sums<kLogFmt>(args, buffer, memory, num_now);
    }
    const bool is_last = first + num_warps >= num_tasks;
    if (is_last && kRows != CombineRows::kSelections) return true;
    arch::sync_block();  // rows and weights have been read
    if (is_last) return true;
  }
}

}  // namespace deep_comm
