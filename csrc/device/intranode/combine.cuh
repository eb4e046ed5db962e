// combine: every expert rank returns its rows to the ranks that own the tokens, which add them.
//
// in     x [N, H] in dispatch's order, optional topk_weights [N, K]; optional bias_0, bias_1
//        [T, H]; rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, send_head
//        of the dispatch
// out    combined_x [T, H] = round(((0 + bias_0 + bias_1) + x of rank a) + x of rank b + …), ranks
//        ascending or in the order of the token's last selections there (SumOrder), in float32,
//        rounded once; combined_topk_weights [T, K] likewise in float32
// modes  staged (combine_staged.cuh) if every rank has room for all rows that return to it, which
//        it announces at entry as in dispatch; otherwise rings (combine_ring.cuh). This rank's own
//        rows are read where they are
// grid   num_channels blocks: num_senders warps, one that returns credits, one that publishes, and
//        the others add
// smem   num_senders x (stages + mbarriers), then a CombineEntry
// beside combine_sums, of an expanded output: that has announced this rank, and makes the rows of x;
//        in staged mode it brings those that return to peers to their staging, so that nothing is
//        left to send. All threads await its end
// words  arrived, staging_line, staging_rows · owner: reader · written by each peer's block 0 ·
//        entry
// before entry: every rank's rings and staging are free and this rank's handle is complete
// not promised: nothing; the result does not depend on mode, C, slots, chunks or number of warps
#pragma once

#include "device/intranode/combine_ring.cuh"
#include "device/intranode/combine_staged.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

// Rings belong to a channel. Any block may send or add staged rows.
DC_DEVICE bool has_channel(const CombineArgs& args) {
  return arch::block_idx() < args.ring.num_channels;
}

// A sending warp. Its loads begin before the mode is known. If this rank has staging, the mode is
// probably staged.
DC_DEVICE void enter_and_send(const Context& context, const CombineArgs& args,
                              CombineEntry* entry) {
  StagePipe pipe = make_pipe(args.stage, args.barriers_offset);
  RowSender<ChunksToRanks, CombineArgs, CombineEntry> sender(
      context, args, entry, pipe, arch::warp_idx(), ChunksToRanks::ask(context, args, entry));
  if (args.staging_line != 0) sender.begin();
  arch::sync_block_apart();
  if (entry->start.mode == CombineMode::kStaged) return sender.run();
  sender.give_up();
  if (entry->start.mode == CombineMode::kRings && has_channel(args)) {
    send_by_rings(context, args, entry, pipe);
  }
}

// The same, of an expanded output. In ring mode the sums come first.
DC_DEVICE void enter_and_send_sums(const Context& context, const CombineArgs& args,
                                   CombineEntry* entry) {
  arch::sync_block_apart();
  if (entry->start.mode != CombineMode::kRings || !has_channel(args)) return;
  arch::await_earlier_launch();
  StagePipe pipe = make_pipe(args.stage, args.barriers_offset);
  send_by_rings(context, args, entry, pipe);
}

template <Dtype kDtype, bool kIsExpanded>
DC_DEVICE void combine(const CombineArgs& args) {
  const World& world = args.world;
  const Context context{world, Kernel::kCombine, current_generation(world)};
  note_in_block(context, TraceStep::kBegun);
  if (!kIsExpanded && arch::block_idx() == 0) announce_staging(context, args);
  CombineEntry* entry = CombineEntry::of_block(args);
  entry->reset();
  if (arch::warp_idx() < args.num_senders) {
    if constexpr (kIsExpanded) {
      enter_and_send_sums(context, args, entry);
    } else {
      enter_and_send(context, args, entry);
    }
    note_in_warp(context, TraceStep::kSent);
  } else {
    if (arch::warp_idx() == args.num_senders) {
      enter_combine(context, args, &entry->start);
    }
    arch::sync_block_apart();
    if (arch::warp_idx() == args.num_senders) {
      note_in_warp(context, TraceStep::kEntered, static_cast<uint32_t>(entry->start.mode));
      retire_early(context);
    }
    if (entry->start.mode == CombineMode::kStaged) {
      receive_staged<kDtype, kIsExpanded>(context, args, entry);
    }
    if (entry->start.mode == CombineMode::kRings && has_channel(args)) {
      if constexpr (kIsExpanded) arch::await_earlier_launch();
      receive_by_rings<kDtype>(context, args, entry);
    }
    note_in_warp(context, TraceStep::kLeft);
  }
  // What follows in the stream comes after both.
  if constexpr (kIsExpanded) arch::await_earlier_launch();
}

}  // namespace deep_comm
