#include "simulated_memory.hpp"

#include <cstring>

#include "executor.hpp"
#include "simulated_executor.hpp"

namespace deep_comm::simt {
namespace {

// How often a load looks into the past: the seed takes one.
constexpr uint32_t kStaleMeans[] = {2, 6, 40, 0};
// So often in a row a word may be read that is older than what has arrived.
constexpr uint32_t kMaxStaleReads = 6;

void check_aligned(Executor& executor, const Fiber* fiber, const void* address,
                   unsigned num_bytes) {
  if (reinterpret_cast<uintptr_t>(address) % num_bytes == 0) [[likely]]
    return;
  executor.fail(fiber, "misaligned access of " + std::to_string(num_bytes) + " bytes");
}

}  // namespace

SimulatedMemory::SimulatedMemory(bool weak, bool allow_late_loads, int num_ranks, Random& random,
                                 Executor& executor)
    : weak_(weak),
      finds_late_loads_(weak && !allow_late_loads),
      random_(random),
      executor_(executor),
      stale_load_(weak ? kStaleMeans[random.below(std::size(kStaleMeans))] : 0, random),
      stale_bulk_(weak ? kStaleMeans[random.below(std::size(kStaleMeans))] : 0, random),
      past_store_(weak ? kStaleMeans[random.below(std::size(kStaleMeans))] : 0, random),
      ranks_(static_cast<size_t>(num_ranks)) {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].bound = kRankLines;
    ranks_[rank].rank = static_cast<int>(rank);
  }
}

// Nothing that this fiber stores there may be seen by a load that has taken place.
void SimulatedMemory::require_loaded(const Fiber* fiber, const void* address, size_t num_bytes) {
  if (!finds_late_loads_ || block_of(fiber)->owns(address)) return;
  const std::string error = late_loads_.find(fiber, address, num_bytes, history_.forgotten_loads());
  if (!error.empty()) executor_.fail(fiber, error);
}

void SimulatedMemory::peek(const Fiber* fiber, void* value, const void* address,
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

namespace {

void overlay(uint8_t* bytes, const StoreLine& line, uint16_t wanted) {
  copy_valid(bytes, line.bytes, line.valid & wanted);
}

}  // namespace

void SimulatedMemory::load(Fiber* fiber, void* value, const void* address, unsigned num_bytes) {
  if (finds_late_loads_ && !block_of(fiber)->owns(address)) {
    late_loads_.note(fiber, address, num_bytes);
  }
  if (!stale_load_.strikes(random_)) [[likely]] {
    peek(fiber, value, address, num_bytes);
    return;
  }
  const LineKey key = line_key(address);
  const uint16_t wanted = valid_mask(address, num_bytes);
  Layers layers = layers_of(fiber, key, wanted, false);
  take_back(fiber, fiber->view, key, wanted, 0, true, layers);
  finish_load(fiber, value, address, num_bytes, layers);
}

void SimulatedMemory::finish_load(const Fiber* fiber, void* value, const void* address,
                                  unsigned num_bytes, Layers& layers) {
  const LineKey key = line_key(address);
  const uint16_t wanted = valid_mask(address, num_bytes);
  overlay(layers.memory, layers.rank, wanted);
  overlay(layers.memory, layers.block, wanted);
  for (StoreBuffer* own : {fiber->warp->stores, fiber->stores}) {
    if (const StoreLine* line = own ? own->find(key) : nullptr)
      overlay(layers.memory, *line, wanted);
  }
  memcpy(value, layers.memory + reinterpret_cast<uintptr_t>(address) % kLineBytes, num_bytes);
}

void SimulatedMemory::ordered_load(Fiber* fiber, void* value, const void* address,
                                   unsigned num_bytes, bool acquires, Scope scope) {
  const LineKey key = line_key(address);
  bool goes_back = stale_load_.strikes(random_);
  if (!weak_ || history_.first(key) == 0) {
    peek(fiber, value, address, num_bytes);
    return;
  }
  const uint16_t wanted = valid_mask(address, num_bytes);
  Layers layers = layers_of(fiber, key, wanted, false);
  ReadState::Floor* floor = fiber->reads ? fiber->reads->find(key) : nullptr;
  goes_back = goes_back && (!floor || floor->num_stale < kMaxStaleReads);
  const Left left =
      take_back(fiber, fiber->view, key, wanted, floor ? floor->time : 0, goes_back, layers);
  finish_load(fiber, value, address, num_bytes, layers);
  if (left.time == 0) return;
  if (!left.is_seen_anyway) {
    Change& seen = history_.at(left.time);
    if (seen.key == key && seen.read_time == 0) seen.read_time = history_.now();
    if (!floor) {
      ReadState& reads = reads_of(fiber);
      floor = &reads.floors[reads.next_floor++ % ReadState::kNumFloors];
      if (floor->key != 0) see_all_until(fiber, floor->time);
      *floor = {.key = key, .time = 0, .num_stale = 0};
    }
    floor->time = std::max(floor->time, left.time);
  }
  if (floor) floor->num_stale = goes_back ? floor->num_stale + 1 : 0;
  observe(fiber, left.release, left.time, acquires, scope);
}

void SimulatedMemory::store(Fiber* fiber, void* address, const void* value, unsigned num_bytes) {
  store(fiber, address, value, num_bytes, 0);
}

void SimulatedMemory::relaxed_store(Fiber* fiber, void* address, const void* value,
                                    unsigned num_bytes, Scope scope) {
  store(fiber, address, value, num_bytes, relaxed_release(fiber, scope));
}

// Nothing orders this store after a change that its fiber need not see, so it may come before that
// change: then nobody sees the store who sees the change. Whoever must see the store sees nothing
// older.
bool SimulatedMemory::store_in_the_past(Fiber* fiber, void* address, const void* value,
                                        unsigned num_bytes, uint32_t release) {
  if (!past_store_.strikes(random_)) [[likely]]
    return false;
  const LineKey key = line_key(address);
  const uint16_t written = valid_mask(address, num_bytes);
  for (StoreBuffer* own :
       {buffer_of_rank(fiber), fiber->warp->block->stores, fiber->warp->stores, fiber->stores}) {
    if (own && own->find(key)) return false;
  }
  uint32_t time = history_.first(key);
  while (time != 0) {
    const Change& change = history_.at(time);
    if (change.key == key && (change.written & written) != 0) break;
    time = history_.next(change);
  }
  if (time == 0) return false;
  Change& change = history_.at(time);
  const ReadState::Floor* floor = fiber->reads ? fiber->reads->find(key) : nullptr;
  if (change.is_atomic || change.scope != Scope::kSys || (written & ~change.written) != 0 ||
      must_see(change, time, fiber, fiber->view) || (floor && floor->time >= time)) {
    return false;
  }
  memcpy(change.old + reinterpret_cast<uintptr_t>(address) % kLineBytes, value, num_bytes);
  change.past_release = join_releases(change.past_release, release);
  change.has_past = true;
  do {
    time = history_.next(history_.at(time));
  } while (time != 0 &&
           (history_.at(time).key != key || (history_.at(time).written & written) == 0));
  see_all_until(fiber, time);
  return true;
}

bool SimulatedMemory::was_written(const Fiber* fiber, const void* address) const {
  const LineKey key = line_key(address);
  const uint16_t wanted = valid_mask(address, 1);
  for (uint32_t time = history_.first(key); time > grid_of(fiber)->start_time;) {
    const Change& change = history_.at(time);
    if (change.key == key && (change.written & wanted) != 0) return true;
    time = history_.next(change);
  }
  return false;
}

void SimulatedMemory::store(Fiber* fiber, void* address, const void* value, unsigned num_bytes,
                            uint32_t release) {
  check_aligned(executor_, fiber, address, num_bytes);
  const bool is_shared = block_of(fiber)->owns(address);
  require_loaded(fiber, address, num_bytes);
  if (!is_shared && store_in_the_past(fiber, address, value, num_bytes, release)) return;
  if (!weak_ || is_shared) {
    if (weak_) note_change_of_block(fiber, address, num_bytes, release);
    memcpy(address, value, num_bytes);
    note_progress();
    executor_.notify(address);
    return;
  }
  uint8_t bytes[kLineBytes];
  memcpy(bytes + reinterpret_cast<uintptr_t>(address) % kLineBytes, value, num_bytes);
  put(buffer_of(fiber), line_key(address), valid_mask(address, num_bytes), bytes, release, fiber,
      nullptr);
}

void SimulatedMemory::release_store(Fiber* fiber, void* address, const void* value,
                                    unsigned num_bytes, Scope scope) {
  check_aligned(executor_, fiber, address, num_bytes);
  require_loaded(fiber, address, num_bytes);
  order(fiber, scope);
  if (!weak_) {
    memcpy(address, value, num_bytes);
    note_progress();
    executor_.notify(address);
    return;
  }
  const uint32_t release = join_releases(relaxed_release(fiber, scope), add_release(fiber, scope));
  if (block_of(fiber)->owns(address)) {
    note_change_of_block(fiber, address, num_bytes, release);
    memcpy(address, value, num_bytes);
  } else {
    uint8_t bytes[kLineBytes];
    memcpy(bytes + reinterpret_cast<uintptr_t>(address) % kLineBytes, value, num_bytes);
    const LineKey key = line_key(address);
    const uint16_t valid = valid_mask(address, num_bytes);
    LastPushes* pushes = &fiber->warp->pushes;
    if (scope == Scope::kSys) {
      write(key, valid, bytes, release, fiber, grid_of(fiber)->grid.rank, pushes);
    } else {
      StoreBuffer* place =
          scope == Scope::kCta ? buffer_of(block_of(fiber)) : buffer_of_rank(fiber);
      put(place, key, valid, bytes, release, fiber, pushes);
    }
  }
  note_progress();
  executor_.notify(address);
}

void SimulatedMemory::begin_atomic(Fiber* fiber, const void* address, unsigned num_bytes,
                                   AtomicOrder atomic_order, Scope scope) {
  require_loaded(fiber, address, num_bytes);
  if (atomic_order == AtomicOrder::kAcqRel) order(fiber, scope);
  settle(fiber, address, num_bytes);
  memcpy(before_atomic_ + reinterpret_cast<uintptr_t>(address) % kLineBytes, address, num_bytes);
}

// An atomic reads the newest value. What it stores carries what it has read, too.
void SimulatedMemory::end_atomic(Fiber* fiber, const void* address, unsigned num_bytes,
                                 AtomicOrder atomic_order, Scope scope) {
  if (!weak_) return;
  const bool is_ordered = atomic_order == AtomicOrder::kAcqRel;
  const LineKey key = line_key(address);
  const uint16_t wanted = valid_mask(address, num_bytes);
  uint32_t read_release = 0;
  Layers unused;
  const Left left = take_back(fiber, fiber->view, key, wanted, 0, false, unused);
  if (left.time != 0) {
    read_release = left.release;
    observe(fiber, read_release, left.time, is_ordered, scope);
  }
  uint32_t release = join_releases(read_release, relaxed_release(fiber, scope));
  if (is_ordered) release = join_releases(release, add_release(fiber, scope));
  const bool is_shared = block_of(fiber)->owns(address);
  Change change;
  change.key = key;
  change.source = fiber;
  change.release = release;
  change.written = wanted;
  change.old_valid = 0xffff;
  change.rank = static_cast<uint16_t>(grid_of(fiber)->grid.rank);
  change.scope = is_shared ? Scope::kCta : Scope::kSys;
  change.is_atomic = true;
  copy_valid(change.old, before_atomic_, wanted);
  const uint32_t time = history_.add(change);
  (is_shared ? fiber->warp->pushes.block : fiber->warp->pushes.sys) = time;
}

void SimulatedMemory::fence(Fiber* fiber, Scope scope) {
  order(fiber, scope);
  if (!weak_) return;
  ReadState& reads = reads_of(fiber);
  for (size_t place = 0; place <= static_cast<size_t>(scope); ++place) {
    if (reads.has_relaxed[place]) fiber->view.join(reads.relaxed[place]);
  }
  const Release before = reads.fence;
  reads.fence = release_of(fiber, scope);
  // Readers whom this fence does not reach still get what a wider one before it has released.
  if (!reads.has_fence) {
    reads.fence.wider = release_of_launch(fiber);
  } else {
    reads.fence.wider = before.scope > scope ? history_.add_release(before) : before.wider;
  }
  reads.has_fence = true;
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

}  // namespace deep_comm::simt
