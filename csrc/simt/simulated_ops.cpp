// What fibers ask of the simulated machine's memory; each place with an order is one where another
// fiber may come first.
#include "ops.hpp"
#include "simulated_executor.hpp"

namespace deep_comm::simt {
namespace {

Races* races_of(Fiber* self) { return block_of(self)->races.get(); }

bool orders_memory(WarpOp op) {
  return op == WarpOp::kSync || t_state.simulated->collectives_order_memory();
}

// An access by a primitive. `code`: where the kernel goes on.
void note_access(Fiber* self, const void* address, unsigned num_bytes, Races::Access access,
                 const void* code) {
  if (Races* races = races_of(self)) races->access(self, address, num_bytes, access, code);
}

}  // namespace

// The launch before this one may still read and write whatever is not this block's own.
void require_begun(Fiber* self, const void* address) {
  if (!self->is_early || block_of(self)->owns(address)) [[likely]]
    return;
  t_state.executor->fail(self, "touches memory before await_earlier_launch");
}

void await_earlier_launch() {
  Fiber* self = t_state.current;
  if (t_state.simulated) t_state.simulated->await_earlier(self);
  self->owes_wait = self->is_early = false;
}

void allow_later_launch() {
  Fiber* self = t_state.current;
  if (self->owes_wait) {
    t_state.executor->fail(self,
                           "allow_later_launch before await_earlier_launch: the later launch would "
                           "not wait for the earlier one");
  }
  if (!t_state.simulated) return;
  t_state.simulated->allow_later(block_of(self));
  t_state.simulated->maybe_preempt(self);
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
  note_access(t_state.current, address, num_bytes, Races::Access::kRead,
              __builtin_return_address(0));
  t_state.simulated->memory().load(t_state.current, value, address, num_bytes);
}

void simulated_ordered_load(void* value, const void* address, unsigned num_bytes, bool acquires,
                            Scope scope) {
  require_begun(t_state.current, address);
  SimulatedExecutor* machine = t_state.simulated;
  machine->maybe_preempt(t_state.current);
  Fiber* self = t_state.current;
  note_access(self, address, num_bytes, Races::Access::kStrongRead, __builtin_return_address(0));
  machine->memory().ordered_load(self, value, address, num_bytes, acquires, scope);
  if (Races* races = races_of(self)) races->load_word(self, address, acquires);
}

void simulated_store(void* address, const void* value, unsigned num_bytes) {
  require_begun(t_state.current, address);
  note_access(t_state.current, address, num_bytes, Races::Access::kWrite,
              __builtin_return_address(0));
  t_state.simulated->memory().store(t_state.current, address, value, num_bytes);
}

void simulated_relaxed_store(void* address, const void* value, unsigned num_bytes, Scope scope) {
  require_begun(t_state.current, address);
  Fiber* self = t_state.current;
  note_access(self, address, num_bytes, Races::Access::kStrongWrite, __builtin_return_address(0));
  t_state.simulated->memory().relaxed_store(self, address, value, num_bytes, scope);
  if (Races* races = races_of(self)) races->store_word(self, address, false);
}

void simulated_release_store(void* address, const void* value, unsigned num_bytes, Scope scope) {
  require_begun(t_state.current, address);
  SimulatedExecutor* machine = t_state.simulated;
  machine->maybe_preempt(t_state.current);
  Fiber* self = t_state.current;
  note_access(self, address, num_bytes, Races::Access::kStrongWrite, __builtin_return_address(0));
  machine->memory().release_store(self, address, value, num_bytes, scope);
  if (Races* races = races_of(self)) races->store_word(self, address, true);
}

void simulated_fence(Scope scope) {
  SimulatedExecutor* machine = t_state.simulated;
  machine->maybe_preempt(t_state.current);
  Fiber* self = t_state.current;
  machine->memory().fence(self, scope);
  if (Races* races = races_of(self)) races->fence(self);
}

void simulated_proxy_fence(bool of_shared, bool of_global) {
  SimulatedExecutor* machine = t_state.simulated;
  Fiber* self = t_state.current;
  machine->maybe_preempt(self);
  if (of_global) machine->memory().order(self, Scope::kGpu);
  if (Races* races = races_of(self); races && of_shared) races->proxy_fence(self);
}

void simulated_atomic_begin(void* address, unsigned num_bytes, AtomicOrder order, Scope scope) {
  require_begun(t_state.current, address);
  SimulatedExecutor* machine = t_state.simulated;
  Fiber* self = t_state.current;
  machine->maybe_preempt(self);
  machine->memory().begin_atomic(self, address, num_bytes, order, scope);
}

void simulated_atomic_end(void* address, unsigned num_bytes, AtomicOrder order, Scope scope) {
  Fiber* self = t_state.current;
  note_access(self, address, num_bytes, Races::Access::kStrongWrite, __builtin_return_address(0));
  t_state.simulated->memory().end_atomic(self, address, num_bytes, order, scope);
  if (Races* races = races_of(self)) {
    races->update_word(self, address, order == AtomicOrder::kAcqRel);
  }
  t_state.simulated->note_progress();
  t_state.simulated->notify(address);
}

void arrive_at_block(Fiber* self, Meeting& meeting) {
  meeting.view.join(t_state.simulated->memory().view_for_block(self));
  if (Races* races = races_of(self)) races->arrive(self, meeting);
}

void leave_barrier(Fiber* self, const Meeting& meeting) {
  self->view.join(meeting.view);
  if (Races* races = races_of(self)) races->leave(self, meeting);
}

void leave_mbarrier(Fiber* self, const Meeting& meeting) {
  self->view.join(meeting.view);
  if (Races* races = races_of(self)) races->acquire(self, meeting);
}

void arrive_at_warp(Fiber* self, WarpOp op, Meeting& meeting) {
  if (!orders_memory(op)) return;
  SimulatedMemory& memory = t_state.simulated->memory();
  memory.order_to_warp(self);
  meeting.view.join(memory.view_for_warp(self));
  if (Races* races = races_of(self)) races->arrive(self, meeting);
}

void leave_warp(Fiber* self, WarpOp op, const Meeting& meeting) {
  if (orders_memory(op)) leave_barrier(self, meeting);
}

void touch_shared(Fiber* self, const uint64_t* barrier, Races::Access access) {
  if (Races* races = races_of(self)) races->access(self, barrier, sizeof *barrier, access, nullptr);
}

void note_progress() {
  if (t_state.simulated) t_state.simulated->note_progress();
}

}  // namespace deep_comm::simt
