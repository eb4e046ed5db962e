// What fibers ask of the simulated machine's memory; each place with an order is one where another
// fiber may come first.
#include "ops.hpp"
#include "simulated_executor.hpp"

namespace deep_comm::simt {

void simulated_load(void* value, const void* address, unsigned num_bytes) {
  t_state.simulated->memory().load(t_state.current, value, address, num_bytes);
}

void simulated_ordered_load(void* value, const void* address, unsigned num_bytes) {
  SimulatedExecutor* machine = t_state.simulated;
  machine->maybe_preempt(t_state.current);
  machine->memory().load(t_state.current, value, address, num_bytes);
}

void simulated_store(void* address, const void* value, unsigned num_bytes) {
  t_state.simulated->memory().store(t_state.current, address, value, num_bytes);
}

void simulated_release_store(void* address, const void* value, unsigned num_bytes, Scope scope) {
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
