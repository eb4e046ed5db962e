// combine, the last step: the rank that owns a token adds its sums, one per node.
#pragma once

#include "device/internode/reduce_team.cuh"
#include "device/layout/channel_range.cuh"

namespace deep_comm {

// Lane l: the ordinal of `token` in the ring from node first + l, or -1.
DC_DEVICE int load_node_head(const InternodeCombineArgs& args, int token, int first) {
  const int node = first + arch::lane_idx(), num_nodes = args.tiers.num_nodes();
  if (node >= num_nodes) return -1;
  return arch::ld_nc(args.send_node_head + static_cast<int64_t>(token) * num_nodes + node);
}

// One warp: calls visit(slot) for the token's sum of each of its nodes, in their order.
template <class Visit>
DC_DEVICE void for_each_sum(const Context& rail, const InternodeCombineArgs& args, int channel,
                            int token, Visit visit) {
  const uint8_t* base = rail.world.bases[rail.world.rank];
  for (int first = 0; first < args.tiers.num_nodes(); first += kWarpSize) {
    const int head = load_node_head(args, token, first);
    const uint32_t present = arch::ballot(kFullMask, head >= 0);
    const int position = args.order.position_of_lane(token, present, first);
    for (int next = 0; next < arch::popc(present); ++next) {
      const int lane = arch::ffs(arch::ballot(kFullMask, head >= 0 && position == next)) - 1;
      const int row_idx = arch::shfl(kFullMask, head, lane);
      visit(base + args.rail_rings.recv_ring(channel, first + lane) +
            args.rail_rings.slot_offset(row_idx));
    }
  }
}

// One warp, one token: waits for its sums, adds the biases and them in float32, rounds.
template <Dtype kDtype>
DC_DEVICE bool reduce_token(const Context& rail, const InternodeCombineArgs& args, int channel,
                            int token) {
  using Type = Numeric<kDtype>;
  constexpr int kUnroll = 2;
  const int lane = arch::lane_idx();
  bool ok = true;
  for (int first = 0; first < args.tiers.num_nodes() && ok; first += kWarpSize) {
    const int head = load_node_head(args, token, first);
    if (head < 0) continue;
    RailReceiver ring(rail, args.tiers.rail, args.rail_rings, channel, first + lane);
    ok = ring.await_filled(head);
  }
  arch::sync_warp();  // hands each lane's acquire to the whole warp
  if (!arch::all(kFullMask, ok)) return false;
  const int row_bytes = args.message.row_bytes, num_vecs = row_bytes / 16;
  const int64_t offset = static_cast<int64_t>(token) * row_bytes;
  // Whole warps step together: the ballots in for_each_sum need all lanes.
  for (int block = 0; block < num_vecs; block += kWarpSize * kUnroll) {
    float sums[kUnroll][Type::kPerVec] = {};
    const auto add = [&](const uint8_t* row) {
      const Vec16* vecs = reinterpret_cast<const Vec16*>(row) + block + lane;
      Vec16 loaded[kUnroll];
      DC_UNROLL
      for (int step = 0; step < kUnroll; ++step) {
        const bool is_inside = block + lane + step * kWarpSize < num_vecs;
        if (is_inside) loaded[step] = arch::ld_weak(vecs + step * kWarpSize);
      }
      DC_UNROLL
      for (int step = 0; step < kUnroll; ++step) {
        const bool is_inside = block + lane + step * kWarpSize < num_vecs;
        if (is_inside) Type::add(sums[step], loaded[step]);
      }
    };
    DC_UNROLL
    for (int bias = 0; bias < 2; ++bias) {
      if (args.bias[bias] != nullptr) add(args.bias[bias] + offset);
    }
    for_each_sum(rail, args, channel, token, add);
    Vec16* out = reinterpret_cast<Vec16*>(args.combined_x + offset) + block + lane;
    DC_UNROLL
    for (int step = 0; step < kUnroll; ++step) {
      if (block + lane + step * kWarpSize < num_vecs) {
        arch::st_streaming(out + step * kWarpSize, Type::round(sums[step]));
      }
    }
  }
  for (int base = 0; base < args.message.num_topk; base += kWarpSize) {
    const int k = base + lane;
    float sum = 0.0f;
    for_each_sum(rail, args, channel, token, [&](const uint8_t* row) {
      if (k < args.message.num_topk) {
        sum += arch::ld_weak(reinterpret_cast<const float*>(row + row_bytes) + k);
      }
    });
    if (k < args.message.num_topk) {
      arch::st_weak(
          args.combined_topk_weights + static_cast<int64_t>(token) * args.message.num_topk + k,
          sum);
    }
  }
  return true;
}

// One reducing warp: every num_reduce_warps-th token of the channel.
template <Dtype kDtype>
DC_DEVICE void reduce_tokens(const Context& rail, const InternodeCombineArgs& args,
                             ReduceProgress* progress, int channel, int warp) {
  const ChannelRange range =
      ChannelRange::of(args.num_tokens, args.rail_rings.num_channels, channel);
  uint32_t num_done = 0;
  for (int token = range.begin + warp; token < range.end; token += args.num_reduce_warps) {
    if (!reduce_token<kDtype>(rail, args, channel, token)) return;
    progress->finish_item(warp, ++num_done);
  }
}

// Rows read from every node's ring, and credits returned; in shared memory, for the one warp that
// returns credits.
struct SumsRead {
  uint32_t num_read;
  uint32_t num_returned;
};

// One warp, which follows the reducing ones: returns credits on the rail.
DC_DEVICE void return_sum_credits(const TierContexts& contexts, const InternodeCombineArgs& args,
                                  ReduceProgress* progress, SumsRead* rings, int channel) {
  const int num_nodes = args.tiers.num_nodes(), lane = arch::lane_idx();
  const ChannelRange range =
      ChannelRange::of(args.num_tokens, args.rail_rings.num_channels, channel);
  const auto batch =
      static_cast<uint32_t>(min_of(args.num_rail_send_tokens, args.rail_rings.num_slots));
  for (int node = lane; node < num_nodes; node += kWarpSize) rings[node] = {0, 0};
  ProgressFollower follower(contexts.rail, progress, args.num_reduce_warps, channel);
  const auto num_tokens = static_cast<uint32_t>(range.end - range.begin);
  for (uint32_t num_passed = 0; num_passed < num_tokens;) {
    uint32_t reached = num_tokens;
    if (!arch::fault(Fault::kEarlyRailCredit))
      reached = follower.await_next(num_passed, num_tokens);
    if (reached == 0) return;
    for (; num_passed < reached; ++num_passed) {
      const int token = range.begin + static_cast<int>(num_passed);
      for (int first = 0; first < num_nodes; first += kWarpSize) {
        const int head = load_node_head(args, token, first);
        if (head < 0) continue;
        SumsRead& ring = rings[first + lane];
        ring.num_read = head + 1;
        if (ring.num_read - ring.num_returned < batch) continue;
        ring.num_returned = ring.num_read;
        RailReceiver(contexts.rail, args.tiers.rail, args.rail_rings, channel, first + lane)
            .return_credit(ring.num_read);
      }
    }
  }
}

}  // namespace deep_comm
