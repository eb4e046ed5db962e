#include "barrier.hpp"

#include <cstring>
#include <string>

#include "executor.hpp"
#include "ops.hpp"
#include "simulated_memory.hpp"

namespace deep_comm::simt {
namespace {

// Those who wait see what those who have arrived had stored and seen.
void wake_all(NamedBarrier& state) {
  while (Fiber* fiber = state.waiting.pop_front()) {
    fiber->wait = Wait::kNone;
    if (t_state.simulated) leave_barrier(fiber, state.meeting);
    t_state.executor->make_ready(fiber);
  }
}

// Stores of the arriving thread and of those its warp has seen become visible to the block.
void publish_to_block(Fiber* self, NamedBarrier& state) {
  if (!t_state.simulated) return;
  if (state.arrived == 0) state.meeting = {};
  arrive_at_block(self, state.meeting);
}

NamedBarrier& named_barrier(Fiber* self, int barrier, int num_threads, const char* op) {
  Executor* executor = t_state.executor;
  const std::string call =
      std::string(op) + "(" + std::to_string(barrier) + ", " + std::to_string(num_threads) + ")";
  if (barrier < 1 || barrier >= kNumBarriers) {
    executor->fail(self, call + ": a named barrier is 1 to 15");
  }
  if (num_threads <= 0 || num_threads % kLanes != 0) {
    executor->fail(self, call + ": the number of threads is a positive multiple of 32");
  }
  NamedBarrier& state = block_of(self)->barriers[barrier];
  if (state.expected == 0) state.expected = num_threads;
  if (state.expected != num_threads) {
    executor->fail(self, call + ": others use this barrier with " + std::to_string(state.expected) +
                             " threads");
  }
  return state;
}

void check_site(Fiber* self, NamedBarrier& state, CallSite site) {
  if (state.arrived == 0) {
    state.file = site.file;
    state.line = site.line;
  }
  if (site.line == state.line && std::strcmp(site.file, state.file) == 0) return;
  const auto name = [](const std::string& file, int line) {
    return file.empty() ? "sync_block_apart" : "sync_block at " + file + ":" + std::to_string(line);
  };
  t_state.executor->fail(self, name(site.file, site.line) + ": others of this block stand at " +
                                   name(state.file, state.line) +
                                   "; where roles meet, all call sync_block_apart");
}

// Returns whether this arrival completed the barrier.
bool arrive(NamedBarrier& state) {
  if (++state.arrived < state.expected) return false;
  state.arrived = state.expected = 0;
  wake_all(state);
  return true;
}

}  // namespace

namespace {

void complete_block_barrier(NamedBarrier& state) {
  state.arrived = 0;
  state.result = state.any;
  state.any = false;
  wake_all(state);
}

}  // namespace

bool sync_block_any(bool predicate, CallSite site) {
  Fiber* self = t_state.current;
  Block* block = block_of(self);
  NamedBarrier& state = block->barriers[0];
  check_site(self, state, site);
  publish_to_block(self, state);
  state.any = state.any || predicate;
  if (++state.arrived == block->num_live) {
    note_progress();
    complete_block_barrier(state);
    if (t_state.simulated) leave_barrier(self, state.meeting);
    return state.result;
  }
  self->wait = Wait::kBlockBarrier;
  state.waiting.push_back(self);
  t_state.executor->suspend(self);
  // It completes again only when this thread has arrived again.
  return state.result;
}

void sync_block(CallSite site) { sync_block_any(false, site); }

void complete_block_barrier_after_exit(Block* block) {
  NamedBarrier& state = block->barriers[0];
  if (state.arrived == 0 || state.arrived < block->num_live) return;
  complete_block_barrier(state);
}

void sync_named(int barrier, int num_threads) {
  Fiber* self = t_state.current;
  NamedBarrier& state = named_barrier(self, barrier, num_threads, "sync_named");
  publish_to_block(self, state);
  if (arrive(state)) {
    note_progress();
    if (t_state.simulated) leave_barrier(self, state.meeting);
    return;
  }
  self->wait = Wait::kNamedBarrier;
  self->barrier = barrier;
  state.waiting.push_back(self);
  t_state.executor->suspend(self);
}

void arrive_named(int barrier, int num_threads) {
  Fiber* self = t_state.current;
  NamedBarrier& state = named_barrier(self, barrier, num_threads, "arrive_named");
  publish_to_block(self, state);
  if (arrive(state)) note_progress();
}

}  // namespace deep_comm::simt
