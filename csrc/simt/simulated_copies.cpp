// Bulk copies, and what NICs read and write.
#include <cstring>

#include "executor.hpp"
#include "simulated_memory.hpp"

namespace deep_comm::simt {
namespace {

// Lines of a bulk copy that stay behind after its wait. More would find nothing more: a reader that
// is too early has to meet one.
constexpr size_t kMaxBulkLinesHeld = 16;

// Lines of a bulk copy, or of a put, of which the history remembers what they held before.
constexpr size_t kMaxBulkLinesNoted = 8;

}  // namespace

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

}  // namespace deep_comm::simt
