// Bulk copies: what is checked and counted on both machines. A direct machine copies at issue; a
// simulated one queues the copy (simulated_bulk.cpp).
#include <cstring>

#include "barrier.hpp"
#include "executor.hpp"
#include "ops.hpp"
#include "simulated_bulk.hpp"

namespace deep_comm::simt {
namespace {

void check(Fiber* self, const char* op, const void* global, const void* smem, uint32_t num_bytes) {
  auto refuse = [&](const std::string& rule) {
    t_state.executor->fail(
        self, std::string(op) + " of " + std::to_string(num_bytes) + " bytes: " + rule);
  };
  if (num_bytes % 16 != 0) refuse("the size is a multiple of 16");
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) refuse("the global address is not 16-aligned");
  if (reinterpret_cast<uintptr_t>(smem) % 16 != 0) refuse("the shared address is not 16-aligned");
  if (num_bytes == 0) refuse("there is nothing to copy");
  const Block* block = block_of(self);
  const auto offset = static_cast<size_t>(static_cast<const uint8_t*>(smem) - block->smem.base);
  if (offset > block->smem.num_bytes || num_bytes > block->smem.num_bytes - offset) {
    refuse("outside of the block's " + std::to_string(block->smem.num_bytes) +
           " bytes of shared memory (offset " + std::to_string(static_cast<ptrdiff_t>(offset)) +
           ")");
  }
}

// The copy is the work of another engine: nothing of it may move over the waits in the kernel.
void copy_at_once(void* dst, const void* src, uint32_t num_bytes) {
  memcpy(dst, src, num_bytes);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

}  // namespace

void bulk_load(void* smem_dst, const void* global_src, uint32_t num_bytes, uint64_t* barrier) {
  Fiber* self = t_state.current;
  check(self, "bulk_load", global_src, smem_dst, num_bytes);
  if (!block_of(self)->owns(barrier)) {
    t_state.executor->fail(self, "bulk_load: the mbarrier is not in the block's shared memory");
  }
  mbarrier_arrive(barrier, num_bytes);
  if (t_state.simulated) {
    issue_bulk_load(self, smem_dst, global_src, num_bytes, barrier);
    return;
  }
  copy_at_once(smem_dst, global_src, num_bytes);
  const char* error = nullptr;
  const bool done = mbarrier_complete_bytes(barrier, num_bytes, &error);
  if (error) t_state.executor->fail(self, std::string("bulk_load: ") + error);
  if (done) t_state.executor->notify(barrier);
}

void bulk_store(void* global_dst, const void* smem_src, uint32_t num_bytes) {
  Fiber* self = t_state.current;
  check(self, "bulk_store", global_dst, smem_src, num_bytes);
  ++self->num_open_stores;
  if (t_state.simulated) {
    issue_bulk_store(self, global_dst, smem_src, num_bytes);
  } else {
    copy_at_once(global_dst, smem_src, num_bytes);
  }
}

void bulk_commit() {
  Fiber* self = t_state.current;
  self->num_open_stores = 0;
  ++self->num_committed_groups;
  ++self->num_unread_groups;
  ++self->num_unwritten_groups;
}

void bulk_wait(int newest_groups, bool read_only) {
  Fiber* self = t_state.current;
  const auto newest = static_cast<uint32_t>(newest_groups);
  if (self->num_unread_groups > newest) self->num_unread_groups = newest;
  if (!read_only && self->num_unwritten_groups > newest) self->num_unwritten_groups = newest;
  if (t_state.simulated) finish_bulk_stores(self, newest, read_only);
}

}  // namespace deep_comm::simt
