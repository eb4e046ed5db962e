// get_dispatch_layout: which ranks each token goes to, and how many tokens go where.
#pragma once

#include <memory>

#include "host/calls/call_context.hpp"

namespace deep_comm {

struct LayoutRequest {
  TensorRef topk_idx;
  IntegerRef num_experts;
  StreamOptions streams;
};

// R ranks, N nodes, E experts, T tokens of this rank.
struct LayoutResult {
  Object num_tokens_per_rank;    // int32 [R], a token counts once per rank
  Object num_tokens_per_node;    // int32 [N], likewise; absent inside one node
  Object num_tokens_per_expert;  // int32 [E], every selection counts
  Object is_token_in_rank;       // bool [T, R]
  std::shared_ptr<Event> event;  // of an asynchronous call
};

// What the kernel finds wrong with the indices is in the error record.
LayoutResult get_dispatch_layout(CallContext& context, const LayoutRequest& request);

// Launches the counting kernel of either tier; addresses of its outputs.
struct LayoutAddresses {
  uintptr_t num_tokens_per_rank, num_tokens_per_node, num_tokens_per_expert, is_token_in_rank;
};
void launch_layout(CallContext& context, const TensorRef& topk_idx, int num_experts,
                   const LayoutAddresses& out, uint64_t stream);

}  // namespace deep_comm
