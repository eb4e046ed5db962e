// One warp's end of a ring that it fills through registers: rows are published in batches, and
// before every wait for credit.
//
// A Ring has, of one lane, poll_slot, await_slot and slot (ring.cuh), and, of the whole warp,
//
//   void publish(uint32_t begin, uint32_t end)   the lanes have filled these rows and synchronised
#pragma once

#include "device/channel/rail.cuh"
#include "device/channel/ring.cuh"

namespace deep_comm {

// The ring of a peer inside the node, whose tail the filling warp itself writes.
class PublishingSender : public RingSender {
 public:
  DC_DEVICE PublishingSender(const Context& node, const RingLayout& layout, int channel, int peer)
      : RingSender(node, ring_slots(node.world, layout, channel, peer, node.world.rank), channel,
                   peer),
        generation_(node.generation),
        tail_(ring_tail(node.world, channel, peer)) {}

  DC_DEVICE void publish(uint32_t begin, uint32_t end) {
    if (begin == end || arch::lane_idx() != 0) return;
    // pairs with: RingReceiver::await_filled — slots of rows [0, end)
    arch::st_release_sys(tail_, Tagged::pack(generation_, end));
  }

 private:
  uint32_t generation_;
  uint64_t* tail_;
};

template <class Ring>
class Outlet {
 public:
  DC_DEVICE Outlet(const Ring& ring, uint32_t batch) : ring_(ring), batch_(batch) {}

  // The next slot, or null if the wait failed. The whole warp calls it; all lanes may use the slot.
  DC_DEVICE uint8_t* acquire() {
    bool ok = true;
    if (arch::lane_idx() == 0) ok = ring_.poll_slot(num_filled_);
    ok = arch::all(kFullMask, ok);
    if (!ok) {
      publish();
      ok = true;
      if (arch::lane_idx() == 0) ok = ring_.await_slot(num_filled_);
      ok = arch::all(kFullMask, ok);
    }
    // Hands the leader's acquire to all lanes.
    arch::sync_warp();
    return ok ? ring_.slot(num_filled_) : nullptr;
  }
  // All lanes have filled the slot.
  DC_DEVICE void commit() {
    if (++num_filled_ - num_published_ >= batch_) publish();
  }
  DC_DEVICE void publish() {
    arch::sync_warp();  // the lanes' stores before the put, or the leader's release
    ring_.publish(num_published_, num_filled_);
    num_published_ = num_filled_;
  }

 private:
  Ring ring_;
  uint32_t batch_;
  uint32_t num_filled_ = 0;
  uint32_t num_published_ = 0;
};

}  // namespace deep_comm
