// The rail of arch.cuh through the software NIC: a descriptor in pinned memory, carried out by a
// thread of this rank's process (host/software_nic_cuda.cpp).
#pragma once

#include "arch.cuh"

namespace deep_comm::arch {

namespace detail {

DC_DEVICE void post_rail(const RailQueue& queue, uint64_t src, uint64_t dst_offset, uint64_t value,
                         uint32_t num_bytes, int peer, int qp) {
  const uint64_t ticket = atomic_add_relaxed_gpu(queue.num_posted, 1);
  const uint64_t deadline_ns = globaltimer_ns() + queue.timeout_ns;
  while (ticket >= queue.depth && ld_acquire_sys(queue.num_taken) + queue.depth <= ticket) {
    // A NIC that takes nothing any more: what is not posted never comes, and the peers' waits end
    // this.
    if (globaltimer_ns() >= deadline_ns) return;
  }
  RailDescriptor* slot = queue.slots + ticket % queue.depth;
  st_relaxed_sys(&slot->src, src);
  st_relaxed_sys(&slot->dst_offset, dst_offset);
  st_relaxed_sys(&slot->value, value);
  st_relaxed_sys(&slot->num_bytes, num_bytes);
  st_relaxed_sys(&slot->peer, static_cast<int32_t>(peer));
  st_relaxed_sys(&slot->qp, static_cast<int32_t>(qp));
  // pairs with: SoftwareNic::take on the host — the descriptor, and the bytes that it names.
  st_release_sys(&slot->sequence, ticket + 1);
}

}  // namespace detail

DC_DEVICE void rail_put(const RailPort& port, int peer, int qp, size_t dst_offset, const void* src,
                        uint32_t num_bytes) {
  detail::post_rail(port.queue, reinterpret_cast<uint64_t>(src), dst_offset, 0, num_bytes, peer,
                    qp);
}
DC_DEVICE void rail_signal(const RailPort& port, int peer, int qp, size_t word_offset,
                           uint64_t value) {
  detail::post_rail(port.queue, 0, word_offset, value, 0, peer, qp);
}
DC_DEVICE void rail_put_warp(const RailPort& port, int peer, int qp, size_t dst_offset,
                             const void* src, uint32_t num_bytes) {
  if (lane_idx() == 0) rail_put(port, peer, qp, dst_offset, src, num_bytes);
}
DC_DEVICE uint8_t* rail_near(const RailPort&, int) { return nullptr; }
DC_DEVICE void rail_count(const RailPort&, int, int, uint64_t) {}
DC_DEVICE void rail_done(const RailPort& port) {
  const RailQueue& queue = port.queue;
  // acq_rel, pairs with itself: the last block's ticket comes behind those of all others.
  const auto num_callers = static_cast<uint32_t>(num_blocks());
  if (atomic_add_acq_rel_gpu(queue.num_done, 1u) + 1 != num_callers) return;
  st_relaxed_gpu(queue.num_done, 0u);
  detail::post_rail(queue, 0, 0, queue.launch, 0, kRailDone, 0);
}

}  // namespace deep_comm::arch
