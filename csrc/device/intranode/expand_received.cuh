// expand_received: an expanded output of rows that had no output row on the way, between nodes.
// Runs after number_received. Local: no peer takes part.
//
// in     recv_x [N, row], recv_scales [N, S], recv_weights [N, K] as dispatch has delivered them;
//        recv_rows [N, K], expert_offsets [L + 1], expert_counts [L]
// out    x [M, row], scales [M, S]: each row once for each of its top-k entries here; with
//        zero_padding, zeros in rows of no token
//        expert_idx [M], -1 in rows of no token; weights [M], 0 there
// grid   any number of blocks and warps: a token per warp, then a group per block
// smem   TokenRows, one per warp
// after  outputs complete on this stream; recv_x has been read. The next kernel of a peer may write
//        it, since it waits for this rank to enter
#pragma once

#include "device/intranode/expand.cuh"

namespace deep_comm {

// One warp: copies a token's row to all of its output rows.
template <class T>
DC_DEVICE void copy_received(uint8_t* base, const uint8_t* received, int64_t token, int row_bytes,
                             const TokenRows& rows, int num_rows) {
  copy_to_rows<T, 4>(base, received + token * row_bytes, row_bytes, rows, 0, num_rows);
}

DC_DEVICE void expand_received(const ExpandReceivedArgs& args) {
  const ExpandedOutput& output = args.output;
  TokenRows& rows = TokenRows::of_warp();
  const int num_tokens = num_received(args.world, args.rank_prefix_matrix, args.num_tokens_limit);
  const int step = arch::num_warps() * arch::num_blocks(), num_topk = args.num_topk;
  for (int token = arch::warp_idx() * arch::num_blocks() + arch::block_idx(); token < num_tokens;
       token += step) {
    const int num_rows = rows.load(output.recv_rows, token, num_topk, output.num_rows);
    copy_received<Vec16>(output.x, args.recv_x, token, args.row_bytes, rows, num_rows);
    if (output.scales != nullptr) {
      if (args.scale_row_bytes % 4 == 0) {
        copy_received<uint32_t>(output.scales, args.recv_scales, token, args.scale_row_bytes, rows,
                                num_rows);
      } else {
        copy_received<uint8_t>(output.scales, args.recv_scales, token, args.scale_row_bytes, rows,
                               num_rows);
      }
    }
    if (output.weights == nullptr) continue;
    for (int k = arch::lane_idx(); k < num_topk; k += kWarpSize) {
      const int64_t position = static_cast<int64_t>(token) * num_topk + k;
      const int32_t row = arch::ld_weak(output.recv_rows + position);
      if (row >= 0 && row < output.num_rows)
        arch::st_weak(output.weights + row, arch::ld_weak(args.recv_weights + position));
    }
  }
  finish_groups(args, output);
}

}  // namespace deep_comm
