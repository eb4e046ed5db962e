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

// combined_topk_weights[token], summed over num_received rows; of a call with weights. The lanes load
// several rows at once: otherwise each row would cost a trip to memory.
DC_DEVICE void add_weights(const CombineArgs& args, const uint8_t* const* rows, int num_received,
                           int own_position, int64_t own_row, int token) {
  const int num_topk = args.message.num_topk;
  const int width = min_of(num_topk, kWarpSize), num_at_once = kWarpSize / width;
  const int group = arch::lane_idx() / width, column = arch::lane_idx() - group * width;
  for (int base = 0; base < num_topk; base += kWarpSize) {
    const int k = base + column;
    float sum = 0.0f;
    for (int first = 0; first < num_received; first += num_at_once) {
      const int idx = first + group, end = min_of(num_at_once, num_received - first);
      float weight = 0.0f;
      if (group < end && k < num_topk) {
        const float* row = idx == own_position
                               ? args.topk_weights + own_row * num_topk
                               : reinterpret_cast<const float*>(rows[idx] + args.message.row_bytes);
        weight = arch::ld_weak(row + k);
      }
      DC_NO_UNROLL
      for (int other = 0; other < end; ++other) {
        sum += arch::shfl(kFullMask, weight, other * width + column);
      }
    }
    if (group == 0 && k < num_topk) {
      arch::st_weak(args.combined_topk_weights + static_cast<int64_t>(token) * num_topk + k, sum);
    }
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
  if (args.message.num_topk != 0) {
    add_weights(args, rows + num_biases, num_received, own_position, own_row, token);
  }
}

}  // namespace deep_comm
