// Generations instead of resets: every kernel that talks to peers is one generation, counted on the
// device (so that a CUDA graph replays correctly), and every word it writes carries it.
#pragma once

#include "device/sync/context.cuh"

namespace deep_comm {

// The generation of the kernel that is running. Equal in all its blocks: it moves when the last
// block leaves.
DC_DEVICE uint32_t current_generation(const World& world) {
  return next_generation(arch::ld_relaxed_gpu(&world.state()->generation));
}

struct BlockExit {
  bool is_last;  // all other blocks of the kernel have come here before
};

// Every thread of every block; the block's work is done. What the other blocks did is visible to
// the last one. num_exited_blocks: a word of this rank, zero while no kernel of its kind runs; the
// last block zeroes it.
DC_DEVICE BlockExit exit_block(uint32_t* num_exited_blocks) {
  uint32_t* num_exited =
      reinterpret_cast<uint32_t*>(arch::dynamic_smem());  // nobody needs the stages any more
  arch::sync_block();
  if (arch::thread_idx() == 0) {
    // acq_rel, pairs with itself: the last block sees all that the others have done, and that they
    // have read `generation`.
    *num_exited = arch::atomic_add_acq_rel_gpu(num_exited_blocks, 1u);
  }
  arch::sync_block();
  return {*num_exited + 1 == static_cast<uint32_t>(arch::num_blocks())};
}

DC_DEVICE BlockExit exit_block(const Context& context) {
  return exit_block(&context.world.state()->num_exited_blocks);
}

// Threads of the last block: the next kernel is a new generation.
DC_DEVICE void close_generation(const Context& context) {
  LocalState* state = context.world.state();
  const int thread = arch::thread_idx();
  if (thread < context.world.num_ranks) arch::st_relaxed_gpu(&state->num_taken_chunks[thread], 0u);
  if (thread != 0) return;
  arch::st_relaxed_gpu(&state->num_taken_tokens, 0u);
  arch::st_relaxed_gpu(&state->num_exited_blocks, 0u);
  arch::st_relaxed_gpu(&state->generation, context.generation);
}

// Every thread of every block calls this last, unless it does something between the two halves.
DC_DEVICE void retire_block(const Context& context) {
  if (exit_block(context).is_last) close_generation(context);
}

}  // namespace deep_comm
