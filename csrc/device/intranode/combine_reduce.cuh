// The adding half of combine, for both modes: one warp, one token.
#pragma once

#include "device/intranode/combine_entry.cuh"
#include "device/move/reduce.cuh"

namespace deep_comm {

// Calls take(index, row) for each bias of `token`; returns their number.
template <class Take>
DC_DEVICE int take_biases(const CombineArgs& args, int token, const Take& take) {
  int num_biases = 0;
  DC_UNROLL
  for (int bias = 0; bias < 2; ++bias) {
    if (args.bias[bias] == nullptr) continue;
    take(num_biases++, args.bias[bias] + static_cast<int64_t>(token) * args.message.row_bytes);
  }
  return num_biases;
}

// combined_topk_weights[token], summed over num_received rows.
DC_DEVICE void add_weights(const CombineArgs& args, const uint8_t* const* rows, int num_received,
                           int own_position, int64_t own_row, int token) {
  const int num_topk = args.message.num_topk;
  for (int k = arch::lane_idx(); k < num_topk; k += kWarpSize) {
    float sum = 0.0f;
    for (int idx = 0; idx < num_received; ++idx) {
      const float* weights =
          idx == own_position ? args.topk_weights + own_row * num_topk
                              : reinterpret_cast<const float*>(rows[idx] + args.message.row_bytes);
      sum += arch::ld_weak(weights + k);
    }
    arch::st_weak(args.combined_topk_weights + static_cast<int64_t>(token) * num_topk + k, sum);
  }
}

// combined_x[token] and combined_topk_weights[token]. Lane r < R passes rank r's row, or null.
// `own_row` is the index in x of this rank's own row, in every lane. `rows`: this warp's part of
// shared memory.
template <Dtype kDtype>
DC_DEVICE void add_token(const CombineArgs& args, const uint8_t** rows, int token,
                         const uint8_t* row, int64_t own_row) {
  const int rank = args.world.rank;
  const uint32_t present = arch::ballot(kFullMask, row != nullptr);
  const uint32_t positions = args.order.positions(token, present);
  const int num_received = arch::popc(present);
  const int num_biases = take_biases(args, token, [&](int idx, const uint8_t* bias) {
    rows[idx] = bias;  // every lane stores the same
  });
  if (row != nullptr) rows[num_biases + (positions >> (4 * arch::lane_idx()) & 15u)] = row;
  arch::sync_warp();  // the rows' addresses, and each lane's acquire, before any lane follows them
  reduce_rows<kDtype>(args.combined_x + static_cast<int64_t>(token) * args.message.row_bytes, rows,
                      num_biases + num_received, args.message.row_bytes / 16);
  const bool has_own = (present >> rank & 1u) != 0;
  const int own_position = has_own ? static_cast<int>(positions >> (4 * rank) & 15u) : -1;
  add_weights(args, rows + num_biases, num_received, own_position, own_row, token);
}

// The first row of x that `src` sent, if it sent any.
DC_DEVICE int64_t first_row_of(const CombineArgs& args, int src) {
  return src == 0 ? 0
                  : arch::ld_nc(args.rank_prefix_matrix + (src - 1) * args.world.num_ranks +
                                args.world.rank);
}

// Writes the weights that follow a row of x into shared memory.
DC_DEVICE void write_weights(const CombineArgs& args, uint8_t* meta, int64_t row) {
  const int num_topk = args.message.num_topk;
  for (int k = arch::lane_idx(); k < num_topk; k += kWarpSize) {
    reinterpret_cast<float*>(meta)[k] = arch::ld_nc(args.topk_weights + row * num_topk + k);
  }
}

}  // namespace deep_comm
