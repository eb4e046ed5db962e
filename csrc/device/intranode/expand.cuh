// expand_rows: completes an expanded output on its own rank, after dispatch. Local: no peer takes
// part.
//
// in     x [M, row], scales [M, S] with the first row of every received token; recv_rows [N, K];
//        expert_offsets [L + 1], expert_counts [L]
// out    x, scales: the token's other rows, copies of its first; with zero_padding, zeros in rows
//        of no token
//        expert_idx [M], -1 in rows of no token; weights [M], 0 there (dispatch has written the
//        others); worst-case mode: recv_src_idx, recv_rows past the received tokens: -1
// grid   any number of blocks and warps: a token per warp, then a group per block
// smem   TokenRows, one per warp
// after  outputs complete on this stream
#pragma once

#include "device/intranode/token_rows.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// One warp: copies a row to `rows`, from first_row on, in units of T.
template <class T>
DC_DEVICE void copy_to_rows(uint8_t* base, const uint8_t* row, int row_bytes, const TokenRows& rows,
                            int first_row, int num_rows) {
  constexpr int kUnroll = 4;
  const int num_units = row_bytes / static_cast<int>(sizeof(T));
  const T* src = reinterpret_cast<const T*>(row);
  for (int first = arch::lane_idx(); first < num_units; first += kUnroll * kWarpSize) {
    T units[kUnroll];
    DC_UNROLL
    for (int step = 0; step < kUnroll; ++step) {
      const int unit = first + step * kWarpSize;
      if (unit < num_units) units[step] = arch::ld_weak(src + unit);
    }
    for (int idx = first_row; idx < num_rows; ++idx) {
      T* dst = reinterpret_cast<T*>(base + static_cast<int64_t>(rows.row_idx[idx]) * row_bytes);
      DC_UNROLL
      for (int step = 0; step < kUnroll; ++step) {
        const int unit = first + step * kWarpSize;
        if (unit < num_units) arch::st_streaming(dst + unit, units[step]);
      }
    }
  }
}

// One warp: copies the first of `rows` to the others.
template <class T>
DC_DEVICE void copy_to_others(uint8_t* base, int row_bytes, const TokenRows& rows, int num_rows) {
  copy_to_rows<T>(base, base + static_cast<int64_t>(rows.row_idx[0]) * row_bytes, row_bytes, rows,
                  1, num_rows);
}

// One warp: zeroes a row of `base`.
DC_DEVICE void zero_row(uint8_t* base, int64_t row, int row_bytes) {
  uint8_t* dst = base + row * row_bytes;
  if (row_bytes % 16 == 0) {
    for (int unit = arch::lane_idx(); unit < row_bytes / 16; unit += kWarpSize) {
      arch::st_weak(reinterpret_cast<Vec16*>(dst) + unit, Vec16{});
    }
  } else {
    for (int unit = arch::lane_idx(); unit < row_bytes; unit += kWarpSize) {
      arch::st_weak(dst + unit, uint8_t{0});
    }
  }
}

DC_DEVICE void copy_tokens(const ExpandArgs& args, int num_tokens) {
  TokenRows& rows = TokenRows::of_warp();
  const int step = arch::num_warps() * arch::num_blocks();
  for (int token = arch::warp_idx() * arch::num_blocks() + arch::block_idx(); token < num_tokens;
       token += step) {
    const int num_rows = rows.load(args.recv_rows, token, args.num_topk, args.num_rows);
    if (num_rows < 2) continue;
    copy_to_others<Vec16>(args.x, args.row_bytes, rows, num_rows);
    if (args.scales == nullptr) continue;
    if (args.scale_row_bytes % 4 == 0) {
      copy_to_others<uint32_t>(args.scales, args.scale_row_bytes, rows, num_rows);
    } else {
      copy_to_others<uint8_t>(args.scales, args.scale_row_bytes, rows, num_rows);
    }
  }
}

// Rows [begin, end): the first `num_filled` belong to `expert`, the others to no token. Threads
// `thread`, thread + num_threads, …; warps likewise.
DC_DEVICE void finish_group(const ExpandArgs& args, int expert, int64_t begin, int64_t num_filled,
                            int64_t end, int thread, int num_threads) {
  for (int64_t row = begin + thread; row < end; row += num_threads) {
    const bool is_filled = row < begin + num_filled;
    if (args.expert_idx != nullptr) {
      store_expert(args.expert_idx, row, args.expert_idx_bytes, is_filled ? expert : -1);
    }
    if (args.weights != nullptr && !is_filled) arch::st_weak(args.weights + row, 0.0f);
  }
  if (!args.zero_padding) return;
  for (int64_t row = begin + num_filled + thread / kWarpSize; row < end;
       row += num_threads / kWarpSize) {
    zero_row(args.x, row, args.row_bytes);
    if (args.scales != nullptr) zero_row(args.scales, row, args.scale_row_bytes);
  }
}

// Worst-case mode: what the handle says of tokens that did not arrive.
DC_DEVICE void fill_handle(const ExpandArgs& args, int num_tokens, int thread, int num_threads) {
  for (int64_t token = num_tokens + thread; token < args.num_tokens_limit; token += num_threads) {
    arch::st_weak(args.fill_src_idx + token, -1);
    for (int k = 0; k < args.num_topk; ++k) {
      arch::st_weak(args.fill_rows + token * args.num_topk + k, -1);
    }
  }
}

// What is written per row, whoever has copied the rows; the whole grid.
DC_DEVICE void finish_groups(const ExpandArgs& args) {
  const int grid_threads = arch::num_blocks() * arch::num_threads();
  // Warps, not threads, are dealt to the grid.
  const int grid_thread = arch::block_idx() * arch::num_threads() + arch::thread_idx();
  // Bounded, because a failed notify may have left anything there.
  const auto offset_of = [&](int expert) {
    return max_of(0, min_of(arch::ld_nc(args.expert_offsets + expert), args.num_rows));
  };
  for (int expert = arch::block_idx(); expert < args.num_local_experts;
       expert += arch::num_blocks()) {
    const int begin = offset_of(expert), end = max_of(begin, offset_of(expert + 1));
    const int num_filled = max_of(0, min_of(arch::ld_nc(args.expert_counts + expert), end - begin));
    finish_group(args, expert, begin, num_filled, end, arch::thread_idx(), arch::num_threads());
  }
  finish_group(args, -1, offset_of(args.num_local_experts), 0, args.num_rows, grid_thread,
               grid_threads);
}

DC_DEVICE void expand_rows(const ExpandArgs& args) {
  const int num_tokens = num_received(args.world, args.rank_prefix_matrix, args.num_tokens_limit);
  copy_tokens(args, num_tokens);
  finish_groups(args);
  if (args.fill_src_idx != nullptr) {
    fill_handle(args, max_of(0, num_tokens),
                arch::block_idx() * arch::num_threads() + arch::thread_idx(),
                arch::num_blocks() * arch::num_threads());
  }
}

}  // namespace deep_comm
