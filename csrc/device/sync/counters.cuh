// What the blocks of a layout or notify kernel count together, and which of them is the last.
#pragma once

#include "device/sync/context.cuh"

namespace deep_comm {

// Adds a block's counters in shared memory to the rank's accumulators. All threads, after a block
// barrier. The caller's next barrier and ticket order the additions.
DC_DEVICE void add_counters(int32_t* totals, const int32_t* counters, int num_counters) {
  for (int idx = arch::thread_idx(); idx < num_counters; idx += arch::num_threads()) {
    if (counters[idx] != 0) arch::atomic_add_relaxed_gpu(totals + idx, counters[idx]);
  }
}

// Every thread of every block: true in the last block to call it, which sees what the others wrote.
// `ticket`: shared memory.
DC_DEVICE bool is_last_to_count(const World& world, uint32_t* ticket) {
  arch::sync_block();  // the block's work before the ticket that releases it
  if (arch::thread_idx() == 0) {
    // pairs with: itself in the last block — accumulators and outputs of all blocks
    *ticket = arch::atomic_add_acq_rel_gpu(&world.state()->layout_ticket, 1u);
    if (*ticket + 1 == static_cast<uint32_t>(arch::num_blocks())) {
      arch::st_relaxed_gpu(&world.state()->layout_ticket, 0u);
    }
  }
  arch::sync_block();
  return *ticket + 1 == static_cast<uint32_t>(arch::num_blocks());
}

}  // namespace deep_comm
