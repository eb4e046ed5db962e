// combine of either tier: every token's rows come home and are summed. combine.cpp is the call inside a
// node, internode_combine.cpp the one between nodes.
#pragma once

#include <memory>

#include "host/calls/handle.hpp"

namespace deep_comm {

struct CombineRequest {
  TensorRef x;
  HandleRequest handle;
  TensorRef topk_weights;
  TensorRef bias[2];
  int num_bias_items = -1;  // of a tuple or list; -1: a tensor, or none
  TensorRef topk_idx;       // whose order the sums follow; not given: ranks ascending
  bool apply_weights = false;
  ConfigChoice config;
  StreamOptions streams;
};

struct CombineResult {
  Object combined_x;
  Object combined_topk_weights;  // null without
  std::shared_ptr<Event> event;  // null: synchronous
};

// What a combine of either tier is given, checked.
struct CheckedCombine {
  std::shared_ptr<DispatchRecord> handle;
  Dtype dtype;
  ElementType type;
  int64_t num_rows = 0, hidden = 0;
  int row_bytes = 0;
  int num_topk = 0;  // of weights that come home; 0: none do
  uintptr_t x = 0;
  uintptr_t weights = 0;      // that come home, [N, K] or of an expanded output [M]; 0: none
  uintptr_t row_weights = 0;  // [M], multiplied with the rows; 0: none
  uintptr_t bias[2] = {0, 0};
  SumOrder order{};
};
// Throws CallError: kArgument, kHandleMismatch. The checks of Buffer.combine, in its order.
CheckedCombine check_combine(const CallContext& context, const CombineRequest& request);

// Of an expanded output: its rows [M, H] as one row a received token [N, H], weights [M] as [N, K],
// where `combine` takes them. The tensors live until the call is launched.
struct ReducedRows {
  MadeTensor x, weights;
  ReduceExpertsArgs args{};  // of the sums; all but what the engine fills in

  // Nothing, without expansion.
  static ReducedRows allocate(CallContext& context, CheckedCombine& combine,
                              const DispatchRecord& handle, CallOrder& order);
};

// What combine returns.
struct CombinedTensors {
  MadeTensor x, weights;  // weights: none if none come home

  static CombinedTensors allocate(CallContext& context, const CheckedCombine& combine,
                                  CallOrder& order);
};

// Its addresses, and the checked ones, in the arguments of either tier's combine kernel.
template <class Args>
void set_combine(const Memory& memory, const CheckedCombine& combine,
                 const CombinedTensors& combined, Args* args) {
  args->num_tokens = static_cast<int>(combine.handle->num_tokens);
  args->num_rows = static_cast<int>(combine.handle->num_recv_rows);
  args->x = pointer_of<uint8_t>(combine.x);
  args->topk_weights = pointer_of<float>(combine.weights);
  for (int item = 0; item < 2; ++item) args->bias[item] = pointer_of<uint8_t>(combine.bias[item]);
  args->order = combine.order;
  args->combined_x = pointer_of<uint8_t>(memory.non_null(combined.x.address));
  if (combine.weights != 0) {
    args->combined_topk_weights = pointer_of<float>(memory.non_null(combined.weights.address));
  }
}

// The caller's tensors of a call, for CallOrder::finish.
std::vector<const void*> inputs_of(const CombineRequest& request);

CombineResult combine_in_node(CallContext& context, const CombineRequest& request);
CombineResult combine_between_nodes(CallContext& context, const CombineRequest& request);
inline CombineResult combine(CallContext& context, const CombineRequest& request) {
  return context.group.is_internode() ? combine_between_nodes(context, request)
                                      : combine_in_node(context, request);
}

}  // namespace deep_comm
