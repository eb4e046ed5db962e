// The rail of arch.cuh through the software NIC. A request is a descriptor in pinned memory; a
// thread of this rank's process carries it out (host/software_nic_cuda.cpp).
#pragma once

#include "arch.cuh"

namespace deep_comm::arch {

namespace detail {

// Orders nothing: the caller has fenced the data.
DC_DEVICE void post_rail(const RailQueue& queue, const RailRequest& request) {
  const uint64_t ticket = atomic_add_relaxed_gpu(queue.num_posted, 1);
  const uint64_t deadline_ns = globaltimer_ns() + queue.timeout_ns;
  while (ticket >= queue.depth && ld_acquire_sys(queue.num_taken) + queue.depth <= ticket) {
    // The NIC has stopped taking requests. This one is dropped, and so is at once what else finds no
    // slot: kernels that post many end soon. The peers' waits time out, and this rank's host raises.
    if (globaltimer_ns() >= deadline_ns || ld_relaxed_sys(queue.has_given_up) != 0u) {
      st_relaxed_sys(queue.has_given_up, 1u);
      return;
    }
  }
  uint64_t* halves = queue.slots[ticket % queue.depth].halves;
  const uint64_t number = static_cast<uint64_t>(RailDescriptor::number_of(ticket)) << 32;
  st_relaxed_sys(halves, number | static_cast<uint32_t>(request.what));
  st_relaxed_sys(halves + 1, number | request.what >> 32);
  st_relaxed_sys(halves + 2, number | static_cast<uint32_t>(request.dst_offset));
  st_relaxed_sys(halves + 3, number | request.dst_offset >> 32);
  st_relaxed_sys(halves + 4, number | request.num_bytes);
  st_relaxed_sys(halves + 5, number | static_cast<uint32_t>(request.peer));
  st_relaxed_sys(halves + 6, number | static_cast<uint32_t>(request.qp));
}

}  // namespace detail

DC_DEVICE void rail_put(const RailPort& port, int peer, int qp, size_t dst_offset, const void* src,
                        uint32_t num_bytes) {
  detail::post_rail(port.queue, {reinterpret_cast<uint64_t>(src), dst_offset, num_bytes, peer, qp});
}
DC_DEVICE void rail_signal(const RailPort& port, int peer, int qp, size_t word_offset,
                           uint64_t value) {
  detail::post_rail(port.queue, {value, word_offset, 0, peer, qp});
}
DC_DEVICE void rail_put_warp(const RailPort& port, int peer, int qp, size_t dst_offset,
                             const void* src, uint32_t num_bytes) {
  if (lane_idx() == 0) rail_put(port, peer, qp, dst_offset, src, num_bytes);
}
DC_DEVICE uint8_t* rail_near(const RailPort&, int) { return nullptr; }
DC_DEVICE void rail_count(const RailPort&, int, int, uint64_t) {}
DC_DEVICE void rail_done(const RailPort& port) {
  const RailQueue& queue = port.queue;
  // acq_rel, pairs with itself: the last block's ticket comes after those of all others.
  const auto num_callers = static_cast<uint32_t>(num_blocks());
  if (atomic_add_acq_rel_gpu(queue.num_done, 1u) + 1 != num_callers) return;
  st_relaxed_gpu(queue.num_done, 0u);
  detail::post_rail(queue, {queue.launch, 0, 0, kRailDone, 0});
}

}  // namespace deep_comm::arch
