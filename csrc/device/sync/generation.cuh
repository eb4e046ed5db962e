// Generations instead of resets: every kernel that talks to peers is one generation, counted on the device (so
// that a CUDA graph replays correctly), and every word it writes carries it.
#pragma once

#include "device/sync/context.cuh"

namespace deep_comm {

// The generation of the kernel that is running. Equal in all its blocks: it moves when the last block leaves.
DC_DEVICE uint32_t current_generation(const World& world) {
  return arch::ld_relaxed_gpu(&world.state()->generation) + 1;
}

// Every thread of every block calls this last. The last block out makes the next generation current.
DC_DEVICE void retire_block(const Context& context) {
  arch::sync_block();
  if (arch::thread_idx() != 0) return;
  LocalState* state = context.world.state();
  // acq_rel, pairs with itself: the last block sees that the others have read `generation`.
  const uint32_t num_exited = arch::atomic_add_acq_rel_gpu(&state->num_exited_blocks, 1u);
  if (num_exited + 1 != static_cast<uint32_t>(arch::num_blocks())) return;
  arch::st_relaxed_gpu(&state->num_exited_blocks, 0u);
  arch::st_relaxed_gpu(&state->generation, context.generation);
}

}  // namespace deep_comm
