// Tells builds of the rail's kernels apart, by what crosses between two modules.
#pragma once

#include <cstdint>

#include "host/rail_kernel_list.hpp"
#include "host/rail_kernels.hpp"
#include "host/word_hash.hpp"

namespace deep_comm {

inline uint64_t rail_fingerprint() {
  WordHash hash;
  hash.add(sizeof(LaunchConfig));
  hash.add(sizeof(RailPort));
  hash.add(DirectEntry::num_bytes(1, 1));  // shared memory, which whoever launches sizes
  RailKernelList::for_each([&]<class KernelType>(int place, std::type_identity<KernelType>) {
    hash.add(static_cast<uint64_t>(place));
    hash.add(sizeof(typename KernelType::Args));
    hash.add(static_cast<uint64_t>(KernelType::kName));
    hash.add(static_cast<uint64_t>(KernelType::kMaxThreads));
  });
  return hash.value();
}

}  // namespace deep_comm
