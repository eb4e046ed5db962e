// combine of a group of several nodes: rows are added in each node, sums cross and are added.
#include <algorithm>
#include <utility>

#include "host/calls/combine.hpp"
#include "host/calls/internode_plan.hpp"
#include "host/ring_sizes.hpp"

namespace deep_comm {

namespace {

// Rows and sums for which a combine needs a place: those that the node's other ranks return, that come
// from other nodes and that go there.
int64_t num_staging_rows_of(const GroupShape& group, const DispatchRecord& handle) {
  // Of so many targets, how many a token can go to.
  const auto most = [&](int64_t num_targets) {
    return handle.num_topk > 0 ? std::min<int64_t>(handle.num_topk, num_targets) : num_targets;
  };
  const int64_t returning =
      handle.num_returning_rows.value_or(handle.num_forward_rows * most(group.ranks_per_node - 1));
  const int64_t crossing = handle.num_tokens * most(group.num_nodes - 1);
  return std::max<int64_t>(1, returning + crossing + handle.num_forward_rows);
}

class CheckedTierCombine {
 public:
  CheckedTierCombine(CallContext& context, const CombineRequest& request)
      : context_(context), request_(request) {
    context.begin();
    checked_ = check_combine(context, request);
    plan_ = plan_two_tiers(context, request.config, checked_.row_bytes, 0, checked_.num_topk,
                           checked_.handle.get());
  }

 protected:
  CallContext& context_;
  const CombineRequest& request_;
  CheckedCombine checked_;
  RingPlan plan_;
};

class ReservedTierCombine : public CheckedTierCombine {
 public:
  // The rows of an expanded output are added here, by a local kernel.
  ReservedTierCombine(CheckedTierCombine&& checked, CallOrder& order)
      : CheckedTierCombine(std::move(checked)),
        order_(order),
        reduced_(ReducedRows::allocate(context_, checked_, handle(), order_)) {
    if (handle().expansion) {
      context_.launch([&] {
        context_.engine.reduce_experts(reduced_.args, checked_.dtype,
                                       {plan_.num_local_blocks, 1, 1}, order_.stream());
      });
    }
    combined_ = CombinedTensors::allocate(context_, checked_, order_);
    // Without the places of rows, or room for them, the rings serve.
    num_staging_rows_ = num_staging_rows_of(context_.group, handle());
    const size_t num_bytes = static_cast<size_t>(num_staging_rows_) *
                             staging_row_bytes(checked_.row_bytes, checked_.num_topk);
    if (handle().routing.forward_slots != 0 && context_.has_region()) {
      staging_ = context_.memory.take(num_bytes, order_, true);
    }
    context_.region_use.note(&RegionUse::combine, staging_ != nullptr, num_bytes);
  }

 protected:
  DispatchRecord& handle() const { return *checked_.handle; }

  CallOrder& order_;
  ReducedRows reduced_;
  CombinedTensors combined_;
  // Goes with the call: whoever gets its memory next writes there after this kernel. Those who write
  // before their rail peers have come keep away: see RailReads.
  std::shared_ptr<Block> staging_;
  int64_t num_staging_rows_ = 0;
};

class LaunchedTierCombine : public ReservedTierCombine {
 public:
  explicit LaunchedTierCombine(ReservedTierCombine&& reserved)
      : ReservedTierCombine(std::move(reserved)) {
    const RoutingAddresses& routing = handle().routing;
    InternodeCombineArgs args{};
    args.send_node_head = pointer_of<int32_t>(routing.send_node_head);
    args.send_rank_head = pointer_of<int32_t>(routing.send_rank_head);
    args.recv_node_channel_prefix = pointer_of<int32_t>(routing.recv_node_prefix);
    args.recv_node_prefix_sum = pointer_of<int32_t>(routing.recv_node_sum);
    args.recv_rank_channel_start = pointer_of<int32_t>(routing.recv_channel_prefix);
    args.recv_rank_prefix_sum = pointer_of<int32_t>(routing.recv_rank_sum);
    args.node_channel_prefix = pointer_of<int32_t>(routing.node_prefix);
    args.forward_slots = pointer_of<int32_t>(routing.forward_slots);
    args.num_forward_rows = static_cast<int>(handle().num_forward_rows);
    set_combine(context_.memory, checked_, combined_, &args);
    if (staging_ != nullptr) {
      args.staging_line = static_cast<uint32_t>(staging_->offset / kLineBytes);
      args.num_staging_rows = static_cast<int>(num_staging_rows_);
      context_.rail_reads.begin = staging_->offset;
      context_.rail_reads.end = staging_->offset + staging_->num_bytes;
    }
    context_.launch([&] {
      context_.engine.internode_combine(args, checked_.dtype, plan_.channels, plan_.rail,
                                        checked_.num_topk, checked_.row_bytes, order_.stream());
    });
  }

  CombineResult receive() {
    std::shared_ptr<Event> event = order_.finish(inputs_of(request_), &handle().held);
    return {std::move(combined_.x.tensor), std::move(combined_.weights.tensor), std::move(event)};
  }
};

}  // namespace

CombineResult combine_between_nodes(CallContext& context, const CombineRequest& request) {
  return run_call<CheckedTierCombine, ReservedTierCombine, LaunchedTierCombine>(context, request);
}

}  // namespace deep_comm
