// combine inside a node.
#include "host/calls/combine.hpp"

#include <algorithm>
#include <utility>

#include "host/calls/dispatch.hpp"

namespace deep_comm {

namespace {

// Rows that may come, each of which has a place of its own in staged mode.
int64_t num_staging_rows(const CallContext& context, const DispatchRecord& handle) {
  int num_peers = context.group.num_ranks - 1;
  if (handle.num_topk > 0) num_peers = std::min(num_peers, handle.num_topk);
  return handle.num_tokens * num_peers;
}

class CheckedInNodeCombine {
 public:
  CheckedInNodeCombine(CallContext& context, const CombineRequest& request)
      : context_(context), request_(request) {
    context.begin();
    combine_ = check_combine(context, request);
    plan_ = &plan_of(
        context, CombineKey{request.config, combine_.dtype, combine_.row_bytes, combine_.num_topk,
                            handle().num_channels, handle().has_default_sms});
    require_channels(handle(), plan_->rings.channels.num_channels, "num_sms");
  }

 protected:
  DispatchRecord& handle() const { return *combine_.handle; }

  CallContext& context_;
  const CombineRequest& request_;
  CheckedCombine combine_;
  const InNodeCombinePlan* plan_;  // holds until the Buffer's next call of normal mode
};

class ReservedInNodeCombine : public CheckedInNodeCombine {
 public:
  ReservedInNodeCombine(CheckedInNodeCombine&& checked, CallOrder& order)
      : CheckedInNodeCombine(std::move(checked)),
        order_(order),
        reduced_(ReducedRows::allocate(context_, combine_, handle(), order)) {
    num_staging_rows_ = num_staging_rows(context_, handle());
    const size_t num_bytes = static_cast<size_t>(num_staging_rows_) * plan_->staging_row_bytes;
    staging_ = context_.memory.take(num_bytes, order, true);
    context_.region_use.note(&RegionUse::combine, staging_ != nullptr, num_bytes);
    combined_ = CombinedTensors::allocate(context_, combine_, order);
  }

 protected:
  CallOrder& order_;
  ReducedRows reduced_;
  std::shared_ptr<Block> staging_;  // whoever gets it next writes there after this call's kernel
  int64_t num_staging_rows_ = 0;
  CombinedTensors combined_;
};

class LaunchedInNodeCombine : public ReservedInNodeCombine {
 public:
  explicit LaunchedInNodeCombine(ReservedInNodeCombine&& reserved)
      : ReservedInNodeCombine(std::move(reserved)) {
    const RoutingAddresses& routing = handle().routing;
    CombineArgs args = plan_->combine.args;
    if (staging_ != nullptr) {
      args.staging_line = static_cast<uint32_t>(staging_->offset / kLineBytes);
      args.num_staging_rows = static_cast<int>(num_staging_rows_);
    }
    args.rank_prefix_matrix = pointer_of<int32_t>(routing.rank_prefix);
    args.channel_prefix_matrix = pointer_of<int32_t>(routing.channel_prefix);
    args.recv_channel_prefix_matrix = pointer_of<int32_t>(routing.recv_channel_prefix);
    args.send_head = pointer_of<int32_t>(routing.send_head);
    set_combine(context_.memory, combine_, combined_, &args);
    context_.launch([&] {
      if (handle().expansion) {
        context_.engine.combine_expanded(plan_->combine, args, reduced_.args,
                                         plan_->rings.num_local_blocks,
                                         plan_->rings.may_wait_beside, order_.stream());
      } else {
        context_.engine.combine(plan_->combine, args, order_.stream());
      }
    });
  }

  CombineResult receive() {
    std::shared_ptr<Event> event = order_.finish(inputs_of(request_), &handle().held);
    return {std::move(combined_.x.tensor), std::move(combined_.weights.tensor), std::move(event)};
  }
};

}  // namespace

CombinedTensors CombinedTensors::allocate(CallContext& context, const CheckedCombine& combine,
                                          CallOrder& order) {
  const int64_t num_tokens = combine.handle->num_tokens;
  const auto empty = [&](ElementType type, int64_t num_columns) {
    return context.memory.empty(TensorSpec::of(type, {num_tokens, num_columns}), order);
  };
  CombinedTensors made{.x = empty(combine.type, combine.hidden), .weights = {}};
  if (combine.weights != 0) made.weights = empty(kFloat32, combine.num_topk);
  return made;
}

CombineResult combine_in_node(CallContext& context, const CombineRequest& request) {
  return run_call<CheckedInNodeCombine, ReservedInNodeCombine, LaunchedInNodeCombine>(context,
                                                                                      request);
}

}  // namespace deep_comm
