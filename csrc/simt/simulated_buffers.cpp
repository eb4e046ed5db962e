// Where stores wait, and how their lines go outward.
#include <cstring>

#include "executor.hpp"
#include "simulated_executor.hpp"
#include "simulated_memory.hpp"

namespace deep_comm::simt {

StoreBuffer* SimulatedMemory::take_buffer(StoreBuffer* outer, size_t bound, LastPushes* pushes) {
  if (free_.empty()) {
    all_.push_back(std::make_unique<StoreBuffer>());
    free_.push_back(all_.back().get());
  }
  StoreBuffer* buffer = free_.back();
  free_.pop_back();
  buffer->outer = outer;
  buffer->bound = bound;
  buffer->rank = outer->rank;
  buffer->pushes = pushes;
  return buffer;
}

void SimulatedMemory::give_back(StoreBuffer*& buffer) {
  if (!buffer) return;
  free_.push_back(buffer);
  buffer = nullptr;
}

void SimulatedMemory::give_back(Fiber* fiber) {
  give_back(fiber->stores);
  if (!fiber->reads) return;
  free_reads_.push_back(fiber->reads);
  fiber->reads = nullptr;
}

StoreBuffer* SimulatedMemory::buffer_of_rank(const Fiber* fiber) {
  return &ranks_[static_cast<size_t>(grid_of(fiber)->grid.rank)];
}
StoreBuffer* SimulatedMemory::buffer_of(Block* block) {
  if (!block->stores) {
    block->stores = take_buffer(&ranks_[static_cast<size_t>(block->grid->grid.rank)], kBlockLines,
                                &block->pushes);
  }
  return block->stores;
}
StoreBuffer* SimulatedMemory::buffer_of(Warp* warp) {
  if (!warp->stores) warp->stores = take_buffer(buffer_of(warp->block), kWarpLines, &warp->pushes);
  return warp->stores;
}
StoreBuffer* SimulatedMemory::buffer_of(Fiber* fiber) {
  if (!fiber->stores) {
    fiber->stores = take_buffer(buffer_of(fiber->warp), kFiberLines, &fiber->warp->pushes);
  }
  return fiber->stores;
}
void SimulatedMemory::write(LineKey key, uint16_t valid, const uint8_t* bytes, uint32_t release,
                            const void* source, int rank, LastPushes* pushes) {
  auto* address = reinterpret_cast<uint8_t*>(key * kLineBytes);
  note_change(key, valid, nullptr, address, valid, source, rank, pushes, release);
  copy_valid(address, bytes, valid);
  note_progress();
  executor_.notify(address);
}

void SimulatedMemory::empty(StoreBuffer* buffer) {
  if (buffer->list_index < 0) return;
  StoreBuffer* last = filled_.back();
  filled_[static_cast<size_t>(buffer->list_index)] = last;
  last->list_index = buffer->list_index;
  filled_.pop_back();
  buffer->list_index = -1;
}

void SimulatedMemory::drop(StoreBuffer* buffer, StoreLine* line) {
  buffer->erase(line);
  --num_lines_;
  if (buffer->empty()) empty(buffer);
}

void SimulatedMemory::put(StoreBuffer* buffer, LineKey key, uint16_t valid, const uint8_t* bytes,
                          uint32_t release, const void* source, LastPushes* pushes) {
  StoreLine* line = buffer->find_or_add(key);
  const bool is_new = line->valid == 0;
  // Only blocks and ranks have readers that need not see it.
  if (buffer->outer == nullptr || buffer->outer->outer == nullptr) {
    note_change(key, valid, buffer, line->bytes, line->valid, source, buffer->rank, pushes,
                release);
  }
  copy_valid(line->bytes, bytes, valid);
  line->valid |= valid;
  line->release = join_releases(line->release, release);
  if (!is_new) return;
  ++num_lines_;
  if (buffer->list_index < 0) {
    buffer->list_index = static_cast<int>(filled_.size());
    filled_.push_back(buffer);
  }
  if (buffer->size() > buffer->bound) {
    drain(buffer, &buffer->line(random_.below(buffer->size())), 0xffff);
  }
}

// The bytes of the line that `part` names go to memory, after what is older for the same observers.
void SimulatedMemory::drain(StoreBuffer* buffer, StoreLine* line, uint16_t part) {
  const LineKey key = line->key;
  StoreBuffer* older[3];
  int num_older = 0;
  for (StoreBuffer* outer = buffer->outer; outer; outer = outer->outer) {
    if (outer->may_hold(key)) older[num_older++] = outer;
  }
  while (num_older-- > 0) {
    StoreLine* older_line = older[num_older]->find(key);
    if (!older_line) continue;
    const StoreLine copy = *older_line;
    drop(older[num_older], older_line);
    write(key, copy.valid, copy.bytes, copy.release, older[num_older], buffer->rank,
          older[num_older]->pushes);
  }
  const StoreLine copy = *line;
  const uint16_t rest = copy.valid & static_cast<uint16_t>(~part);
  if (rest == 0) {
    drop(buffer, line);
  } else {
    line->valid = rest;
  }
  write(key, copy.valid & part, copy.bytes, copy.release, buffer, buffer->rank, buffer->pushes);
}

void SimulatedMemory::drain_one() {
  StoreBuffer* buffer = filled_[random_.below(filled_.size())];
  StoreLine* line = &buffer->line(random_.below(buffer->size()));
  // A scalar of eight bytes is one access; a vector of sixteen need not be.
  const uint64_t which = random_.below(4);
  uint16_t part = which == 0 ? 0x00ff : which == 1 ? 0xff00 : 0xffff;
  if ((line->valid & part) == 0) part = 0xffff;
  drain(buffer, line, part);
}

void SimulatedMemory::move(StoreBuffer* from, StoreBuffer* to) {
  if (!from || from->empty()) return;
  num_lines_ -= from->size();
  empty(from);
  for (size_t i = 0; i < from->size(); ++i) {
    const StoreLine& line = from->line(i);
    put(to, line.key, line.valid, line.bytes, line.release, from, from->pushes);
  }
  // Only now: a fiber that wakes looks through both buffers.
  for (size_t i = 0; i < from->size(); ++i) {
    executor_.notify(reinterpret_cast<const void*>(from->line(i).key * kLineBytes));
  }
  from->clear();
}

void SimulatedMemory::drain_all(StoreBuffer* buffer) {
  if (!buffer || buffer->empty()) return;
  num_lines_ -= buffer->size();
  empty(buffer);
  for (size_t i = 0; i < buffer->size(); ++i) {
    const StoreLine& line = buffer->line(i);
    write(line.key, line.valid, line.bytes, line.release, buffer, buffer->rank, buffer->pushes);
  }
  buffer->clear();
}

void SimulatedMemory::settle(Fiber* fiber, const void* address, size_t num_bytes) {
  if (num_lines_ == 0) return;
  Warp* warp = fiber->warp;
  StoreBuffer* chain[4] = {buffer_of_rank(fiber), warp->block->stores, warp->stores, fiber->stores};
  const LineKey last = line_key(static_cast<const uint8_t*>(address) + num_bytes - 1);
  for (StoreBuffer* buffer : chain) {
    if (!buffer || buffer->empty()) continue;
    for (LineKey key = line_key(address); key <= last; ++key) {
      if (StoreLine* line = buffer->find(key)) drain(buffer, line, 0xffff);
    }
  }
}

void SimulatedMemory::finish_grid(GridRun& run) {
  drain_all(&ranks_[static_cast<size_t>(run.grid.rank)]);
  for (int i = 0; i < run.grid.num_blocks; ++i) drain_all(run.blocks[i].stores);
  for (int i = 0; i < run.num_warps(); ++i) drain_all(run.warps[i].stores);
  for (int i = 0; i < run.num_fibers(); ++i) drain_all(run.fibers[i]->stores);
  for (int i = 0; i < run.num_fibers(); ++i) give_back(run.fibers[i]);
  for (int i = 0; i < run.num_warps(); ++i) give_back(run.warps[i].stores);
  for (int i = 0; i < run.grid.num_blocks; ++i) give_back(run.blocks[i].stores);
}

void SimulatedMemory::drop_grid(GridRun& run) {
  late_loads_.forget(run.grid.rank);
  auto discard = [this](StoreBuffer*& buffer) {
    if (!buffer) return;
    num_lines_ -= buffer->size();
    empty(buffer);
    buffer->clear();
    give_back(buffer);
  };
  StoreBuffer* rank = &ranks_[static_cast<size_t>(run.grid.rank)];
  num_lines_ -= rank->size();
  empty(rank);
  rank->clear();
  for (int i = 0; i < run.num_fibers(); ++i) {
    discard(run.fibers[i]->stores);
    give_back(run.fibers[i]);
  }
  for (int i = 0; i < run.num_warps(); ++i) discard(run.warps[i].stores);
  for (int i = 0; i < run.grid.num_blocks; ++i) discard(run.blocks[i].stores);
}

}  // namespace deep_comm::simt
