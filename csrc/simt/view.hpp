// What a thread of the simulated machine must see at least.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace deep_comm::simt {

// Times of the history (history.hpp), one per place where stores become visible: the thread's
// block, its rank, and memory by the rank that stored there.
struct View {
  static constexpr uint32_t kNumRanks = 8;  // of more ranks some share a time, which is stronger

  uint32_t block = 0;
  uint32_t gpu = 0;
  std::array<uint32_t, kNumRanks> sys{};
  // Whatever somebody has read until then with a strong load. Of all readers, which is stronger.
  uint32_t reads = 0;
  // By rank, and by the NIC of a rank: which of its loads come before what the thread does now
  // (late_loads.hpp).
  std::array<uint32_t, kNumRanks> loads{};
  std::array<uint32_t, kNumRanks> nic_loads{};

  static View all(uint32_t time) {
    View view{.block = time, .gpu = time, .sys = {}, .reads = time, .loads = {}, .nic_loads = {}};
    view.sys.fill(time);
    return view;
  }

  uint32_t& sys_of(int rank) { return sys[static_cast<uint32_t>(rank) % kNumRanks]; }
  uint32_t sys_of(int rank) const { return sys[static_cast<uint32_t>(rank) % kNumRanks]; }

  uint32_t& loads_of(int rank) { return loads[static_cast<uint32_t>(rank) % kNumRanks]; }
  uint32_t loads_of(int rank) const { return loads[static_cast<uint32_t>(rank) % kNumRanks]; }
  uint32_t& nic_loads_of(int rank) { return nic_loads[static_cast<uint32_t>(rank) % kNumRanks]; }
  uint32_t nic_loads_of(int rank) const {
    return nic_loads[static_cast<uint32_t>(rank) % kNumRanks];
  }

  // True if `other` adds nothing.
  bool covers(const View& other) const {
    bool all = block >= other.block && gpu >= other.gpu && reads >= other.reads;
    for (uint32_t i = 0; i < kNumRanks; ++i) {
      all = all && sys[i] >= other.sys[i] && loads[i] >= other.loads[i] &&
            nic_loads[i] >= other.nic_loads[i];
    }
    return all;
  }

  void join(const View& other) {
    block = std::max(block, other.block);
    gpu = std::max(gpu, other.gpu);
    reads = std::max(reads, other.reads);
    for (uint32_t i = 0; i < kNumRanks; ++i) {
      sys[i] = std::max(sys[i], other.sys[i]);
      loads[i] = std::max(loads[i], other.loads[i]);
      nic_loads[i] = std::max(nic_loads[i], other.nic_loads[i]);
    }
  }
};

}  // namespace deep_comm::simt
