// What a dispatch learned, as calls use it: addresses, sizes and owners. Handles of Python are views of
// it (deep_comm/handle.py).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "host/memory.hpp"
#include "host/routing_block.hpp"
#include "host/stream_order.hpp"

namespace deep_comm {

// Whose calls take a handle without checks: those of one Buffer, since its last reset with other ranks
// absent. Compared by identity.
struct BufferToken {};

// Where rows of an expanded output lie. L local experts, K selections, N received tokens.
struct ExpansionRecord {
  uintptr_t send_row = 0;      // int32 [T, R] first row of a token at each rank; 0 between nodes
  uintptr_t num_expanded = 0;  // int32 [R]; 0 between nodes
  uintptr_t recv_rows = 0;     // int32 [N, K] row of a selection, or -1
  uintptr_t expert_offsets = 0;  // int32 [L + 1]
  uintptr_t expert_counts = 0;   // int32 [L]
  int num_topk = 0;
  int num_local_experts = 0;
  int64_t num_tokens_limit = 0;  // rows of recv_rows
  int64_t num_rows = 0;          // M
  int expert_alignment = 1;
};

// Addresses, 0: not known. Parts of a routing block or tensors of a caller's.
struct RoutingAddresses {
  uintptr_t is_token_in_rank = 0;
  // inside a node
  uintptr_t send_head = 0;
  uintptr_t rank_prefix = 0;
  uintptr_t channel_prefix = 0;
  uintptr_t recv_channel_prefix = 0;
  uintptr_t recv_src_idx = 0;
  // between nodes (channel_prefix and recv_channel_prefix are those of ranks)
  uintptr_t send_node_head = 0;
  uintptr_t node_prefix = 0;
  uintptr_t recv_node_prefix = 0;
  uintptr_t recv_node_sum = 0;
  uintptr_t recv_rank_sum = 0;
  uintptr_t send_places = 0;
  uintptr_t forward_places = 0;
  uintptr_t send_rank_head = 0;
  uintptr_t recv_src_meta = 0;
};

struct DispatchRecord {
  std::shared_ptr<const BufferToken> owner;
  int rank = -1;
  int num_experts = 0;  // 0: not known
  int num_topk = 0;     // 0: dispatched without top-k, or not known
  int num_channels = 0;
  int64_t num_tokens = 0;       // T
  int64_t num_recv_rows = 0;    // received tokens, or the bound of them
  int64_t num_output_rows = 0;  // rows that dispatch returned and combine takes
  int64_t num_forward_rows = 0;                 // between nodes
  std::optional<int64_t> num_returning_rows;    // between nodes
  std::optional<int64_t> num_recv_tokens, max_num_tokens;  // empty: the host has not been told
  bool has_default_sms = false;  // nobody said how many SMs the dispatch gets: combine may take more
  RoutingAddresses routing;
  std::optional<ExpansionRecord> expansion;
  // The framework's tensors in it, which streams may have to be recorded on.
  HeldTensors held;

  // Where the parts lie that no tensor has been made of. No block of routing: given as tensors.
  std::optional<RoutingBlock> layout;
  uintptr_t base = 0;             // of the routing block
  std::shared_ptr<Block> block;   // of the receive region; null: `held` keeps the memory
  // Of what was received: recv_src_idx, between nodes recv_src_meta and send_rank_head as well. Likewise.
  std::shared_ptr<Block> source_block;
};

}  // namespace deep_comm
