// dispatch, the sending side: one channel's tokens for one node, each once, into the rail's ring.
#pragma once

#include "device/channel/outlet.cuh"
#include "device/internode/scales.cuh"
#include "device/internode/tiers.cuh"
#include "device/layout/channel_range.cuh"
#include "device/move/copy_row.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// All lanes: writes what follows a row. Quantised: with scales that this block has written.
template <bool kIsQuantised>
DC_DEVICE void write_rail_meta(const InternodeDispatchArgs& args, uint8_t* meta, int token,
                               int node) {
  const RailMessage& parts = args.message;
  uint8_t* scales = meta + parts.scales_offset();
  if constexpr (kIsQuantised) {
    store_written_scales(args, scales, token);
  } else {
    store_input_scales(args, scales, token);
  }
  int32_t* experts = reinterpret_cast<int32_t*>(meta + parts.topk_idx_offset());
  float* weights = reinterpret_cast<float*>(meta + parts.topk_weights_offset());
  for (int k = arch::lane_idx(); k < parts.num_topk; k += kWarpSize) {
    const int64_t position = static_cast<int64_t>(token) * parts.num_topk + k;
    arch::st_weak(experts + k, load_expert(args.topk_idx, position, args.topk_idx_bytes));
    arch::st_weak(weights + k,
                  args.topk_weights != nullptr ? arch::ld_nc(args.topk_weights + position) : 0.0f);
  }
  const int num_local = args.tiers.ranks_per_node();
  const int64_t first = static_cast<int64_t>(token) * args.tiers.num_ranks() + node * num_local;
  const bool goes = arch::lane_idx() < num_local &&
                    arch::ld_nc(args.is_token_in_rank + first + arch::lane_idx()) != 0;
  const int position =
      args.order.position_of_lane(token, arch::ballot(kFullMask, goes), node * num_local);
  uint32_t ranks = goes ? OrderedRanks::of(arch::lane_idx(), position) : 0;
  for (int delta = 1; delta < kMaxRanks; delta *= 2) {
    ranks |= arch::shfl_xor(kFullMask, ranks, delta);
  }
  if (arch::lane_idx() == 0) {
    arch::st_weak(reinterpret_cast<int32_t*>(meta + parts.src_idx_offset()),
                  static_cast<int32_t>(token));
    arch::st_weak(reinterpret_cast<uint32_t*>(meta + parts.ranks_offset()), ranks);
  }
}

// One warp. False: a wait failed.
template <bool kIsQuantised>
DC_DEVICE bool send_channel_to_node(const Context& rail, const InternodeDispatchArgs& args,
                                    int channel, int node) {
  const int num_nodes = args.tiers.num_nodes();
  const int row_bytes = args.message.row_bytes;
  const ChannelRange range =
      ChannelRange::of(args.num_tokens, args.rail_rings.num_channels, channel);
  Outlet outlet(RailSender(rail, args.tiers.rail, args.rail_rings, channel, node),
                args.num_rail_send_tokens);
  for (int base = range.begin; base < range.end; base += kWarpSize) {
    const int64_t own = base + arch::lane_idx();
    uint32_t pending =
        arch::ballot(kFullMask, own < range.end &&
                                    arch::ld_nc(args.send_node_head + own * num_nodes + node) >= 0);
    for (; pending != 0; pending &= pending - 1) {
      const int token = base + arch::ffs(pending) - 1;
      uint8_t* slot = outlet.acquire();
      if (slot == nullptr) return false;
      copy_row(slot, args.x + static_cast<size_t>(token) * row_bytes, row_bytes);
      write_rail_meta<kIsQuantised>(args, slot + row_bytes, token, node);
      outlet.commit();
    }
  }
  outlet.publish();
  return true;
}

// One warp: every num_sender_warps-th node of the channel's rotation.
template <bool kIsQuantised>
DC_DEVICE void send_to_nodes(const Context& rail, const InternodeDispatchArgs& args, int channel,
                             int warp) {
  const int num_nodes = args.tiers.num_nodes();
  for (int step = warp; step < num_nodes; step += args.num_sender_warps) {
    const int node = NodeOrder::dispatch_to(args.tiers.rail.node, channel, step, num_nodes);
    if (!send_channel_to_node<kIsQuantised>(rail, args, channel, node)) return;
  }
}

}  // namespace deep_comm
