// What the simulated memory remembers: changes, what a release carries, and what a load may take
// back.
#include <cstring>

#include "executor.hpp"
#include "simulated_memory.hpp"

namespace deep_comm::simt {

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
  joined.is_forgotten = joined.is_forgotten || first.is_forgotten;
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
  const bool reaches_any = release.is_forgotten || release.block == block_of(fiber);
  const Scope needed = reaches_any                                 ? Scope::kCta
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

void SimulatedMemory::Layers::take_back(const Change& change) {
  if (change.place == nullptr) {
    copy_valid(memory, change.old, change.written);
    return;
  }
  StoreLine& line = change.scope == Scope::kGpu ? rank : block;
  copy_valid(line.bytes, change.old, change.written & change.old_valid);
  line.valid =
      static_cast<uint16_t>((line.valid & ~change.written) | (change.written & change.old_valid));
}

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

}  // namespace deep_comm::simt
