// One ring between two ranks. The slots and the `tail` word lie with the receiver, the `head` word
// with the sender, so each side polls its own memory. Credits are counted in rows since the kernel
// began.
//
//   sender:   poll_slot / await_slot → fill slot() → tail = n      (when the bytes have landed)
//   receiver: poll_filled / await_filled → read slot() → head = n  (when they have been read)
//
// Other warps publish the words (ring_tail, ring_head): a release costs a moving warp too much.
//
// One lane of a warp owns an end. The methods are for that lane.
#pragma once

#include "device/layout/ring_layout.cuh"
#include "device/sync/await.cuh"

namespace deep_comm {

// The words that this rank writes at a peer: of the ring it fills there, and of the ring the peer
// fills here.
DC_DEVICE uint64_t* ring_tail(const World& world, int channel, int peer) {
  return &world.recv_line(peer, channel, world.rank)->tail;
}
DC_DEVICE uint64_t* ring_head(const World& world, int channel, int peer) {
  return &world.send_line(peer, channel, world.rank)->head;
}

// The slots of the ring that rank `source` fills in rank `owner`'s data region.
DC_DEVICE RingSlots ring_slots(const World& world, const RingLayout& layout, int channel, int owner,
                               int source) {
  return {world.data(owner) + layout.ring_offset(channel, source),
          static_cast<uint32_t>(layout.num_slots), layout.slot_bytes};
}

class RingSender {
 public:
  DC_DEVICE RingSender(const Context& context, const RingSlots& slots, int channel, int peer)
      : context_(context),
        slots_(slots),
        channel_(channel),
        peer_(peer),
        head_(&context.world.send_line(context.world.rank, channel, peer)->head) {}

  // True if row `row_idx` has a free slot. Reads the head once if this lane does not know of one.
  DC_DEVICE bool poll_slot(uint32_t row_idx) {
    if (is_free(row_idx)) return true;
    const Tagged head = Tagged::unpack(arch::ld_acquire_sys(head_));
    if (head.generation == context_.generation) num_released_ = head.value;
    return is_free(row_idx);
  }
  // Waits for that slot. All filled slots must be published by then, or the receiver cannot free
  // one.
  DC_DEVICE bool await_slot(uint32_t row_idx) {
    if (arch::fault(Fault::kSkipCredit)) return true;
    return await_tagged(context_, head_, {Stage::kRingCredit, Word::kHead, peer_, channel_},
                        row_idx + 1 - slots_.num_slots, &num_released_);
  }
  DC_DEVICE uint8_t* slot(uint32_t row_idx) const { return slots_.slot(row_idx); }

 private:
  DC_DEVICE bool is_free(uint32_t row_idx) const {
    return row_idx - num_released_ < slots_.num_slots;
  }

  const Context& context_;
  RingSlots slots_;
  int channel_;
  int peer_;
  const uint64_t* head_;
  uint32_t num_released_ = 0;  // as last seen
};

class RingReceiver {
 public:
  DC_DEVICE RingReceiver(const Context& context, const RingSlots& slots, int channel, int peer)
      : context_(context),
        slots_(slots),
        channel_(channel),
        peer_(peer),
        tail_(&context.world.recv_line(context.world.rank, channel, peer)->tail) {}

  // True if row `row_idx` is known to have arrived, without a look at the tail.
  DC_DEVICE bool knows(uint32_t row_idx) const { return row_idx < num_filled_; }
  // True if it has arrived. Reads the tail once if this lane does not know of that row.
  DC_DEVICE bool poll_filled(uint32_t row_idx) {
    if (knows(row_idx)) return true;
    const Tagged tail = Tagged::unpack(arch::ld_acquire_sys(tail_));
    if (tail.generation == context_.generation) num_filled_ = tail.value;
    return knows(row_idx);
  }
  DC_DEVICE bool await_filled(uint32_t row_idx, Stage stage = Stage::kRingTail) {
    if (knows(row_idx)) return true;
    return await_tagged(context_, tail_, {stage, Word::kTail, peer_, channel_}, row_idx + 1,
                        &num_filled_);
  }
  DC_DEVICE const uint8_t* slot(uint32_t row_idx) const { return slots_.slot(row_idx); }

 private:
  const Context& context_;
  RingSlots slots_;
  int channel_;
  int peer_;
  const uint64_t* tail_;
  uint32_t num_filled_ = 0;  // as last seen
};

}  // namespace deep_comm
