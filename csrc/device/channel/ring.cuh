// One ring between two ranks: the slots and the `tail` word lie with the receiver, the `head` word with the
// sender, so that each side polls its own memory. Credits are counted in rows since the kernel began.
//
//   sender:   poll_slot / await_slot → fill slot() → tail = n      (after the bytes have landed)
//   receiver: await_filled → read slot() → head = n               (after the bytes have been read)
//
// The words are published elsewhere (ring_tail, ring_head): a release is too dear for the warp that moves.
//
// One lane of a warp owns an end; the methods are for that lane alone.
#pragma once

#include "device/layout/ring_layout.cuh"
#include "device/sync/await.cuh"

namespace deep_comm {

// The words that this rank writes at a peer: of the ring it fills there, and of the ring the peer fills here.
DC_DEVICE uint64_t* ring_tail(const World& world, int lane, int peer) {
  return &world.recv_line(peer, lane, world.rank)->tail;
}
DC_DEVICE uint64_t* ring_head(const World& world, int lane, int peer) {
  return &world.send_line(peer, lane, world.rank)->head;
}

class RingSender {
 public:
  DC_DEVICE RingSender(const Context& context, const RingLayout& layout, int lane, int peer)
      : context_(context),
        layout_(layout),
        lane_(lane),
        peer_(peer),
        slots_(context.world.data(peer) + layout.ring_offset(lane, context.world.rank)),
        head_(&context.world.send_line(context.world.rank, lane, peer)->head) {}

  // Whether row `row_idx` has a free slot; looks once if this lane does not know of one.
  DC_DEVICE bool poll_slot(uint32_t row_idx) {
    if (is_free(row_idx)) return true;
    const Tagged head = Tagged::unpack(arch::ld_acquire_sys(head_));
    if (head.generation == context_.generation) num_released_ = head.value;
    return is_free(row_idx);
  }
  // Waits for that slot. Everything filled must have been published, or the receiver cannot free one.
  DC_DEVICE bool await_slot(uint32_t row_idx) {
    if (arch::fault(Fault::kSkipCredit)) return true;
    return await_tagged(context_, head_,
                        {Stage::kRingCredit, Word::kHead, peer_, layout_.channel_of(lane_)},
                        row_idx + 1 - layout_.num_slots, &num_released_);
  }
  DC_DEVICE uint8_t* slot(uint32_t row_idx) const {
    return slots_ + static_cast<size_t>(row_idx % layout_.num_slots) * layout_.slot_bytes;
  }

 private:
  DC_DEVICE bool is_free(uint32_t row_idx) const {
    return row_idx - num_released_ < static_cast<uint32_t>(layout_.num_slots);
  }

  const Context& context_;
  const RingLayout& layout_;
  int lane_;
  int peer_;
  uint8_t* slots_;
  const uint64_t* head_;
  uint32_t num_released_ = 0;  // as last seen
};

class RingReceiver {
 public:
  DC_DEVICE RingReceiver(const Context& context, const RingLayout& layout, int lane, int peer)
      : context_(context),
        layout_(layout),
        lane_(lane),
        peer_(peer),
        slots_(context.world.data(context.world.rank) + layout.ring_offset(lane, peer)),
        tail_(&context.world.recv_line(context.world.rank, lane, peer)->tail) {}

  DC_DEVICE uint32_t num_filled() const { return num_filled_; }  // as last seen
  // Whether row `row_idx` has arrived; looks once.
  DC_DEVICE bool poll_filled(uint32_t row_idx) {
    if (row_idx < num_filled_) return true;
    const Tagged tail = Tagged::unpack(arch::ld_acquire_sys(tail_));
    if (tail.generation == context_.generation) num_filled_ = tail.value;
    return row_idx < num_filled_;
  }
  DC_DEVICE bool await_filled(uint32_t row_idx, Stage stage = Stage::kRingTail) {
    if (row_idx < num_filled_) return true;
    return await_tagged(context_, tail_, {stage, Word::kTail, peer_, layout_.channel_of(lane_)},
                        row_idx + 1, &num_filled_);
  }
  DC_DEVICE const uint8_t* slot(uint32_t row_idx) const {
    return slots_ + static_cast<size_t>(row_idx % layout_.num_slots) * layout_.slot_bytes;
  }

 private:
  const Context& context_;
  const RingLayout& layout_;
  int lane_;
  int peer_;
  const uint8_t* slots_;
  const uint64_t* tail_;
  uint32_t num_filled_ = 0;  // as last seen
};

}  // namespace deep_comm
