// What kernels over NVSHMEM need of one Buffer, in device memory: its peers, and counters of bytes.
#pragma once

#include <vector>

#include "device/arch/types.cuh"
#include "host/rail_kernels.hpp"

namespace deep_comm {

class NvshmemRailState {
 public:
  // Copies the peers; the segment and the queues' handles are the caller's and outlive it.
  NvshmemRailState(const NvshmemRail& rail, RailPort port, int num_peers);
  ~NvshmemRailState();
  NvshmemRailState(const NvshmemRailState&) = delete;
  NvshmemRailState& operator=(const NvshmemRailState&) = delete;

  const RailKernels* kernels() const { return kernels_; }
  const RailPort& port() const { return port_; }
  // [num_peers, num_qps], once the kernels that count have ended.
  std::vector<uint64_t> put_bytes() const;

 private:
  const RailKernels* kernels_;
  RailPort port_;
  size_t num_counters_;
  void* memory_ = nullptr;  // counters, then peers
};

}  // namespace deep_comm
