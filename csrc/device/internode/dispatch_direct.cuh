// dispatch, direct mode: every row has a slot wherever it is sent. So nobody waits for credit, and
// nothing is copied twice at a rank.
//
//   rank (n, l)                       rank (n', l)                          rank (n', j)
//   sender ──bulk stores──→ final rows of the own node
//          ──bulk stores──→ slots of the own rail peers ──forwarder──bulk──→ final rows
//          ──bulk stores──→ final rows there            ──forwarder──bulk──→ final rows
//          publisher ──landed[chunk]──→
//
// The last of these, straight rows: if all rows between nodes are stored, and for a row that (n', l)
// gets itself. Its slot has the other metadata alone, without scales.
//
// grid   any number of blocks, roles by warp: the first enters, then publishes; the next S send the
//        tokens they take; the next F forward the rows they take; then some write metadata, of rows
//        for the own node and of forwarded ones
// smem   stages of senders, of forwarders, their mbarriers, DirectEntry
// words  landed[n][chunk]      · owner: receiver · written by node n's publisher, after the rows,
//                                stored or put on the queue of the chunk
//        added[n][chunk]       · this rank · rows of a put chunk that are in their slots;
//                                zero at rest
//        outputs[n]           · owner: a near sender · where this rank's rows from it belong;
//                                written before the arrival
//        has_room, announcements · see direct_entry.cuh
//        done                  · owner: receiver · by each local rank's last block
// waits  landed: unblocked by the sender of the chunk, which waits only for its own publisher,
//        which waits for nobody; done: by every local rank's last block
// slots  of the rail are free when all ranks have entered the next kernel. A rank leaves when all
//        of its rows have arrived, hence were read where they were staged, and all that it staged
//        has been read
#pragma once

#include "device/internode/direct_meta.cuh"

namespace deep_comm {

// A warp of every block that does not send.
DC_DEVICE void run_direct_warp(const TierContexts& contexts, const InternodeDispatchArgs& args,
                               DirectEntry* entry) {
  // Straight rows that no other rank gets need no forwarder. Its warps write metadata.
  const bool forwards = !args.tiers.rail.are_all_near || args.tiers.ranks_per_node() > 1;
  const int num_forwarders = forwards ? args.num_forward_warps : 0;
  const int num_meta_warps = args.num_forward_warps + args.num_meta_warps - num_forwarders;
  const int forwarder = arch::warp_idx() - 1 - args.num_send_warps;
  const int meta = forwarder - num_forwarders;
  if (arch::warp_idx() == 0) {
    const bool is_early = arch::fault(Fault::kEarlyRailDone);
    if (is_early && arch::lane_idx() == 0) arch::rail_done(args.tiers.rail.port);
    RowPublisher(contexts.node, args, entry).run();
    note_in_warp(contexts.node, TraceStep::kSent);
    // Block 0 announced itself before the block barrier. Since then only the publisher posts.
    if (!is_early && arch::lane_idx() == 0) arch::rail_done(args.tiers.rail.port);
  } else if (forwarder < num_forwarders) {
    RowForwarder(contexts.rail, args, entry, forwarder).run();
    note_in_warp(contexts.node, TraceStep::kForwarded);
  } else if (meta < num_meta_warps) {
    write_metadata(contexts, args, entry, meta, num_meta_warps);
    note_in_warp(contexts.node, TraceStep::kForwarded);
  }
}

// Every thread of every block, last. The last block tells the neighbours that this rank is done,
// waits for theirs, and closes the generation.
DC_DEVICE void leave_direct(const TierContexts& contexts, const TwoTier& tiers) {
  const Context& context = contexts.node;
  const World& world = context.world;
  if (!exit_block(context).is_last) return;
  // A thread that failed set the abort word before it came here. Its rows may be missing.
  if (!is_aborted(world) && arch::thread_idx() < world.num_ranks) {
    const int peer = arch::thread_idx();
    // pairs with: the await below at the peer — every row and word that this rank has written into
    // its segment, including forwarded ones
    arch::st_release_sys(&announcement_to(context, tiers, peer)->done,
                         Tagged::pack(context.generation, 1));
    uint32_t done = 0;
    const bool ok = arch::fault(Fault::kSkipExitBarrier) ||
                    await_tagged(context, &announcement_by(context, tiers, peer)->done,
                                 {Stage::kDone, Word::kDone, peer, -1}, 1, &done);
    if (ok) note(context, TraceStep::kReceived);  // of the last neighbour that is done
  }
  // order-proof: matters after a failed wait alone, which share_failure must see. Otherwise the end
  // of the kernel follows.
  arch::sync_block();
  if (arch::thread_idx() == 0 && is_aborted(world)) share_failure(contexts);
  close_generation(context);
}

}  // namespace deep_comm
