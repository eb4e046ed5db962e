// How arguments of Engine's methods come from Python, and when the GIL is released.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "host/engine.hpp"

namespace deep_comm {

template <class T>
T* as_pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline Dtype dtype_of(const std::string& name) {
  if (name == "bfloat16") return Dtype::kBfloat16;
  if (name == "float16") return Dtype::kFloat16;
  if (name == "float32") return Dtype::kFloat32;
  throw std::invalid_argument("dtype = " + name + ", must be bfloat16, float16 or float32");
}

// Offsets in a segment travel to peers in lines.
inline uint32_t line_of(const char* name, size_t offset) {
  if (offset % kLineBytes != 0) {
    throw std::invalid_argument(std::string(name) + " = " + std::to_string(offset) +
                                ", must be a multiple of " + std::to_string(kLineBytes));
  }
  return static_cast<uint32_t>(offset / kLineBytes);
}

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
