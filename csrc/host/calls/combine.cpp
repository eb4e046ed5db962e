// combine inside a node.
#include "host/calls/combine.hpp"

#include <algorithm>
#include <utility>

#include "host/calls/dispatch.hpp"

namespace deep_comm {

namespace {

template <class T>
T* pointer_of(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Rows that may come, each of which has a place of its own in staged mode.
int64_t num_staging_rows(const CallContext& context, const DispatchRecord& handle) {
  int num_peers = context.group.num_ranks - 1;
  if (handle.num_topk > 0) num_peers = std::min(num_peers, handle.num_topk);
  return handle.num_tokens * num_peers;
}

class LaunchedCombine;

// All memory that the launches write.
class ReservedCombine {
 public:
  ReservedCombine(CallContext& context, const CheckedCombine& combine,
                  const InNodeCombinePlan& plan, CallOrder& order)
      : context_(context), combine_(combine), plan_(plan), order_(order) {
    const DispatchRecord& handle = *combine.handle;
    Memory& memory = context.memory;
    reduced_ = reduce_experts(context, combine_, handle, plan.rings.num_local_blocks, order);
    num_staging_rows_ = num_staging_rows(context, handle);
    staging_ =
        memory.take(static_cast<size_t>(num_staging_rows_) * plan.staging_row_bytes, order, true);
    combined_x_ =
        memory.empty(TensorSpec::of(combine.type, {handle.num_tokens, combine.hidden}), order);
    if (combine_.weights != 0) {
      combined_weights_ =
          memory.empty(TensorSpec::of(kFloat32, {handle.num_tokens, combine.num_topk}), order);
    }
  }

  LaunchedCombine launch() &&;

 private:
  CallContext& context_;
  CheckedCombine combine_;
  const InNodeCombinePlan& plan_;
  CallOrder& order_;
  ReducedRows reduced_;
  std::shared_ptr<Block> staging_;  // whoever gets it next writes there after this call's kernel
  int64_t num_staging_rows_ = 0;
  MadeTensor combined_x_, combined_weights_;
};

class LaunchedCombine {
 public:
  CombineResult finish(const CombineRequest& request, CallOrder& order) && {
    std::shared_ptr<Event> event = order.finish(inputs_of(request), &handle_->held);
    return {std::move(combined_x_), std::move(combined_weights_), std::move(event)};
  }

 private:
  friend class ReservedCombine;
  LaunchedCombine() = default;

  std::shared_ptr<DispatchRecord> handle_;
  Object combined_x_, combined_weights_;
};

LaunchedCombine ReservedCombine::launch() && {
  const DispatchRecord& handle = *combine_.handle;
  const RoutingAddresses& routing = handle.routing;
  const Memory& memory = context_.memory;
  CombineArgs args = plan_.combine.args;
  if (staging_ != nullptr) {
    args.staging_line = static_cast<uint32_t>(staging_->offset / kLineBytes);
    args.num_staging_rows = static_cast<int>(num_staging_rows_);
  }
  args.rank_prefix_matrix = pointer_of<int32_t>(routing.rank_prefix);
  args.channel_prefix_matrix = pointer_of<int32_t>(routing.channel_prefix);
  args.recv_channel_prefix_matrix = pointer_of<int32_t>(routing.recv_channel_prefix);
  args.send_head = pointer_of<int32_t>(routing.send_head);
  args.num_tokens = static_cast<int>(handle.num_tokens);
  args.num_rows = static_cast<int>(handle.num_recv_rows);
  args.x = pointer_of<uint8_t>(combine_.x);
  args.topk_weights = pointer_of<float>(combine_.weights);
  for (int item = 0; item < 2; ++item) args.bias[item] = pointer_of<uint8_t>(combine_.bias[item]);
  args.combined_x = pointer_of<uint8_t>(memory.non_null(combined_x_.address));
  if (combine_.weights != 0) {
    args.combined_topk_weights = pointer_of<float>(memory.non_null(combined_weights_.address));
  }
  context_.launch([&] { context_.engine.combine(plan_.combine, args, order_.stream()); });
  LaunchedCombine launched;
  launched.handle_ = combine_.handle;
  launched.combined_x_ = std::move(combined_x_.tensor);
  launched.combined_weights_ = std::move(combined_weights_.tensor);
  return launched;
}

}  // namespace

CombineResult combine_in_node(CallContext& context, const CombineRequest& request) {
  context.begin();
  const CheckedCombine combine = check_combine(context, request);
  const DispatchRecord& handle = *combine.handle;
  const InNodeCombinePlan& plan =
      plan_of(context, CombineKey{request.config, combine.dtype, combine.row_bytes,
                                  combine.num_topk, handle.num_channels, handle.has_default_sms});
  require_channels(handle, plan.rings.channels.num_channels, "num_sms");

  CallOrder order(context.order, request.streams);
  CombineResult result =
      ReservedCombine(context, combine, plan, order).launch().finish(request, order);
  context.end();
  return result;
}

}  // namespace deep_comm
