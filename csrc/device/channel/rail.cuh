// One ring between two nodes: between the ranks of this local index. As in ring.cuh, slots and
// `tail` lie with the receiver, `head` with the sender. The NIC puts what crosses.
//
//   sender:   poll_slot / await_slot → fill slot() → publish(begin, end)   (puts, then tail)
//   receiver: await_filled → read slot() → return_credit(n)                (head)
//
// Each word is always written through the same queue, so its writes keep their order from kernel to
// kernel. A late write of an older kernel carries its generation and counts as "not yet". A send
// slot is free again when its credit is back: then the receiver has read the row.
//
// Rows for the own node use the receive ring as well, without the NIC. So do rows for near nodes,
// whose memory this rank's stores reach: slot() then lies there.
//
// One lane of a warp owns an end. The methods are for that lane, except slot() and publish().
#pragma once

#include "device/layout/rail.cuh"
#include "device/sync/await.cuh"

namespace deep_comm {

// This rank on its rail.
struct RailTier {
  int node;
  bool are_all_near;  // agreed: every rank's stores reach its peers on the rail, so nothing is put
  RailPort port;
  RailLayout layout;

  DC_HOST_DEVICE int num_nodes() const { return layout.num_nodes; }
  // The first half of the queues carries rows and their tails, the other half credits.
  // On a queue of rows credits would wait for them.
  DC_HOST_DEVICE int data_qp(int channel) const { return channel % max_of(1, port.num_qps / 2); }
  // The queue of a chunk of rows that have slots of their own, and of the word that announces it.
  // Neighbouring chunks share a queue: a software NIC joins them.
  DC_HOST_DEVICE int landed_qp(int chunk) const { return data_qp(chunk / 8); }
  DC_HOST_DEVICE int credit_qp(int channel) const {
    const int num_data = max_of(1, port.num_qps / 2);
    return port.num_qps == 1 ? 0 : num_data + channel % (port.num_qps - num_data);
  }
};

// The segment of this local index at `node` if this rank's stores reach it, else null.
DC_DEVICE uint8_t* near_segment(const World& world, const RailTier& tier, int node) {
  return node == tier.node ? world.bases[world.rank] : arch::rail_near(tier.port, node);
}

// One thread: writes a word at `node`, after everything that this thread has put on the queue or
// stored there.
DC_DEVICE void write_rail_word(const World& world, const RailTier& tier, int node, int qp,
                               size_t offset, uint64_t value) {
  uint8_t* near = near_segment(world, tier, node);
  if (near != nullptr) {
    // pairs with: what the caller's comment names. Readers of the word cannot tell which way it
    // came.
    arch::st_release_sys(reinterpret_cast<uint64_t*>(near + offset), value);
  } else {
    arch::rail_signal(tier.port, node, qp, offset, value);
  }
}

// One thread: writes a word at `node` without ordering what was stored there before. The thread then
// calls write_rail_word for this node and queue, which orders both.
DC_DEVICE void write_rail_word_first(const World& world, const RailTier& tier, int node, int qp,
                                     size_t offset, uint64_t value) {
  uint8_t* near = near_segment(world, tier, node);
  if (near != nullptr) {
    arch::st_relaxed_sys(reinterpret_cast<uint64_t*>(near + offset), value);
  } else {
    arch::rail_signal(tier.port, node, qp, offset, value);
  }
}

class RailSender {
 public:
  DC_DEVICE RailSender(const Context& context, const RailTier& tier, const RailRings& rings,
                       int channel, int node)
      : context_(context), tier_(tier), rings_(rings), channel_(channel), node_(node) {
    uint8_t* base = context.world.bases[context.world.rank];
    near_ = near_segment(context.world, tier, node);
    slots_ = near_ != nullptr ? near_ + rings.recv_ring(channel, tier.node)
                              : base + rings.send_ring(channel, node);
    head_ = reinterpret_cast<const uint64_t*>(base + tier.layout.head_of(channel, node));
  }

  DC_DEVICE uint8_t* slot(uint32_t row_idx) const { return slots_ + rings_.slot_offset(row_idx); }
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
    if (is_free(row_idx) || arch::fault(Fault::kSkipRailCredit)) return true;
    return await_tagged(context_, head_, {Stage::kRailCredit, Word::kRailHead, node_, channel_},
                        row_idx + 1 - rings_.num_slots, &num_released_);
  }
  // The whole warp. It has filled rows [begin, end), or others have, and a barrier or an acquire
  // orders that. The lanes have synchronised since.
  DC_DEVICE void publish(uint32_t begin, uint32_t end) {
    if (begin == end) return;
    const int qp = tier_.data_qp(channel_);
    if (near_ == nullptr) {
      // Orders the filled slots before the NIC's reads of them.
      if (arch::lane_idx() == 0 && !arch::fault(Fault::kSkipRailFence)) arch::fence_acq_rel_sys();
      // order-proof: for NVSHMEM, where all lanes move the rows. Here lane 0 posts, which has fenced.
      arch::sync_warp();
      const size_t target = rings_.recv_ring(channel_, tier_.node);
      for (uint32_t row = begin; row != end;) {
        const uint32_t first = row % rings_.num_slots;
        const uint32_t count = min_of(end - row, static_cast<uint32_t>(rings_.num_slots) - first);
        arch::rail_put_warp(tier_.port, node_, qp, target + rings_.slot_offset(row), slot(row),
                            count * rings_.slot_bytes);
        row += count;
      }
    }
    if (arch::lane_idx() != 0) return;
    if (near_ != nullptr && node_ != tier_.node) {
      arch::rail_count(tier_.port, node_, qp, (end - begin) * rings_.slot_bytes);
    }
    // pairs with: RailReceiver::await_filled at the node — the puts above, on the same queue, or
    // the stores into the slots
    write_rail_word(context_.world, tier_, node_, qp, tier_.layout.tail_of(channel_, tier_.node),
                    Tagged::pack(context_.generation, end));
  }

 private:
  DC_DEVICE bool is_free(uint32_t row_idx) const {
    return row_idx - num_released_ < static_cast<uint32_t>(rings_.num_slots);
  }

  const Context& context_;
  const RailTier& tier_;
  const RailRings& rings_;
  int channel_;
  int node_;
  uint8_t* near_;  // the node's segment, if stores reach it
  uint8_t* slots_;
  const uint64_t* head_;
  uint32_t num_released_ = 0;  // as last seen
};

class RailReceiver {
 public:
  DC_DEVICE RailReceiver(const Context& context, const RailTier& tier, const RailRings& rings,
                         int channel, int node)
      : context_(context), tier_(tier), rings_(rings), channel_(channel), node_(node) {
    const uint8_t* base = context.world.bases[context.world.rank];
    slots_ = base + rings.recv_ring(channel, node);
    tail_ = reinterpret_cast<const uint64_t*>(base + tier.layout.tail_of(channel, node));
  }

  // True if row `row_idx` has arrived. Reads the tail once.
  DC_DEVICE bool poll_filled(uint32_t row_idx) {
    if (row_idx < num_filled_) return true;
    const Tagged tail = Tagged::unpack(arch::ld_acquire_sys(tail_));
    if (tail.generation == context_.generation) num_filled_ = tail.value;
    return row_idx < num_filled_;
  }
  DC_DEVICE bool await_filled(uint32_t row_idx) {
    if (row_idx < num_filled_) return true;
    return await_tagged(context_, tail_, {Stage::kRailTail, Word::kRailTail, node_, channel_},
                        row_idx + 1, &num_filled_);
  }
  DC_DEVICE const uint8_t* slot(uint32_t row_idx) const {
    return slots_ + rings_.slot_offset(row_idx);
  }
  // Rows [0, num_rows) have been read by this lane, or by others, and a barrier or an acquire
  // orders that.
  DC_DEVICE void return_credit(uint32_t num_rows) const {
    const bool is_near = near_segment(context_.world, tier_, node_) != nullptr;
    if (!is_near) arch::fence_acq_rel_sys();  // the reads before the signal
    // pairs with: RailSender::await_slot and ::poll_slot at the node — the reads of the slots
    write_rail_word(context_.world, tier_, node_, tier_.credit_qp(channel_),
                    tier_.layout.head_of(channel_, tier_.node),
                    Tagged::pack(context_.generation, num_rows));
  }
  // The number of credits that a sender of `num_rows` rows can need. More are never returned.
  DC_DEVICE static uint32_t num_needed(const RailRings& rings, uint32_t num_rows) {
    const auto num_slots = static_cast<uint32_t>(rings.num_slots);
    return num_rows > num_slots ? num_rows - num_slots : 0;
  }

 private:
  const Context& context_;
  const RailTier& tier_;
  const RailRings& rings_;
  int channel_;
  int node_;
  const uint8_t* slots_;
  const uint64_t* tail_;
  uint32_t num_filled_ = 0;  // as last seen
};

}  // namespace deep_comm
