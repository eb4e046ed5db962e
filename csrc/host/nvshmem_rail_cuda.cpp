#include "host/nvshmem_rail_cuda.hpp"

#include "host/check_cuda.hpp"

namespace deep_comm {

NvshmemRailState::NvshmemRailState(const NvshmemRail& rail, RailPort port, int num_peers)
    : kernels_(rail.kernels),
      port_(port),
      num_counters_(static_cast<size_t>(num_peers) * port.num_qps) {
  const size_t counter_bytes = sizeof(uint64_t) * num_counters_;
  const size_t peer_bytes = sizeof(RailPeer) * num_peers;
  check(cudaMalloc(&memory_, counter_bytes + peer_bytes), "cudaMalloc");
  uint8_t* memory = static_cast<uint8_t*>(memory_);
  cudaError_t status = cudaMemset(memory, 0, counter_bytes);
  if (status == cudaSuccess) {
    status = cudaMemcpy(memory + counter_bytes, rail.peers, peer_bytes, cudaMemcpyHostToDevice);
  }
  if (status == cudaSuccess) status = cudaDeviceSynchronize();
  if (status != cudaSuccess) (void)cudaFree(memory_);
  check(status, "filling device memory");
  port_.num_bytes = reinterpret_cast<uint64_t*>(memory);
  port_.peers = reinterpret_cast<const RailPeer*>(memory + counter_bytes);
  port_.base = rail.base;
  port_.qps = rail.qps;
}

NvshmemRailState::~NvshmemRailState() { (void)cudaFree(memory_); }

std::vector<uint64_t> NvshmemRailState::put_bytes() const {
  std::vector<uint64_t> counters(num_counters_);
  check(cudaMemcpy(counters.data(), memory_, sizeof(uint64_t) * num_counters_,
                   cudaMemcpyDeviceToHost),
        "reading the counters");
  return counters;
}

}  // namespace deep_comm
