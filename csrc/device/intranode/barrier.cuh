// barrier: ends on every rank after all ranks have entered it.
//
// grid   one block of one warp; lane p handles rank p
// words  arrived · as at the entry of every kernel
// before what this rank's stream has done before
// after  on this rank's stream: what every rank's stream had done before
#pragma once

#include "device/intranode/args.cuh"
#include "device/sync/barrier.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

DC_DEVICE void barrier(const BarrierArgs& args) {
  const Context context{args.world, Kernel::kBarrier, current_generation(args.world)};
  note_in_block(context, TraceStep::kBegun);
  announce_arrival(context, args.signature);
  if (await_all_entered(context, Stage::kEntryBarrier, args.signature)) {
    note_in_warp(context, TraceStep::kEntered);
  }
  // Every lane has read the generation.
  // order-proof: orders loads of a word, which the simulation does not report if they could be late
  arch::sync_warp();
  close_generation(context);
}

}  // namespace deep_comm
