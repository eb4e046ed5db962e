#include "simulated_memory.hpp"

#include <cstring>

#include "executor.hpp"
#include "simulated_executor.hpp"

namespace deep_comm::simt {
namespace {

constexpr size_t kFiberLines = 64;
constexpr size_t kWarpLines = 256;
constexpr size_t kBlockLines = 1024;
constexpr size_t kRankLines = 4096;

// Lines of a bulk copy that stay behind after its wait. More would find nothing more: a reader that
// is too early has to meet one.
constexpr size_t kMaxBulkLinesHeld = 16;

uint16_t valid_mask(const void* address, unsigned num_bytes) {
  const unsigned offset = reinterpret_cast<uintptr_t>(address) % kLineBytes;
  return static_cast<uint16_t>(((1u << num_bytes) - 1) << offset);
}

void check_aligned(Executor& executor, const Fiber* fiber, const void* address,
                   unsigned num_bytes) {
  if (reinterpret_cast<uintptr_t>(address) % num_bytes == 0) [[likely]]
    return;
  executor.fail(fiber, "misaligned access of " + std::to_string(num_bytes) + " bytes");
}

}  // namespace

SimulatedMemory::SimulatedMemory(bool weak, int num_ranks, Random& random, Executor& executor)
    : weak_(weak), random_(random), executor_(executor), ranks_(static_cast<size_t>(num_ranks)) {
  for (StoreBuffer& buffer : ranks_) buffer.bound = kRankLines;
}

// ---- buffers --------------------------------------------------------------------------

StoreBuffer* SimulatedMemory::take_buffer(StoreBuffer* outer, size_t bound) {
  if (free_.empty()) {
    all_.push_back(std::make_unique<StoreBuffer>());
    free_.push_back(all_.back().get());
  }
  StoreBuffer* buffer = free_.back();
  free_.pop_back();
  buffer->outer = outer;
  buffer->bound = bound;
  return buffer;
}

void SimulatedMemory::give_back(StoreBuffer*& buffer) {
  if (!buffer) return;
  free_.push_back(buffer);
  buffer = nullptr;
}

StoreBuffer* SimulatedMemory::buffer_of_rank(const Fiber* fiber) {
  return &ranks_[static_cast<size_t>(grid_of(fiber)->grid.rank)];
}
StoreBuffer* SimulatedMemory::buffer_of(Block* block) {
  if (!block->stores) {
    block->stores = take_buffer(&ranks_[static_cast<size_t>(block->grid->grid.rank)], kBlockLines);
  }
  return block->stores;
}
StoreBuffer* SimulatedMemory::buffer_of(Warp* warp) {
  if (!warp->stores) warp->stores = take_buffer(buffer_of(warp->block), kWarpLines);
  return warp->stores;
}
StoreBuffer* SimulatedMemory::buffer_of(Fiber* fiber) {
  if (!fiber->stores) fiber->stores = take_buffer(buffer_of(fiber->warp), kFiberLines);
  return fiber->stores;
}

// ---- lines ----------------------------------------------------------------------------

void SimulatedMemory::write(LineKey key, uint16_t valid, const uint8_t* bytes) {
  auto* address = reinterpret_cast<uint8_t*>(key * kLineBytes);
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

void SimulatedMemory::put(StoreBuffer* buffer, LineKey key, uint16_t valid, const uint8_t* bytes) {
  if (!buffer->merge(key, valid, bytes)) return;
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
    write(key, copy.valid, copy.bytes);
  }
  const StoreLine copy = *line;
  const uint16_t rest = copy.valid & static_cast<uint16_t>(~part);
  if (rest == 0) {
    drop(buffer, line);
  } else {
    line->valid = rest;
  }
  write(key, copy.valid & part, copy.bytes);
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
    put(to, line.key, line.valid, line.bytes);
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
    write(line.key, line.valid, line.bytes);
  }
  buffer->clear();
}

// ---- accesses -------------------------------------------------------------------------

void SimulatedMemory::load(const Fiber* fiber, void* value, const void* address,
                           unsigned num_bytes) {
  memcpy(value, address, num_bytes);
  if (num_lines_ == 0) return;
  const LineKey key = line_key(address);
  const Warp* warp = fiber->warp;
  StoreBuffer* chain[4] = {buffer_of_rank(fiber), warp->block->stores, warp->stores, fiber->stores};
  const unsigned offset = reinterpret_cast<uintptr_t>(address) % kLineBytes;
  const uint32_t wanted = (1u << num_bytes) - 1;
  for (StoreBuffer* buffer : chain) {
    if (!buffer || !buffer->may_hold(key)) continue;
    const StoreLine* line = buffer->find(key);
    if (!line) continue;
    for (uint32_t left = line->valid >> offset & wanted; left; left &= left - 1) {
      const int i = __builtin_ctz(left);
      static_cast<uint8_t*>(value)[i] = line->bytes[offset + static_cast<unsigned>(i)];
    }
  }
}

void SimulatedMemory::store(Fiber* fiber, void* address, const void* value, unsigned num_bytes) {
  check_aligned(executor_, fiber, address, num_bytes);
  if (!weak_ || block_of(fiber)->owns(address)) {
    memcpy(address, value, num_bytes);
    note_progress();
    executor_.notify(address);
    return;
  }
  uint8_t bytes[kLineBytes];
  memcpy(bytes + reinterpret_cast<uintptr_t>(address) % kLineBytes, value, num_bytes);
  put(buffer_of(fiber), line_key(address), valid_mask(address, num_bytes), bytes);
}

void SimulatedMemory::release_store(Fiber* fiber, void* address, const void* value,
                                    unsigned num_bytes, Scope scope) {
  check_aligned(executor_, fiber, address, num_bytes);
  order(fiber, scope);
  if (!weak_ || scope == Scope::kSys || block_of(fiber)->owns(address)) {
    memcpy(address, value, num_bytes);
  } else {
    uint8_t bytes[kLineBytes];
    memcpy(bytes + reinterpret_cast<uintptr_t>(address) % kLineBytes, value, num_bytes);
    put(scope == Scope::kCta ? buffer_of(block_of(fiber)) : buffer_of_rank(fiber),
        line_key(address), valid_mask(address, num_bytes), bytes);
  }
  note_progress();
  executor_.notify(address);
}

void SimulatedMemory::order(Fiber* fiber, Scope scope) {
  if (num_lines_ == 0) return;
  Warp* warp = fiber->warp;
  Block* block = warp->block;
  StoreBuffer* const inner[3] = {block->stores, warp->stores, fiber->stores};  // oldest first
  switch (scope) {
    case Scope::kCta:
      if ((!warp->stores || warp->stores->empty()) && (!fiber->stores || fiber->stores->empty())) {
        return;
      }
      move(warp->stores, buffer_of(block));
      move(fiber->stores, buffer_of(block));
      break;
    case Scope::kGpu:
      for (StoreBuffer* buffer : inner) move(buffer, buffer_of_rank(fiber));
      break;
    case Scope::kSys:
      drain_all(buffer_of_rank(fiber));
      for (StoreBuffer* buffer : inner) drain_all(buffer);
      break;
  }
}

void SimulatedMemory::order_to_warp(Fiber* fiber) {
  if (fiber->stores && !fiber->stores->empty()) move(fiber->stores, buffer_of(fiber->warp));
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

// ---- bulk copies ----------------------------------------------------------------------

void SimulatedMemory::write_bulk(Fiber* fiber, void* dst, const uint8_t* src, size_t num_bytes,
                                 bool waited_for) {
  if (num_bytes == 0) return;
  settle(fiber, dst, num_bytes);
  const size_t num_lines = num_bytes / kLineBytes;
  uint8_t* const out = static_cast<uint8_t*>(dst);
  size_t held[kMaxBulkLinesHeld];
  size_t num_held = 0;
  if (waited_for && weak_) {
    num_held = num_lines < kMaxBulkLinesHeld ? num_lines : kMaxBulkLinesHeld;
    for (size_t i = 0; i < num_held; ++i) held[i] = random_.below(num_lines);
  }
  uint8_t before[kMaxBulkLinesHeld][kLineBytes];
  for (size_t i = 0; i < num_held; ++i) memcpy(before[i], out + held[i] * kLineBytes, kLineBytes);
  memcpy(dst, src, num_bytes);
  for (size_t i = 0; i < num_held; ++i) {
    memcpy(out + held[i] * kLineBytes, before[i], kLineBytes);
    put(buffer_of(fiber), line_key(out) + held[i], 0xffff, src + held[i] * kLineBytes);
  }
  note_progress();
  for (size_t i = 0; i < num_lines; ++i) executor_.notify(out + i * kLineBytes);
}

void SimulatedMemory::read_bulk(const Fiber* fiber, uint8_t* dst, const void* src,
                                size_t num_bytes) {
  memcpy(dst, src, num_bytes);
  StoreBuffer* buffer = buffer_of_rank(fiber);
  if (buffer->empty()) return;
  for (size_t offset = 0; offset < num_bytes; offset += kLineBytes) {
    const StoreLine* line = buffer->find(line_key(src) + offset / kLineBytes);
    if (line) copy_valid(dst + offset, line->bytes, line->valid);
  }
}

// ---- the end of a grid ----------------------------------------------------------------

void SimulatedMemory::finish_grid(GridRun& run) {
  drain_all(&ranks_[static_cast<size_t>(run.grid.rank)]);
  for (int i = 0; i < run.grid.num_blocks; ++i) drain_all(run.blocks[i].stores);
  for (int i = 0; i < run.num_warps(); ++i) drain_all(run.warps[i].stores);
  for (int i = 0; i < run.num_fibers(); ++i) drain_all(run.fibers[i]->stores);
  for (int i = 0; i < run.num_fibers(); ++i) give_back(run.fibers[i]->stores);
  for (int i = 0; i < run.num_warps(); ++i) give_back(run.warps[i].stores);
  for (int i = 0; i < run.grid.num_blocks; ++i) give_back(run.blocks[i].stores);
}

void SimulatedMemory::drop_grid(GridRun& run) {
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
  for (int i = 0; i < run.num_fibers(); ++i) discard(run.fibers[i]->stores);
  for (int i = 0; i < run.num_warps(); ++i) discard(run.warps[i].stores);
  for (int i = 0; i < run.grid.num_blocks; ++i) discard(run.blocks[i].stores);
}

}  // namespace deep_comm::simt
