// Which way the rows of dispatch and combine took, as one rank sees it: see Buffer.stats().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

namespace deep_comm {

struct RegionUse {
  struct Calls {
    int64_t num_in_region = 0, num_without_room = 0;
  };
  Calls dispatch, combine;
  size_t most_bytes_without_room = 0;  // of one call
  // Called once, for the first large call without room; it may not throw. Empty: no warning.
  std::function<void(size_t num_bytes)> warn;

  // `num_bytes`: what the call needed of the receive region.
  void note(Calls RegionUse::*operation, bool has_room, size_t num_bytes) {
    // Rings take about as long as direct mode for rows of fewer bytes.
    constexpr size_t kWorthAWarning = size_t{8} << 20;
    if (has_room) {
      ++(this->*operation).num_in_region;
      return;
    }
    ++(this->*operation).num_without_room;
    if (num_bytes > most_bytes_without_room) most_bytes_without_room = num_bytes;
    if (num_bytes < kWorthAWarning || !warn) return;
    std::exchange(warn, nullptr)(num_bytes);
  }
};

}  // namespace deep_comm
