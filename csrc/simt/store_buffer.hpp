// Stores that not everybody sees yet, by aligned 16-byte lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deep_comm::simt {

inline constexpr unsigned kLineBytes = 16;  // no access is wider, and every access lies in one line
using LineKey = uintptr_t;                  // address / kLineBytes

inline LineKey line_key(const void* address) {
  return reinterpret_cast<uintptr_t>(address) / kLineBytes;
}
// The bytes of an access in its line.
inline uint16_t valid_mask(const void* address, unsigned num_bytes) {
  const unsigned offset = reinterpret_cast<uintptr_t>(address) % kLineBytes;
  return static_cast<uint16_t>(((1u << num_bytes) - 1) << offset);
}
inline uint64_t line_hash(LineKey key) { return key * 0x9e3779b97f4a7c15u; }

struct LastPushes;

struct StoreLine {
  LineKey key;
  uint32_t release;  // of the bytes; 0: none (history.hpp)
  uint16_t valid;    // bit i: bytes[i] was stored
  uint8_t bytes[kLineBytes];
};

// Copies the bytes that `valid` names.
void copy_valid(uint8_t* dst, const uint8_t* src, uint16_t valid);

class StoreBuffer {
 public:
  bool empty() const { return lines_.empty(); }
  size_t size() const { return lines_.size(); }
  StoreLine& line(size_t i) { return lines_[i]; }

  // False says that no line of that key is here; most lookups end with it.
  bool may_hold(LineKey key) const { return filter_ >> (line_hash(key) >> 58) & 1; }
  StoreLine* find(LineKey key);
  // The line of that key, which may be new and without bytes.
  StoreLine* find_or_add(LineKey key);
  void erase(StoreLine* line);
  void clear();

  StoreBuffer* outer = nullptr;  // whose stores are older for whoever looks through this one
  size_t bound = 0;              // lines it holds before it must let one go
  int list_index = -1;           // in the memory's list of buffers that hold something
  int rank = 0;
  LastPushes* pushes = nullptr;  // of whose buffer it is; null: the rank's

 private:
  size_t slot_of(LineKey key) const;
  void rebuild(size_t num_slots);

  std::vector<StoreLine> lines_;
  // open addressing: place in lines_ + 1, or 0. Empty while few lines.
  std::vector<uint32_t> slots_;
  uint64_t filter_ = 0;
};

}  // namespace deep_comm::simt
