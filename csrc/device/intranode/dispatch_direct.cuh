// dispatch, direct mode: after notify every row's final index is known, so the sender writes it there at once.
// A row is loaded once and stored once a destination, the destinations by as many lanes; no receiver copies it.
//
// grid   any number of blocks; warps [0, num_move_warps) move rows, the next num_meta_warps write metadata; tokens
//        are dealt to the moving (metadata) warps of all blocks in turn
// smem   num_move_warps x (kNumDirectStages stages + mbarriers)
// words  recv_line[c].{start,end}_offset · owner: receiver · written by block 0 of the sender, before `done`
//        done              · owner: receiver · written by the sender's last block · release/acquire sys
//        num_exited_blocks · this rank · counts blocks whose rows have landed
// waits  done: unblocked by every peer's last block
#pragma once

#include "device/channel/offsets.cuh"
#include "device/intranode/args.cuh"
#include "device/intranode/dispatch_output.cuh"
#include "device/intranode/ring_send.cuh"
#include "device/layout/channel_range.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

// Lane r < R: the row of `token` in rank r's output, or -1.
DC_DEVICE int64_t final_row(const DispatchArgs& args, int token, int peer) {
  const World& world = args.world;
  const int head = arch::ld_nc(args.send_head + static_cast<int64_t>(token) * world.num_ranks + peer);
  if (head < 0) return -1;
  const int channel = token / ceil_div(args.num_tokens, args.ring.num_channels);
  const int64_t before_channel =
      channel == 0 ? 0 : arch::ld_nc(args.channel_prefix_matrix + peer * args.ring.num_channels + channel - 1);
  const int64_t before_rank =
      world.rank == 0 ? 0 : arch::ld_nc(args.rank_prefix_matrix + (world.rank - 1) * world.num_ranks + peer);
  return before_rank + before_channel + head;
}

// One warp: moves every num_warps-th token from `warp` on. Lane i stores to rank (rank + 1 + i) % R, so that
// ranks do not all write to the same receiver first.
DC_DEVICE void move_tokens(const DispatchArgs& args, const PeerOutput* outputs, int warp, int num_warps) {
  const World& world = args.world;
  const bool is_leader = arch::lane_idx() == 0;
  const bool is_storing = arch::lane_idx() < world.num_ranks;
  const int peer = (world.rank + 1 + arch::lane_idx()) % world.num_ranks;
  const Strip row{0, args.message.row_bytes, 0};
  const Pieces pieces = Pieces::of(row, args.direct_stage);
  StagePipe<kNumDirectStages> pipe = make_pipe<kNumDirectStages>(args.direct_stage, args.num_move_warps);
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
DC_DEVICE void write_metadata(const DispatchArgs& args, const PeerOutput* outputs, int warp, int num_warps) {
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
DC_DEVICE void send_channel_starts(const Context& context, const DispatchArgs& args) {
  const int num_words = args.world.num_ranks * args.ring.num_channels;
  for (int idx = arch::thread_idx(); idx < num_words; idx += arch::num_threads()) {
    const int peer = idx / args.ring.num_channels, channel = idx % args.ring.num_channels;
    const int32_t* prefix = args.channel_prefix_matrix + static_cast<int64_t>(peer) * args.ring.num_channels;
    const int32_t start = channel == 0 ? 0 : arch::ld_nc(prefix + channel - 1);
    publish_offsets(context, channel, peer,
                    {static_cast<uint32_t>(start), static_cast<uint32_t>(arch::ld_nc(prefix + channel))});
  }
}

// The last block, after every peer is done.
DC_DEVICE void read_channel_starts(const DispatchArgs& args) {
  const World& world = args.world;
  const int num_words = world.num_ranks * args.ring.num_channels;
  for (int idx = arch::thread_idx(); idx < num_words; idx += arch::num_threads()) {
    const int channel = idx % args.ring.num_channels, source = idx / args.ring.num_channels;
    const RecvLine* line = world.recv_line(world.rank, channel, source);
    arch::st_weak(args.recv_channel_prefix_matrix + idx,
                  static_cast<int32_t>(Tagged::unpack(arch::ld_relaxed_sys(&line->start_offset)).value));
  }
}

// Every thread of every block, last. The last block tells the peers, waits for theirs, and closes the generation.
DC_DEVICE void finish_direct(const Context& context, const DispatchArgs& args) {
  const World& world = args.world;
  const BlockExit exit = exit_block(context);
  if (!exit.is_last) return;
  // Whoever gave up has set the abort word before it came here; its rows may be missing.
  if (!is_aborted(world) && arch::thread_idx() < world.num_ranks) {
    const int peer = arch::thread_idx();
    // pairs with: the await below at the peer — every row and word this rank wrote into its segment.
    arch::st_release_sys(&world.arrived_line(peer, world.rank)->done, Tagged::pack(context.generation, 1));
    uint32_t done = 0;
    await_tagged(context, &world.arrived_line(world.rank, peer)->done, {Stage::kDone, Word::kDone, peer, -1}, 1,
                 &done);
  }
  arch::sync_block();
  if (!is_aborted(world)) read_channel_starts(args);
  close_generation(context);
}

// The direct mode of one block, up to finish_direct.
DC_DEVICE void dispatch_directly(const Context& context, const DispatchArgs& args, const PeerOutput* outputs) {
  const int warp = arch::warp_idx(), block = arch::block_idx(), num_blocks = arch::num_blocks();
  if (block == 0) send_channel_starts(context, args);
  // Blocks, not warps, are dealt tokens first: neighbouring tokens move on different SMs.
  if (warp < args.num_move_warps) {
    move_tokens(args, outputs, warp * num_blocks + block, args.num_move_warps * num_blocks);
  } else if (warp < args.num_move_warps + args.num_meta_warps) {
    write_metadata(args, outputs, (warp - args.num_move_warps) * num_blocks + block,
                   args.num_meta_warps * num_blocks);
  }
}

}  // namespace deep_comm
