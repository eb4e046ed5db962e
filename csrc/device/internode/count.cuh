// internode_count: counts and numbers the tokens of this rank by channel, for every node and rank.
//
// in     is_token_in_rank [T, R]
// out    node_channel_prefix [N, C], rank_channel_prefix [R, C], send_node_head [T, N],
//        send_slots [T, N + R]; each may be omitted
// grid   any number of blocks; a block handles one target (node, then rank) at a time
// smem   TargetTokens
// local: no peer takes part, the generation does not advance
#pragma once

#include "device/internode/args.cuh"
#include "device/layout/channel_range.cuh"
#include "device/layout/divisor.cuh"
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

// What a block knows of a target; in shared memory. The tokens of a channel lie in words of 32, the last
// of them perhaps not full.
class TargetTokens {
 public:
  DC_HOST_DEVICE static int words_of_channel(int num_tokens, int num_channels) {
    return ceil_div(ceil_div(num_tokens, num_channels), kWarpSize);
  }
  DC_HOST_DEVICE static size_t num_bytes(int num_tokens, int num_channels) {
    const size_t num_words =
        static_cast<size_t>(num_channels) * words_of_channel(num_tokens, num_channels);
    return sizeof(int32_t) * (num_channels + 2 * num_words);
  }
  DC_DEVICE explicit TargetTokens(const InternodeCountArgs& args)
      : args_(args),
        channel_tokens_(ChannelRange::of(args.num_tokens, args.num_channels, 0).end),
        words_of_channel_(words_of_channel(args.num_tokens, args.num_channels)),
        by_words_(Divisor::make(max_of(words_of_channel_, 1))),
        num_words_(args.num_channels * words_of_channel_),
        starts_(reinterpret_cast<int32_t*>(arch::dynamic_smem())),
        before_(starts_ + args.num_channels),
        going_(reinterpret_cast<uint32_t*>(before_ + num_words_)) {}

  // The block. Several words of a warp are loaded at once: each load is a trip to memory.
  DC_DEVICE void load(int target) {
    constexpr int kAtOnce = 4;
    DC_NO_UNROLL
    for (int base = arch::warp_idx(); base < num_words_; base += kAtOnce * arch::num_warps()) {
      bool goes[kAtOnce];
      DC_UNROLL
      for (int idx = 0; idx < kAtOnce; ++idx) {
        const int token = token_at(base + idx * arch::num_warps());
        goes[idx] = token >= 0 && goes_to(args_, token, target);
      }
      DC_UNROLL
      for (int idx = 0; idx < kAtOnce; ++idx) {
        const int word = base + idx * arch::num_warps();
        const uint32_t going = arch::ballot(kFullMask, goes[idx]);
        if (word < num_words_ && arch::lane_idx() == 0) going_[word] = going;
      }
    }
  }
  // The block, after a barrier: counts what goes to the target before each word, in its channel, and
  // in each channel.
  DC_DEVICE void count() {
    for (int channel = arch::warp_idx(); channel < args_.num_channels;
         channel += arch::num_warps()) {
      int32_t total = 0;
      for (int base = 0; base < words_of_channel_; base += kWarpSize) {
        const int idx = base + arch::lane_idx(), word = channel * words_of_channel_ + idx;
        const int32_t own = idx < words_of_channel_ ? arch::popc(going_[word]) : 0;
        const int32_t end = prefix_sum(own);
        if (idx < words_of_channel_) before_[word] = total + end - own;
        total += arch::shfl(kFullMask, end, kWarpSize - 1);
      }
      if (arch::lane_idx() == 0) starts_[channel] = total;
    }
  }
  // One warp, after a barrier: turns the channels' counts into where each begins, and writes their
  // prefix sums, unless `prefix` is null.
  DC_DEVICE void add_up(int32_t* prefix) {
    int32_t before = 0;
    for (int base = 0; base < args_.num_channels; base += kWarpSize) {
      const int channel = base + arch::lane_idx();
      const int32_t own = channel < args_.num_channels ? starts_[channel] : 0;
      const int32_t end = prefix_sum(own);
      if (channel < args_.num_channels) {
        starts_[channel] = before + end - own;
        if (prefix != nullptr) arch::st_weak(prefix + channel, before + end);
      }
      before += arch::shfl(kFullMask, end, kWarpSize - 1);
    }
  }
  // The block, after a barrier: calls visit(token, start, ordinal) for every token: where its channel
  // begins, and which of the channel's tokens for the target it is, or -1.
  template <class Visit>
  DC_DEVICE void for_each_token(const Visit& visit) const {
    const uint32_t own = 1u << arch::lane_idx();
    for (int word = arch::warp_idx(); word < num_words_; word += arch::num_warps()) {
      const int token = token_at(word);
      const uint32_t going = going_[word];
      if (token < 0) continue;
      visit(token, starts_[by_words_.quotient(word)],
            (going & own) != 0 ? before_[word] + arch::popc(going & (own - 1)) : -1);
    }
  }

 private:
  // This lane's token of a word, or -1.
  DC_DEVICE int token_at(int word) const {
    const int channel = by_words_.quotient(word);
    const int idx = (word - channel * words_of_channel_) * kWarpSize + arch::lane_idx();
    const int token = channel * channel_tokens_ + idx;
    return idx < channel_tokens_ && token < args_.num_tokens ? token : -1;
  }

  const InternodeCountArgs& args_;
  int channel_tokens_;  // of the last channels perhaps fewer
  int words_of_channel_;
  Divisor by_words_;
  int num_words_;
  int32_t* starts_;  // [C]
  int32_t* before_;  // [words]
  uint32_t* going_;  // [words]
};

DC_DEVICE void internode_count(const InternodeCountArgs& args) {
  const int num_nodes = args.tiers.num_nodes(), num_targets = num_nodes + args.tiers.num_ranks();
  TargetTokens tokens(args);
  for (int target = arch::block_idx(); target < num_targets; target += arch::num_blocks()) {
    tokens.load(target);
    arch::sync_block();
    tokens.count();
    arch::sync_block();
    if (arch::warp_idx() == 0) {
      int32_t* prefix = nullptr;
      if (args.node_channel_prefix != nullptr) {
        prefix = target < num_nodes
                     ? args.node_channel_prefix + target * args.num_channels
                     : args.rank_channel_prefix + (target - num_nodes) * args.num_channels;
      }
      tokens.add_up(prefix);
    }
    arch::sync_block();
    const bool has_head = args.send_node_head != nullptr && target < num_nodes;
    tokens.for_each_token([&](int token, int start, int ordinal) {
      if (has_head) {
        arch::st_weak(args.send_node_head + static_cast<int64_t>(token) * num_nodes + target,
                      ordinal);
      }
      if (args.send_slots != nullptr) {
        arch::st_weak(args.send_slots + static_cast<int64_t>(token) * num_targets + target,
                      ordinal < 0 ? -1 : start + ordinal);
      }
    });
    arch::sync_block();  // the next target's words
  }
}

}  // namespace deep_comm
