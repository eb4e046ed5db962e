// What the warps of one combining block share, in shared memory behind the senders' stages.
#pragma once

#include "device/intranode/args.cuh"
#include "device/intranode/combine_staging.cuh"
#include "device/sync/publisher.cuh"

namespace deep_comm {

struct CombineEntry {
  static constexpr int kMaxReduceWarps = 32;
  static constexpr int kMaxRows = kMaxRanks + 2;  // of one token: one a rank, then the biases

  CombineMode mode;
  uint32_t staging_lines[kMaxRanks];  // staged mode: where every rank's staging begins
  // Ring mode: [peer] rows sent to it, [R + peer] rows of its ring that have been read.
  // Staged mode: [sender] chunks that have landed.
  Progress progress;
  uint32_t num_done[kMaxReduceWarps];              // ring mode: tokens a reducing warp has finished
  const uint8_t* rows[kMaxReduceWarps][kMaxRows];  // what each of them adds
  LandedChunks landed;                             // staged mode

  DC_DEVICE static CombineEntry* of_block(const CombineArgs& args) {
    return reinterpret_cast<CombineEntry*>(arch::dynamic_smem() + args.entry_offset);
  }
  // Warps that neither send nor return credits nor publish.
  DC_DEVICE static int num_reduce_warps(const CombineArgs& args) {
    return arch::num_warps() - args.num_senders - 2;
  }
  DC_DEVICE void reset() {
    progress.reset();
    landed.reset();
    if (arch::thread_idx() < kMaxReduceWarps) num_done[arch::thread_idx()] = 0;
  }
};

}  // namespace deep_comm
