// What the warps of one combining block share, in shared memory after the senders' stages.
#pragma once

#include "device/intranode/args.cuh"
#include "device/intranode/combine_staging.cuh"
#include "device/sync/landed_items.cuh"

namespace deep_comm {

// Staged mode: the tokens that a block works on, and what is added for each.
struct TokenWindow {
  static constexpr int kMaxSlots = 28;
  static constexpr int kMaxTeams = 8;
  // A slow team holds a slot for each of its tokens, so no entry of `ready` is overwritten before
  // it has been read.
  static constexpr int kNumReady = 256;
  static_assert(kNumReady >= kMaxSlots * kMaxTeams && kMaxSlots <= kWarpSize);
  static constexpr uint32_t kAll = 1u << 31;

  struct Slot {
    const uint8_t* rows[kMaxRanks + 2];
    int token;
    int own_row;  // of x
    int16_t num_rows;
    int16_t num_biases;    // of them, the first; the rest has come from ranks
    int16_t own_position;  // of this rank's row among the latter, or -1
  };
  Slot slots[kMaxSlots];
  uint8_t ready[kNumReady];              // the slot of the i-th token whose rows have all arrived
  const uint8_t* first_rows[kMaxRanks];  // where each rank's rows begin: staged, this rank's in x
  int chunk_shift[kMaxRanks];
};

struct CombineEntry {
  static constexpr int kMaxReduceWarps = 32;
  static constexpr int kMaxRows = kMaxRanks + 2;  // of one token: the biases, then one per rank

  CombineStart start;
  // Ring mode: [sender] rows sent, [num_senders + peer] rows read from its ring. Staged mode:
  // [sender] chunks that have landed.
  Progress progress;
  union {                                 // both begin at zero
    uint32_t num_done[kMaxReduceWarps];   // ring mode: tokens that a reducing warp has finished
    uint32_t num_using[kMaxReduceWarps];  // staged mode: warps that still read a slot of the window
  };
  uint32_t num_ready;  // staged mode: tokens passed to the teams
  union {
    const uint8_t* rows[kMaxReduceWarps][kMaxRows];  // ring mode: the rows that each warp adds
    TokenWindow window;                              // staged mode
  };
  LandedItems<kMaxRanks> landed;  // staged mode: chunks, by sender

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
    if (arch::thread_idx() == 0) num_ready = 0;
  }
};

}  // namespace deep_comm
