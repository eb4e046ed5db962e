// dispatch_direct: after notify every row's final index is known, so the sender writes it there at once.
//
// in     as dispatch; send_head [T, R] of notify_dispatch
// out    the rank's output block in the receive region: recv_x, scales, local expert ids, weights, source tokens,
//        sorted by (source rank, source token); recv_channel_prefix_matrix [R, C]
// grid   any number of blocks; warps [0, num_move_warps) move rows, the others write metadata; tokens are dealt to
//        the moving (metadata) warps of all blocks in turn
// smem   num_move_warps x (kNumDirectStages stages + mbarriers), then one PeerOutput a rank
// words  arrived, output_line, output_rows · owner: reader · written by each peer's block 0 · read at entry
//        done  · owner: reader · written by each peer's last block · release/acquire sys
//        recv_line[c].start_offset · owner: reader · written by block 0, before `done`
//        num_exited_blocks · this rank · counts blocks whose rows have landed
// before nothing: entry is a barrier, and it tells every sender where each receiver's block lies
// after  this rank's block is complete, all peers' rows included; blocks of peers are complete on their streams
// waits  arrivals: unblocked by every peer's entry; done: by every peer's last block
// A row is loaded once and stored once a destination, the destinations by as many lanes; no receiver copies it.
#pragma once

#include "device/channel/offsets.cuh"
#include "device/intranode/args.cuh"
#include "device/intranode/ring_send.cuh"
#include "device/layout/channel_range.cuh"
#include "device/layout/expert_map.cuh"
#include "device/layout/output.cuh"
#include "device/move/element.cuh"
#include "device/sync/barrier.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

inline constexpr int kNumDirectStages = 4;

// One receiver's output block, as this rank addresses it.
struct PeerOutput {
  uint8_t* x;
  uint8_t* scales;
  uint8_t* topk_idx;
  float* topk_weights;
  int32_t* src_idx;
  int64_t num_rows;
};

DC_DEVICE PeerOutput* peer_outputs(const DirectDispatchArgs& args) {
  const size_t move_bytes =
      kNumDirectStages * static_cast<size_t>(args.stage.stage_bytes) + StagePipe<kNumDirectStages>::barrier_bytes();
  return reinterpret_cast<PeerOutput*>(arch::dynamic_smem() + args.num_move_warps * move_bytes);
}

// Block 0, threads [0, R): tells every peer where this rank's block lies, before the arrival that releases it.
DC_DEVICE void announce_output(const Context& context, const DirectDispatchArgs& args) {
  const World& world = args.world;
  const int peer = arch::thread_idx();
  if (peer < world.num_ranks) {
    ArrivedLine* line = world.arrived_line(peer, world.rank);
    arch::st_relaxed_sys(&line->output_line, Tagged::pack(context.generation, args.output_line));
    arch::st_relaxed_sys(&line->output_rows,
                         Tagged::pack(context.generation, static_cast<uint32_t>(args.num_recv_rows)));
  }
  announce_arrival(context, args.signature);
}

// Lane r: the block of rank r. After await_arrivals.
DC_DEVICE PeerOutput find_output(const DirectDispatchArgs& args, int peer) {
  const World& world = args.world;
  const ArrivedLine* line = world.arrived_line(world.rank, peer);
  const uint32_t output_line = Tagged::unpack(arch::ld_relaxed_sys(&line->output_line)).value;
  const int64_t num_rows = Tagged::unpack(arch::ld_relaxed_sys(&line->output_rows)).value;
  const OutputLayout layout = OutputLayout::make(num_rows, args.message.row_bytes, args.message.scale_row_bytes,
                                                 args.message.num_topk, args.topk_idx_bytes);
  uint8_t* block = world.bases[peer] + static_cast<size_t>(output_line) * kLineBytes;
  return {block + layout.x,
          block + layout.scales,
          block + layout.topk_idx,
          reinterpret_cast<float*>(block + layout.topk_weights),
          reinterpret_cast<int32_t*>(block + layout.src_idx),
          num_rows};
}

// Lane r < R: the row of `token` in rank r's output, or -1.
DC_DEVICE int64_t final_row(const DirectDispatchArgs& args, int token, int peer) {
  const World& world = args.world;
  const int head = arch::ld_nc(args.send_head + static_cast<int64_t>(token) * world.num_ranks + peer);
  if (head < 0) return -1;
  const int channel = token / ceil_div(args.num_tokens, args.num_channels);
  const int64_t before_channel =
      channel == 0 ? 0 : arch::ld_nc(args.channel_prefix_matrix + peer * args.num_channels + channel - 1);
  const int64_t before_rank =
      world.rank == 0 ? 0 : arch::ld_nc(args.rank_prefix_matrix + (world.rank - 1) * world.num_ranks + peer);
  return before_rank + before_channel + head;
}

// One warp: moves every num_warps-th token from `warp` on. Lane i stores to rank (rank + 1 + i) % R, so that
// ranks do not all write to the same receiver first.
DC_DEVICE void move_tokens(const DirectDispatchArgs& args, const PeerOutput* outputs, int warp, int num_warps) {
  const World& world = args.world;
  const bool is_leader = arch::lane_idx() == 0;
  const bool is_storing = arch::lane_idx() < world.num_ranks;
  const int peer = (world.rank + 1 + arch::lane_idx()) % world.num_ranks;
  const Strip row{0, args.message.row_bytes, 0};
  const Pieces pieces = Pieces::of(row, args.stage);
  StagePipe<kNumDirectStages> pipe = make_pipe<kNumDirectStages>(args.stage, args.num_move_warps);
  int load_token = warp, load_piece = 0;
  auto load_next = [&] {
    if (load_token >= args.num_tokens) return;
    if (is_leader) {
      pipe.load(args.x + static_cast<size_t>(load_token) * row.num_bytes + load_piece * pieces.piece_bytes,
                pieces.bytes_of(load_piece));
    }
    pipe.advance_load();
    if (++load_piece == pieces.num_pieces) load_piece = 0, load_token += num_warps;
  };
  for (int stage = 0; stage < StagePipe<kNumDirectStages>::kLookAhead; ++stage) load_next();
  int64_t dst_row = is_storing && warp < args.num_tokens ? final_row(args, warp, peer) : -1;
  for (int token = warp; token < args.num_tokens; token += num_warps) {
    // The next token's place is looked up while this one moves.
    const int next = token + num_warps;
    const int64_t next_row = is_storing && next < args.num_tokens ? final_row(args, next, peer) : -1;
    const bool fits = dst_row >= 0 && dst_row < outputs[peer].num_rows;
    uint8_t* dst = outputs[peer].x + dst_row * row.num_bytes;
    for (int piece = 0; piece < pieces.num_pieces; ++piece) {
      pipe.await_load();
      if (is_storing) {
        pipe.store(dst + piece * pieces.piece_bytes, fits ? pieces.bytes_of(piece) : 0);
        pipe.advance_store();
        pipe.make_room();
      } else {
        pipe.advance_store();
      }
      arch::sync_warp();  // all storing lanes have read the stage that the leader loads next
      load_next();
    }
    dst_row = next_row;
  }
  pipe.drain();
}

// One warp: scales, expert ids, weights and source of every num_warps-th token, straight to the outputs.
DC_DEVICE void write_metadata(const DirectDispatchArgs& args, const PeerOutput* outputs, int warp, int num_warps) {
  const World& world = args.world;
  const ExpertMap experts{args.num_experts, world.num_ranks};
  const int lane = arch::lane_idx(), num_topk = args.message.num_topk;
  for (int token = warp; token < args.num_tokens; token += num_warps) {
    const int64_t my_row = lane < world.num_ranks ? final_row(args, token, lane) : -1;
    for (int peer = 0; peer < world.num_ranks; ++peer) {
      const int64_t row = arch::shfl(kFullMask, my_row, peer);
      const PeerOutput& output = outputs[peer];
      if (row < 0 || row >= output.num_rows) continue;
      const int first = experts.first_expert(peer), count = experts.num_local_experts(peer);
      for (int k = lane; k < num_topk; k += kWarpSize) {
        const int64_t position = static_cast<int64_t>(token) * num_topk + k;
        const int local = load_expert(args.topk_idx, position, args.topk_idx_bytes) - first;
        const bool is_here = local >= 0 && local < count;
        store_expert(output.topk_idx, row * num_topk + k, args.topk_idx_bytes, is_here ? local : -1);
        arch::st_weak(output.topk_weights + row * num_topk + k,
                      is_here ? arch::ld_nc(args.topk_weights + position) : 0.0f);
      }
      for (int column = lane; column < args.num_scales; column += kWarpSize) {
        const int64_t position = token * args.scale_token_stride + column * args.scale_column_stride;
        copy_element(output.scales + (row * args.num_scales + column) * args.scale_bytes,
                     args.x_scales + position * args.scale_bytes, args.scale_bytes);
      }
      if (lane == 0) arch::st_weak(output.src_idx + row, token);
    }
  }
}

// Block 0: where each channel's rows begin, for the receivers' handles.
DC_DEVICE void send_channel_starts(const Context& context, const DirectDispatchArgs& args) {
  const int num_words = args.world.num_ranks * args.num_channels;
  for (int idx = arch::thread_idx(); idx < num_words; idx += arch::num_threads()) {
    const int peer = idx / args.num_channels, channel = idx % args.num_channels;
    const int32_t* prefix = args.channel_prefix_matrix + static_cast<int64_t>(peer) * args.num_channels;
    const int32_t start = channel == 0 ? 0 : arch::ld_nc(prefix + channel - 1);
    publish_offsets(context, channel, peer,
                    {static_cast<uint32_t>(start), static_cast<uint32_t>(arch::ld_nc(prefix + channel))});
  }
}

// The last block, after every peer is done: what only then is known or may be written.
DC_DEVICE void finish_outputs(const Context& context, const DirectDispatchArgs& args) {
  const World& world = args.world;
  const int num_words = world.num_ranks * args.num_channels;
  for (int idx = arch::thread_idx(); idx < num_words; idx += arch::num_threads()) {
    const RecvLine* line = world.recv_line(world.rank, idx % args.num_channels, idx / args.num_channels);
    arch::st_weak(args.recv_channel_prefix_matrix + idx,
                  static_cast<int32_t>(Tagged::unpack(arch::ld_relaxed_sys(&line->start_offset)).value));
  }
  const int num_rows = arch::ld_nc(args.rank_prefix_matrix + (world.num_ranks - 1) * world.num_ranks + world.rank);
  if (num_rows > args.num_recv_rows && arch::thread_idx() == 0) {
    report_error(context, {ErrorKind::kOverflow,
                           {Stage::kCheckArguments, Word::kNumRecvRows, world.rank, -1},
                           static_cast<uint64_t>(num_rows), static_cast<uint64_t>(args.num_recv_rows), 0, -1});
  }
  if (!args.fill_tail) return;
  const PeerOutput own = find_output(args, world.rank);
  const int num_topk = args.message.num_topk;
  for (int64_t row = num_rows + arch::thread_idx(); row < args.num_recv_rows; row += arch::num_threads()) {
    arch::st_weak(own.src_idx + row, -1);
    for (int k = 0; k < num_topk; ++k) {
      store_expert(own.topk_idx, row * num_topk + k, args.topk_idx_bytes, -1);
      arch::st_weak(own.topk_weights + row * num_topk + k, 0.0f);
    }
  }
}

// Every thread of every block, last. The last block tells the peers, waits for theirs, and closes the generation.
DC_DEVICE void finish_direct(const Context& context, const DirectDispatchArgs& args, bool ok) {
  const World& world = args.world;
  uint32_t* is_last = reinterpret_cast<uint32_t*>(arch::dynamic_smem());
  arch::sync_block();  // every warp of the block has drained
  if (arch::thread_idx() == 0) {
    // acq_rel, pairs with itself: the last block has seen that all blocks' rows have landed.
    const uint32_t num_exited = arch::atomic_add_acq_rel_gpu(&world.state()->num_exited_blocks, 1u);
    *is_last = num_exited + 1 == static_cast<uint32_t>(arch::num_blocks());
  }
  arch::sync_block();
  if (*is_last == 0) return;
  // A warp that gave up has set the abort word before it came here.
  if (ok && !is_aborted(world) && arch::thread_idx() < world.num_ranks) {
    const int peer = arch::thread_idx();
    // pairs with: the await below at the peer — every row and word this rank wrote into its segment.
    arch::st_release_sys(&world.arrived_line(peer, world.rank)->done, Tagged::pack(context.generation, 1));
    uint32_t done = 0;
    await_tagged(context, &world.arrived_line(world.rank, peer)->done, {Stage::kDone, Word::kDone, peer, -1}, 1,
                 &done);
  }
  arch::sync_block();
  if (!is_aborted(world)) finish_outputs(context, args);
  if (arch::thread_idx() == 0) {
    arch::st_relaxed_gpu(&world.state()->num_exited_blocks, 0u);
    arch::st_relaxed_gpu(&world.state()->generation, context.generation);
  }
}

DC_DEVICE void dispatch_direct(const DirectDispatchArgs& args) {
  const World& world = args.world;
  const Context context{world, Kernel::kDispatchDirect, current_generation(world)};
  PeerOutput* outputs = peer_outputs(args);
  if (arch::block_idx() == 0) announce_output(context, args);
  const bool ok = await_arrivals(context, Stage::kEntryBarrier, args.signature);
  if (ok && arch::warp_idx() == 0 && arch::lane_idx() < world.num_ranks) {
    outputs[arch::lane_idx()] = find_output(args, arch::lane_idx());
  }
  arch::sync_block();
  if (ok) {
    const int num_meta_warps = arch::num_warps() - args.num_move_warps;
    const int warp = arch::warp_idx();
    if (arch::block_idx() == 0) send_channel_starts(context, args);
    // Warps of one block take tokens that lie far apart: blocks, not warps, are dealt first.
    if (warp < args.num_move_warps) {
      move_tokens(args, outputs, warp * arch::num_blocks() + arch::block_idx(),
                  args.num_move_warps * arch::num_blocks());
    } else {
      write_metadata(args, outputs, (warp - args.num_move_warps) * arch::num_blocks() + arch::block_idx(),
                     num_meta_warps * arch::num_blocks());
    }
  }
  finish_direct(context, args, ok);
}

}  // namespace deep_comm
