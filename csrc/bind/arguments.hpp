// How arguments of Engine's methods come from Python, and when the GIL is released.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "host/engine.hpp"

namespace deep_comm {

// Releases the GIL where the call may last: everywhere on a synchronous target; on the other in
// waits, and in launches that wait for their kernel (`lasts`), which may need what other threads of
// this process are about to launch.
template <bool kReleases>
struct MaybeRelease {
  explicit MaybeRelease(bool /*lasts*/ = true) {}
  pybind11::gil_scoped_release release;
};
template <>
struct MaybeRelease<false> {
  explicit MaybeRelease(bool lasts = false) {
    if (lasts) release.emplace();
  }
  std::optional<pybind11::gil_scoped_release> release;
};

}  // namespace deep_comm
