// dispatch of a group of several nodes, whose tokens cross once to a node.
#include <algorithm>
#include <utility>

#include "host/calls/dispatch.hpp"
#include "host/calls/internode_expand.hpp"
#include "host/calls/internode_plan.hpp"
#include "host/calls/internode_rows.hpp"
#include "host/calls/layout.hpp"
#include "host/calls/pending.hpp"

namespace deep_comm {

namespace {

// A launch of the dispatch kernel.
struct Movement {
  const RingPlan& plan;
  const Payload& payload;
  const RoutingAddresses& routing;
  int num_experts = 0;
  // Of new routing.
  uintptr_t topk_idx = 0, topk_weights = 0;
  int num_topk = 0, topk_idx_bytes = 0;
  uintptr_t combine_start = 0;
  bool is_new = false;
  bool fill_tail = false, zero_tail = false, is_early = false;
};

// `rows` null: an early dispatch without room here. The kernel tells the other ranks; none sends.
void move_rows(CallContext& context, const Movement& movement, const TierRows* rows,
               uint64_t stream) {
  const Payload& payload = movement.payload;
  const RoutingAddresses& routing = movement.routing;
  InternodeDispatchArgs args{};
  args.fill_tail = movement.fill_tail;
  args.zero_tail = movement.zero_tail;
  args.is_early = movement.is_early;
  args.experts = context.group.experts(movement.num_experts);
  args.is_token_in_rank = pointer_of<uint8_t>(routing.is_token_in_rank);
  args.send_node_head = pointer_of<int32_t>(routing.send_node_head);
  args.recv_node_channel_prefix = pointer_of<int32_t>(routing.recv_node_prefix);
  args.recv_node_prefix_sum = pointer_of<int32_t>(routing.recv_node_sum);
  args.recv_rank_channel_start = pointer_of<int32_t>(routing.recv_channel_prefix);
  args.recv_rank_prefix_sum = pointer_of<int32_t>(routing.recv_rank_sum);
  args.node_channel_prefix = pointer_of<int32_t>(routing.node_prefix);
  args.send_slots = pointer_of<int32_t>(routing.send_slots);
  set_payload(payload, &args);
  args.scale_bytes = payload.form.scale_bytes();
  args.num_scales = payload.form.num_scales;
  args.scale_format = payload.form.scale_format;
  args.topk_idx = pointer_of<void>(movement.topk_idx);
  args.topk_idx_bytes = movement.topk_idx_bytes;
  args.topk_weights = pointer_of<float>(movement.topk_weights);
  // In direct mode the kernel only tests these addresses for null.
  args.recv_x = pointer_of<uint8_t>(payload.x);
  if (rows != nullptr) {
    const DispatchOutputs& out = rows->output();
    set_outputs(out, &args);
    args.output_line = static_cast<uint32_t>(out.output_offset / kLineBytes);
    args.src_line = static_cast<uint32_t>(out.src_offset / kLineBytes);
    args.num_forward_rows = static_cast<int>(rows->num_forward_rows());
    args.recv_src_meta = pointer_of<int32_t>(rows->recv_src_meta());
    args.send_rank_head = pointer_of<int32_t>(rows->send_rank_head());
  }
  if (movement.is_new) {
    args.combine_start = pointer_of<int32_t>(movement.combine_start);
    args.forward_slots = pointer_of<int32_t>(routing.forward_slots);
  }
  const RingPlan& plan = movement.plan;
  context.launch([&] {
    context.engine.internode_dispatch(args, plan.channels, plan.rail, movement.num_topk,
                                      payload.form.dtypes(), payload.form.row_bytes(), stream);
  });
}

// ---- the routing of a handle: no counts to exchange, no wait of the host

class CheckedCachedTierDispatch : public CachedDispatchCall {
 public:
  CheckedCachedTierDispatch(CallContext& context, const DispatchRequest& request)
      : CachedDispatchCall(context, request),
        plan_(plan_two_tiers(context, request.config, payload_.form.row_bytes(),
                             payload_.form.scale_row_bytes(), 0, handle_.get())) {}

 protected:
  RingPlan plan_;
};

class ReservedCachedTierDispatch : public CheckedCachedTierDispatch {
 public:
  ReservedCachedTierDispatch(CheckedCachedTierDispatch&& checked, CallOrder& order)
      : CheckedCachedTierDispatch(std::move(checked)),
        order_(order),
        scratch_(allocate_scratch(context_, payload_, order_)),
        rows_(TierRows::allocate(context_, {.payload = payload_.form, .makes_handle = false},
                                 handle_->expansion.has_value(), handle_->num_recv_rows,
                                 handle_->num_forward_rows, order_)) {
    // A handle that was given as ten tensors does not bring them along.
    if (handle_->routing.send_slots != 0 || !rows_.are_in_region()) return;
    const GroupShape& group = context_.group;
    send_slots_ = context_.memory.empty(
        TensorSpec::of(kInt32, {payload_.num_tokens, group.num_nodes + group.num_ranks}), order_);
  }

 protected:
  CallOrder& order_;
  CastScratch scratch_;
  TierRows rows_;
  MadeTensor send_slots_;
};

class LaunchedCachedTierDispatch : public ReservedCachedTierDispatch {
 public:
  explicit LaunchedCachedTierDispatch(ReservedCachedTierDispatch&& reserved)
      : ReservedCachedTierDispatch(std::move(reserved)) {
    RoutingAddresses routing = handle_->routing;
    if (send_slots_.tensor) {
      routing.send_slots = context_.memory.non_null(send_slots_.address);
      context_.launch([&] {
        context_.engine.internode_send_slots(
            pointer_of<uint8_t>(routing.is_token_in_rank), static_cast<int>(payload_.num_tokens),
            handle_->num_channels, pointer_of<int32_t>(routing.send_slots), order_.stream());
      });
    }
    const Movement movement{.plan = plan_,
                            .payload = payload_,
                            .routing = routing,
                            .num_experts = handle_->num_experts};
    move_rows(context_, movement, &rows_, order_.stream());
  }

  DispatchResult receive() {
    rows_.note_use(context_.region_use);
    DispatchResult result;
    if (const auto& expansion = handle_->expansion) {
      DispatchOutputs out = expand_received(
          context_, rows_, handle_->routing.num_received(context_.group.num_ranks), *expansion,
          request_.flags.zero_padding, true, plan_.num_local_blocks, order_);
      fill_result(context_, payload_, expanded_form(rows_, true), plan_.num_local_blocks, false,
                  std::move(out), order_, &result);
    } else {
      fill_result(context_, payload_, rows_.form(), plan_.num_local_blocks, false,
                  rows_.take_output(), order_, &result);
    }
    result.event = order_.finish({payload_.x_object, payload_.scales_object}, &handle_->held);
    return result;
  }
};

// ---- new routing

// Keeps all that it needs of the request: the call may go on after the caller's has returned.
class CheckedTierDispatch {
 public:
  CheckedTierDispatch(CallContext& context, const DispatchRequest& request)
      : context_(context), topk_idx_(request.topk_idx), flags_(request.flags) {
    context.begin();
    payload_ = check_payload(context, request.payload);
    routing_ = check_routing(context, request, payload_.num_tokens);
    const TensorRef& per_node = request.num_tokens_per_rdma_rank;
    if (per_node.is_given()) {
      require_tensor("num_tokens_per_rdma_rank", per_node, {{context.group.num_nodes}, {kInt32}},
                     context.device_name);
    }
    plan_ = plan_two_tiers(context, request.config, payload_.form.row_bytes(),
                           payload_.form.scale_row_bytes(), routing_.num_topk, nullptr);
    inputs_ = inputs_of(payload_, request);
    if (routing_.has_layout) mask_ = Object::borrow(request.is_token_in_rank.object);
  }
  std::vector<Object> kept_inputs() const { return borrow_all(inputs_); }

 protected:
  bool is_bounded() const { return routing_.num_worst_tokens > 0; }

  CallContext& context_;
  Payload payload_;
  CheckedRouting routing_;
  TensorRef topk_idx_;
  RingPlan plan_;
  DispatchFlags flags_;
  std::vector<const void*> inputs_;
  Object mask_;  // the caller's
};

class ReservedTierDispatch : public CheckedTierDispatch {
 public:
  ReservedTierDispatch(CheckedTierDispatch&& checked, CallOrder& order)
      : CheckedTierDispatch(std::move(checked)),
        order_(order),
        scratch_(allocate_scratch(context_, payload_, order_)),
        form_{.payload = payload_.form,
              .num_topk = routing_.num_topk,
              .topk_idx_bytes = routing_.topk_idx_bytes,
              .has_weights = routing_.has_weights()} {
    reserve_routing();
    const int64_t num_forward = context_.forecast.forwarded_rows(payload_.num_tokens);
    if (is_bounded()) {
      const int64_t num_rows = routing_.num_worst_tokens;
      rows_ = TierRows::allocate(context_, form_, flags_.expand, num_rows,
                                 std::max(num_rows, num_forward), order_);
    } else if (context_.has_region() && context_.early_dispatches.is_next()) {
      is_early_ = true;
      // For as many rows as may come, before anybody knows the number.
      for (const int64_t num_rows : context_.forecast.rows(payload_.num_tokens)) {
        rows_ = TierRows::in_region(context_, form_, flags_.expand, num_rows, num_forward, order_);
        if (rows_) break;
      }
    }
  }

 protected:
  CallOrder& order_;
  CastScratch scratch_;
  OutputForm form_;
  RoutingBlock layout_;
  PartMemory block_;  // of routing
  RoutingAddresses addresses_;
  uintptr_t num_tokens_per_expert_ = 0;
  std::optional<TierRows> rows_;
  bool is_early_ = false;  // rows go out before their counts are known

 private:
  // What the counting kernels write. With late rail reads the RDMA NIC may still read the last combine's
  // staging in the region, since no peer has entered this call yet. So the counting kernels must not
  // write there, and the routing block comes from torch: docs/design/0056.
  void reserve_routing() {
    const GroupShape& group = context_.group;
    layout_ = RoutingBlock::between_nodes(
        group.num_nodes, group.num_ranks, plan_.channels.num_channels,
        group.num_local_experts(routing_.num_experts), routing_.num_experts, payload_.num_tokens,
        context_.has_region(), !routing_.has_layout);
    Memory& memory = context_.memory;
    std::shared_ptr<Block> block;
    if (context_.has_region() && !context_.rail_reads.are_late) {
      block = memory.take(layout_.num_bytes(), order_, true);
    }
    if (block != nullptr) {
      poison_block(context_, *block, order_);
      block_ = PartMemory::of(memory, std::move(block));
    } else {
      const auto num_bytes = static_cast<int64_t>(layout_.num_bytes());
      block_ = PartMemory::of_bytes(memory.empty(TensorSpec::of(kUint8, {num_bytes}), order_));
    }
    using enum RoutingPart;
    const auto at = [&](RoutingPart part) { return layout_.address(block_.base, part); };
    addresses_.is_token_in_rank = routing_.has_layout ? routing_.is_token_in_rank : at(kTokenMask);
    addresses_.channel_prefix = at(kChannelPrefix);
    addresses_.recv_channel_prefix = at(kRecvChannelPrefix);
    addresses_.send_node_head = at(kSendNodeHead);
    addresses_.node_prefix = at(kNodePrefix);
    addresses_.recv_node_prefix = at(kRecvNodePrefix);
    addresses_.recv_node_sum = at(kRecvNodeSum);
    addresses_.recv_rank_sum = at(kRecvRankSum);
    addresses_.send_slots = at(kSendSlots);
    addresses_.forward_slots = at(kForwardSlots);
    num_tokens_per_expert_ =
        routing_.has_layout ? routing_.num_tokens_per_expert : at(kCountsPerExpert);
  }
};

class LaunchedTierDispatch final : public ReservedTierDispatch, public LaunchedCall {
 public:
  explicit LaunchedTierDispatch(ReservedTierDispatch&& reserved)
      : ReservedTierDispatch(std::move(reserved)) {
    if (!routing_.has_layout) count();
    notify();
    // Right behind: rows may move before this host knows how many they are (docs/design/0035).
    if (is_bounded() || is_early_) move(rows_ ? &*rows_ : nullptr);
  }

  DispatchResult receive() override {
    std::optional<TwoTierCounts> counts;
    if (!is_bounded()) {
      counts = wait_counts();
      if (counts->is_direct) {
        rows_->shrink(context_, counts->num_recv_tokens, counts->num_forward_tokens);
        if (flags_.expand) order_.follow_caller();
      } else {
        // A rank lacked room, so an early dispatch sent nothing. All ranks launch it again.
        context_.keep_step([&] {
          is_early_ = false;
          rows_.reset();
          order_.follow_caller();
          rows_ = TierRows::allocate(context_, form_, flags_.expand, counts->num_recv_tokens,
                                     counts->num_forward_tokens, order_);
          move(&*rows_);
        });
      }
    }
    return end(counts);
  }

 private:
  void count() {
    using enum RoutingPart;
    const auto at = [&](RoutingPart part) { return layout_.address(block_.base, part); };
    launch_layout(context_, topk_idx_, routing_.num_experts,
                  {at(kCountsPerRank), at(kCountsPerNode), at(kCountsPerExpert), at(kTokenMask)},
                  order_.stream());
  }

  // Tells the peers, and learns from them.
  void notify() {
    InternodeNotifyArgs args{};
    const auto field = [&](RailField name) -> int& {
      return args.header.fields[static_cast<int>(name)];
    };
    const PayloadForm& form = payload_.form;
    field(RailField::kNumTopk) = routing_.num_topk;
    field(RailField::kDtypes) = form.dtypes();
    field(RailField::kRowBytes) = form.row_bytes();
    field(RailField::kScaleRowBytes) = form.scale_row_bytes();
    field(RailField::kCast) = form.cast();
    field(RailField::kHasWeights) = routing_.has_weights();
    args.experts = context_.group.experts(routing_.num_experts);
    args.expert_alignment = routing_.expert_alignment;
    args.num_tokens_per_expert = pointer_of<int32_t>(num_tokens_per_expert_);
    args.node_channel_prefix = pointer_of<int32_t>(addresses_.node_prefix);
    args.rank_channel_prefix = pointer_of<int32_t>(addresses_.channel_prefix);
    args.recv_node_channel_prefix = pointer_of<int32_t>(addresses_.recv_node_prefix);
    args.recv_node_prefix_sum = pointer_of<int32_t>(addresses_.recv_node_sum);
    args.recv_rank_channel_start = pointer_of<int32_t>(addresses_.recv_channel_prefix);
    args.recv_rank_prefix_sum = pointer_of<int32_t>(addresses_.recv_rank_sum);
    args.forward_slots = pointer_of<int32_t>(addresses_.forward_slots);
    using enum RoutingPart;
    const auto at = [&](RoutingPart part) {
      return pointer_of<int32_t>(layout_.address(block_.base, part));
    };
    args.combine_start = at(kCombineStart);
    args.num_recv_tokens_per_expert = at(kTokensPerExpert);
    args.num_recv_tokens_per_rank = at(kRecvCounts);
    context_.launch([&] {
      context_.engine.internode_notify(
          args, pointer_of<uint8_t>(addresses_.is_token_in_rank),
          static_cast<int>(payload_.num_tokens), pointer_of<int32_t>(addresses_.send_node_head),
          pointer_of<int32_t>(addresses_.send_slots), plan_.channels, plan_.rail, order_.stream());
    });
    context_.end();
  }

  void move(const TierRows* rows) {
    const Movement movement{
        .plan = plan_,
        .payload = payload_,
        .routing = addresses_,
        .num_experts = routing_.num_experts,
        .topk_idx = routing_.topk_idx,
        .topk_weights = routing_.topk_weights,
        .num_topk = routing_.num_topk,
        .topk_idx_bytes = routing_.topk_idx_bytes,
        .combine_start = layout_.address(block_.base, RoutingPart::kCombineStart),
        .is_new = true,
        .fill_tail = is_bounded(),
        .zero_tail = is_bounded() && flags_.zero_tail,
        .is_early = is_early_};
    move_rows(context_, movement, rows, order_.stream());
  }

  TwoTierCounts wait_counts() {
    TwoTierCounts counts =
        context_.wait_counts([&] { return context_.engine.wait_internode_counts(is_early_); });
    context_.forecast.learn(counts.num_recv_tokens, counts.max_num_tokens);
    if (is_early_) context_.early_dispatches.learn(counts.is_direct);
    return counts;
  }

  // What follows the rows: local kernels, which nobody waits for.
  DispatchResult end(const std::optional<TwoTierCounts>& counts) {
    rows_->note_use(context_.region_use);
    DispatchResult result;
    result.record = make_record(counts);
    DispatchRecord& record = *result.record;
    if (flags_.expand) {
      int64_t num_rows = routing_.num_worst_tokens;
      if (counts) {
        for (const int count : counts->num_recv_tokens_per_expert) num_rows += count;
      }
      const bool needs_experts = !flags_.defers_topk;
      const uintptr_t num_received = addresses_.num_received(context_.group.num_ranks);
      ReceivedNumbering numbering = number_received(
          context_, *rows_, num_received, context_.group.num_local_experts(routing_.num_experts),
          routing_.expert_alignment, num_rows, plan_.num_local_blocks, order_);
      DispatchOutputs out =
          expand_received(context_, *rows_, num_received, numbering.expansion, flags_.zero_padding,
                          needs_experts, plan_.num_local_blocks, order_);
      fill_result(context_, payload_, expanded_form(*rows_, needs_experts), plan_.num_local_blocks,
                  flags_.defers_topk, std::move(out), order_, &result);
      record.num_output_rows = num_rows;
      record.expansion = std::move(numbering.expansion);
      record.held.tensors.push_back(std::move(numbering.storage.tensor));
    } else {
      fill_result(context_, payload_, form_, plan_.num_local_blocks, false, rows_->take_output(),
                  order_, &result);
    }
    result.event = order_.finish(inputs_, nullptr);
    result.has_counts = true;
    if (counts) result.num_recv_tokens_per_expert = counts->num_recv_tokens_per_expert;
    return result;
  }

  std::shared_ptr<DispatchRecord> make_record(const std::optional<TwoTierCounts>& counts) {
    const RecordSource source{routing_,
                              addresses_,
                              layout_,
                              block_,
                              mask_,
                              payload_.num_tokens,
                              plan_.channels.num_channels};
    std::shared_ptr<DispatchRecord> record = source.make(context_, order_);
    if (counts) {
      record->num_recv_tokens = counts->num_recv_tokens;
      record->max_num_tokens = counts->max_num_tokens;
      record->num_returning_rows = counts->num_returning_rows;
    }
    rows_->give_sources(context_, *record);
    record->num_output_rows = record->num_recv_rows;
    return record;
  }
};

}  // namespace

DispatchResult dispatch_between_nodes(CallContext& context, const DispatchRequest& request) {
  if (request.handle.is_given) {
    return run_call<CheckedCachedTierDispatch, ReservedCachedTierDispatch,
                    LaunchedCachedTierDispatch>(context, request);
  }
  return run_call<CheckedTierDispatch, ReservedTierDispatch, LaunchedTierDispatch>(context,
                                                                                   request);
}

std::shared_ptr<PendingDispatch> begin_dispatch_between_nodes(CallContext& context,
                                                              const DispatchRequest& request) {
  CheckedTierDispatch checked(context, request);
  return launch_pending(context, request.streams, checked.kept_inputs(), [&](CallOrder& order) {
    return std::make_unique<LaunchedTierDispatch>(ReservedTierDispatch(std::move(checked), order));
  });
}

}  // namespace deep_comm
