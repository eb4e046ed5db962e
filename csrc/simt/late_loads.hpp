// Which loads may still come late: a load that nothing orders before a store may return what is
// stored. Fibers run in program order, so no load of the machine does; instead each line remembers
// who has read it, and a store to a line must be ordered behind that (Flanagan and Freund,
// "FastTrack", PLDI 2009, with one time for all reads of a rank).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fiber.hpp"
#include "store_buffer.hpp"
#include "view.hpp"

namespace deep_comm::simt {

class LateLoads {
 public:
  LateLoads() : reads_(size_t{1} << kTableBits) {}

  uint32_t now() const { return now_; }
  // A plain load of a fiber.
  void note(Fiber* fiber, const void* address, size_t num_bytes) {
    fiber->last_read = note({.rank = grid_of(fiber)->grid.rank,
                             .block = block_of(fiber)->index,
                             .thread = fiber->thread_idx},
                            address, num_bytes);
  }
  // A bulk copy of a block, or a NIC, has read. Of much some is remembered.
  uint32_t note_bulk(const Block* block, const void* src, size_t num_bytes) {
    return note({.rank = block->grid->grid.rank, .block = block->index, .thread = kOfBulk}, src,
                num_bytes);
  }
  void note_nic(int rank, const void* src, size_t num_bytes) {
    note({.rank = rank, .thread = kOfNic}, src, num_bytes);
  }
  // Empty: the writer comes behind all reads of these bytes that are remembered and younger than
  // `forgotten`.
  std::string find(const Fiber* writer, const void* dst, size_t num_bytes,
                   uint32_t forgotten) const;
  // A killed rank reads no more.
  void forget(int rank);

 private:
  static constexpr int kTableBits = 15;
  static constexpr size_t kMaxSmall = 4 * kLineBytes;
  static constexpr int kOfBulk = -1, kOfNic = -2;

  struct Read {
    LineKey key = 0;
    uint32_t time = 0;
    int32_t rank = 0, block = 0, thread = 0;
    uint16_t bytes = 0;  // bit i: byte i
  };

  uint32_t note(Read read, const void* src, size_t num_bytes);
  // visit(line, which of its bytes); the same lines of much memory, whoever asks.
  template <class Visit>
  static void for_lines(const void* begin, size_t num_bytes, Visit visit) {
    const auto first = reinterpret_cast<uintptr_t>(begin), end = first + num_bytes;
    for (LineKey key = first / kLineBytes; key * kLineBytes < end; ++key) {
      if (num_bytes > kMaxSmall && line_hash(key) >> 62 != 0) continue;
      const uintptr_t line = key * kLineBytes;
      const unsigned from = line < first ? static_cast<unsigned>(first - line) : 0;
      const unsigned to = end - line < kLineBytes ? static_cast<unsigned>(end - line) : kLineBytes;
      visit(key, static_cast<uint16_t>((1u << to) - (1u << from)));
    }
  }
  Read& of(LineKey key) { return reads_[line_hash(key) >> (64 - kTableBits)]; }
  const Read& of(LineKey key) const { return reads_[line_hash(key) >> (64 - kTableBits)]; }

  uint32_t now_ = 0;
  std::vector<Read> reads_;  // by line; one that has the place of another replaces it
};

}  // namespace deep_comm::simt
