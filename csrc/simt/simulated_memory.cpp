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

// Lines of a bulk copy, or of a put, of which the history remembers what they held before.
constexpr size_t kMaxBulkLinesNoted = 8;

// How often a load looks into the past: the seed takes one.
constexpr uint32_t kStaleMeans[] = {2, 6, 40, 0};
// So often in a row a word may be read that is older than what has arrived.
constexpr uint32_t kMaxStaleReads = 6;

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

// ---- buffers --------------------------------------------------------------------------

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
ReadState& SimulatedMemory::reads_of(Fiber* fiber) {
  if (fiber->reads) return *fiber->reads;
  if (free_reads_.empty()) {
    all_reads_.push_back(std::make_unique<ReadState>());
    free_reads_.push_back(all_reads_.back().get());
  }
  fiber->reads = free_reads_.back();
  free_reads_.pop_back();
  *fiber->reads = ReadState{};
  return *fiber->reads;
}

// Nothing that this fiber stores there may be seen by a load that has taken place.
void SimulatedMemory::require_loaded(const Fiber* fiber, const void* address, size_t num_bytes) {
  if (!finds_late_loads_ || block_of(fiber)->owns(address)) return;
  const std::string error = late_loads_.find(fiber, address, num_bytes, history_.forgotten_loads());
  if (!error.empty()) executor_.fail(fiber, error);
}

// ---- what is remembered ---------------------------------------------------------------

uint32_t SimulatedMemory::note_change(LineKey key, uint16_t written, const StoreBuffer* place,
                                      const uint8_t* old_bytes, uint16_t old_valid,
                                      const void* source, int rank, LastPushes* pushes,
                                      uint32_t release) {
  Change change;
  change.key = key;
  change.place = place;
  change.source = source;
  change.release = release;
  change.written = written;
  change.old_valid = old_valid;
  change.rank = static_cast<uint16_t>(rank);
  change.scope = place == nullptr                              ? Scope::kSys
                 : place == &ranks_[static_cast<size_t>(rank)] ? Scope::kGpu
                                                               : Scope::kCta;
  copy_valid(change.old, old_bytes, written & old_valid);
  const uint32_t time = history_.add(change);
  if (pushes) {
    (change.scope == Scope::kCta   ? pushes->block
     : change.scope == Scope::kGpu ? pushes->gpu
                                   : pushes->sys) = time;
  }
  return time;
}

// Before a fiber changes a word of its block's shared memory.
void SimulatedMemory::note_change_of_block(Fiber* fiber, const void* address, unsigned num_bytes,
                                           uint32_t release) {
  Change change;
  change.key = line_key(address);
  change.source = fiber;
  change.release = release;
  change.written = valid_mask(address, num_bytes);
  change.old_valid = 0xffff;
  change.rank = static_cast<uint16_t>(grid_of(fiber)->grid.rank);
  change.scope = Scope::kCta;
  memcpy(change.old + reinterpret_cast<uintptr_t>(address) % kLineBytes, address, num_bytes);
  fiber->warp->pushes.block = history_.add(change);
}

// After all that the fiber has met was moved as far as `scope`.
Release SimulatedMemory::release_of(const Fiber* fiber, Scope scope) const {
  const int rank = grid_of(fiber)->grid.rank;
  const Block* block = block_of(fiber);
  Release release{.view = view_for_warp(fiber), .scope = scope, .rank = rank, .block = block};
  const uint32_t now = history_.now();
  View& view = release.view;
  view.block = now;
  if (scope != Scope::kCta) {
    view.gpu = now;
    view.sys_of(rank) = std::max(view.sys_of(rank), block->pushes.sys);
  }
  if (scope == Scope::kSys) view.sys_of(rank) = now;
  return release;
}

// An atomic, or a store to a line of a buffer, after one that was released.
uint32_t SimulatedMemory::join_releases(uint32_t earlier, uint32_t later) {
  if (earlier == 0 || earlier == later) return later;
  if (later == 0) return earlier;
  const Release first = history_.release(earlier, history_.now());
  Release joined = history_.release(later, history_.now());
  if (joined.scope >= first.scope && first.wider == 0 && joined.view.covers(first.view)) {
    return later;
  }
  if (joined.rank < 0) {
    joined.rank = first.rank;
    joined.block = first.block;
  }
  // Readers whom the narrower one reaches get both, all others the wider one alone.
  if (first.scope < joined.scope) {
    joined.wider = join_releases(first.wider, later);
  } else if (first.scope > joined.scope) {
    joined.wider = join_releases(earlier, joined.wider);
  } else {
    joined.wider = join_releases(first.wider, joined.wider);
  }
  joined.view.join(first.view);
  joined.scope = std::min(first.scope, joined.scope);
  return history_.add_release(joined);
}

uint32_t SimulatedMemory::release_of_launch(const Fiber* fiber) {
  return kLaunchesRelease ? History::release_of_time(grid_of(fiber)->start_time) : 0;
}

// What a relaxed store carries because of a fence before it; 0: nothing.
uint32_t SimulatedMemory::relaxed_release(Fiber* fiber, Scope scope) {
  if (!fiber->reads || !fiber->reads->has_fence) return release_of_launch(fiber);
  Release release = fiber->reads->fence;
  if (release.scope >= scope) release.wider = 0;
  release.scope = std::min(release.scope, scope);
  return history_.add_release(release);
}

// The fiber has read a value that carries a release, in a change of that time.
void SimulatedMemory::observe(Fiber* fiber, uint32_t number, uint32_t time, bool acquires,
                              Scope scope) {
  if (number == 0) return;
  const Release release = history_.release(number, time);
  const Scope needed = release.block == block_of(fiber)            ? Scope::kCta
                       : release.rank == grid_of(fiber)->grid.rank ? Scope::kGpu
                                                                   : Scope::kSys;
  if (release.scope < needed) return observe(fiber, release.wider, time, acquires, scope);
  View view = release.view;
  if (needed != Scope::kCta) view.block = 0;
  if (needed == Scope::kSys) view.gpu = 0;
  if (fiber->view.covers(view)) return;
  if (acquires && scope >= needed) {
    fiber->view.join(view);
    return;
  }
  ReadState& reads = reads_of(fiber);
  const auto place = static_cast<size_t>(needed);
  reads.has_relaxed[place] = true;
  reads.relaxed[place].join(view);
}

// There is no room to remember that a fiber has read this change: so it sees all others, too.
void SimulatedMemory::see_all_until(Fiber* fiber, uint32_t time) {
  fiber->view.join(View::all(time));
}

bool SimulatedMemory::can_see(const Change& change, const Fiber* fiber) const {
  if (change.place == nullptr) return true;
  return change.place == fiber->warp->block->stores ||
         change.place == &ranks_[static_cast<size_t>(grid_of(fiber)->grid.rank)];
}

bool SimulatedMemory::must_see(const Change& change, uint32_t time, const Fiber* fiber,
                               const View& view) const {
  if (change.read_time != 0 && change.read_time <= view.reads) return true;
  switch (change.scope) {
    case Scope::kCta:
      if (time <= view.block) return true;
      break;
    case Scope::kGpu:
      if (time <= view.gpu) return true;
      break;
    case Scope::kSys:
      if (time <= view.sys_of(change.rank)) return true;
      break;
  }
  const Warp* warp = fiber->warp;
  return change.source == fiber || change.source == fiber->stores ||
         change.source == warp->stores || change.source == warp->block->stores ||
         change.source == &ranks_[static_cast<size_t>(grid_of(fiber)->grid.rank)];
}

struct SimulatedMemory::Layers {
  uint8_t memory[kLineBytes];
  StoreLine rank, block;  // valid 0: none

  void take_back(const Change& change) {
    if (change.place == nullptr) {
      copy_valid(memory, change.old, change.written);
      return;
    }
    StoreLine& line = change.scope == Scope::kGpu ? rank : block;
    copy_valid(line.bytes, change.old, change.written & change.old_valid);
    line.valid =
        static_cast<uint16_t>((line.valid & ~change.written) | (change.written & change.old_valid));
  }
};

SimulatedMemory::Layers SimulatedMemory::layers_of(const Fiber* fiber, LineKey key, uint16_t wanted,
                                                   bool only_of_rank) {
  Layers layers;
  copy_valid(layers.memory, reinterpret_cast<const uint8_t*>(key * kLineBytes), wanted);
  const auto find = [key](StoreBuffer* buffer, StoreLine& copy) {
    const StoreLine* line = buffer ? buffer->find(key) : nullptr;
    copy.valid = 0;
    if (line) copy = *line;
  };
  find(buffer_of_rank(fiber), layers.rank);
  find(only_of_rank ? nullptr : fiber->warp->block->stores, layers.block);
  return layers;
}

SimulatedMemory::Left SimulatedMemory::take_back(const Fiber* fiber, const View& view, LineKey key,
                                                 uint16_t wanted, uint32_t floor, bool goes_back,
                                                 Layers& layers) {
  Left past;
  for (uint32_t time = history_.first(key); time != 0; time = history_.next(history_.at(time))) {
    const Change& change = history_.at(time);
    if (change.key != key || (change.written & wanted) == 0 || !can_see(change, fiber)) continue;
    const bool is_seen = time <= floor || must_see(change, time, fiber, view);
    if (!goes_back || is_seen) {
      return past.time != 0 ? past : Left{time, change.release, is_seen};
    }
    layers.take_back(change);
    goes_back = random_.coin();
    past = change.has_past ? Left{time - 1, change.past_release, false} : Left{};
  }
  return past;
}

// ---- lines ----------------------------------------------------------------------------

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

// ---- accesses -------------------------------------------------------------------------

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

View SimulatedMemory::view_for_warp(const Fiber* fiber) const {
  View view = fiber->view;
  view.reads = history_.now();
  uint32_t& loads = view.loads_of(grid_of(fiber)->grid.rank);
  loads = std::max(loads, fiber->last_read);
  const LastPushes& pushes = fiber->warp->pushes;
  view.block = std::max(view.block, pushes.block);
  view.gpu = std::max(view.gpu, pushes.gpu);
  uint32_t& sys = view.sys_of(grid_of(fiber)->grid.rank);
  sys = std::max(sys, pushes.sys);
  return view;
}

View SimulatedMemory::view_for_block(Fiber* fiber) {
  order(fiber, Scope::kCta);
  return release_of(fiber, Scope::kCta).view;
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

// ---- bulk copies and the network ------------------------------------------------------

// Notes what some of the lines hold that are about to be written.
void SimulatedMemory::note_lines(uint8_t* dst, size_t num_lines, const void* source, int rank,
                                 LastPushes* pushes) {
  const auto note = [&](size_t line) {
    uint8_t* address = dst + line * kLineBytes;
    note_change(line_key(address), 0xffff, nullptr, address, 0xffff, source, rank, pushes, 0);
  };
  if (num_lines <= kMaxBulkLinesNoted) {
    for (size_t line = 0; line < num_lines; ++line) note(line);
  } else {
    // One in each part: a line that is noted twice would look as if it had been written twice.
    for (size_t part = 0; part < kMaxBulkLinesNoted; ++part) {
      const size_t begin = part * num_lines / kMaxBulkLinesNoted;
      const size_t end = (part + 1) * num_lines / kMaxBulkLinesNoted;
      note(begin + random_.below(end - begin));
    }
  }
}

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
  if (weak_) {
    note_lines(out, num_lines, fiber, grid_of(fiber)->grid.rank, &fiber->warp->pushes);
  }
  memcpy(dst, src, num_bytes);
  for (size_t i = 0; i < num_held; ++i) {
    memcpy(out + held[i] * kLineBytes, before[i], kLineBytes);
    put(buffer_of(fiber), line_key(out) + held[i], 0xffff, src + held[i] * kLineBytes, 0, fiber,
        nullptr);
  }
  note_progress();
  for (size_t i = 0; i < num_lines; ++i) executor_.notify(out + i * kLineBytes);
}

uint32_t SimulatedMemory::read_bulk(Fiber* fiber, const View& view, uint8_t* dst, const void* src,
                                    size_t num_bytes) {
  const uint32_t time = late_loads_.note_bulk(block_of(fiber), src, num_bytes);
  memcpy(dst, src, num_bytes);
  StoreBuffer* buffer = buffer_of_rank(fiber);
  if (!buffer->empty()) {
    for (size_t offset = 0; offset < num_bytes; offset += kLineBytes) {
      const StoreLine* line = buffer->find(line_key(src) + offset / kLineBytes);
      if (line) copy_valid(dst + offset, line->bytes, line->valid);
    }
  }
  if (stale_bulk_.strikes(random_)) take_back_lines(fiber, view, dst, src, num_bytes, false);
  return time;
}

void SimulatedMemory::take_back_lines(const Fiber* fiber, const View& view, uint8_t* dst,
                                      const void* src, size_t num_bytes, bool past_buffers) {
  const LineKey first = line_key(src), last = first + num_bytes / kLineBytes - 1;
  for (LineKey near = History::neighbourhood(first); near <= History::neighbourhood(last); ++near) {
    uint64_t done = 0;  // lines of this neighbourhood
    uint32_t time = history_.first_near(near << History::kNearBits);
    for (; time != 0; time = history_.next_near(history_.at(time))) {
      const Change& change = history_.at(time);
      const uint64_t bit = uint64_t{1} << (change.key & 63);
      if (change.key < first || change.key > last || (done & bit) != 0) continue;
      if (History::neighbourhood(change.key) != near || !can_see(change, fiber)) continue;
      if (past_buffers && change.place != nullptr) continue;
      done |= bit;
      if (must_see(change, time, fiber, view)) continue;
      Layers layers = layers_of(fiber, change.key, 0xffff, true);
      take_back(fiber, view, change.key, 0xffff, 0, true, layers);
      if (!past_buffers) copy_valid(layers.memory, layers.rank.bytes, layers.rank.valid);
      memcpy(dst + (change.key - first) * kLineBytes, layers.memory, kLineBytes);
    }
  }
}

void SimulatedMemory::read_early(const Fiber* fiber, RailOp* put) {
  const bool has_lines =
      reinterpret_cast<uintptr_t>(put->src) % kLineBytes == 0 && put->num_bytes % kLineBytes == 0;
  if (!has_lines || !stale_bulk_.strikes(random_)) return;
  put->early.assign(put->src, put->src + put->num_bytes);
  take_back_lines(fiber, fiber->view, put->early.data(), put->src, put->num_bytes, true);
  late_loads_.note_nic(put->rank, put->src, put->num_bytes);
}

void SimulatedMemory::land(const RailOp& put, uint32_t begin, uint32_t num_bytes) {
  const bool is_early = !put.early.empty();
  const uint8_t* src = (is_early ? put.early.data() : put.src) + begin;
  if (weak_) {
    note_lines(put.dst + begin, num_bytes / kLineBytes, this, put.rank, nullptr);
    if (!is_early) late_loads_.note_nic(put.rank, src, num_bytes);
  }
  memcpy(put.dst + begin, src, num_bytes);
}

void SimulatedMemory::land_signal(int rank, uint64_t* word, uint64_t value) {
  if (weak_) {
    Release release{.view = {}, .scope = Scope::kSys, .rank = rank, .block = nullptr};
    release.view.sys_of(rank) = history_.now();  // the puts before it
    release.view.nic_loads_of(rank) = late_loads_.now();
    uint32_t carried = history_.add_release(release);
    if (auto posted = signals_.find(word); posted != signals_.end()) {
      carried = join_releases(posted->second.front(), carried);
      posted->second.pop_front();
      if (posted->second.empty()) signals_.erase(posted);
    }
    const auto offset = reinterpret_cast<uintptr_t>(word) % kLineBytes;
    uint8_t* line = reinterpret_cast<uint8_t*>(word) - offset;
    note_change(line_key(word), valid_mask(word, sizeof *word), nullptr, line, 0xffff, this, rank,
                nullptr, carried);
  }
  *word = value;
}

// ---- the end of a grid ----------------------------------------------------------------

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
