// dispatch of either tier: what callers pass and get. dispatch.cpp is the call inside a node,
// internode_dispatch.cpp the one between nodes.
#pragma once

#include <memory>
#include <vector>

#include "host/calls/handle.hpp"
#include "host/calls/payload.hpp"

namespace deep_comm {

// How the outputs of new routing are written. See Buffer.dispatch.
struct DispatchFlags {
  bool zero_tail = false, expand = false, zero_padding = false;
  // With expand: whoever calls takes the weights when it needs a tensor of them, and no indices.
  bool defers_topk = false;

  // Throws CallError: kArgument.
  void check(bool has_topk_idx) const {
    if (expand && !has_topk_idx) refuse_argument("topk_idx", {}, "is needed with expand");
    if (zero_tail && expand) {
      refuse_argument("zero_tail", true,
                      "is for outputs without expand; zero_padding serves expanded ones");
    }
    if (zero_padding && !expand) refuse_argument("zero_padding", true, "needs expand=True");
  }
};

struct DispatchRequest {
  PayloadRequest payload;
  // Of an earlier dispatch, whose routing is repeated; not given: new routing.
  HandleRequest handle;
  TensorRef num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert;
  TensorRef topk_idx, topk_weights;
  IntegerRef expert_alignment, num_worst_tokens, num_experts;
  DispatchFlags flags;
  ConfigChoice config;
  StreamOptions streams;
};

struct DispatchResult {
  Object recv_x, recv_scales;               // scales: null without
  Object recv_topk_idx, recv_topk_weights;  // null without, and if they are deferred
  RecordPart deferred_topk_weights;
  bool has_counts = false;  // false: cached
  std::vector<int> num_recv_tokens_per_expert;
  std::shared_ptr<DispatchRecord> record;  // null: cached
  std::shared_ptr<Event> event;            // null: synchronous
};

struct OutputForm;
struct DispatchOutputs;
// After all rows have come: the caller's tensors.
void fill_result(CallContext& context, const Payload& payload, const OutputForm& form,
                 int num_local_blocks, bool defers_topk, DispatchOutputs&& out, CallOrder& order,
                 DispatchResult* result);

// ---- new routing, of either tier

// What a dispatch with new routing is given beside its rows, checked.
struct CheckedRouting {
  bool has_layout = false;  // given; else made of the indices
  int num_experts = 0;
  int num_topk = 0;  // 0: without indices
  int topk_idx_bytes = 0;
  int expert_alignment = 1;
  int64_t num_worst_tokens = 0;  // 0: the host waits for the counts
  uintptr_t topk_idx = 0, topk_weights = 0;
  uintptr_t is_token_in_rank = 0, num_tokens_per_expert = 0;  // of a given layout
  bool has_weights() const { return topk_weights != 0; }
};
// Throws CallError: kArgument. The checks of Buffer.dispatch, in its order.
CheckedRouting check_routing(const CallContext& context, const DispatchRequest& request,
                             int64_t num_tokens);

// The caller's tensors of a call, for CallOrder::finish.
std::vector<const void*> inputs_of(const Payload& payload, const DispatchRequest& request);

// ---- handles

// Throws CallError kHandleMismatch unless it is of as many tokens, and expanded if the call needs that.
void require_handle(const DispatchRecord& handle, int64_t num_tokens, bool needs_expansion);
void require_channels(const DispatchRecord& handle, int num_channels, const char* sms_of_channels);

// What a call knows, checked, whose routing is that of a handle. Such calls exchange no counts, and
// their host does not wait. Throws CallError: kArgument, kHandleMismatch.
class CachedDispatchCall {
 protected:
  CachedDispatchCall(CallContext& context, const DispatchRequest& request);

  CallContext& context_;
  const DispatchRequest& request_;
  Payload payload_;
  std::shared_ptr<DispatchRecord> handle_;
};

// What the handle of a call with new routing is made of, in either tier.
struct RecordSource {
  const CheckedRouting& routing;
  const RoutingAddresses& addresses;
  const RoutingBlock& layout;
  const PartMemory& block;  // of routing
  const Object& mask;       // is_token_in_rank, where the caller gave it
  int64_t num_tokens;
  int num_channels;

  // Without what the rows that come bring along.
  std::shared_ptr<DispatchRecord> make(const CallContext& context, const CallOrder& order) const;
};

// ---- the calls

DispatchResult dispatch_in_node(CallContext& context, const DispatchRequest& request);
DispatchResult dispatch_between_nodes(CallContext& context, const DispatchRequest& request);
inline DispatchResult dispatch(CallContext& context, const DispatchRequest& request) {
  return context.group.is_internode() ? dispatch_between_nodes(context, request)
                                      : dispatch_in_node(context, request);
}

// A dispatch with new routing and exact counts, asynchronous, up to where the host would wait.
class PendingDispatch : public PendingCall {
 public:
  // Waits, and returns the result, once; throws what went wrong, in every call.
  virtual DispatchResult result() = 0;
};
std::shared_ptr<PendingDispatch> begin_dispatch_in_node(CallContext& context,
                                                        const DispatchRequest& request);
std::shared_ptr<PendingDispatch> begin_dispatch_between_nodes(CallContext& context,
                                                              const DispatchRequest& request);
inline std::shared_ptr<PendingDispatch> begin_dispatch(CallContext& context,
                                                       const DispatchRequest& request) {
  return context.group.is_internode() ? begin_dispatch_between_nodes(context, request)
                                      : begin_dispatch_in_node(context, request);
}

}  // namespace deep_comm
