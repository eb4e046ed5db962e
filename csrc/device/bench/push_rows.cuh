// The capacity of the links when nothing else is in the way: every rank pushes rows to every other
// rank by bulk copies through shared memory, without counts, flags or barriers. The bench runs it
// beside dispatch and combine and calls its rate the link limit.
//
//   grid          any number of blocks and warps; rows are dealt to all warps, one lane each moves
//   smem          num_warps x kPushStages rows, then as many mbarriers
//   before        destinations[p] maps rank p's receive area of num_ranks * num_rows_per_peer rows
//   after         rank p's rows [rank * num_rows_per_peer, (rank + 1) * num_rows_per_peer) are this
//                 rank's; what orders the receiver's stream after this kernel (e.g. a collective)
//                 makes them visible
//   not promised  anything about the rows at p that belong to p
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

inline constexpr int kPushStages = 4;
inline constexpr int kMaxPushRanks = 8;

struct PushRowsArgs {
  uint8_t* destinations[kMaxPushRanks];
  // [(num_ranks - 1) * num_rows_per_peer, row_bytes]: row t is for peer t % (num_ranks - 1)
  const uint8_t* src;
  int rank;
  int num_ranks;
  int num_rows_per_peer;
  int row_bytes;  // a multiple of 16
};

DC_HOST_DEVICE constexpr size_t push_rows_smem_bytes(int num_warps, int row_bytes) {
  return static_cast<size_t>(num_warps) * kPushStages * (row_bytes + sizeof(uint64_t));
}

// Neighbouring rows go to different peers, and every rank begins with its next neighbour. So all
// ranks never push to the same one at once.
DC_DEVICE uint8_t* push_destination(const PushRowsArgs& args, int64_t row_idx) {
  const int num_peers = args.num_ranks - 1;
  const int peer = (args.rank + 1 + static_cast<int>(row_idx % num_peers)) % args.num_ranks;
  const int64_t dst_row =
      static_cast<int64_t>(args.rank) * args.num_rows_per_peer + row_idx / num_peers;
  return args.destinations[peer] + dst_row * args.row_bytes;
}

DC_DEVICE void push_rows(const PushRowsArgs& args) {
  if (arch::lane_idx() != 0) return;
  uint8_t* smem = arch::dynamic_smem();
  const int64_t warp_bytes = static_cast<int64_t>(kPushStages) * args.row_bytes;
  uint8_t* stages = smem + arch::warp_idx() * warp_bytes;
  auto* barriers = reinterpret_cast<arch::Mbarrier*>(smem + arch::num_warps() * warp_bytes) +
                   arch::warp_idx() * kPushStages;
  for (int stage = 0; stage < kPushStages; ++stage) arch::mbarrier_init(barriers + stage, 1);
  arch::fence_mbarrier_init();

  // Rows are dealt to blocks first, then to warps: neighbouring rows move on different SMs.
  const int64_t first =
      static_cast<int64_t>(arch::warp_idx()) * arch::num_blocks() + arch::block_idx();
  const int64_t step = static_cast<int64_t>(arch::num_warps()) * arch::num_blocks();
  const int64_t num_rows = static_cast<int64_t>(args.num_ranks - 1) * args.num_rows_per_peer;

  int64_t load_row = first;
  uint32_t num_loads = 0;
  auto load_next = [&] {
    if (load_row >= num_rows) return;
    const uint32_t stage = num_loads++ % kPushStages;
    arch::bulk_load(stages + stage * args.row_bytes, args.src + load_row * args.row_bytes,
                    args.row_bytes, barriers + stage);
    load_row += step;
  };
  for (int stage = 0; stage < kPushStages - 1; ++stage) load_next();

  uint32_t num_stores = 0;
  for (int64_t row_idx = first; row_idx < num_rows; row_idx += step, ++num_stores) {
    const uint32_t stage = num_stores % kPushStages;
    // The load ends by itself, so no deadline is needed.
    while (!arch::mbarrier_try_wait_parity(barriers + stage, num_stores / kPushStages & 1)) {
    }
    arch::bulk_store(push_destination(args, row_idx), stages + stage * args.row_bytes,
                     args.row_bytes);
    arch::bulk_commit();
    // The stage that is loaded next was stored one group ago.
    arch::bulk_wait_read<1>();
    load_next();
  }
  arch::bulk_wait<0>();
}

}  // namespace deep_comm
