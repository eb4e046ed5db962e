// Words in memory that the ranks of one host share: how many tokens each of them has in a step.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace deep_comm {

// Of one rank. A word is written whole and holds all there is to know, so that nothing needs an
// order: the number of the exchange, which the ranks count alike, and the tokens. There are two of
// a rank, for even and odd exchanges, each in a line that only this rank writes. The count lies
// there as well, in a line of its own that nobody else looks at: all objects over the memory, of
// whichever module, count the same exchanges.
class HostWords {
 public:
  static constexpr size_t kLineBytes = 128;
  static constexpr size_t num_bytes(int num_ranks) {
    return 3 * static_cast<size_t>(num_ranks) * kLineBytes;
  }

  HostWords(uintptr_t address, int rank, int num_ranks)
      : address_(address), rank_(rank), num_ranks_(num_ranks) {
    if (address % kLineBytes != 0 || rank < 0 || rank >= num_ranks) {
      throw std::invalid_argument("words of rank " + std::to_string(rank) + " of " +
                                  std::to_string(num_ranks) + " at " + std::to_string(address));
    }
  }

  // The last one that this rank has told of, modulo 2**32; 0: none.
  uint64_t exchange() const { return *count(); }
  // The next one to tell of is the one behind this.
  void set_exchange(uint64_t exchange) const { *count() = exchange & kMost; }

  // Of the next exchange, whose number it returns.
  uint64_t tell(uint64_t num_tokens) const {
    set_exchange(exchange() + 1);
    const uint64_t told = exchange();
    word(told, rank_).store(told << kCountBits | (num_tokens & kMost), std::memory_order_relaxed);
    return told;
  }

  // The most that any rank has told of this exchange; empty: not all have.
  std::optional<uint64_t> most(uint64_t exchange) const {
    uint64_t found = 0;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const uint64_t seen = word(exchange, rank).load(std::memory_order_relaxed);
      if (seen >> kCountBits != exchange) return std::nullopt;
      if ((seen & kMost) > found) found = seen & kMost;
    }
    return found;
  }

  // Of the next exchange, ahead of `tell`: whoever has looked at this rank's line has a copy of it,
  // and to take it back takes longer than a store, which a launch behind it would wait for.
  void claim() const {
    const auto mine = word(exchange() + 1, rank_);
    mine.store(mine.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  // Ahead of `most`: the others' lines.
  void prefetch(uint64_t exchange) const {
    for (int rank = 0; rank < num_ranks_; ++rank) __builtin_prefetch(line(exchange & 1, rank));
  }

  // most, looked for as long as `patience`.
  std::optional<uint64_t> wait_most(uint64_t exchange, std::chrono::microseconds patience) const {
    constexpr int kLooks = 8;   // some microseconds, of which the clock takes little
    constexpr int kPauses = 8;  // a look takes the line from the rank that is to write it
    const auto end = std::chrono::steady_clock::now() + patience;
    do {
      for (int look = 0; look < kLooks; ++look) {
        if (const auto found = most(exchange)) return found;
        for (int times = 0; times < kPauses; ++times) pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    return std::nullopt;
  }

 private:
  static constexpr int kCountBits = 32;
  static constexpr uint64_t kMost = (uint64_t{1} << kCountBits) - 1;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  uint64_t* line(uint64_t group, int rank) const {
    const size_t number = group * static_cast<size_t>(num_ranks_) + static_cast<size_t>(rank);
    return reinterpret_cast<uint64_t*>(address_ + number * kLineBytes);
  }
  std::atomic_ref<uint64_t> word(uint64_t exchange, int rank) const {
    return std::atomic_ref(*line(exchange & 1, rank));
  }
  uint64_t* count() const { return line(2, rank_); }

  uintptr_t address_;
  int rank_, num_ranks_;
};

}  // namespace deep_comm
