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
#include "device/layout/prefix_sum.cuh"

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

// One warp, one channel: calls visit(token, going) for its tokens, a token per lane. going: the lanes
// whose tokens go to the target. Several tokens of a lane are loaded at once: each load is a trip to
// memory.
template <class Visit>
DC_DEVICE void visit_channel(const InternodeCountArgs& args, int channel, int target,
                             const Visit& visit) {
  constexpr int kAtOnce = 4;
  const ChannelRange range = ChannelRange::of(args.num_tokens, args.num_channels, channel);
  DC_NO_UNROLL
  for (int base = range.begin; base < range.end; base += kAtOnce * kWarpSize) {
    bool goes[kAtOnce];
    DC_UNROLL
    for (int idx = 0; idx < kAtOnce; ++idx) {
      const int token = base + idx * kWarpSize + arch::lane_idx();
      goes[idx] = token < range.end && goes_to(args, token, target);
    }
    DC_UNROLL
    for (int idx = 0; idx < kAtOnce; ++idx) {
      const int first = base + idx * kWarpSize, token = first + arch::lane_idx();
      if (first < range.end) {
        visit(token < range.end ? token : -1, arch::ballot(kFullMask, goes[idx]));
      }
    }
  }
}

// This lane's ordinal among `going`, from `start` on; -1: it is none of them.
DC_DEVICE int ordinal_in(uint32_t going, int start) {
  const uint32_t own = 1u << arch::lane_idx();
  return (going & own) != 0 ? start + arch::popc(going & (own - 1)) : -1;
}

// One warp, one channel: counts its tokens for a target, and numbers them if it is a node.
DC_DEVICE int count_channel(const InternodeCountArgs& args, int channel, int target) {
  const int num_nodes = args.tiers.num_nodes();
  const bool numbers = args.send_node_head != nullptr && target < num_nodes;
  int num_rows = 0;
  visit_channel(args, channel, target, [&](int token, uint32_t going) {
    if (numbers && token >= 0) {
      arch::st_weak(args.send_node_head + static_cast<int64_t>(token) * num_nodes + target,
                    ordinal_in(going, num_rows));
    }
    num_rows += arch::popc(going);
  });
  return num_rows;
}

// One warp, one channel, whose first place at the target is `start`: writes the places of its
// tokens.
DC_DEVICE void place_channel(const InternodeCountArgs& args, int channel, int target, int start) {
  const int num_targets = args.tiers.num_nodes() + args.tiers.num_ranks();
  visit_channel(args, channel, target, [&](int token, uint32_t going) {
    if (token >= 0) {
      arch::st_weak(args.send_slots + static_cast<int64_t>(token) * num_targets + target,
                    ordinal_in(going, start));
    }
    start += arch::popc(going);
  });
}

// One warp: turns the counts of a target's channels into where each begins, and writes their prefix
// sums to `prefix`, unless that is null.
DC_DEVICE void add_up_channels(const InternodeCountArgs& args, int32_t* counts, int32_t* prefix) {
  int32_t before = 0;
  for (int base = 0; base < args.num_channels; base += kWarpSize) {
    const int channel = base + arch::lane_idx();
    const int32_t own = channel < args.num_channels ? counts[channel] : 0;
    const int32_t end = prefix_sum(own);
    if (channel < args.num_channels) {
      counts[channel] = before + end - own;
      if (prefix != nullptr) arch::st_weak(prefix + channel, before + end);
    }
    before += arch::shfl(kFullMask, end, kWarpSize - 1);
  }
}

DC_DEVICE void internode_count(const InternodeCountArgs& args) {
  const int num_nodes = args.tiers.num_nodes();
  int32_t* counts = reinterpret_cast<int32_t*>(arch::dynamic_smem());
  for (int target = arch::block_idx(); target < num_nodes + args.tiers.num_ranks();
       target += arch::num_blocks()) {
    for (int channel = arch::warp_idx(); channel < args.num_channels;
         channel += arch::num_warps()) {
      const int count = count_channel(args, channel, target);
      if (arch::lane_idx() == 0) counts[channel] = count;
    }
    arch::sync_block();
    if (arch::warp_idx() == 0) {
      int32_t* prefix = nullptr;
      if (args.node_channel_prefix != nullptr) {
        prefix = target < num_nodes
                     ? args.node_channel_prefix + target * args.num_channels
                     : args.rank_channel_prefix + (target - num_nodes) * args.num_channels;
      }
      add_up_channels(args, counts, prefix);
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
