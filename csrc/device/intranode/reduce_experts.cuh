// reduce_experts: adds the rows that a token has on this rank, before combine sends the sum back.
// Local: no peer takes part. Each row still crosses the link once.
//
// Between nodes it runs before combine (reduce_experts). Inside a node it runs beside combine, which
// is launched right behind it (reduce_for_combine): chunk by chunk in the order in which combine's
// senders take them, and its adders those of this rank's own tokens.
//
// in     x [M, H] grouped by expert, recv_rows [N, K] of the dispatch; optional row_weights [M]
// out    reduced_x [N, H] = round(((0 + w_a * x_a) + w_b * x_b) + …), in float32, top-k entries
//        ascending; each product is rounded to float32 before it is added, the sum is rounded to
//        the dtype once; w = 1 without row_weights
//        reduced_weights [N, K] = weights[output row of the entry], 0 if it is on another rank
// grid   any number of blocks and warps; a token per warp, or a part of one: reduce_for_combine
// smem   TokenRows, one per warp; reduce_for_combine: then PartCounts
// words  reduce_for_combine: send_line.summed · this rank · read by combine's senders and watch ·
//        release gpu / acquire sys
// waits  none
// not promised: rows past the received tokens, which combine does not read
#pragma once

#include "device/intranode/combine_chunks.cuh"
#include "device/intranode/token_rows.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

// One warp: dst = the sum of `rows`, vectors [first_vec, num_vecs). The weights are loaded beside the
// first vectors, one per lane: otherwise each would cost a trip to memory.
template <Dtype kDtype>
DC_DEVICE void reduce_rows_of_token(const ReduceExpertsArgs& args, uint8_t* dst,
                                    const TokenRows& rows, int num_rows, int first_vec,
                                    int num_vecs) {
  using Type = Numeric<kDtype>;
  constexpr int kInFlight = 4, kUnroll = 2;  // rows and vectors whose loads are issued together
  const int lane = arch::lane_idx();
  float weights[kMaxTopk / kWarpSize];  // of rows lane, lane + 32
  static_assert(kMaxTopk == 2 * kWarpSize && kWarpSize % kInFlight == 0);
  DC_UNROLL
  for (int idx = 0; idx < kMaxTopk / kWarpSize; ++idx) {
    const int row = idx * kWarpSize + lane;
    const bool is_weighted = args.row_weights != nullptr && row < num_rows;
    weights[idx] = is_weighted ? arch::ld_nc(args.row_weights + rows.row_idx[row]) : 1.0f;
  }
  for (int base = first_vec; base < num_vecs; base += kWarpSize * kUnroll) {
    float sums[kUnroll][Type::kPerVec] = {};
    for (int first = 0; first < num_rows; first += kInFlight) {
      Vec16 vecs[kInFlight][kUnroll];
      DC_UNROLL
      for (int idx = 0; idx < kInFlight; ++idx) {
        if (first + idx >= num_rows) continue;
        const Vec16* src = reinterpret_cast<const Vec16*>(
            args.x + static_cast<int64_t>(rows.row_idx[first + idx]) * args.row_bytes);
        DC_UNROLL
        for (int step = 0; step < kUnroll; ++step) {
          const int vec_idx = base + step * kWarpSize + lane;
          if (vec_idx < num_vecs) vecs[idx][step] = arch::ld_nc(src + vec_idx);
        }
      }
      DC_UNROLL
      for (int idx = 0; idx < kInFlight; ++idx) {
        if (first + idx >= num_rows) continue;
        const float weight = arch::shfl(kFullMask, first < kWarpSize ? weights[0] : weights[1],
                                        (first + idx) % kWarpSize);
        DC_UNROLL
        for (int step = 0; step < kUnroll; ++step) {
          if (base + step * kWarpSize + lane >= num_vecs) continue;
          Type::add_weighted(sums[step], vecs[idx][step], weight);  // times one: exact
        }
      }
    }
    DC_UNROLL
    for (int step = 0; step < kUnroll; ++step) {
      const int vec_idx = base + step * kWarpSize + lane;
      if (vec_idx < num_vecs) {
        arch::st_weak(reinterpret_cast<Vec16*>(dst) + vec_idx, Type::round(sums[step]));
      }
    }
  }
}

// One warp: reduced_weights of a token.
DC_DEVICE void return_weights(const ReduceExpertsArgs& args, int64_t token) {
  for (int k = arch::lane_idx(); k < args.num_topk; k += kWarpSize) {
    const int64_t position = token * args.num_topk + k;
    const int32_t row = arch::ld_nc(args.recv_rows + position);
    const bool is_here = row >= 0 && row < args.num_rows;
    arch::st_weak(args.reduced_weights + position,
                  is_here ? arch::ld_nc(args.weights + row) : 0.0f);
  }
}

template <Dtype kDtype>
DC_DEVICE void reduce_experts(const ReduceExpertsArgs& args) {
  TokenRows& rows = TokenRows::of_warp();
  const int num_tokens = num_received(args.world, args.rank_prefix_matrix, args.num_tokens_limit);
  const int step = arch::num_warps() * arch::num_blocks();
  for (int token = arch::warp_idx() * arch::num_blocks() + arch::block_idx(); token < num_tokens;
       token += step) {
    const int num_rows = rows.load(args.recv_rows, token, args.num_topk, args.num_rows);
    reduce_rows_of_token<kDtype>(args,
                                 args.reduced_x + static_cast<int64_t>(token) * args.row_bytes,
                                 rows, num_rows, 0, args.row_bytes / 16);
    if (args.weights != nullptr) return_weights(args, token);
  }
}

// How many parts of a block's chunks are complete, by the block's own count of chunks.
struct PartCounts {
  uint32_t generation;  // of the combine
  uint32_t counts[1];   // [most_chunks]

  // The chunks of one of num_blocks blocks, at most.
  DC_HOST_DEVICE static constexpr int most_chunks(int num_ranks, int num_blocks) {
    return ceil_div(kMaxChunks * num_ranks, num_blocks);
  }
  DC_HOST_DEVICE static constexpr size_t num_bytes(int num_ranks, int num_blocks) {
    return sizeof(uint32_t) * static_cast<size_t>(1 + most_chunks(num_ranks, num_blocks));
  }
  DC_DEVICE static PartCounts& of_block() {
    return *reinterpret_cast<PartCounts*>(arch::dynamic_smem() +
                                          arch::num_warps() * sizeof(TokenRows));
  }
};

// A part of a row that returns, for one warp.
struct RowPart {
  static constexpr int kNumVecs = 4 * kWarpSize;

  int chunk_idx;   // by the block's own count
  int item;        // of the chunk: ChunkRotation::at
  int chunk_rows;  // that the chunk has; 0: there is no further part
  int token;
  int number;  // in the row
};

// The parts of a warp, one after the other. Each block has every num_blocks-th chunk, and its warps
// take turns with the parts of these: a whole chunk per warp would let all chunks be ready at the
// end, and none before.
class PartTurns {
 public:
  DC_DEVICE explicit PartTurns(const ReduceExpertsArgs& args)
      : chunks_(args),
        returned_(args),
        parts_of_row_(ceil_div(args.row_bytes / 16, RowPart::kNumVecs)),
        parts_of_chunk_(parts_of_row_ * returned_.most_chunk_rows()),
        turn_(arch::warp_idx()) {}

  DC_DEVICE int parts_of_row() const { return parts_of_row_; }
  DC_DEVICE RowPart next() {
    while (true) {
      const int idx = turn_ / parts_of_chunk_, part = turn_ - idx * parts_of_chunk_;
      const int item =
          chunks_.at(static_cast<uint32_t>(idx * arch::num_blocks() + arch::block_idx()));
      if (item == chunks_.kEnd) return {};
      turn_ += arch::num_warps();
      const Chunk chunk = returned_.chunk(item);
      const int row = part / parts_of_row_;
      if (row >= chunk.num_rows) continue;  // short, or none
      return {idx, item, chunk.num_rows, static_cast<int>(chunk.x_row) + row,
              part - row * parts_of_row_};
    }
  }

 private:
  ChunkRotation<true> chunks_;
  ReturnedRows returned_;
  int parts_of_row_;
  int parts_of_chunk_;
  int turn_;
};

// One lane, when a part is complete: the last part of a chunk sets its word.
DC_DEVICE void complete_part(const ReduceExpertsArgs& args, PartCounts* parts, const RowPart& part,
                             int parts_of_row) {
  // acq_rel, pairs with itself: the warp that completes the chunk has what the others have stored.
  const uint32_t num_done = 1 + arch::atomic_add_acq_rel_cta(&parts->counts[part.chunk_idx], 1u);
  const uint32_t num_all = static_cast<uint32_t>(part.chunk_rows * parts_of_row);
  if (num_done != (arch::fault(Fault::kEarlySums) ? 1u : num_all)) return;
  if (arch::fault(Fault::kLostSums)) return;
  // pairs with: await_summed, TokenWatch::look — the sums of the chunk's rows
  arch::st_release_gpu(summed_word(args.world, part.item / kMaxChunks, part.item % kMaxChunks),
                       Tagged::pack(parts->generation, 1));
}

template <Dtype kDtype>
DC_DEVICE void reduce_for_combine(const ReduceExpertsArgs& args) {
  const World& world = args.world;
  PartCounts& parts = PartCounts::of_block();
  const int most_chunks = PartCounts::most_chunks(world.num_ranks, arch::num_blocks());
  for (int idx = arch::thread_idx(); idx < most_chunks; idx += arch::num_threads()) {
    parts.counts[idx] = 0;
  }
  if (arch::thread_idx() == 0) parts.generation = current_generation(world);
  arch::sync_block();
  // Combine advances the generation when its blocks have read it.
  if (args.lets_combine_begin) arch::allow_later_launch();

  TokenRows& rows = TokenRows::of_warp();
  const int num_tokens = num_received(world, args.rank_prefix_matrix, args.num_tokens_limit);
  const int num_vecs = args.row_bytes / 16;
  PartTurns turns(args);
  // A token's rows are loaded a turn ahead: the sum of a part costs two to four trips to memory, and
  // this would be one more.
  LoadedRows ahead;
  const auto load_rows = [&](const RowPart& part) {
    if (part.chunk_rows == 0 || part.token >= num_tokens) return;
    ahead.load(args.recv_rows, part.token, args.num_topk);
  };
  RowPart part = turns.next();
  load_rows(part);
  while (part.chunk_rows != 0) {
    const int num_rows = rows.take(ahead, args.num_rows);
    const RowPart next = turns.next();
    load_rows(next);
    if (part.token < num_tokens) {
      reduce_rows_of_token<kDtype>(
          args, args.reduced_x + static_cast<int64_t>(part.token) * args.row_bytes, rows, num_rows,
          part.number * RowPart::kNumVecs, min_of(num_vecs, (part.number + 1) * RowPart::kNumVecs));
      if (args.weights != nullptr && part.number == 0) return_weights(args, part.token);
    }
    arch::sync_warp();  // what the lanes have stored
    if (arch::lane_idx() == 0) complete_part(args, &parts, part, turns.parts_of_row());
    part = next;
  }
}

}  // namespace deep_comm
