// What a low-latency dispatch returns besides rows and scales, as one block of memory: one
// allocation, and one address for the combine that follows. L local experts; N = R * M rows per
// expert, or compact in all.
//
//   block = [ recv_count | num_recv | ticket | recv_tokens | layout_range | src_info | recv_rows
//           | recv_weights | compact_idx | compact_weights | num_rows | return_addresses ]
//
// The parts from recv_weights on exist only in calls that need them. num_rows and return_addresses
// exist between nodes only. There recv_rows and recv_weights are by source and slot, not by token.
#pragma once

#include "device/layout/region.cuh"

namespace deep_comm {

struct LowLatencyMetadata {
  static constexpr size_t kNone = ~size_t{0};

  size_t recv_count;       // int32 [L]
  size_t num_recv;         // int32 [1]
  size_t ticket;           // uint32 [1]
  size_t recv_tokens;      // int32 [R]
  size_t layout_range;     // int64 [L, R] or [R]
  size_t src_info;         // int32 [L, N] or [N]
  size_t recv_rows;        // int32 [R, M, K] or [R, M]
  size_t recv_weights;     // float32 [R, M, K]
  size_t compact_idx;      // int32 [N, K]
  size_t compact_weights;  // float32 [N, K]
  // int32 [2, R]: rows from each source, and how many of them were forwarded in the node
  size_t num_rows;
  size_t return_addresses;  // int32 [R, M]: ReturnAddress of each of them
  size_t num_bytes;

  DC_HOST_DEVICE static LowLatencyMetadata make(int num_ranks, int num_local, int num_max_tokens,
                                                int num_topk, bool is_compact, bool has_weights,
                                                bool is_internode) {
    const size_t num_rows = static_cast<size_t>(num_ranks) * num_max_tokens;
    const size_t num_groups = is_compact ? 1 : num_local;
    LowLatencyMetadata layout{};
    RegionCursor cursor;
    const auto take = [&](size_t num_elements, size_t element_bytes, bool is_there = true) {
      return is_there ? cursor.take(num_elements * element_bytes, 16) : kNone;
    };
    layout.recv_count = take(num_local, 4);
    layout.num_recv = take(1, 4);
    layout.ticket = take(1, 4);
    layout.recv_tokens = take(num_ranks, 4);
    layout.layout_range = take(num_groups * num_ranks, 8);
    layout.src_info = take(num_groups * num_rows, 4);
    layout.recv_rows = take(num_rows * (is_compact ? 1 : num_topk), 4);
    layout.recv_weights = take(num_rows * num_topk, 4, has_weights && !is_compact);
    layout.compact_idx = take(num_rows * num_topk, 4, is_compact);
    layout.compact_weights = take(num_rows * num_topk, 4, has_weights && is_compact);
    layout.num_rows = take(2 * num_ranks, 4, is_internode);
    layout.return_addresses = take(num_rows, 4, is_internode);
    layout.num_bytes = cursor.num_bytes();
    return layout;
  }
};

}  // namespace deep_comm
