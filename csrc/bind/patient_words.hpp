// Looking for the others' words as long as the host can wait.
#pragma once

#include "bind/bindings.hpp"
#include "host/host_words.hpp"

namespace deep_comm {

// What HostWords::most finds at once or in a while, in which the GIL is free: the others may be
// threads. A step of few tokens takes some tens of microseconds; a rank that is later than this is
// looked for elsewhere.
inline std::optional<uint64_t> patient_most(const HostWords& words, uint64_t exchange) {
  constexpr std::chrono::microseconds kPatience{200};
  std::optional<uint64_t> found = words.most(exchange);
  if (!found) {
    pybind11::gil_scoped_release release;
    found = words.wait_most(exchange, kPatience);
  }
  return found;
}

}  // namespace deep_comm
