// combine for decoding: the experts' rows back to the ranks that own the
// tokens, where they are added.
//
// in     x [L, R*M, H] bfloat16 in dispatch's places, or compact [R*M, H], one row a token; topk_weights [T, K] at
//        the source; recv_tokens, places and, if the weights came with dispatch, recv_weights at
//        the expert's rank
// out    combined_x [T, H]
// sum    an expert's rank adds weight * row over a token's selections there, k ascending, in float32, each product
//        rounded by itself, and rounds to bfloat16; the source adds those rows, ranks ascending, in
//        float32, and rounds once more. Compact rows are sent as they are. One rounding: every row
//        is sent as it is, and the source adds weight * row, k ascending, and rounds. LogFMT: what
//        an expert's rank sends is not rounded to bfloat16 but to LogFMT-10 (move/logfmt.cuh).
// grid   B blocks, as in dispatch: block b takes the tokens that block b of their source sent
// words  as in dispatch, rows being what comes back; weight · owner: expert's rank · written by the source's leading
//        block · number in the word
// before the operation's dispatch has been received on this rank
// waits  half_credit: as in dispatch; weights: unblocked by the source's send phase; rows: by the expert rank's
// not promised: nothing; the result does not depend on B
#pragma once

#include "device/low_latency/block.cuh"
#include "device/move/logfmt.cuh"
#include "device/move/reduce.cuh"

namespace deep_comm {

// Source: every weight to the rank that needs it.
DC_DEVICE void send_weights(const Context& context, const LowLatencyCombineArgs& args,
                            const LowLatencyHalf& half, const BlockMemory& memory,
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
        half.weights(peer, args.world.rank, share.begin) + idx,
        Tagged::pack(context.generation,
                     bit_cast<uint32_t>(arch::ld_nc(args.topk_weights + position))));
  }
}

// A token's places on this rank, and the weights that dispatch brought: of selection `k`, a lane
// each.
struct RawSummand {
  int place;
  float weight;

  template <CombineRows kRows>
  DC_DEVICE static RawSummand load(const LowLatencyCombineArgs& args, int32_t task, int k) {
    const int num_columns = kRows == CombineRows::kReduced ? 1 : args.shape.num_topk;
    RawSummand raw{-1, 1.0f};
    if (k >= num_columns) return raw;
    const int64_t row =
        static_cast<int64_t>(source_of(task)) * args.shape.num_max_tokens + token_of(task);
    const int64_t position = row * num_columns + k;
    raw.place = arch::ld_nc(args.places + position);
    // Beside the place, whether it is needed or not: they are trips to memory.
    if (kRows == CombineRows::kSums && args.recv_weights != nullptr) {
      raw.weight = arch::ld_nc(args.recv_weights + position);
    }
    return raw;
  }
};

// One warp: the rows of a task's token that lie on this rank, and their weights, k ascending.
// `raw`: of the first ones.
template <CombineRows kRows>
DC_DEVICE bool find_summands(const Context& context, const LowLatencyCombineArgs& args,
                             const LowLatencyHalf& half, const BlockMemory& memory, int32_t task,
                             RawSummand raw) {
  const LowLatencyShape& shape = args.shape;
  const int num_topk = shape.num_topk, warp = arch::warp_idx(),
            num_columns = kRows == CombineRows::kReduced ? 1 : num_topk;
  const int source = source_of(task), token = token_of(task);
  int num_places = 0;
  bool ok = true;
  DC_NO_UNROLL
  for (int base = 0; base < num_columns; base += kWarpSize) {
    const int k = base + arch::lane_idx();
    if (base > 0) raw = RawSummand::load<kRows>(args, task, k);
    const uint32_t here = arch::ballot(kFullMask, raw.place >= 0);
    if (raw.place >= 0) {
      const int position =
          warp * num_topk + num_places + arch::popc(here & ((1u << arch::lane_idx()) - 1));
      float weight = raw.weight;
      if (kRows == CombineRows::kSelections) {
        weight = bit_cast<float>(k);  // the source weights; it wants to know which row this is
      } else if (kRows == CombineRows::kSums && args.recv_weights == nullptr) {
        uint32_t bits = 0;
        ok = await_tagged_alone(context, half.weights(args.world.rank, source, token) + k,
                                {Stage::kWeights, Word::kWeight, source, arch::block_idx()}, &bits);
        ok = ok || is_given_up(context, source);
        weight = bit_cast<float>(bits);
      }
      memory.places[position] = raw.place;
      memory.weights[position] = weight;
    }
    num_places += arch::popc(here);
  }
  if (arch::lane_idx() == 0) {
    memory.num_places[warp] = num_places;
    memory.tasks[warp] = task;
  }
  return ok;
}

// A row's part on its way: two zeros travel as two zeros of the other sign. Sums begin at +0.0, so
// that it makes no difference to them.
DC_DEVICE void send_piece(uint8_t* row, int column, Vec16 vec) {
  DC_UNROLL
  for (int word = 0; word < 4; ++word) {
    if (vec.words[word] == 0) vec.words[word] = 0x80008000u;
  }
  // pairs with: take_arrival in add_ranks and add_selections — nothing but the words themselves.
  arch::st_relaxed_sys(reinterpret_cast<Vec16*>(row) + column, vec);
}

DC_DEVICE void add_weighted(float* sum, const Vec16& vec, float weight) {
  DC_UNROLL
  for (int word = 0; word < 4; ++word) {
    sum[2 * word] += arch::multiply(weight, bit_cast<float>(vec.words[word] << 16));
    sum[2 * word + 1] += arch::multiply(weight, bit_cast<float>(vec.words[word] & 0xffff0000u));
  }
}

// Adds weight * row over a task's rows, k ascending: kVecs pieces of 16 bytes from `column` on.
template <int kVecs, class Memory>
DC_DEVICE void sum_places(const LowLatencyCombineArgs& args, const Memory& memory, int warp,
                          int column, float* sum) {
  constexpr int kAhead = 4 / kVecs;  // rows whose loads are in flight together
  constexpr int kPerVec = Numeric<Dtype::kBfloat16>::kPerVec;
  const size_t row_bytes = args.shape.hidden * sizeof(Bf16);
  const int num_places = memory.num_places[warp];
  const int32_t* places = memory.places + warp * args.shape.num_topk;
  const float* weights = memory.weights + warp * args.shape.num_topk;
  DC_NO_UNROLL
  for (int first = 0; first < num_places; first += kAhead) {
    Vec16 vecs[kAhead][kVecs];
    DC_UNROLL
    for (int step = 0; step < kAhead; ++step) {
      if (first + step >= num_places) continue;
      const uint8_t* row = args.x + static_cast<size_t>(places[first + step]) * row_bytes;
      DC_UNROLL
      for (int vec = 0; vec < kVecs; ++vec) {
        vecs[step][vec] = arch::ld_nc(reinterpret_cast<const Vec16*>(row) + column + vec);
      }
    }
    DC_UNROLL
    for (int step = 0; step < kAhead; ++step) {
      if (first + step >= num_places) continue;
      DC_UNROLL
      for (int vec = 0; vec < kVecs; ++vec) {
        add_weighted(sum + vec * kPerVec, vecs[step][vec], weights[first + step]);
      }
    }
  }
}

// Where piece number `piece` of a row in LogFMT lies: its codes, then, behind those of the
// whole row, its last words.
DC_DEVICE Vec16* log_codes(uint8_t* row, int piece) {
  return reinterpret_cast<Vec16*>(row) + piece;
}
DC_DEVICE uint32_t* log_last(uint8_t* row, int hidden, int piece) {
  return reinterpret_cast<uint32_t*>(row + hidden) + 2 * piece;
}

// The block adds the rows of its warps' tokens and stores the sums with their sources.
template <bool kLogFmt>
DC_DEVICE void send_sums(const LowLatencyCombineArgs& args, const LowLatencyHalf& half,
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
    if (memory.num_places[warp] == 0 || vec >= memory.header->num_vecs[source]) continue;
    const int column = memory.header->first_vec[source] + vec;
    uint8_t* row = half.combine_row(source, args.world.rank, token);
    float sum[kVecs * Type::kPerVec] = {};
    sum_places<kVecs>(args, memory, warp, column, sum);
    if constexpr (kLogFmt) {
      const LogPiece piece = LogPiece::encode(sum);
      // pairs with: take_arrival in add_ranks — nothing but the words themselves.
      arch::st_relaxed_sys(log_codes(row, column / kVecs), piece.codes);
      arch::st_relaxed_sys(log_last(row, args.shape.hidden, column / kVecs), piece.last[0]);
      arch::st_relaxed_sys(log_last(row, args.shape.hidden, column / kVecs) + 1, piece.last[1]);
    } else {
      send_piece(row, column, Type::round(sum));
    }
  }
}

// The block stores every row of its warps' tokens with their sources.
DC_DEVICE void send_selections(const LowLatencyCombineArgs& args, const LowLatencyHalf& half,
                               const BlockMemory& memory, int num_tasks) {
  const LowLatencyShape& shape = args.shape;
  const int max_vecs = memory.header->max_vecs;
  const Divisor by_max_vecs = memory.header->by_max_vecs;
  for (int idx = arch::thread_idx(); idx < num_tasks * max_vecs; idx += arch::num_threads()) {
    const int warp = by_max_vecs.quotient(idx), vec = idx - warp * max_vecs;
    const int source = source_of(memory.tasks[warp]), token = token_of(memory.tasks[warp]);
    if (vec >= memory.header->num_vecs[source]) continue;
    const int column = memory.header->first_vec[source] + vec;
    for (int row = warp * shape.num_topk; row < warp * shape.num_topk + memory.num_places[warp];
         ++row) {
      const uint8_t* src =
          args.x + static_cast<size_t>(memory.places[row]) * shape.hidden * sizeof(Bf16);
      send_piece(half.gather_row(source, token, bit_cast<int32_t>(memory.weights[row])), column,
                 arch::ld_nc(reinterpret_cast<const Vec16*>(src) + column));
    }
  }
}

// A warp's first task if every source has as many tokens as this rank, which they mostly have: so
// what is needed for it can be loaded together with their numbers.
struct GuessedTask {
  TaskNumbering numbering;
  int32_t task;
  bool is_there;

  DC_DEVICE static GuessedTask make(const LowLatencyCombineArgs& args) {
    GuessedTask guess{TaskNumbering::make(args.world, args.shape, args.num_tokens), 0, false};
    guess.is_there = arch::warp_idx() < guess.numbering.num_tasks;
    if (guess.is_there) guess.task = guess.numbering.find(args.world, arch::warp_idx());
    return guess;
  }
};

// What a launch loads at its begin.
struct CombineInputs {
  LowLatencyShare share;
  int num_tokens;         // lane p: of source_at(p)
  RawExperts<2> experts;  // of this warp's first token, by lane
  RawSummand summand;     // of the guessed task

  template <CombineRows kRows>
  DC_DEVICE static CombineInputs load(const LowLatencyCombineArgs& args,
                                      const LowLatencyShare& share, const GuessedTask& guess) {
    CombineInputs inputs{share, 0, {}, {-1, 1.0f}};
    const int lane = arch::lane_idx(), token = inputs.share.begin + arch::warp_idx();
    if (args.phases.send && lane < args.world.num_ranks) {
      inputs.num_tokens = arch::ld_nc(args.recv_tokens + source_at(args.world, lane));
    }
    if (guess.is_there) inputs.summand = RawSummand::load<kRows>(args, guess.task, lane);
    if (kRows != CombineRows::kSelections && args.phases.receive && token < inputs.share.end) {
      inputs.load_experts(args, token);
    }
    return inputs;
  }
  DC_DEVICE void load_experts(const LowLatencyCombineArgs& args, int token) {
    const int64_t begin = static_cast<int64_t>(token) * args.shape.num_topk;
    experts.load(args.topk_idx, begin + arch::lane_idx(), kWarpSize, begin + args.shape.num_topk,
                 args.topk_idx_bytes);
  }
  // One warp: the ranks that hold an expert of its token.
  DC_DEVICE uint32_t ranks(const LowLatencyCombineArgs& args) const {
    return warp_or(rank_bit(args.experts, experts.get(0)) | rank_bit(args.experts, experts.get(1)));
  }
};

template <CombineRows kRows, bool kLogFmt>
DC_DEVICE bool combine_send(const Context& context, const LowLatencyCombineArgs& args,
                            const LowLatencyHalf& half, const BlockMemory& memory,
                            const Beginning& begin, const GuessedTask& guess,
                            const CombineInputs& inputs) {
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  // Peers wait for the weights: they go first. Their words of this half were read before the rows
  // of two operations ago came back, which this rank has received.
  if (kRows == CombineRows::kSums && args.recv_weights == nullptr)
    send_weights(context, args, half, memory, inputs.share);
  const bool is_source = arch::lane_idx() < args.world.num_ranks;
  const bool is_heard = is_source && is_active(memory, source_at(args.world, arch::lane_idx()));
  const int num_tokens = is_heard ? inputs.num_tokens : 0;
  const bool has_guessed = arch::all(kFullMask, !is_source || num_tokens == args.num_tokens);
  TaskNumbering numbering = guess.numbering;
  if (!has_guessed) numbering = TaskNumbering::make(args.world, args.shape, num_tokens);
  if (warp == 0) numbering.note(args.world, memory, Piece<PayloadFormat::kBfloat16>::kElements);
  const int num_tasks = numbering.num_tasks;
  bool ok = !has_credit_warp() ||
            await_credit(context, half, memory, begin, args.signature, args.num_tokens);
  DC_NO_UNROLL
  for (int first = 0; first < num_tasks; first += num_warps) {
    const int num_now = min_of(num_warps, num_tasks - first);
    if (warp < num_now) {
      int32_t task = guess.task;
      RawSummand summand = inputs.summand;
      if (!has_guessed || first > 0) {
        task = numbering.find(args.world, first + warp);
        summand = RawSummand::load<kRows>(args, task, arch::lane_idx());
      }
      ok = find_summands<kRows>(context, args, half, memory, task, summand) && ok;
    }
    if (!block_agrees(ok)) return false;
    if (first == 0) number_records(context, half, args.phases, begin);
    if constexpr (kRows == CombineRows::kSelections) {
      send_selections(args, half, memory, num_now);
    } else {
      send_sums<kLogFmt>(args, half, memory, num_now);
    }
    if (kRows != CombineRows::kSelections && first + num_warps >= num_tasks) break;
    arch::sync_block();  // places and weights have been read
  }
  if (num_tasks > 0) return true;
  if (!block_agrees(ok)) return false;
  number_records(context, half, args.phases, begin);
  return true;
}

// The block adds the ranks' rows of tokens [begin, end) and writes the results. A thread looks at
// eight places at a time: of a piece on up to eight ranks, or, of few ranks, of two pieces, the
// second in the upper half.
DC_DEVICE bool add_ranks(const Context& context, const LowLatencyCombineArgs& args,
                         const LowLatencyHalf& half, const LowLatencyShare& share,
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
    DC_UNROLL
    for (int piece = 0; piece < 2; ++piece) {
      const int idx = has_pairs ? base + piece * num_threads : base;
      const bool is_there = idx < num_total;
      const Position position = Position::of(is_there ? idx : 0, by_vecs, num_vecs);
      const int token = begin + position.row, vec = first_vec + position.column;
      const uint32_t mask = is_there ? memory.masks[position.row] & memory.active : 0;
      if (is_there) {
        results[piece] = reinterpret_cast<Vec16*>(args.combined_x) +
                         static_cast<size_t>(token) * (args.shape.hidden / Type::kPerVec) + vec;
      }
      const int first_peer = has_pairs ? 0 : piece * kHalf;
      uint8_t* row = half.combine_row(args.world.rank, first_peer, token);
      DC_UNROLL
      for (int peer = 0; peer < kHalf; ++peer) {
        Vec16*& from = arrivals.from[piece * kHalf + peer];
        from = nullptr;
        if ((mask >> (first_peer + peer) & 1u) == 0) continue;
        from = reinterpret_cast<Vec16*>(row + peer * args.shape.combine_source_bytes()) + vec;
      }
    }
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
      if (arrivals.from[idx] == nullptr) continue;
      Type::add(sum, arrivals.vecs[idx]);
      arrivals.clear(idx);
    }
    if (results[1] != nullptr) arch::st_streaming(results[1], Type::round(sum));
  }
  return true;
}

// The same for rows in LogFMT.
DC_DEVICE bool add_log_ranks(const Context& context, const LowLatencyCombineArgs& args,
                             const LowLatencyHalf& half, const LowLatencyShare& share,
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
      uint8_t* row = half.combine_row(args.world.rank, peer, token);
      uint32_t* last = log_last(row, args.shape.hidden, piece_idx);
      // First looks together: they are trips to memory.
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

// Source, one warp: the selections of a token and their weights, k ascending.
DC_DEVICE void find_selections(const LowLatencyCombineArgs& args, const BlockMemory& memory,
                               int token) {
  const int num_topk = args.shape.num_topk, warp = arch::warp_idx();
  int num_rows = 0;
  for (int base = 0; base < num_topk; base += kWarpSize) {
    const int k = base + arch::lane_idx();
    const int64_t position = static_cast<int64_t>(token) * num_topk + k;
    const int expert =
        k < num_topk ? load_expert(args.topk_idx, position, args.topk_idx_bytes) : -1;
    const bool is_selected = expert >= 0 && expert < args.shape.num_experts &&
                             is_active(memory, args.experts.rank_of(expert));
    const uint32_t selected = arch::ballot(kFullMask, is_selected);
    if (is_selected) {
      const int row =
          warp * num_topk + num_rows + arch::popc(selected & ((1u << arch::lane_idx()) - 1));
      memory.places[row] = k;
      memory.weights[row] = arch::ld_nc(args.topk_weights + position);
    }
    num_rows += arch::popc(selected);
  }
  if (arch::lane_idx() == 0) memory.num_places[warp] = num_rows;
}

// The block weights and adds the rows of tokens [begin, end) and writes the results.
DC_DEVICE bool add_selections(const Context& context, const LowLatencyCombineArgs& args,
                              const LowLatencyHalf& half, const LowLatencyShare& share,
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
    const int32_t* selections = memory.places + warp * num_topk;
    const float* weights = memory.weights + warp * num_topk;
    const int num_rows = memory.num_places[warp];
    float sum[Type::kPerVec] = {};
    DC_NO_UNROLL
    for (int first = 0; first < num_rows; first += kAhead) {
      Arrivals<kAhead> arrivals;
      DC_UNROLL
      for (int step = 0; step < kAhead; ++step) {
        arrivals.from[step] = nullptr;
        if (first + step >= num_rows) continue;
        arrivals.from[step] = reinterpret_cast<Vec16*>(half.gather_row(args.world.rank, token,
                                                                       selections[first + step])) +
                              vec;
      }
      arrivals.look();
      const bool ok = await_arrivals(context, arrivals, [&](int step) {
        const int64_t selection = static_cast<int64_t>(token) * num_topk + selections[first + step];
        const int peer =
            args.experts.rank_of(load_expert(args.topk_idx, selection, args.topk_idx_bytes));
        return WaitFor{Stage::kRows, Word::kRow, peer, arch::block_idx()};
      });
      if (!ok) return false;
      DC_UNROLL
      for (int step = 0; step < kAhead; ++step) {
        if (arrivals.from[step] == nullptr) continue;
        add_weighted(sum, arrivals.vecs[step], weights[first + step]);
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
                               const LowLatencyHalf& half, const BlockMemory& memory,
                               CombineInputs& inputs) {
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  const LowLatencyShare& share = inputs.share;
  bool ok = true;
  // Rows need no announcement; a rank that does something else, or nothing, is found by one block.
  if (arch::block_idx() == 0 && warp == num_warps - 1) {
    ok = await_announcements(context, half, memory, memory.active, args.signature, args.wait_stats);
  }
  DC_NO_UNROLL
  for (int group = share.begin; group < share.end; group += num_warps) {
    const int group_end = min_of(group + num_warps, share.end);
    if (group + warp < group_end) {
      if constexpr (kRows == CombineRows::kSelections) {
        find_selections(args, memory, group + warp);
      } else {
        if (group != share.begin) inputs.load_experts(args, group + warp);
        const uint32_t mask = inputs.ranks(args);
        if (arch::lane_idx() == 0) memory.masks[warp] = mask;
      }
    }
    if (!block_agrees(ok)) return;
    if constexpr (kRows == CombineRows::kSelections) {
      ok = add_selections(context, args, half, share, memory, group, group_end);
    } else if constexpr (kLogFmt) {
      ok = add_log_ranks(context, args, half, share, memory, group, group_end);
    } else {
      ok = add_ranks(context, args, half, share, memory, group, group_end);
    }
    if (group_end >= share.end) break;
    if (!block_agrees(ok)) return;  // what the warps have found has been read
  }
}

template <CombineRows kRows, bool kLogFmt>
DC_DEVICE void low_latency_combine(const LowLatencyCombineArgs& args) {
  LowLatencyHalf half{args.world, args.region, args.shape, LowLatencyKind::kCombine, 0};
  const LowLatencyShare share = LowLatencyShare::of(args.shape, args.num_tokens, arch::block_idx());
  BlockMemory memory = BlockMemory::make(args.shape, args.world.num_ranks);
  GuessedTask guess{};
  if (args.phases.send) guess = GuessedTask::make(args);
  arch::await_earlier_launch();
  arch::allow_later_launch();
  const Beginning begin = Beginning::load(half, args.phases);
  CombineInputs inputs = CombineInputs::load<kRows>(args, share, guess);
  const Context context{args.world, Kernel::kLowLatencyCombine, begin.operation(args.phases),
                        args.can_shrink};
  half.half = static_cast<int>(context.generation & 1u);
  find_active(context, &memory);
  return_credit(context, half, args.phases, begin);
  bool ok = true;
  if (args.phases.send)
    ok = combine_send<kRows, kLogFmt>(context, args, half, memory, begin, guess, inputs);
  if (args.phases.receive && ok)
    combine_receive<kRows, kLogFmt>(context, args, half, memory, inputs);
}

}  // namespace deep_comm
