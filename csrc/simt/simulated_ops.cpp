// What fibers ask of the simulated machine's memory; each place with an order is one where another
// fiber may come first.
#include "ops.hpp"
#include "simulated_executor.hpp"

namespace deep_comm::simt {
namespace {

// The launch before this one may still read and write whatever is not this block's own.
void require_begun(Fiber* self, const void* address) {
  if (!self->is_early || block_of(self)->owns(address)) [[likely]]
    return;
  t_state.executor->fail(self, "touches memory before await_earlier_launch");
}

}  // namespace

void await_earlier_launch() { t_state.current->is_early = false; }

void allow_later_launch() {
  Fiber* self = t_state.current;
  if (!self->is_early) return;
  t_state.executor->fail(self,
                         "allow_later_launch before await_earlier_launch: the later launch would "
                         "not wait for the earlier one");
}

void simulated_touch(const void* address) { require_begun(t_state.current, address); }

void simulated_load(void* value, const void* address, unsigned num_bytes) {
  require_begun(t_state.current, address);
  t_state.simulated->memory().load(t_state.current, value, address, num_bytes);
}

void simulated_ordered_load(void* value, const void* address, unsigned num_bytes) {
  require_begun(t_state.current, address);
  SimulatedExecutor* machine = t_state.simulated;
  machine->maybe_preempt(t_state.current);
  machine->memory().load(t_state.current, value, address, num_bytes);
}

void simulated_store(void* address, const void* value, unsigned num_bytes) {
  require_begun(t_state.current, address);
  t_state.simulated->memory().store(t_state.current, address, value, num_bytes);
}

void simulated_release_store(void* address, const void* value, unsigned num_bytes, Scope scope) {
  require_begun(t_state.current, address);
  SimulatedExecutor* machine = t_state.simulated;
  machine->maybe_preempt(t_state.current);
  machine->memory().release_store(t_state.current, address, value, num_bytes, scope);
}

void simulated_fence(Scope scope) {
  SimulatedExecutor* machine = t_state.simulated;
  machine->maybe_preempt(t_state.current);
  machine->memory().order(t_state.current, scope);
}

void simulated_atomic_begin(void* address, unsigned num_bytes, bool releases, Scope scope) {
  require_begun(t_state.current, address);
  SimulatedExecutor* machine = t_state.simulated;
  Fiber* self = t_state.current;
  machine->maybe_preempt(self);
  if (releases) machine->memory().order(self, scope);
  machine->memory().settle(self, address, num_bytes);
}

void simulated_atomic_end(void* address) {
  t_state.simulated->note_progress();
  t_state.simulated->notify(address);
}

void order_stores(Fiber* self, Scope scope) { t_state.simulated->memory().order(self, scope); }

void order_stores_to_warp(Fiber* self, WarpOp op) {
  if (op == WarpOp::kSync || kCollectivesOrderMemory) {
    t_state.simulated->memory().order_to_warp(self);
  }
}

void note_progress() {
  if (t_state.simulated) t_state.simulated->note_progress();
}

}  // namespace deep_comm::simt
