// internode_count: counts and numbers the tokens of this rank by channel, for every node and rank.
//
// in     is_token_in_rank [T, R]
// out    node_channel_prefix [N, C], rank_channel_prefix [R, C], send_node_head [T, N],
//        send_slots [T, N + R]; each may be omitted
// grid   any number of blocks; a block handles one target (node, then rank) at a time, a warp one
//        channel
// smem   int32 [C]
// local: no peer takes part, the generation does not advance
#pragma once

#include "device/internode/args.cuh"
#include "device/layout/channel_range.cuh"

namespace deep_comm {

// True if a token goes to a target. Targets [0, N) are nodes, [N, N + R) are ranks.
DC_DEVICE bool goes_to(const InternodeCountArgs& args, int64_t token, int target) {
  const int num_nodes = args.tiers.num_nodes(), num_local = args.tiers.ranks_per_node();
  const uint8_t* row = args.is_token_in_rank + token * args.tiers.num_ranks();
  if (target >= num_nodes) return arch::ld_nc(row + target - num_nodes) != 0;
  bool goes = false;
  for (int local = 0; local < num_local; ++local) {
    goes = arch::ld_nc(row + target * num_local + local) != 0 || goes;
  }
  return goes;
}

// One warp, one channel: counts its tokens for a target, and numbers them if it is a node.
DC_DEVICE int count_channel(const InternodeCountArgs& args, int channel, int target) {
  const int num_nodes = args.tiers.num_nodes();
  const ChannelRange range = ChannelRange::of(args.num_tokens, args.num_channels, channel);
  const uint32_t lower_lanes = (1u << arch::lane_idx()) - 1;
  int num_rows = 0;
  for (int base = range.begin; base < range.end; base += kWarpSize) {
    const int token = base + arch::lane_idx();
    const bool goes = token < range.end && goes_to(args, token, target);
    const uint32_t going = arch::ballot(kFullMask, goes);
    if (args.send_node_head != nullptr && target < num_nodes && token < range.end) {
      arch::st_weak(args.send_node_head + static_cast<int64_t>(token) * num_nodes + target,
                    goes ? num_rows + arch::popc(going & lower_lanes) : -1);
    }
    num_rows += arch::popc(going);
  }
  return num_rows;
}

// One warp, one channel, whose first place at the target is `start`: writes the places of its
// tokens.
DC_DEVICE void place_channel(const InternodeCountArgs& args, int channel, int target, int start) {
  const int num_targets = args.tiers.num_nodes() + args.tiers.num_ranks();
  const ChannelRange range = ChannelRange::of(args.num_tokens, args.num_channels, channel);
  const uint32_t lower_lanes = (1u << arch::lane_idx()) - 1;
  for (int base = range.begin; base < range.end; base += kWarpSize) {
    const int token = base + arch::lane_idx();
    const bool goes = token < range.end && goes_to(args, token, target);
    const uint32_t going = arch::ballot(kFullMask, goes);
    if (token < range.end) {
      arch::st_weak(args.send_slots + static_cast<int64_t>(token) * num_targets + target,
                    goes ? start + arch::popc(going & lower_lanes) : -1);
    }
    start += arch::popc(going);
  }
}

DC_DEVICE void internode_count(const InternodeCountArgs& args) {
  const int num_nodes = args.tiers.num_nodes();
  const bool writes_prefixes = args.node_channel_prefix != nullptr;
  int32_t* counts = reinterpret_cast<int32_t*>(arch::dynamic_smem());
  for (int target = arch::block_idx(); target < num_nodes + args.tiers.num_ranks();
       target += arch::num_blocks()) {
    for (int channel = arch::warp_idx(); channel < args.num_channels;
         channel += arch::num_warps()) {
      const int count = count_channel(args, channel, target);
      if (arch::lane_idx() == 0) counts[channel] = count;
    }
    arch::sync_block();
    if (arch::thread_idx() == 0) {
      int32_t* prefix = target < num_nodes
                            ? args.node_channel_prefix + target * args.num_channels
                            : args.rank_channel_prefix + (target - num_nodes) * args.num_channels;
      int32_t sum = 0;
      for (int channel = 0; channel < args.num_channels; ++channel) {
        const int32_t start = sum;
        sum += counts[channel];
        counts[channel] = start;
        if (writes_prefixes) arch::st_weak(prefix + channel, sum);
      }
    }
    arch::sync_block();
    for (int channel = arch::warp_idx(); args.send_slots != nullptr && channel < args.num_channels;
         channel += arch::num_warps()) {
      place_channel(args, channel, target, counts[channel]);
    }
    // A warp overwrites the counts that its own lanes have read.
    arch::sync_warp();
  }
}

}  // namespace deep_comm
