// note: a block has passed a step. With tracing off (a null pointer) it costs a test of an
// argument. With tracing on it reads the clock and stores one slot, for which nothing waits.
//
// Not for loops over rows. If several warps of a block pass a step, the note of one of them remains:
// the last one's, unless they pass it at about the same time.
#pragma once

#include "device/sync/context.cuh"

namespace deep_comm {

// Out of line, so that disabled tracing costs no space in the caller.
DC_DEVICE_COLD void write_note(const Trace& trace, Kernel kernel, TraceStep step,
                               uint32_t generation, uint32_t value) {
  const int block = arch::block_idx();
  if (block >= Trace::kMaxBlocks) return;
  const uint64_t now_ns = arch::globaltimer_ns();
  arch::st_weak(reinterpret_cast<Vec16*>(trace.slot(kernel, generation, block, step)),
                Vec16{{static_cast<uint32_t>(now_ns), static_cast<uint32_t>(now_ns >> 32),
                       generation, value}});
}

// One thread.
DC_DEVICE void note(const Context& context, TraceStep step, uint32_t value = 0) {
  const Trace trace = context.world.trace();
  if (!Trace::is_noted(context.kernel) || trace.slots == nullptr) return;
  write_note(trace, context.kernel, step, context.generation, value);
}

// The first thread of a block, or of a warp; other threads do nothing.
DC_DEVICE void note_in_block(const Context& context, TraceStep step, uint32_t value = 0) {
  if (!Trace::is_noted(context.kernel) || context.world.trace_slots == nullptr) return;
  if (arch::thread_idx() == 0) note(context, step, value);
}
DC_DEVICE void note_in_warp(const Context& context, TraceStep step, uint32_t value = 0) {
  if (!Trace::is_noted(context.kernel) || context.world.trace_slots == nullptr) return;
  if (arch::lane_idx() == 0) note(context, step, value);
}

}  // namespace deep_comm
