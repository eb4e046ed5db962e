// Counters in memory that the ranks of one host share: how many tokens each rank has in a step.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace deep_comm {

// One rank's view. Each counter holds the number of the exchange and the number of tokens in one
// word, so no memory order is needed. The ranks count exchanges alike. A rank has two counters, for
// even and odd exchanges, each in a cache line that only this rank writes. The number of its last
// exchange has a third line, so that all objects over the memory count the same exchanges.
class HostCounters {
 public:
  static constexpr size_t kLineBytes = 128;
  static constexpr size_t num_bytes(int num_ranks) {
    return 3 * static_cast<size_t>(num_ranks) * kLineBytes;
  }

  HostCounters(uintptr_t address, int rank, int num_ranks)
      : address_(address), rank_(rank), num_ranks_(num_ranks) {
    if (address % kLineBytes != 0 || rank < 0 || rank >= num_ranks) {
      throw std::invalid_argument("counters of rank " + std::to_string(rank) + " of " +
                                  std::to_string(num_ranks) + " at " + std::to_string(address));
    }
  }

  // This rank's last published exchange, modulo 2**32; 0: none.
  uint64_t exchange() const { return *count(); }
  // The next exchange to publish is the one after this.
  void set_exchange(uint64_t exchange) const { *count() = exchange & kMost; }

  // Publishes the tokens of the next exchange. Returns its number.
  uint64_t publish(uint64_t num_tokens) const {
    set_exchange(exchange() + 1);
    const uint64_t number = exchange();
    counter(number, rank_)
        .store(number << kCountBits | (num_tokens & kMost), std::memory_order_relaxed);
    return number;
  }

  // The largest number of tokens in this exchange; empty if not all ranks have published theirs.
  std::optional<uint64_t> max(uint64_t exchange) const {
    uint64_t found = 0;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const uint64_t seen = counter(exchange, rank).load(std::memory_order_relaxed);
      if (seen >> kCountBits != exchange) return std::nullopt;
      if ((seen & kMost) > found) found = seen & kMost;
    }
    return found;
  }

  // Before `publish`: takes the cache line back from ranks that have read it. That takes longer than
  // a store, and the launch after the store would wait for it.
  void claim() const {
    const auto mine = counter(exchange() + 1, rank_);
    mine.store(mine.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  // Before `max`: fetches the peers' lines.
  void prefetch(uint64_t exchange) const {
    for (int rank = 0; rank < num_ranks_; ++rank) __builtin_prefetch(line(exchange & 1, rank));
  }

  // max, polled for as long as `patience`.
  std::optional<uint64_t> wait_for_max(uint64_t exchange,
                                       std::chrono::microseconds patience) const {
    constexpr int kLooks = 8;   // some microseconds; reading the clock is a small part
    constexpr int kPauses = 8;  // a read takes the line from the rank that will write it
    const auto end = std::chrono::steady_clock::now() + patience;
    do {
      for (int look = 0; look < kLooks; ++look) {
        if (const auto found = max(exchange)) return found;
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
  std::atomic_ref<uint64_t> counter(uint64_t exchange, int rank) const {
    return std::atomic_ref(*line(exchange & 1, rank));
  }
  uint64_t* count() const { return line(2, rank_); }

  uintptr_t address_;
  int rank_, num_ranks_;
};

}  // namespace deep_comm
