// internode_barrier: ends on every rank after all ranks of all nodes have entered it.
//
// grid   one block of one warp; lane p handles local rank p, and nodes p, p + 32, …
// words  arrived (rail), arrived (node) · as at the entry of every kernel over both tiers
// after  on this rank's stream: what every rank's stream had done before
#pragma once

#include "device/internode/tiers.cuh"

namespace deep_comm {

DC_DEVICE void internode_barrier(const InternodeBarrierArgs& args) {
  const TierContexts contexts = TierContexts::make(args.world, args.tiers, Kernel::kBarrier);
  const RailTier& tier = args.tiers.rail;
  note_in_block(contexts.node, TraceStep::kBegun);
  announce_on_rail(contexts.rail, tier, args.signature);
  if (await_rail_arrivals(contexts.rail, tier, args.signature)) {
    announce_arrival(contexts.node, args.signature);
    if (await_all_entered(contexts.node, Stage::kEntryBarrier, args.signature)) {
      note_in_warp(contexts.node, TraceStep::kEntered);
    }
  } else {
    announce_dispute(contexts);
  }
  leave_tiers(contexts);
}

}  // namespace deep_comm
