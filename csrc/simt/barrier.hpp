// Block barriers and mbarriers: what the executor itself needs of them.
#pragma once

#include <cstdint>

#include "fiber.hpp"

namespace deep_comm::simt {

// An exit may be what the others at sync_block were waiting for.
void complete_block_barrier_after_exit(Block* block);

// Has the phase of that parity completed? True for parity 1 of a fresh barrier, as on the GPU.
bool mbarrier_phase_done(uint64_t barrier, uint32_t parity);

// The bytes of a bulk copy have arrived. Returns whether the phase completed; `error` says what is
// wrong with the barrier, if anything.
bool mbarrier_complete_bytes(uint64_t* barrier, uint32_t num_bytes, const char** error);

// Simulated machine.
MbarrierState& mbarrier_state(Block* block, const uint64_t* barrier);
void complete_mbarrier_phase(Block* block, const uint64_t* barrier);

}  // namespace deep_comm::simt
