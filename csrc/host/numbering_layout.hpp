// Where an expanded dispatch keeps what its rows are numbered with: one block of this rank's own
// memory, of R ranks, E experts, L of them local, T tokens of K selections.
//
//   block = [ expert_counts [L] | expert_offsets [L + 1] | num_expanded [R] | first_rows [E]
//             | send_row [T, R] | send_rows [T, K] ]      int32, parts begin at whole lines
//
// The counts come first: a compiled graph takes them as they are (deep_comm/layer/ops.py), and
// expects a tensor that begins where its memory does.
#pragma once

#include "device/layout/region.cuh"

namespace deep_comm {

struct NumberingLayout {
  size_t expert_offsets, expert_counts, num_expanded, first_rows, send_row, send_rows;  // bytes
  size_t num_bytes;

  static NumberingLayout make(int64_t num_ranks, int64_t num_experts, int64_t num_local_experts,
                              int64_t num_tokens, int64_t num_topk) {
    RegionCursor cursor;
    const auto take = [&](int64_t num_words) {
      return cursor.take(static_cast<size_t>(num_words) * sizeof(int32_t));
    };
    NumberingLayout layout{};
    layout.expert_counts = take(num_local_experts);
    layout.expert_offsets = take(num_local_experts + 1);
    layout.num_expanded = take(num_ranks);
    layout.first_rows = take(num_experts);
    layout.send_row = take(num_tokens * num_ranks);
    layout.send_rows = take(num_tokens * num_topk);
    layout.num_bytes = cursor.num_bytes();
    return layout;
  }
};

}  // namespace deep_comm
