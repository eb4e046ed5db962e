// Generations instead of resets. Every kernel that talks to peers is one generation, and every word
// it writes carries its number. The device counts generations, so a CUDA graph replays correctly.
#pragma once

#include "device/sync/context.cuh"

namespace deep_comm {

// The generation of the running kernel. All its blocks read the same number: it advances when all
// of them have read it. A notify that a dispatch follows advances it before it ends.
DC_DEVICE uint32_t current_generation(const World& world) {
  return next_generation(arch::ld_relaxed_gpu(&world.state()->generation));
}

// After this number of other blocks.
DC_DEVICE bool is_last_block(uint32_t num_before) {
  return num_before + 1 == static_cast<uint32_t>(arch::num_blocks()) ||
         arch::fault(Fault::kEarlyGeneration);
}

struct BlockExit {
  bool is_last;  // all other blocks of the kernel have called this before
};

// Every thread of every block, when the block's work is done. The last block sees what the other
// blocks did. num_retired_blocks: a word of this rank, zero while no kernel of its kind runs; the
// last block zeroes it.
DC_DEVICE BlockExit exit_block(uint32_t* num_retired_blocks) {
  uint32_t* num_exited =
      reinterpret_cast<uint32_t*>(arch::dynamic_smem());  // nobody needs the stages any more
  arch::sync_block();
  if (arch::thread_idx() == 0) {
    // acq_rel, pairs with itself: the last block sees what the others have done, and that they have
    // read `generation`.
    *num_exited = arch::atomic_add_acq_rel_gpu(num_retired_blocks, 1u);
  }
  arch::sync_block();
  return {is_last_block(*num_exited)};
}

DC_DEVICE BlockExit exit_block(const Context& context) {
  return exit_block(&context.world.state()->num_retired_blocks);
}

// The first threads of the last block, numbered: starts the next generation, with no work taken.
// This kernel's own counters stay as they are, because its warps may still look for work.
DC_DEVICE void close_generation(const Context& context, int thread) {
  LocalState* state = context.world.state();
  TakenWork* next = &state->taken[next_generation(context.generation) & 1u];
  if (thread < context.world.num_ranks) arch::st_relaxed_gpu(&next->num_chunks[thread], 0u);
  if (thread != 0) return;
  arch::st_relaxed_gpu(&next->num_tokens, 0u);
  arch::st_relaxed_gpu(&state->num_retired_blocks, 0u);
  arch::st_relaxed_gpu(&state->generation, context.generation);
}
DC_DEVICE void close_generation(const Context& context) {
  close_generation(context, arch::thread_idx());
}

// Counters of this kernel's work, shared by its blocks.
DC_DEVICE TakenWork* taken_work(const Context& context) {
  return &context.world.state()->taken[context.generation & 1u];
}

// Instead of exit_block and close_generation: one warp of every block calls it once all threads of
// the block have read the generation, after a block barrier. The end of a block then costs no trip
// to memory. The generation advances while the kernel runs, which only the next kernel can see.
DC_DEVICE void retire_early(const Context& context) {
  uint32_t num_retired = 0;
  if (arch::lane_idx() == 0) {
    // acq_rel, pairs with itself: all other blocks have read `generation`.
    // order-proof: orders loads of a word, which the simulation does not report if they could be
    // late
    num_retired = arch::atomic_add_acq_rel_gpu(&context.world.state()->num_retired_blocks, 1u);
  }
  num_retired = arch::shfl(kFullMask, num_retired, 0);
  if (is_last_block(num_retired)) {
    // Only what lane 0 stores replaces what other blocks have read.
    close_generation(context, arch::lane_idx());
  }
}

}  // namespace deep_comm
