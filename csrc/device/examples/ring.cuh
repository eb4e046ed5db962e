// Endless rows through finite memory: a ring of slots, a tail that fills and a head that frees.
//
//   in     num_rows rows of num_words, num_slots slots
//   grid   one warp on each of two ranks: rank 0 sends, rank 1 receives
//
//   word   owner   written by      read by         order                    reset
//   tail   rank 1  lane 0, rank 0  lane 0, rank 1  release / acquire, sys   never: counts rows
//   head   rank 0  lane 0, rank 1  lane 0, rank 0  release / acquire, sys   never: counts rows
//   slot   rank 1  rank 0's lanes  rank 1's lanes  before tail              free again at head
//   wrong  rank 1  rank 1's lanes  the host        end of the kernel        never
//
//   after  wrong: words that rank 1 did not see as rank 0 has written them
//   waits  for a filled slot: unblocked by tail; for a free one: by head, which moves with every
//          row; both bounded
//
// Each rank polls its own memory. A ring of one slot is enough for any number of rows.
// device/channel/ring.cuh is the same with rows of bytes, moved by bulk copies. Faults that the
// simulation finds here: weaken_release, skip_credit.
#pragma once

#include "device/examples/one_flag.cuh"

namespace deep_comm::examples {

DC_DEVICE void ring_send(const Args& args, uint64_t* slots, uint64_t* tail, const uint64_t* head) {
  const int lane = arch::lane_idx();
  for (int row = 0; row < args.num_rows; ++row) {
    bool is_free = true;
    if (lane == 0 && row >= args.num_slots && !arch::fault(Fault::kSkipCredit)) {
      is_free = await_word(head, static_cast<uint64_t>(row + 1 - args.num_slots));
    }
    if (!arch::all(kFullMask, is_free)) return;
    arch::sync_warp();  // hands the acquire to all lanes: a vote orders nothing
    uint64_t* slot = slots + static_cast<int64_t>(row % args.num_slots) * args.num_words;
    for (int word = lane; word < args.num_words; word += kWarpSize) {
      arch::st_weak(slot + word, payload_word(row, word));
    }
    arch::sync_warp();
    // pairs with: await_word(tail) of ring_receive — the row's slot.
    if (lane == 0) arch::st_release_sys(tail, static_cast<uint64_t>(row + 1));
  }
}

DC_DEVICE void ring_receive(const Args& args, const uint64_t* slots, const uint64_t* tail,
                            uint64_t* head, uint64_t* wrong) {
  const int lane = arch::lane_idx();
  for (int row = 0; row < args.num_rows; ++row) {
    const bool arrived = lane != 0 || await_word(tail, static_cast<uint64_t>(row + 1));
    if (!arch::all(kFullMask, arrived)) {
      if (lane == 0) arch::atomic_add_relaxed_sys(wrong, uint64_t{1});
      return;
    }
    arch::sync_warp();
    const uint64_t* slot = slots + static_cast<int64_t>(row % args.num_slots) * args.num_words;
    for (int word = lane; word < args.num_words; word += kWarpSize) {
      if (arch::ld_weak(slot + word) != payload_word(row, word)) {
        arch::atomic_add_relaxed_sys(wrong, uint64_t{1});
      }
    }
    arch::sync_warp();
    // pairs with: await_word(head) of ring_send — the slot has been read.
    if (lane == 0) arch::st_release_sys(head, static_cast<uint64_t>(row + 1));
  }
}

DC_DEVICE void ring(const Args& args) {
  uint64_t* tail = args.memory;
  uint64_t* wrong = args.memory + kLineWords;
  uint64_t* head = args.memory + 2 * kLineWords;
  uint64_t* slots = args.memory + 3 * kLineWords;
  if (args.rank == 0) {
    ring_send(args, slots, tail, head);
  } else {
    ring_receive(args, slots, tail, head, wrong);
  }
}

}  // namespace deep_comm::examples
