// Polls the peers' counters for 200 µs.
#pragma once

#include "bind/bindings.hpp"
#include "host/host_counters.hpp"

namespace deep_comm {

// HostCounters::max, at once or after some polling. Polling releases the GIL: peers may be threads.
// A step of few tokens takes some tens of microseconds. If a rank is later than this, the caller
// reads the counts that the exchange itself has brought.
inline std::optional<uint64_t> wait_for_max(const HostCounters& counters, uint64_t exchange) {
  constexpr std::chrono::microseconds kPatience{200};
  std::optional<uint64_t> found = counters.max(exchange);
  if (!found) {
    pybind11::gil_scoped_release release;
    found = counters.wait_for_max(exchange, kPatience);
  }
  return found;
}

}  // namespace deep_comm
