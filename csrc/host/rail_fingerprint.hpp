// Tells builds of the rail's kernels apart, by what crosses between two modules.
#pragma once

#include <cstdint>

#include "host/rail_kernel_list.hpp"
#include "host/rail_kernels.hpp"

namespace deep_comm {

inline uint64_t rail_fingerprint() {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, of 64-bit words
  const auto add = [&](uint64_t value) { hash = (hash ^ value) * 0x100000001b3u; };
  add(sizeof(LaunchConfig));
  add(sizeof(RailPort));
  RailKernelList::for_each([&]<class KernelType>(int place, std::type_identity<KernelType>) {
    add(static_cast<uint64_t>(place));
    add(sizeof(typename KernelType::Args));
    add(static_cast<uint64_t>(KernelType::kName));
    add(static_cast<uint64_t>(KernelType::kMaxThreads));
  });
  return hash;
}

}  // namespace deep_comm
