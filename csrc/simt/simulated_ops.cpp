// What fibers ask of the simulated machine's memory; each place with an order is one where another
// fiber may come first.
#include "ops.hpp"
#include "simulated_executor.hpp"

namespace deep_comm::simt {

// The launch before this one may still read and write whatever is not this block's own.
void require_begun(Fiber* self, const void* address) {
  if (!self->is_early || block_of(self)->owns(address)) [[likely]]
    return;
  t_state.executor->fail(self, "touches memory before await_earlier_launch");
}

void await_earlier_launch() { t_state.current->is_early = false; }

void allow_later_launch() {
  Fiber* self = t_state.current;
  if (!self->is_early) return;
  t_state.executor->fail(self,
                         "allow_later_launch before await_earlier_launch: the later launch would "
                         "not wait for the earlier one");
}

void simulated_touch(const void* address) {
  Fiber* self = t_state.current;
  require_begun(self, address);
  if (!t_state.simulated->memory().was_written(self, address)) [[likely]]
    return;
  t_state.executor->fail(self, "ld_nc reads memory that was written since the kernel began");
}

void simulated_load(void* value, const void* address, unsigned num_bytes) {
  require_begun(t_state.current, address);
  t_state.simulated->memory().load(t_state.current, value, address, num_bytes);
}

void simulated_ordered_load(void* value, const void* address, unsigned num_bytes, bool acquires,
                            Scope scope) {
  require_begun(t_state.current, address);
  SimulatedExecutor* machine = t_state.simulated;
  machine->maybe_preempt(t_state.current);
  machine->memory().ordered_load(t_state.current, value, address, num_bytes, acquires, scope);
}

void simulated_store(void* address, const void* value, unsigned num_bytes) {
  require_begun(t_state.current, address);
  t_state.simulated->memory().store(t_state.current, address, value, num_bytes);
}

void simulated_relaxed_store(void* address, const void* value, unsigned num_bytes, Scope scope) {
  require_begun(t_state.current, address);
  t_state.simulated->memory().relaxed_store(t_state.current, address, value, num_bytes, scope);
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
  machine->memory().fence(t_state.current, scope);
}

void simulated_proxy_fence() {
  SimulatedExecutor* machine = t_state.simulated;
  machine->maybe_preempt(t_state.current);
  machine->memory().order(t_state.current, Scope::kGpu);
}

void simulated_atomic_begin(void* address, unsigned num_bytes, AtomicOrder order, Scope scope) {
  require_begun(t_state.current, address);
  SimulatedExecutor* machine = t_state.simulated;
  Fiber* self = t_state.current;
  machine->maybe_preempt(self);
  machine->memory().begin_atomic(self, address, num_bytes, order, scope);
}

void simulated_atomic_end(void* address, unsigned num_bytes, AtomicOrder order, Scope scope) {
  t_state.simulated->memory().end_atomic(t_state.current, address, num_bytes, order, scope);
  t_state.simulated->note_progress();
  t_state.simulated->notify(address);
}

void arrive_at_block(Fiber* self, View& view) {
  view.join(t_state.simulated->memory().view_for_block(self));
}

void leave_barrier(Fiber* self, const View& view) { self->view.join(view); }

void arrive_at_warp(Fiber* self, WarpOp op, View& view) {
  if (op != WarpOp::kSync && !t_state.simulated->collectives_order_memory()) return;
  SimulatedMemory& memory = t_state.simulated->memory();
  memory.order_to_warp(self);
  view.join(memory.view_for_warp(self));
}

void note_progress() {
  if (t_state.simulated) t_state.simulated->note_progress();
}

}  // namespace deep_comm::simt
