// Small kernels written against the primitives, which tests/cpu/simt runs by name.
#pragma once

#include <cstdint>
#include <span>

#include "kernel_args.hpp"
#include "simt/machine.hpp"

namespace deep_comm::test {

struct Kernel {
  const char* name;
  simt::Body body;
};

template <void (*kKernel)(const Args&)>
constexpr Kernel kernel(const char* name) {
  return {name, [](const void* args) { kKernel(*static_cast<const Args*>(args)); }};
}

std::span<const Kernel> warp_kernels();
std::span<const Kernel> block_kernels();
std::span<const Kernel> error_kernels();
std::span<const Kernel> bulk_kernels();
std::span<const Kernel> memory_kernels();
std::span<const Kernel> waiting_kernels();
std::span<const Kernel> push_kernels();
std::span<const Kernel> race_kernels();
std::span<const Kernel> launch_kernels();

}  // namespace deep_comm::test
