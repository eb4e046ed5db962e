// The rail of arch.cuh over NVSHMEM's public device API. Only the kernels of the NVSHMEM module
// include this file: its device library costs compile time, and a stack in every kernel.
//
// From NVSHMEM 3.5 on a queue is an explicit QP, before that the default one. A fence orders
// everything that this PE has put, so `fence; signal` fulfils arch.cuh's contract on both.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "arch.cuh"

#define DC_NVSHMEM_HAS_QPS             \
  (NVSHMEM_VENDOR_MAJOR_VERSION > 3 || \
   (NVSHMEM_VENDOR_MAJOR_VERSION == 3 && NVSHMEM_VENDOR_MINOR_VERSION >= 5))

namespace deep_comm::arch {

namespace detail {

DC_DEVICE int pe_of(const RailPort& port, int peer) { return ld_nc(&port.peers[peer].pe); }

}  // namespace detail

DC_DEVICE uint8_t* rail_near(const RailPort& port, int peer) {
  return ld_nc(&port.peers[peer].near);
}
DC_DEVICE void rail_count(const RailPort& port, int peer, int qp, uint64_t num_bytes) {
  atomic_add_relaxed_gpu(port.num_bytes + peer * port.num_qps + qp, num_bytes);
}
DC_DEVICE void rail_done(const RailPort&) {}

DC_DEVICE void rail_put(const RailPort& port, int peer, int qp, size_t dst_offset, const void* src,
                        uint32_t num_bytes) {
  rail_count(port, peer, qp, num_bytes);
#if DC_NVSHMEM_HAS_QPS
  if (port.qps != nullptr) {
    nvshmemx_qp_char_put_nbi(reinterpret_cast<char*>(port.base + dst_offset),
                             static_cast<const char*>(src), num_bytes, detail::pe_of(port, peer),
                             ld_nc(port.qps + qp));
    return;
  }
#endif
  nvshmem_putmem_nbi(port.base + dst_offset, src, num_bytes, detail::pe_of(port, peer));
}

DC_DEVICE void rail_put_warp(const RailPort& port, int peer, int qp, size_t dst_offset,
                             const void* src, uint32_t num_bytes) {
  if (lane_idx() == 0) rail_count(port, peer, qp, num_bytes);
#if DC_NVSHMEM_HAS_QPS
  if (port.qps != nullptr) {
    nvshmemx_qp_char_put_nbi_warp(reinterpret_cast<char*>(port.base + dst_offset),
                                  static_cast<const char*>(src), num_bytes,
                                  detail::pe_of(port, peer), ld_nc(port.qps + qp));
    sync_warp();
    return;
  }
#endif
  nvshmemx_putmem_nbi_warp(port.base + dst_offset, src, num_bytes, detail::pe_of(port, peer));
  // where peers share memory the lanes have stored themselves: before one of them signals
  sync_warp();
}

DC_DEVICE void rail_signal(const RailPort& port, int peer, int qp, size_t word_offset,
                           uint64_t value) {
  uint64_t* word = reinterpret_cast<uint64_t*>(port.base + word_offset);
  const int pe = detail::pe_of(port, peer);
#if DC_NVSHMEM_HAS_QPS
  if (port.qps != nullptr) {
    nvshmemx_qp_handle_t handle = ld_nc(port.qps + qp);
    nvshmemx_qp_fence(pe, &handle, 1);
    nvshmemx_qp_signal_op(word, value, NVSHMEM_SIGNAL_SET, pe, handle);
    return;
  }
#endif
  nvshmem_fence();
  nvshmemx_signal_op(word, value, NVSHMEM_SIGNAL_SET, pe);
}

#undef DC_NVSHMEM_HAS_QPS

}  // namespace deep_comm::arch
