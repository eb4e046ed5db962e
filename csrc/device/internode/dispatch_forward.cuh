// dispatch, inside the node: rows that arrived over the rail are forwarded to the ranks that need
// them.
#pragma once

#include "device/channel/outlet.cuh"
#include "device/internode/tiers.cuh"
#include "device/move/copy_row.cuh"

namespace deep_comm {

// Forwarding warps' progress, for the warp that returns credits; in shared memory.
struct ForwardTeam {
  uint32_t num_read[kMaxRanks];  // rail rows that each forwarding warp has passed, over all steps

  DC_DEVICE static ForwardTeam* of_block() {
    return reinterpret_cast<ForwardTeam*>(arch::dynamic_smem());
  }
  // The block, before a barrier.
  DC_DEVICE void reset() {
    if (arch::thread_idx() < kMaxRanks) num_read[arch::thread_idx()] = 0;
  }
};

// One warp, one source node: forwards its rows for local rank `dst`. num_before: rail rows of
// earlier steps.
DC_DEVICE bool forward_from_node(const TierContexts& contexts, const InternodeDispatchArgs& args,
                                 ForwardTeam* team, Outlet<PublishingSender>& outlet, int channel,
                                 int node, int dst, uint32_t num_before) {
  const int num_local = args.tiers.ranks_per_node();
  const RowRange rows = forwarded_rows(args, node, channel);
  RailReceiver rail(contexts.rail, args.tiers.rail, args.rail_rings, channel, node);
  const bool keeps_heads = args.send_rank_head != nullptr;
  int32_t head = 0;
  if (keeps_heads) {
    const int num_nodes = args.tiers.num_nodes();
    head = arch::ld_nc(args.combine_start + (channel * num_nodes + node) * num_local + dst);
  }
  const auto num_rows = static_cast<uint32_t>(rows.end - rows.begin);
  for (uint32_t row_idx = 0; row_idx < num_rows; ++row_idx) {
    bool arrived = true;
    if (arch::lane_idx() == 0) arrived = rail.poll_filled(row_idx);
    if (!arch::all(kFullMask, arrived)) {
      outlet.publish();  // so the receiver does not wait for what this warp waits for
      arrived = true;
      if (arch::lane_idx() == 0) arrived = rail.await_filled(row_idx);
      if (!arch::all(kFullMask, arrived)) return false;
    }
    arch::sync_warp();  // hands the leader's acquire to all lanes
    const uint8_t* message = rail.slot(row_idx);
    const uint32_t ranks = arch::ld_weak(reinterpret_cast<const uint32_t*>(
        message + args.message.row_bytes + args.message.ranks_offset()));
    const bool goes = (OrderedRanks::mask(ranks) >> dst & 1) != 0;
    if (goes) {
      uint8_t* slot = outlet.acquire();
      if (slot == nullptr) return false;
      copy_row(slot, message, args.message.num_bytes());
      outlet.commit();
    }
    arch::sync_warp();  // every lane has read its part of the slot
    if (arch::lane_idx() == 0) {
      const int row = rows.begin + static_cast<int>(row_idx);
      if (keeps_heads && row < args.num_forward_rows) {
        arch::st_weak(args.send_rank_head + static_cast<int64_t>(row) * num_local + dst,
                      OrderedPlace::pack(goes ? head : -1, OrderedRanks::position(ranks, dst)));
      }
      // pairs with: return_rail_credits — the reads of the slot
      arch::st_release_cta(&team->num_read[dst], num_before + row_idx + 1);
    }
    head += goes;
  }
  return true;
}

// One warp: forwards everything that reaches this rank over its rail for local rank `dst`.
DC_DEVICE void forward_to_rank(const TierContexts& contexts, const InternodeDispatchArgs& args,
                               ForwardTeam* team, int channel, int dst) {
  const int num_nodes = args.tiers.num_nodes();
  Outlet outlet(PublishingSender(contexts.node, args.ring, channel, dst), args.num_send_tokens);
  uint32_t num_before = 0;
  for (int step = 0; step < num_nodes; ++step) {
    const int node = NodeOrder::dispatch_from(args.tiers.rail.node, channel, step, num_nodes);
    if (!forward_from_node(contexts, args, team, outlet, channel, node, dst, num_before)) return;
    const RowRange rows = forwarded_rows(args, node, channel);
    num_before += rows.end - rows.begin;
  }
  outlet.publish();
}

// One warp: returns credits. A rail slot is free when all forwarding warps have passed it. Credits
// are returned in batches, and only as many as the sender can need.
DC_DEVICE void return_rail_credits(const TierContexts& contexts, const InternodeDispatchArgs& args,
                                   ForwardTeam* team, int channel) {
  const int num_nodes = args.tiers.num_nodes(), num_local = args.tiers.ranks_per_node();
  const int lane = arch::lane_idx();
  const auto batch =
      static_cast<uint32_t>(min_of(args.num_rail_send_tokens, args.rail_rings.num_slots));
  uint32_t num_before = 0;
  for (int step = 0; step < num_nodes; ++step) {
    const int node = NodeOrder::dispatch_from(args.tiers.rail.node, channel, step, num_nodes);
    const RowRange rows = forwarded_rows(args, node, channel);
    const auto num_rows = static_cast<uint32_t>(rows.end - rows.begin);
    const uint32_t num_needed = RailReceiver::num_needed(args.rail_rings, num_rows);
    const RailReceiver rail(contexts.rail, args.tiers.rail, args.rail_rings, channel, node);
    for (uint32_t num_returned = 0; num_returned < num_needed;) {
      const uint32_t wanted = min_of(num_returned + batch, num_rows);
      bool ok = true;
      if (lane < num_local && !arch::fault(Fault::kEarlyRailCredit)) {
        uint32_t num_read = 0;
        ok = await<Scope::kCta>(
            contexts.node, &team->num_read[lane],
            {Stage::kRetire, Word::kProgress, contexts.node.world.rank, channel},
            num_before + wanted, [=](uint32_t value) { return value >= num_before + wanted; },
            &num_read);
      }
      // Hands each lane's acquire to the leader.
      arch::sync_warp();
      if (!arch::all(kFullMask, ok)) return;
      if (lane == 0) rail.return_credit(wanted);
      num_returned = wanted;
    }
    num_before += num_rows;
  }
}

}  // namespace deep_comm
