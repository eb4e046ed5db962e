// What every stage of a kernel carries: this rank's view of the job, the kernel's name, its
// generation.
#pragma once

#include "device/arch/arch.cuh"
#include "device/layout/workspace.cuh"

namespace deep_comm {

// Maps ranks of a World to ranks of the group. The World of one node, or of one rail, holds only
// some of them.
struct RankNames {
  int own = -1;  // -1: as in the World
  int first = 0;
  int stride = 1;

  DC_DEVICE int of(int peer) const { return peer < 0 ? peer : first + peer * stride; }
};

struct Context {
  const World& world;
  Kernel kernel;
  uint32_t generation;      // of this kernel; equal on all ranks
  bool can_shrink = false;  // the other ranks may mask a silent one: see mask.cuh
  RankNames names = {};
  uint64_t patience = 1;  // deadlines of this context's waits, in timeouts

  DC_DEVICE int own_name() const { return names.own < 0 ? world.rank : names.own; }
};

// Which peer a wait waits for, and on which word. It names the silent rank when the deadline
// passes.
struct WaitFor {
  Stage stage;
  Word word;
  int peer;
  int channel;
};

struct ErrorReport {
  ErrorKind kind;
  WaitFor wait;
  uint64_t seen;
  uint64_t expected;
  uint64_t waited_ns;
  int64_t index;
};

// Writes the error record if no other thread has. Only the first report counts: later ones are its
// consequences. Arguments by value: the address of a caller's object would keep that object out of
// registers.
DC_DEVICE_COLD void report_error(Context context, ErrorReport report) {
  const World& world = context.world;
  if (arch::atomic_cas_acq_rel_gpu(&world.state()->error_claimed, 0u, 1u) != 0u) return;
  ErrorBlock* block = world.error;
  arch::st_relaxed_sys(&block->kind, static_cast<uint32_t>(report.kind));
  arch::st_relaxed_sys(&block->kernel, static_cast<uint32_t>(context.kernel));
  arch::st_relaxed_sys(&block->stage, static_cast<uint32_t>(report.wait.stage));
  arch::st_relaxed_sys(&block->word, static_cast<uint32_t>(report.wait.word));
  arch::st_relaxed_sys(&block->rank, static_cast<int32_t>(context.own_name()));
  arch::st_relaxed_sys(&block->peer, static_cast<int32_t>(context.names.of(report.wait.peer)));
  arch::st_relaxed_sys(&block->channel, static_cast<int32_t>(report.wait.channel));
  arch::st_relaxed_sys(&block->seen, report.seen);
  arch::st_relaxed_sys(&block->expected, report.expected);
  arch::st_relaxed_sys(&block->waited_ns, report.waited_ns);
  arch::st_relaxed_sys(&block->index, report.index);
  // pairs with: Engine::poll_error on the host — the fields above
  arch::st_release_sys(&block->is_written, 1u);
}

// Makes every other wait of this rank fail, so that the kernel drains.
DC_DEVICE void abort_rank(const Context& context) {
  // pairs with: is_aborted in await — nothing but the word itself
  arch::st_relaxed_gpu(&context.world.state()->abort, 1u);
}

// The other ranks have masked this one, so they ignore what it does.
DC_DEVICE_COLD void report_masked_out(Context context, WaitFor wait, uint64_t waited_ns) {
  report_error(context, {ErrorKind::kMaskedOut, wait, 0, 0, waited_ns, -1});
  abort_rank(context);
}
DC_DEVICE bool is_masked_out(const World& world) {
  return arch::ld_relaxed_sys(world.masked_out(world.rank)) != 0u;
}

DC_DEVICE bool is_aborted(const World& world) {
  // sys: between nodes, a neighbour that has failed sets it as well.
  return arch::ld_relaxed_sys(&world.state()->abort) != 0u;
}

}  // namespace deep_comm
