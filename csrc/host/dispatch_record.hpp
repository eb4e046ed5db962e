// What a dispatch learned, as calls use it: addresses, sizes and owners. Handles of Python are views of
// it (deep_comm/handle.py).
//
// What a dispatch of either tier fills in:
//
//   owner, rank, num_experts, num_topk, num_channels, num_tokens, inside a node has_default_sms
//                      when it is launched
//   num_recv_rows, num_output_rows, num_recv_tokens, max_num_tokens, between nodes num_forward_rows and
//   num_returning_rows when its counts have come, or with a bound of them when it is launched (the two
//                      std::optional numbers of tokens stay empty then)
//   routing            the addresses that cached dispatches and combines take
//   layout, block      the routing block and where it lies: all its parts become tensors by name
//   parts              tensors of the handle outside of the block: made ones (the caller's mask), and
//                      places (recv_src_idx [N]; between nodes recv_src_meta [Q, 8] of uint8 and
//                      send_nvl_head [F, M], too). Names are literals, Python's
//   expansion          of an expanded dispatch, with where `numbering` lies (send_row, num_expanded,
//                      expert_offsets, expert_counts; between nodes the last two) and `recv_rows`
//   held               add() of every tensor of the framework's that calls with the handle read; its
//                      owner_stream
//
// Then Handle and InternodeHandle work: tensors are made when they are asked for.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "host/framework.hpp"
#include "host/memory.hpp"
#include "host/routing_block.hpp"
#include "host/stream_order.hpp"

namespace deep_comm {

// Whose calls take a handle without checks: those of one Buffer, since its last reset with other ranks
// absent. Compared by identity; another Buffer's calls compare what it says.
struct BufferToken {
  int num_ranks = 0, num_nodes = 0;
  std::string device_name;
  // Who the ranks are, and which of them were absent (deep_comm/context/absent.py).
  std::vector<std::string> members;
};

// Bytes that tensors are made over.
struct PartMemory {
  uintptr_t base = 0;
  std::shared_ptr<void> keeper;  // of the receive region's memory: the heap and the block
  std::shared_ptr<Block> block;
  Object tensor;           // or one of the framework's that begins at `base`
  bool is_viewed = false;  // parts are views of that

  // For parts of several types.
  static PartMemory of_bytes(const MadeTensor& made) {
    return {made.address, nullptr, nullptr, made.tensor, false};
  }
  // Flat, of int32, as all its parts are.
  static PartMemory of_words(const MadeTensor& made) {
    return {made.address, nullptr, nullptr, made.tensor, true};
  }
  static PartMemory of(const Memory& memory, std::shared_ptr<Block> block) {
    return {memory.heap_base() + block->offset, memory.keep(block), block, {}, false};
  }
  Object make(Framework& framework, uintptr_t address, const TensorSpec& spec) const;
};

// A tensor of a handle, or of a batch.
struct RecordPart {
  std::string_view name;
  Object made;  // null: to be made
  uintptr_t address = 0;
  TensorSpec spec;
  PartMemory memory;

  static RecordPart of(std::string_view name, Object made) {
    return {name, std::move(made), 0, {}, {}};
  }
  Object make(Framework& framework) const {
    return made ? made : memory.make(framework, address, spec);
  }
};

// Where rows of an expanded output lie. L local experts, K selections, N received tokens.
struct ExpansionRecord {
  uintptr_t send_row = 0;        // int32 [T, R] first row of a token at each rank; 0 between nodes
  uintptr_t num_expanded = 0;    // int32 [R]; 0 between nodes
  uintptr_t recv_rows = 0;       // int32 [N, K] row of a selection, or -1
  uintptr_t expert_offsets = 0;  // int32 [L + 1]
  uintptr_t expert_counts = 0;   // int32 [L]
  int num_topk = 0;
  int num_local_experts = 0;
  int64_t num_tokens_limit = 0;  // rows of recv_rows
  int64_t num_rows = 0;          // M
  int expert_alignment = 1;
  PartMemory numbering, placed;  // of recv_rows
};

// Addresses, 0: not known. Parts of a routing block or tensors of a caller's.
struct RoutingAddresses {
  // Between nodes: address of an int32, the tokens that this rank has received.
  uintptr_t num_received(int num_ranks) const {
    return recv_rank_sum + sizeof(int32_t) * static_cast<size_t>(num_ranks - 1);
  }

  uintptr_t is_token_in_rank = 0;
  // inside a node
  uintptr_t send_head = 0;
  uintptr_t rank_prefix = 0;
  uintptr_t channel_prefix = 0;
  uintptr_t recv_channel_prefix = 0;
  // between nodes (channel_prefix and recv_channel_prefix are those of ranks)
  uintptr_t send_node_head = 0;
  uintptr_t node_prefix = 0;
  uintptr_t recv_node_prefix = 0;
  uintptr_t recv_node_sum = 0;
  uintptr_t recv_rank_sum = 0;
  uintptr_t send_slots = 0;
  uintptr_t forward_slots = 0;
  uintptr_t send_rank_head = 0;
  uintptr_t recv_src_meta = 0;
};

struct DispatchRecord {
  std::shared_ptr<const BufferToken> owner;  // null: of tensors that do not say who made them
  int rank = -1;
  int num_experts = 0;  // 0: not known
  int num_topk = 0;     // 0: dispatched without top-k, or not known
  int num_channels = 0;
  int64_t num_tokens = 0;                     // T
  int64_t num_recv_rows = 0;                  // received tokens, or the bound of them
  int64_t num_output_rows = 0;                // rows that dispatch returned and combine takes
  int64_t num_forward_rows = 0;               // between nodes
  std::optional<int64_t> num_returning_rows;  // between nodes
  std::optional<int64_t> num_recv_tokens, max_num_tokens;  // empty: the host has not been told
  // Nobody said how many SMs the dispatch gets: combine may take more.
  bool has_default_sms = false;
  RoutingAddresses routing;
  std::optional<ExpansionRecord> expansion;
  // The framework's tensors in it, which streams may have to be recorded on.
  HeldTensors held;

  // ---- what Python may ask for
  std::shared_ptr<Framework> framework;  // null: given as tensors, which the caller's handle has
  std::shared_ptr<const RoutingBlock> layout;
  PartMemory block;
  std::vector<RecordPart> parts;

  bool is_given() const { return framework == nullptr; }
  // A tensor of the handle or of its expansion, by its name in Python; null: there is none.
  Object part(std::string_view name) const;
};

}  // namespace deep_comm
