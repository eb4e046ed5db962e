// expand_rows: completes an expanded output on its own rank: copies every token's first row to its
// others. Runs beside the dispatch that writes the first rows, on the SMs that it leaves, and copies
// rows as soon as they have landed (docs/design/0063); or behind it.
//
// in     x [M, row], scales [M, S] with the first row of every received token; recv_rows [N, K]: by
//        the dispatch. expert_offsets [L + 1]; expert_counts [L]
// out    x, scales: the token's other rows, copies of its first; with zero_padding, zeros in rows
//        of no token
//        expert_idx [M], -1 in rows of no token; weights [M], 0 there (dispatch writes the others);
//        worst-case mode: recv_src_idx, recv_rows past the received tokens: -1
// modes  as the dispatch. Direct: rows of a chunk of tokens when its word says that they have landed.
//        Rings: a token per warp after the dispatch
// grid   any number of blocks and warps; tokens are taken in rotation over the sources' chunks
// smem   TokenRows, one per warp, then an Arriving
// words  expanding · this rank · written by the dispatch's block 0, relaxed, value in data; zeroed by
//        the last block of this kernel
//        recv_line[0].num_tokens, recv_line[chunk / 8].landed[chunk % 8]: see dispatch_chunks.cuh
//        taken.num_chunks[0] of the dispatch's generation · this rank · tokens, also such as there are
//        not, where sources have different chunks
// waits  expanding: unblocked by the dispatch before, all of whose blocks run; num_tokens and landed:
//        by the source's dispatch, which waits for nobody's expand_rows
// after  outputs complete on this stream
#pragma once

#include "device/channel/landed.cuh"
#include "device/intranode/dispatch_output.cuh"
#include "device/intranode/token_rows.cuh"
#include "device/move/element.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

// One warp: copies a row to `rows`, from first_row on, in units of T; kUnroll at a time, so that a row
// of 14 KB takes four trips to memory with 7.
template <class T, int kUnroll>
DC_DEVICE void copy_to_rows(uint8_t* base, const uint8_t* row, int row_bytes, const TokenRows& rows,
                            int first_row, int num_rows) {
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
  copy_to_rows<T, 7>(base, base + static_cast<int64_t>(rows.row_idx[0]) * row_bytes, row_bytes,
                     rows, 1, num_rows);
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

// One warp: a received token.
DC_DEVICE void copy_token(const ExpandArgs& args, const ExpandedOutput& output, int token) {
  TokenRows& rows = TokenRows::of_warp();
  const int num_rows = rows.load(output.recv_rows, token, args.num_topk, output.num_rows);
  if (num_rows < 2) return;
  copy_to_others<Vec16>(output.x, args.row_bytes, rows, num_rows);
  if (output.scales == nullptr) return;
  if (args.scale_row_bytes % 4 == 0) {
    copy_to_others<uint32_t>(output.scales, args.scale_row_bytes, rows, num_rows);
  } else {
    copy_to_others<uint8_t>(output.scales, args.scale_row_bytes, rows, num_rows);
  }
}

// All received tokens; the whole grid.
DC_DEVICE void copy_tokens(const ExpandArgs& args, const ExpandedOutput& output, int num_tokens) {
  const int step = arch::num_warps() * arch::num_blocks();
  for (int token = arch::warp_idx() * arch::num_blocks() + arch::block_idx(); token < num_tokens;
       token += step) {
    copy_token(args, output, token);
  }
}

// Rows [begin, end): the first `num_filled` belong to `expert`, the others to no token. Threads
// `thread`, thread + num_threads, …; warps likewise.
DC_DEVICE void finish_group(const ExpandArgs& args, const ExpandedOutput& output, int expert,
                            int64_t begin, int64_t num_filled, int64_t end, int thread,
                            int num_threads) {
  for (int64_t row = begin + thread; row < end; row += num_threads) {
    const bool is_filled = row < begin + num_filled;
    if (output.expert_idx != nullptr) {
      store_expert(output.expert_idx, row, args.expert_idx_bytes, is_filled ? expert : -1);
    }
    if (output.weights != nullptr && !is_filled) arch::st_weak(output.weights + row, 0.0f);
  }
  if (!args.zero_padding) return;
  for (int64_t row = begin + num_filled + thread / kWarpSize; row < end;
       row += num_threads / kWarpSize) {
    zero_row(output.x, row, args.row_bytes);
    if (output.scales != nullptr) zero_row(output.scales, row, args.scale_row_bytes);
  }
}

// Worst-case mode: what the handle says of tokens that did not arrive.
DC_DEVICE void fill_handle(const ExpandRowsArgs& args, int num_tokens, int thread,
                           int num_threads) {
  for (int64_t token = num_tokens + thread; token < args.num_tokens_limit; token += num_threads) {
    arch::st_weak(args.fill_src_idx + token, -1);
    for (int k = 0; k < args.num_topk; ++k) {
      arch::st_weak(args.fill_rows + token * args.num_topk + k, -1);
    }
  }
}

// What is written per row, whoever has copied the rows; the whole grid.
DC_DEVICE void finish_groups(const ExpandArgs& args, const ExpandedOutput& output) {
  const int grid_threads = arch::num_blocks() * arch::num_threads();
  // Warps, not threads, are dealt to the grid.
  const int grid_thread = arch::block_idx() * arch::num_threads() + arch::thread_idx();
  // Bounded, because a failed notify may have left anything there.
  const auto offset_of = [&](int expert) {
    return max_of(0, min_of(arch::ld_nc(args.expert_offsets + expert), output.num_rows));
  };
  for (int expert = arch::block_idx(); expert < args.num_local_experts;
       expert += arch::num_blocks()) {
    const int begin = offset_of(expert), end = max_of(begin, offset_of(expert + 1));
    const int num_filled = max_of(0, min_of(arch::ld_nc(args.expert_counts + expert), end - begin));
    finish_group(args, output, expert, begin, num_filled, end, arch::thread_idx(),
                 arch::num_threads());
  }
  finish_group(args, output, -1, offset_of(args.num_local_experts), 0, output.num_rows, grid_thread,
               grid_threads);
}

// Where the dispatch writes. A speculative one lays its block out for the rows that come, as
// output_at does.
DC_DEVICE ExpandedOutput output_of(const ExpandRowsArgs& args) {
  ExpandedOutput output = args.output;
  if (!args.is_speculative) return output;
  output.num_rows = arch::ld_nc(args.num_expanded + args.world.rank);
  const OutputLayout layout =
      OutputLayout::make(output.num_rows, args.row_bytes, args.scale_row_bytes,
                         min_of(args.num_topk, 1), args.expert_idx_bytes);
  uint8_t* block = output.x - layout.x;
  if (output.scales != nullptr) output.scales = block + layout.scales;
  output.expert_idx = block + layout.topk_idx;
  if (output.weights != nullptr) {
    output.weights = reinterpret_cast<float*>(block + layout.topk_weights);
  }
  output.recv_rows = reinterpret_cast<const int32_t*>(
      reinterpret_cast<const uint8_t*>(args.src_idx) +
      SourceLayout::make(output.num_rows, args.num_topk).recv_rows);
  return output;
}

// What the dispatch before has said about itself, and the sources about theirs; in shared memory,
// after the warps' TokenRows.
struct Arriving {
  DispatchMode mode;
  uint32_t generation;            // of the dispatch
  TokenChunks chunks[kMaxRanks];  // direct mode: of each source
  int num_before[kMaxRanks];      // received tokens of the sources before it

  DC_DEVICE static Arriving& of_block() {
    TokenRows* rows = reinterpret_cast<TokenRows*>(arch::dynamic_smem());
    return *reinterpret_cast<Arriving*>(rows + arch::num_warps());
  }
  DC_HOST_DEVICE static size_t smem_bytes(int num_threads) {
    return num_threads / kWarpSize * sizeof(TokenRows) + sizeof(Arriving);
  }
};

// The first warp of a block. A wait that fails leaves the mode kFailed.
DC_DEVICE void find_arriving(const ExpandRowsArgs& args, Arriving* arriving) {
  const World& world = args.world;
  const int lane = arch::lane_idx();
  const Context before{world, Kernel::kExpandRows, 0};
  uint64_t word = 0;
  bool ok = true;
  if (lane == 0) {
    // Four deadlines: the dispatch has waits of its own, and knows the silent rank.
    ok = await<Scope::kSys>(
        before, &world.state()->expanding, {Stage::kEntryBarrier, Word::kArrived, world.rank, -1},
        1, [](uint64_t value) { return value != 0; }, &word, 4);
  }
  const Tagged expanding = Tagged::unpack(arch::shfl(kFullMask, word, 0));
  const Context context{world, Kernel::kExpandRows, expanding.generation};
  DispatchMode mode = static_cast<DispatchMode>(expanding.value);
  if (arch::shfl(kFullMask, static_cast<int>(ok), 0) == 0) mode = DispatchMode::kFailed;
  if (mode == DispatchMode::kDirect && lane < world.num_ranks) {
    uint32_t num_tokens = 0;
    ok = world.is_absent(lane) ||
         await_tagged_alone(context, &world.recv_line(world.rank, 0, lane)->num_tokens,
                            {Stage::kDone, Word::kTokenCount, lane, -1}, &num_tokens);
    arriving->chunks[lane] = TokenChunks::of(static_cast<int>(num_tokens));
    arriving->num_before[lane] =
        lane == 0
            ? 0
            : arch::ld_nc(args.rank_prefix_matrix + (lane - 1) * world.num_ranks + world.rank);
  }
  if (!arch::all(kFullMask, ok)) mode = DispatchMode::kFailed;
  if (lane == 0) {
    arriving->mode = mode;
    arriving->generation = expanding.generation;
  }
}

// The whole warp: waits until a source's chunk of tokens has landed, with its metadata.
DC_DEVICE bool await_landed(const Context& context, int source, int chunk, LandedRows* rows) {
  uint32_t value = 0;
  bool ok = true;
  if (arch::lane_idx() == 0) {
    const uint64_t* word = landed_word(context.world, context.world.rank, source, chunk);
    // Relaxed: many warps poll.
    ok = await_tagged_alone(context, word, {Stage::kDone, Word::kLanded, source, chunk}, &value);
    // pairs with: ChunkPublisher::publish — the chunk's rows and their metadata
    arch::ld_acquire_sys(word);
  }
  arch::sync_warp();  // hands the leader's acquire to all lanes
  *rows = LandedRows::unpack(arch::shfl(kFullMask, value, 0));
  return arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
}

// Direct mode, the whole grid. A warp takes one token at a time, so that several warps copy the chunk
// that lands last. None is taken ahead or fixed in advance: most warps wait, and blocks that begin
// late should find nothing left.
DC_DEVICE void copy_landing_tokens(const ExpandRowsArgs& args, const ExpandedOutput& output,
                                   const Arriving& arriving) {
  const World& world = args.world;
  const Context context{world, Kernel::kExpandRows, arriving.generation};
  const int num_ranks = world.num_ranks;
  int most_chunks = 0, most_shift = 0;
  for (int source = 0; source < num_ranks; ++source) {
    const TokenChunks& chunks = arriving.chunks[source];
    most_chunks = max_of(most_chunks, chunks.num_chunks());
    most_shift = max_of(most_shift, chunks.shift);
  }
  while (true) {
    uint32_t number = 0;
    if (arch::lane_idx() == 0) {
      number = arch::atomic_add_relaxed_gpu(&taken_work(context)->num_chunks[0], 1u);
    }
    number = arch::shfl(kFullMask, number, 0);
    const uint32_t idx = number & ((1u << most_shift) - 1);  // among the chunk's tokens
    const uint32_t turn = number >> most_shift;
    const int chunk = turn / num_ranks, source = (world.rank + turn) % num_ranks;
    if (chunk >= most_chunks) return;
    const TokenChunks& chunks = arriving.chunks[source];
    if (chunk >= chunks.num_chunks() || idx >> chunks.shift != 0) continue;
    LandedRows rows;
    if (!await_landed(context, source, chunk, &rows)) return;
    const int token = arriving.num_before[source] + static_cast<int>(rows.first + idx);
    // Tokens past the limit have been dropped.
    if (idx < rows.count && token < args.num_tokens_limit) copy_token(args, output, token);
  }
}

DC_DEVICE void expand_rows(const ExpandRowsArgs& args) {
  const NotifyResult notified =
      args.follows_notify ? result_of_notify(args.world) : NotifyResult::kNotDirect;
  // The dispatch returns at once and leaves no trace.
  if (notified == NotifyResult::kFailed ||
      (args.is_speculative && notified != NotifyResult::kDirect)) {
    return arch::await_earlier_launch();
  }
  const World& world = args.world;
  const ExpandedOutput output = output_of(args);
  const int num_tokens = num_received(world, args.rank_prefix_matrix, args.num_tokens_limit);
  finish_groups(args, output);
  if (args.fill_src_idx != nullptr) {
    fill_handle(args, max_of(0, num_tokens),
                arch::block_idx() * arch::num_threads() + arch::thread_idx(),
                arch::num_blocks() * arch::num_threads());
  }
  Arriving& arriving = Arriving::of_block();
  if (arch::warp_idx() == 0) find_arriving(args, &arriving);
  arch::sync_block();
  const DispatchMode mode = arriving.mode;
  if (mode == DispatchMode::kDirect) copy_landing_tokens(args, output, arriving);
  arch::await_earlier_launch();
  if (mode == DispatchMode::kRings) copy_tokens(args, output, num_tokens);
  LocalState* state = world.state();
  if (!exit_block(&state->num_retired_expanding).is_last || arch::thread_idx() != 0) return;
  arch::st_relaxed_gpu(&state->expanding, uint64_t{0});
  arch::st_relaxed_gpu(&state->num_retired_expanding, 0u);
}

}  // namespace deep_comm
