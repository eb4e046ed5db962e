// internode_combine: every expert rank returns its rows to the ranks that own the tokens. They are
// added once per node on the way.
//
// in     x [Q, H] in dispatch's order, optional topk_weights [Q, K]; optional bias_0, bias_1
//        [T, H]; the handle
// out    combined_x [T, H], combined_topk_weights [T, K]
// sums   s(n) = round(((0 + x of rank (n, a)) + x of rank (n, b)) + …), local ranks in their order
//        combined_x = round(((0 + bias_0 + bias_1) + s(m)) + s(n) + …), nodes in their order
//        order: ascending, or that of the token's last selections there (SumOrder); of local ranks
//        dispatch has brought it (OrderedPlace)
//        both in float32, rounded to the dtype of x; weights stay float32
// path   rank (n, j) → NVLink → rank (n, l) → rail → rank (n', l), which owns the token
// modes  staged (combine_staged.cuh) if every rank has room for all rows and sums that arrive,
//        which it announces at entry over both tiers; otherwise rings:
// grid   two blocks per channel c, W reducing warps each:
//          2 c      warp i < M: sender to local rank i; warp M: returns credits on the rail;
//                   then W warps add the nodes' sums
//          2 c + 1  warp 0: puts finished sums on the rail, returns credits in the node;
//                   then W warps add local rows
// smem   rings: a ReduceProgress; then in blocks 2 c SumsRead [N], else pointers [W, kMaxRanks];
//        staged: num_senders x (stages + mbarriers), then a StagedEntry
// words  of entry: arrived and staging lines (rail), arrived, staging_line, staging_rows (node); of
//        rings: as in dispatch with exchanged roles
// waits  ring tail: unblocked by a local sender; ring credit: by warp 0 of the forwarder's block,
//        which waits for its reducing warps only; rail credit: by warp M at the owner, likewise;
//        rail tail: by warp 0 of the forwarder. All nodes serve the owners' nodes in one order, so
//        what is sent at step k is read at step k on all of them: no cycle (docs/design/0007)
// not promised: nothing; the result does not depend on mode, C, slots, chunks or number of warps
#pragma once

#include "device/internode/combine_forward.cuh"
#include "device/internode/combine_reduce.cuh"
#include "device/internode/combine_send.cuh"
#include "device/internode/combine_staged.cuh"

namespace deep_comm {

template <Dtype kDtype>
DC_DEVICE void run_owner_block(const TierContexts& contexts, const InternodeCombineArgs& args,
                               ReduceProgress* progress, int channel) {
  const int num_local = args.tiers.ranks_per_node(), warp = arch::warp_idx();
  const int reducer = warp - num_local - 1;
  if (warp < num_local) {
    send_to_forwarder(contexts.node, args, channel, warp);
  } else if (warp == num_local) {
    SumsRead* rings = reinterpret_cast<SumsRead*>(progress + 1);
    return_sum_credits(contexts, args, progress, rings, channel);
  } else if (reducer < args.num_reduce_warps) {
    reduce_tokens<kDtype>(contexts.rail, args, progress, channel, reducer);
  }
}

template <Dtype kDtype>
DC_DEVICE void run_sum_block(const TierContexts& contexts, const InternodeCombineArgs& args,
                             ReduceProgress* progress, int channel) {
  const int warp = arch::warp_idx();
  if (warp == 0) {
    publish_sums(contexts, args, progress, channel);
  } else if (warp <= args.num_reduce_warps) {
    forward_sums<kDtype>(contexts, args, progress, channel, warp - 1);
  }
}

// The whole block.
template <Dtype kDtype>
DC_DEVICE void combine_by_rings(const TierContexts& contexts, const InternodeCombineArgs& args) {
  ReduceProgress* progress = ReduceProgress::of_block();
  progress->reset();
  arch::sync_block();
  const int channel = arch::block_idx() / 2;
  if (arch::block_idx() % 2 == 0) {
    run_owner_block<kDtype>(contexts, args, progress, channel);
  } else {
    run_sum_block<kDtype>(contexts, args, progress, channel);
  }
}

// A sending warp of staged mode. Its loads begin before the mode is known. If this rank has
// staging, the mode is probably staged.
template <class Chunks>
DC_DEVICE void enter_and_send(const TierContexts& contexts, const InternodeCombineArgs& args,
                              StagedEntry* entry, int sender) {
  arch::Mbarrier* barriers =
      reinterpret_cast<arch::Mbarrier*>(arch::dynamic_smem() + args.barriers_offset);
  StagePipe pipe(arch::dynamic_smem() + args.stages_offset + sender * args.stage.warp_bytes(),
                 barriers + sender * args.stage.num_stages, args.stage);
  RowSender<Chunks, InternodeCombineArgs, StagedEntry> rows(
      contexts.node, args, entry, pipe, sender, Chunks::ask(contexts, args, entry));
  rows.begin();
  arch::sync_block_apart();
  if (entry->mode != SumMode::kStaged) return rows.give_up();
  rows.run();
  if (Chunks::kCrosses) note_in_warp(contexts.node, TraceStep::kForwarded);
}

template <Dtype kDtype>
DC_DEVICE void internode_combine(const InternodeCombineArgs& args) {
  const TierContexts contexts =
      TierContexts::make(args.world, args.tiers, Kernel::kInternodeCombine);
  note_in_block(contexts.node, TraceStep::kBegun);
  StagedEntry* entry = StagedEntry::of_block(args);
  const int sender = arch::warp_idx() - 1;
  const bool may_stage = args.staging_line != 0;
  entry->reset();
  if (may_stage) entry->tables.fill(args);
  arch::sync_block();
  if (may_stage && sender >= 0 && sender < args.num_senders) {
    if (args.tiers.ranks_per_node() == 1) {
      enter_and_send<ChunksToNodes>(contexts, args, entry, sender);
    } else {
      enter_and_send<ChunksInNode>(contexts, args, entry, sender);
    }
  } else {
    if (arch::warp_idx() == 0) {
      const SumMode mode = enter_combine(contexts, args, entry);
      if (arch::lane_idx() == 0) entry->mode = mode;
      if (mode != SumMode::kFailed) {
        note_in_warp(contexts.node, TraceStep::kEntered, static_cast<uint32_t>(mode));
      }
    }
    arch::sync_block_apart();
    if (entry->mode == SumMode::kStaged) add_staged<kDtype>(contexts, args, entry);
  }
  if (entry->mode == SumMode::kRings) combine_by_rings<kDtype>(contexts, args);
  leave_tiers(contexts);
}

}  // namespace deep_comm
