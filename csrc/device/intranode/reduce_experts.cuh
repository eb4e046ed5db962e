// reduce_experts: adds the rows that a token has on this rank, before combine sends the sum back.
// Local: no peer takes part. Each row still crosses the link once. Between nodes it runs before
// combine; inside a node combine_sums makes the same sums (combine_sums.cuh).
//
// in     x [M, H] grouped by expert, recv_rows [N, K] of the dispatch; optional row_weights [M]
// out    reduced_x [N, H] = round(((0 + w_a * x_a) + w_b * x_b) + …), in float32, top-k entries
//        ascending; each product is rounded to float32 before it is added, the sum is rounded to
//        the dtype once; w = 1 without row_weights
//        reduced_weights [N, K] = weights[output row of the entry], 0 if it is on another rank
// grid   any number of blocks and warps; a token per warp
// smem   TokenRows, one per warp
// waits  none
// not promised: rows past the received tokens, which combine does not read
#pragma once

#include "device/intranode/token_rows.cuh"

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

// One warp: dst [K] = the weights of a token by its entries.
DC_DEVICE void return_weights(const ReduceExpertsArgs& args, float* dst, int64_t token) {
  for (int k = arch::lane_idx(); k < args.num_topk; k += kWarpSize) {
    const int32_t row = arch::ld_nc(args.recv_rows + token * args.num_topk + k);
    const bool is_here = row >= 0 && row < args.num_rows;
    arch::st_weak(dst + k, is_here ? arch::ld_nc(args.weights + row) : 0.0f);
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
    if (args.weights != nullptr) {
      return_weights(args, args.reduced_weights + static_cast<int64_t>(token) * args.num_topk,
                     token);
    }
  }
}

}  // namespace deep_comm
