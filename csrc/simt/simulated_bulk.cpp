#include "simulated_bulk.hpp"

#include <cstring>

#include "barrier.hpp"
#include "executor.hpp"
#include "ops.hpp"
#include "simulated_executor.hpp"
#include "simulated_memory.hpp"

namespace deep_comm::simt {

BulkCopy* BulkQueue::take() {
  if (free_.empty()) {
    all_.push_back(std::make_unique<BulkCopy>());
    free_.push_back(all_.back().get());
  }
  BulkCopy* copy = free_.back();
  free_.pop_back();
  copy->next = nullptr;
  copy->barrier = nullptr;
  copy->read = false;
  copy->index = pending_.size();
  pending_.push_back(copy);
  return copy;
}

void BulkQueue::retire(BulkCopy* copy) {
  BulkCopy* last = pending_.back();
  pending_[copy->index] = last;
  last->index = copy->index;
  pending_.pop_back();
  free_.push_back(copy);
}

void BulkQueue::unlink_store(BulkCopy* copy) {
  Fiber* issuer = copy->issuer;
  BulkCopy* previous = nullptr;
  for (BulkCopy* other = issuer->first_bulk; other != copy; other = other->next) previous = other;
  (previous ? previous->next : issuer->first_bulk) = copy->next;
  if (issuer->last_bulk == copy) issuer->last_bulk = previous;
}

void BulkQueue::issue_load(Fiber* self, void* smem_dst, const void* src, uint32_t num_bytes,
                           uint64_t* barrier) {
  BulkCopy* copy = take();
  copy->issuer = self;
  copy->dst = static_cast<uint8_t*>(smem_dst);
  copy->src = static_cast<const uint8_t*>(src);
  copy->barrier = barrier;
  copy->view = self->view;
  copy->num_bytes = num_bytes;
  if (Races* races = block_of(self)->races.get()) {
    touch_shared(self, barrier, Races::Access::kStrongRead);
    MbarrierState& state = mbarrier_state(block_of(self), barrier);
    if (state.load_agent == 0) state.load_agent = races->add_agent("a bulk_load");
    races->bulk_load(self, smem_dst, num_bytes, state.load_agent, state.num_phases + 1);
  }
  if (!delay_) finish_load(copy);
}

void BulkQueue::issue_store(Fiber* self, void* dst, const void* smem_src, uint32_t num_bytes) {
  memory_.begin_write(self, dst, num_bytes);
  BulkCopy* copy = take();
  copy->issuer = self;
  copy->dst = static_cast<uint8_t*>(dst);
  copy->src = static_cast<const uint8_t*>(smem_src);
  copy->num_bytes = num_bytes;
  copy->group = self->num_committed_groups;
  if (Races* races = block_of(self)->races.get()) races->bulk_store(self, smem_src, num_bytes);
  (self->last_bulk ? self->last_bulk->next : self->first_bulk) = copy;
  self->last_bulk = copy;
  if (!delay_) {
    stage(copy);
    finish_store(copy, true);
  }
}

void BulkQueue::stage(BulkCopy* copy) {
  copy->staged.assign(copy->src, copy->src + copy->num_bytes);
  copy->read = true;
  note_progress();
}

void BulkQueue::finish_store(BulkCopy* copy, bool waited_for) {
  memory_.write_bulk(copy->issuer, copy->dst, copy->staged.data(), copy->num_bytes, waited_for);
  unlink_store(copy);
  retire(copy);
}

void BulkQueue::finish_load(BulkCopy* copy) {
  const uint32_t time =
      memory_.read_bulk(copy->issuer, copy->view, copy->dst, copy->src, copy->num_bytes);
  View& arrived = mbarrier_state(block_of(copy->issuer), copy->barrier).arrived.view;
  arrived.loads_of(grid_of(copy->issuer)->grid.rank) = time;
  const char* error = nullptr;
  const bool done = mbarrier_complete_bytes(copy->barrier, copy->num_bytes, &error);
  if (error) executor_.fail(copy->issuer, std::string("bulk_load: ") + error);
  note_progress();
  if (done) {
    complete_mbarrier_phase(block_of(copy->issuer), copy->barrier);
    executor_.notify(copy->barrier);
  }
  retire(copy);
}

void BulkQueue::finish_stores(Fiber* self, uint32_t newest_groups, bool read_only) {
  for (BulkCopy* copy = self->first_bulk; copy;) {
    BulkCopy* next = copy->next;
    // Groups in number order; the open one, not committed, is never waited for.
    if (copy->group + newest_groups >= self->num_committed_groups) break;
    if (!copy->read) stage(copy);
    if (!read_only) finish_store(copy, true);
    copy = next;
  }
}

void BulkQueue::advance_one() {
  BulkCopy* copy = pending_[random_.below(pending_.size())];
  if (copy->barrier) {
    finish_load(copy);
  } else if (!copy->read) {
    stage(copy);
  } else {
    finish_store(copy, false);
  }
}

const BulkCopy* BulkQueue::find_load_of(const Block* block) const {
  for (const BulkCopy* copy : pending_) {
    if (copy->barrier && block_of(copy->issuer) == block) return copy;
  }
  return nullptr;
}

void BulkQueue::finish_grid(const GridRun& run) {
  for (size_t i = 0; i < pending_.size();) {
    BulkCopy* copy = pending_[i];
    if (grid_of(copy->issuer) != &run) {
      ++i;
      continue;
    }
    if (!copy->read) stage(copy);
    finish_store(copy, false);  // another copy takes place i
  }
}

void BulkQueue::drop_grid(const GridRun& run) {
  for (size_t i = 0; i < pending_.size();) {
    BulkCopy* copy = pending_[i];
    if (grid_of(copy->issuer) == &run) {
      retire(copy);
    } else {
      ++i;
    }
  }
}

void issue_bulk_load(Fiber* self, void* smem_dst, const void* global_src, uint32_t num_bytes,
                     uint64_t* barrier) {
  require_begun(self, global_src);
  t_state.simulated->bulk().issue_load(self, smem_dst, global_src, num_bytes, barrier);
  t_state.simulated->maybe_preempt(self);
}

void issue_bulk_store(Fiber* self, void* global_dst, const void* smem_src, uint32_t num_bytes) {
  require_begun(self, global_dst);
  t_state.simulated->bulk().issue_store(self, global_dst, smem_src, num_bytes);
  t_state.simulated->maybe_preempt(self);
}

void finish_bulk_stores(Fiber* self, uint32_t newest_groups, bool read_only) {
  if (Races* races = block_of(self)->races.get()) races->bulk_wait(self, newest_groups);
  t_state.simulated->bulk().finish_stores(self, newest_groups, read_only);
}

}  // namespace deep_comm::simt
