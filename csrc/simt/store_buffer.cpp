#include "store_buffer.hpp"

#include <algorithm>
#include <cstring>

namespace deep_comm::simt {
namespace {

constexpr size_t kMaxLinesWithoutIndex = 8;

}  // namespace

void copy_valid(uint8_t* dst, const uint8_t* src, uint16_t valid) {
  if (valid == 0xffff) {
    memcpy(dst, src, kLineBytes);
    return;
  }
  for (uint32_t left = valid; left; left &= left - 1) {
    const int i = __builtin_ctz(left);
    dst[i] = src[i];
  }
}

// The slot that holds the key, or the empty one where it would go.
size_t StoreBuffer::slot_of(LineKey key) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = (line_hash(key) >> 20) & mask;
  while (slots_[slot] != 0 && lines_[slots_[slot] - 1].key != key) slot = (slot + 1) & mask;
  return slot;
}

void StoreBuffer::rebuild(size_t num_slots) {
  slots_.assign(num_slots, 0);
  for (size_t i = 0; i < lines_.size(); ++i) {
    slots_[slot_of(lines_[i].key)] = static_cast<uint32_t>(i) + 1;
  }
}

StoreLine* StoreBuffer::find(LineKey key) {
  if (!may_hold(key)) return nullptr;
  if (slots_.empty()) {
    for (StoreLine& line : lines_) {
      if (line.key == key) return &line;
    }
    return nullptr;
  }
  const uint32_t place = slots_[slot_of(key)];
  return place == 0 ? nullptr : &lines_[place - 1];
}

StoreLine* StoreBuffer::find_or_add(LineKey key) {
  if (StoreLine* line = find(key)) return line;
  filter_ |= uint64_t{1} << (line_hash(key) >> 58);
  StoreLine& line = lines_.emplace_back();
  line.key = key;
  line.release = 0;
  line.valid = 0;
  if (slots_.empty()) {
    if (lines_.size() > kMaxLinesWithoutIndex) rebuild(4 * kMaxLinesWithoutIndex);
  } else if (2 * lines_.size() > slots_.size()) {
    rebuild(2 * slots_.size());
  } else {
    slots_[slot_of(key)] = static_cast<uint32_t>(lines_.size());
  }
  return &line;
}

void StoreBuffer::erase(StoreLine* line) {
  const auto place = static_cast<size_t>(line - lines_.data());
  if (!slots_.empty()) {
    // Close the gap that the slot leaves in its run of probes.
    const size_t mask = slots_.size() - 1;
    size_t gap = slot_of(line->key);
    slots_[gap] = 0;
    for (size_t slot = (gap + 1) & mask; slots_[slot] != 0; slot = (slot + 1) & mask) {
      const size_t home = (line_hash(lines_[slots_[slot] - 1].key) >> 20) & mask;
      if (((slot - home) & mask) < ((slot - gap) & mask)) continue;
      slots_[gap] = slots_[slot];
      slots_[slot] = 0;
      gap = slot;
    }
    if (place + 1 != lines_.size()) {
      slots_[slot_of(lines_.back().key)] = static_cast<uint32_t>(place) + 1;
    }
  }
  lines_[place] = lines_.back();
  lines_.pop_back();
  if (lines_.empty()) clear();
}

void StoreBuffer::clear() {
  lines_.clear();
  slots_.clear();
  filter_ = 0;
}

}  // namespace deep_comm::simt
