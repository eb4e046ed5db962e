// combine, back between nodes: the rows of one node's tokens are added, rounded, and put on the
// rail.
#pragma once

#include "device/channel/ring.cuh"
#include "device/internode/reduce_team.cuh"

namespace deep_comm {

// The ring that local rank `local` fills for this rank.
DC_DEVICE RingReceiver local_ring(const Context& node, const InternodeCombineArgs& args,
                                  int channel, int local) {
  return {node, ring_slots(node.world, args.ring, channel, node.world.rank, local), channel, local};
}

// Lane j < M: OrderedPlace of the row to be forwarded in local rank j's ring.
DC_DEVICE int load_rank_head(const InternodeCombineArgs& args, int row) {
  const int num_local = args.tiers.ranks_per_node(), lane = arch::lane_idx();
  if (lane >= num_local) return -1;
  return arch::ld_nc(args.send_rank_head + static_cast<int64_t>(row) * num_local + lane);
}

// One warp: waits for the row's parts and for a slot, and adds the parts into it. rows: this warp's
// part of shared memory, a pointer per local rank.
template <Dtype kDtype>
DC_DEVICE bool forward_row(const TierContexts& contexts, const InternodeCombineArgs& args,
                           RailSender& rail, const uint8_t** rows, int channel, int row,
                           uint32_t row_idx) {
  const int lane = arch::lane_idx(), head = load_rank_head(args, row);
  const uint32_t present = arch::ballot(kFullMask, head >= 0);
  bool ok = true;
  if (head >= 0) {
    RingReceiver ring = local_ring(contexts.node, args, channel, lane);
    const int ordinal = OrderedPlace::place(head);
    ok = ring.await_filled(ordinal, Stage::kReduce);
    rows[position_in_node(args, present, head)] = ring.slot(ordinal);
  }
  if (!arch::all(kFullMask, ok)) return false;
  if (lane == 0) ok = rail.poll_slot(row_idx) || rail.await_slot(row_idx);
  arch::sync_warp();  // hands the pointers and each lane's acquires to the whole warp
  if (!arch::all(kFullMask, ok)) return false;
  uint8_t* out = rail.slot(row_idx);
  const int row_bytes = args.message.row_bytes, num_rows = arch::popc(present);
  reduce_rows<kDtype>(out, rows, num_rows, row_bytes / 16);
  for (int k = lane; k < args.message.num_topk; k += kWarpSize) {
    float sum = 0.0f;
    for (int idx = 0; idx < num_rows; ++idx) {
      sum += arch::ld_weak(reinterpret_cast<const float*>(rows[idx] + row_bytes) + k);
    }
    arch::st_weak(reinterpret_cast<float*>(out + row_bytes) + k, sum);
  }
  return true;
}

// One reducing warp: every num_reduce_warps-th row of each node's run.
template <Dtype kDtype>
DC_DEVICE void forward_sums(const TierContexts& contexts, const InternodeCombineArgs& args,
                            ReduceProgress* progress, int channel, int warp) {
  const int num_nodes = args.tiers.num_nodes();
  const uint8_t** pointers = reinterpret_cast<const uint8_t**>(progress + 1) + warp * kMaxRanks;
  uint32_t num_done = 0;
  for (int step = 0; step < num_nodes; ++step) {
    const int node = NodeOrder::combine_to(channel, step, num_nodes);
    const RowRange rows = forwarded_rows(args, node, channel);
    RailSender rail(contexts.rail, args.tiers.rail, args.rail_rings, channel, node);
    for (int row = rows.begin + warp; row < rows.end; row += args.num_reduce_warps) {
      if (!forward_row<kDtype>(contexts, args, rail, pointers, channel, row, row - rows.begin))
        return;
      progress->finish_item(warp, ++num_done);
    }
  }
}

// One warp, which follows the reducing ones: puts finished sums on the rail, and returns the
// credits of the rows that were added. It waits for nothing else, so everything finished is sent.
DC_DEVICE void publish_sums(const TierContexts& contexts, const InternodeCombineArgs& args,
                            ReduceProgress* progress, int channel) {
  const int num_nodes = args.tiers.num_nodes(), num_local = args.tiers.ranks_per_node();
  const int lane = arch::lane_idx();
  const auto batch = static_cast<uint32_t>(min_of(args.num_send_tokens, args.ring.num_slots));
  const auto max_put = static_cast<uint32_t>(args.num_rail_send_tokens);
  ProgressFollower follower(contexts.node, progress, args.num_reduce_warps, channel);
  uint64_t* head_word = lane < num_local ? ring_head(contexts.node.world, channel, lane) : nullptr;
  uint32_t num_read = 0, num_returned = 0;  // rows of local rank `lane`, over all steps
  for (int step = 0; step < num_nodes; ++step) {
    const int node = NodeOrder::combine_to(channel, step, num_nodes);
    const RowRange rows = forwarded_rows(args, node, channel);
    const auto num_rows = static_cast<uint32_t>(rows.end - rows.begin);
    RailSender rail(contexts.rail, args.tiers.rail, args.rail_rings, channel, node);
    for (uint32_t num_put = 0; num_put < num_rows;) {
      const uint32_t reached = follower.await_next(num_put, num_rows);
      if (reached == 0) return;
      for (uint32_t row_idx = num_put; row_idx < reached; ++row_idx) {
        const int head = load_rank_head(args, rows.begin + static_cast<int>(row_idx));
        if (head >= 0) num_read = OrderedPlace::place(head) + 1;
        if (num_read - num_returned < batch) continue;
        num_returned = num_read;
        // pairs with: RingSender::await_slot and ::poll_slot — the reads of slots [0, num_read)
        arch::st_release_sys(head_word, Tagged::pack(contexts.node.generation, num_read));
      }
      for (; num_put < reached; num_put = min_of(num_put + max_put, reached)) {
        rail.publish(num_put, min_of(num_put + max_put, reached));
      }
    }
    follower.end_run(num_rows);
  }
}

}  // namespace deep_comm
