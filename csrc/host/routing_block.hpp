// What counting kernels write for a dispatch with new routing: one block of memory, which the handle
// keeps. One list of parts for each tier says where they lie, how they are shaped and what Python
// calls them; sizes, addresses and the handle's tensors all follow from it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "host/tensor.hpp"

namespace deep_comm {

// Parts of both tiers. Those inside a node come first.
enum class RoutingPart : uint8_t {
  kRankPrefix,         // [R, R]; between nodes not there
  kChannelPrefix,      // [R, C] tokens sent to a rank in channels 0..c
  kRecvChannelPrefix,  // [R, C] start of a channel in a source's rows
  kTokensPerExpert,    // [L] received, aligned
  kSendHead,           // [T, R] ordinal in the (rank, channel) queue
  kRecvCounts,         // [1 + R] all rows, rows by source; between nodes [R]: rows by source
  kTokenMask,          // [T, R] is_token_in_rank, unless the caller gave it
  kNodePrefix,         // between nodes: [N, C]
  kSendNodeHead,       // [T, N]
  kRecvNodePrefix,     // [N, C]
  kRecvNodeSum,        // [N]
  kRecvRankSum,        // [R]
  kForwardSlots,       // [(N + 1) * M + C * N * M]
  kSendSlots,          // [T, N + R], with a receive region
  kCombineStart,       // [C, N, M]
  kCountsPerRank,      // [R], [N], [E]: of a layout that the caller did not give
  kCountsPerNode,
  kCountsPerExpert,
  kNumParts
};

class RoutingBlock {
 public:
  static constexpr size_t kNone = SIZE_MAX;

  struct Part {
    size_t offset = kNone;  // bytes from the block's start
    TensorSpec spec;
  };
  // A tensor of the handle: a part, or words of one.
  struct Named {
    std::string_view name;
    size_t offset;
    TensorSpec spec;
  };
  using Names = std::array<Named, 16>;

  // R ranks, C channels, L local experts, T tokens.
  static RoutingBlock in_node(int64_t num_ranks, int64_t num_channels, int64_t num_local_experts,
                              int64_t num_tokens, bool has_mask) {
    RoutingBlock block;
    using enum RoutingPart;
    block.take(kRankPrefix, kInt32, {num_ranks, num_ranks});
    block.take(kChannelPrefix, kInt32, {num_ranks, num_channels});
    block.take(kRecvChannelPrefix, kInt32, {num_ranks, num_channels});
    block.take(kTokensPerExpert, kInt32, {num_local_experts});
    block.take(kSendHead, kInt32, {num_tokens, num_ranks});
    block.take(kRecvCounts, kInt32, {1 + num_ranks});
    if (has_mask) block.take(kTokenMask, kBool, {num_tokens, num_ranks});
    block.end();
    return block;
  }

  // N nodes of M ranks, R = N * M; E experts.
  static RoutingBlock between_nodes(int64_t num_nodes, int64_t num_ranks, int64_t num_channels,
                                    int64_t num_local_experts, int64_t num_experts,
                                    int64_t num_tokens, bool has_send_slots, bool has_mask) {
    RoutingBlock block;
    using enum RoutingPart;
    const int64_t num_local = num_ranks / num_nodes;
    block.take(kNodePrefix, kInt32, {num_nodes, num_channels});
    block.take(kChannelPrefix, kInt32, {num_ranks, num_channels});
    block.take(kSendNodeHead, kInt32, {num_tokens, num_nodes});
    block.take(kRecvNodePrefix, kInt32, {num_nodes, num_channels});
    block.take(kRecvNodeSum, kInt32, {num_nodes});
    block.take(kRecvChannelPrefix, kInt32, {num_ranks, num_channels});
    block.take(kRecvRankSum, kInt32, {num_ranks});
    block.take(kForwardSlots, kInt32, {(num_nodes + 1 + num_channels * num_nodes) * num_local});
    block.take(kTokensPerExpert, kInt32, {num_local_experts});
    block.take(kRecvCounts, kInt32, {num_ranks});
    if (has_send_slots) block.take(kSendSlots, kInt32, {num_tokens, num_nodes + num_ranks});
    block.take(kCombineStart, kInt32, {num_channels * num_ranks});
    if (has_mask) {
      block.take(kCountsPerRank, kInt32, {num_ranks});
      block.take(kCountsPerNode, kInt32, {num_nodes});
      block.take(kCountsPerExpert, kInt32, {num_experts});
      block.take(kTokenMask, kBool, {num_tokens, num_ranks});
    }
    block.end();
    block.is_between_nodes_ = true;
    return block;
  }

  size_t num_bytes() const { return num_bytes_; }
  bool has(RoutingPart part) const { return at(part).offset != kNone; }
  const Part& at(RoutingPart part) const { return parts_[static_cast<size_t>(part)]; }
  // Of a block at `base`; 0: the part is not there.
  uintptr_t address(uintptr_t base, RoutingPart part) const {
    return has(part) ? base + at(part).offset : 0;
  }

  // The tensors of the handle by their names in Python, of the parts that there are.
  // Returns how many.
  int named(Names* names) const {
    using enum RoutingPart;
    int count = 0;
    const auto add = [&](std::string_view name, RoutingPart part) {
      if (has(part)) (*names)[count++] = {name, at(part).offset, at(part).spec};
    };
    const auto add_words = [&](std::string_view name, RoutingPart part, int64_t first,
                               int64_t size) {
      const size_t begin = at(part).offset + static_cast<size_t>(first) * kInt32.num_bytes;
      (*names)[count++] = {name, begin, TensorSpec::of(kInt32, {size})};
    };
    const int64_t num_ranks = at(kChannelPrefix).spec.shape[0];
    add("is_token_in_rank", kTokenMask);
    add("num_recv_tokens_per_expert", kTokensPerExpert);
    if (is_between_nodes_) {
      add("rdma_channel_prefix_matrix", kNodePrefix);
      add("gbl_channel_prefix_matrix", kChannelPrefix);
      add("recv_rdma_channel_prefix_matrix", kRecvNodePrefix);
      add("recv_rdma_rank_prefix_sum", kRecvNodeSum);
      add("recv_gbl_channel_prefix_matrix", kRecvChannelPrefix);
      add("recv_gbl_rank_prefix_sum", kRecvRankSum);
      add("send_rdma_head", kSendNodeHead);
      add("forward_slots", kForwardSlots);
      add("send_slots", kSendSlots);
      add("num_recv_tokens_per_rank", kRecvCounts);
      add_words("num_recv_tokens_tensor", kRecvRankSum, num_ranks - 1, 1);
    } else {
      add("rank_prefix_matrix", kRankPrefix);
      add("channel_prefix_matrix", kChannelPrefix);
      add("recv_channel_prefix_matrix", kRecvChannelPrefix);
      add("send_head", kSendHead);
      add_words("num_recv_tokens_tensor", kRecvCounts, 0, 1);
      add_words("num_recv_tokens_per_rank", kRecvCounts, 1, num_ranks);
    }
    return count;
  }

 private:
  static constexpr size_t kPartAlignment = 16, kLine = 128;

  void take(RoutingPart part, ElementType type, std::initializer_list<int64_t> shape) {
    Part& taken = parts_[static_cast<size_t>(part)];
    taken.offset = num_bytes_;
    taken.spec = TensorSpec::of(type, shape);
    num_bytes_ += (taken.spec.num_bytes() + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  }
  // What lies after the block begins at a line.
  void end() { num_bytes_ = (num_bytes_ + kLine - 1) / kLine * kLine; }

  std::array<Part, static_cast<size_t>(RoutingPart::kNumParts)> parts_{};
  size_t num_bytes_ = 0;
  bool is_between_nodes_ = false;
};

}  // namespace deep_comm
