// dispatch inside a node: with new routing, and with a handle's.
#include "host/calls/dispatch.hpp"

#include <numeric>
#include <utility>

#include "device/channel/landed.cuh"
#include "host/calls/dispatch_outputs.hpp"
#include "host/calls/expand.hpp"
#include "host/calls/pending.hpp"

namespace deep_comm {

namespace {

uint32_t line_of(size_t offset) { return static_cast<uint32_t>(offset / kLineBytes); }

// Receivers of expanded rows have words for the chunks of so many tokens. Beyond, all ranks use the
// rings.
bool can_be_direct(bool is_expanded, int64_t num_tokens) {
  return !is_expanded || num_tokens <= TokenChunks::kMostTokens;
}

// What every dispatch tells its kernel.
DispatchArgs common_args(const DispatchPlan& plan, const Payload& payload,
                         const RoutingAddresses& routing, const ExpertMap& experts,
                         const DispatchOutputs& out) {
  const size_t output_offset =
      can_be_direct(plan.options.is_expanded, payload.num_tokens) ? out.output_offset : 0;
  DispatchArgs args = plan.variant(output_offset != 0).args;
  args.output_line = line_of(output_offset);
  args.src_line = line_of(out.src_offset);
  args.experts = experts;
  args.is_token_in_rank = pointer_of<uint8_t>(routing.is_token_in_rank);
  args.send_head = pointer_of<int32_t>(routing.send_head);
  args.rank_prefix_matrix = pointer_of<int32_t>(routing.rank_prefix);
  args.channel_prefix_matrix = pointer_of<int32_t>(routing.channel_prefix);
  set_payload(payload, &args);
  set_outputs(out, &args);
  args.recv_rows = pointer_of<int32_t>(out.recv_rows);
  return args;
}

// ---- the routing of a handle: no counts to exchange, no wait of the host

class CheckedCachedDispatch : public CachedDispatchCall {
 public:
  CheckedCachedDispatch(CallContext& context, const DispatchRequest& request)
      : CachedDispatchCall(context, request),
        plan_(&plan_of(context,
                       CachedDispatchKey{request.config, payload_.form, handle_->num_channels,
                                         handle_->expansion.has_value()})) {
    require_channels(*handle_, plan_->rings.channels.num_channels, "num_sms");
  }

 protected:
  const CachedDispatchPlan* plan_;  // holds until the Buffer's next call of normal mode
};

class ReservedCachedDispatch : public CheckedCachedDispatch {
 public:
  ReservedCachedDispatch(CheckedCachedDispatch&& checked, CallOrder& order)
      : CheckedCachedDispatch(std::move(checked)),
        order_(order),
        scratch_(allocate_scratch(context_, payload_, order)),
        out_(cached_outputs(context_.memory, payload_.form, handle_->num_output_rows, order)) {}

 protected:
  CallOrder& order_;
  CastScratch scratch_;
  DispatchOutputs out_;
};

class LaunchedCachedDispatch : public ReservedCachedDispatch {
 public:
  explicit LaunchedCachedDispatch(ReservedCachedDispatch&& reserved)
      : ReservedCachedDispatch(std::move(reserved)) {
    const DispatchRecord& handle = *handle_;
    DispatchArgs args = common_args(plan_->dispatch, payload_, handle.routing,
                                    context_.group.experts(handle.num_experts), out_);
    if (handle.expansion) {
      args.send_row = pointer_of<int32_t>(handle.expansion->send_row);
      args.num_expanded = pointer_of<int32_t>(handle.expansion->num_expanded);
    }
    if (handle.expansion) {
      dispatch_expanded(
          context_, plan_->dispatch, args,
          {.expansion = *handle.expansion, .zero_padding = request_.flags.zero_padding},
          plan_->rings, order_.stream());
      return;
    }
    context_.launch([&] { context_.engine.dispatch(plan_->dispatch, args, order_.stream()); });
  }

  DispatchResult receive() {
    const OutputForm form{.payload = payload_.form, .makes_handle = false};
    context_.region_use.note(&RegionUse::dispatch, out_.block != nullptr,
                             form.layout(out_.num_rows).num_bytes);
    DispatchResult result;
    fill_result(context_, payload_, form, plan_->rings.num_local_blocks, false, std::move(out_),
                order_, &result);
    result.event = order_.finish(inputs_of(payload_, request_), &handle_->held);
    return result;
  }
};

// ---- with new routing

// What a call knows in all its states.
struct NewDispatch {
  CallContext* context;
  Payload payload;
  CheckedRouting routing;
  const NewDispatchPlan* plan;  // holds until the Buffer's next call of normal mode
  OutputForm form;
  RoutingBlock layout;
  std::vector<const void*> inputs;  // the caller's tensors
  Object mask;                      // is_token_in_rank, where the caller gave it
  DispatchFlags flags;
  bool has_default_sms;

  int64_t num_worst_tokens() const { return routing.num_worst_tokens; }
  bool is_bounded() const { return num_worst_tokens() > 0; }
};

class CheckedDispatch : protected NewDispatch {
 public:
  CheckedDispatch(CallContext& call_context, const DispatchRequest& request) {
    context = &call_context;
    call_context.begin();
    payload = check_payload(call_context, request.payload);
    routing = check_routing(call_context, request, payload.num_tokens);
    flags = request.flags;
    has_default_sms = request.config.has_default_sms();
    inputs = inputs_of(payload, request);
    // Expanded rows are placed by topk_idx, so a given layout is ignored: wrong counts would write outside
    // an expert's group.
    if (flags.expand) routing.has_layout = false;
    if (routing.has_layout) mask = Object::borrow(request.is_token_in_rank.object);
    plan = &plan_of(call_context,
                    NewDispatchKey{request.config, payload.form, routing.num_topk,
                                   routing.topk_idx_bytes, routing.num_experts,
                                   routing.expert_alignment, !routing.has_layout, flags.expand});
    form = {.payload = payload.form,
            .num_topk = routing.num_topk,
            .topk_idx_bytes = routing.topk_idx_bytes,
            .has_weights = routing.has_weights(),
            .is_expanded = flags.expand};
    const GroupShape& group = call_context.group;
    layout = RoutingBlock::in_node(group.num_ranks, plan->rings.channels.num_channels,
                                   group.num_local_experts(routing.num_experts), payload.num_tokens,
                                   !routing.has_layout);
  }

  // For as long as the call may go on.
  std::vector<Object> kept_inputs() const { return borrow_all(inputs); }
};

// Holds the memory of the first launches. If no forecast fits, receive_rows allocates the outputs after
// the counts.
class ReservedDispatch : public CheckedDispatch {
 public:
  ReservedDispatch(CheckedDispatch&& checked, CallOrder& call_order)
      : CheckedDispatch(std::move(checked)), order(&call_order) {
    scratch = allocate_scratch(*context, payload, *order);
    if (flags.expand) {
      numbering = Numbering::make(*context, routing.num_experts, payload.num_tokens,
                                  routing.num_topk, *order);
    }
    Memory& memory = context->memory;
    reserve_rows();
    if (reservation) {
      out = reservation->outputs(memory, form);
      block = PartMemory::of(memory, reservation->handle_block());
    } else {
      if (is_bounded()) {
        out = allocate_outputs(memory, form, num_worst_tokens(), num_worst_tokens(), *order);
      }
      const auto num_bytes = static_cast<int64_t>(layout.num_bytes());
      storage = memory.empty(TensorSpec::of(kUint8, {num_bytes}), *order);
      block = PartMemory::of_bytes(storage);
    }
    set_addresses();
  }

 protected:
  // Reserves outputs before the counts are known: takes the first forecast that fits. shrink frees the
  // excess later.
  void reserve_rows() {
    const auto reserve = [&](int64_t num_rows) {
      reservation = Reservation::take(context->memory, form, num_rows, layout.num_bytes(), *order);
      return reservation.has_value();
    };
    if (is_bounded()) {
      reserve(num_worst_tokens());
      return;
    }
    const RowForecast& forecast = context->forecast;
    const RowChoices choices =
        flags.expand ? forecast.expanded_rows(payload.num_tokens, routing.num_topk,
                                              routing.num_experts, routing.expert_alignment)
                     : forecast.rows(payload.num_tokens);
    for (const int64_t num_rows : choices) {
      if (reserve(num_rows)) return;
    }
  }

  void set_addresses() {
    const auto part = [&](RoutingPart name) { return layout.address(block.base, name); };
    addresses.is_token_in_rank =
        routing.has_layout ? routing.is_token_in_rank : part(RoutingPart::kTokenMask);
    addresses.send_head = part(RoutingPart::kSendHead);
    addresses.rank_prefix = part(RoutingPart::kRankPrefix);
    addresses.channel_prefix = part(RoutingPart::kChannelPrefix);
    addresses.recv_channel_prefix = part(RoutingPart::kRecvChannelPrefix);
  }

  NotifyArgs notify_args() const {
    NotifyArgs args = plan->notify.args;
    if (!routing.has_layout) args.topk.data = pointer_of<void>(routing.topk_idx);
    if (routing.has_layout) {
      args.num_tokens_per_expert = pointer_of<int32_t>(routing.num_tokens_per_expert);
    }
    args.is_token_in_rank = pointer_of<uint8_t>(addresses.is_token_in_rank);
    args.num_tokens = static_cast<int>(payload.num_tokens);
    args.header.fields[static_cast<int>(HeaderField::kHasWeights)] = routing.has_weights();
    if (reservation && can_be_direct(flags.expand, payload.num_tokens)) {
      args.place = {line_of(reservation->output_offset()), line_of(reservation->src_offset()),
                    static_cast<int>(reservation->num_rows()), !is_bounded()};
    }
    args.rank_prefix_matrix = pointer_of<int32_t>(addresses.rank_prefix);
    args.channel_prefix_matrix = pointer_of<int32_t>(addresses.channel_prefix);
    args.send_head = pointer_of<int32_t>(addresses.send_head);
    args.num_recv_tokens_per_expert =
        pointer_of<int32_t>(layout.address(block.base, RoutingPart::kTokensPerExpert));
    args.recv_counts = pointer_of<int32_t>(layout.address(block.base, RoutingPart::kRecvCounts));
    if (flags.expand) args.expansion = numbering.notify_args();
    return args;
  }

  // Notify, and the dispatch behind it if there is room for its rows.
  void launch_first() {
    const NotifyArgs notify = notify_args();
    const bool has_dispatch = is_bounded() || reservation;
    EngineCalls& engine = context->engine;
    if (has_dispatch && !flags.expand) {
      const DispatchArgs args = dispatch_args(!is_bounded());
      context->launch([&] {
        engine.notify_and_dispatch(plan->notify, notify, plan->dispatch, args, order->stream());
      });
      return context->end();
    }
    context->launch([&] { engine.notify_dispatch(plan->notify, notify, order->stream()); });
    context->end();
    if (!flags.expand) return;
    number_rows(*context, numbering,
                {routing.topk_idx, routing.topk_idx_bytes, payload.num_tokens, routing.num_topk,
                 routing.num_experts},
                plan->rings.num_local_blocks, order->stream());
    if (has_dispatch) launch_dispatch(!is_bounded());
  }

  DispatchArgs dispatch_args(bool is_speculative) const {
    DispatchArgs args = common_args(plan->dispatch, payload, addresses,
                                    context->group.experts(routing.num_experts), out);
    args.follows_notify = true;
    args.is_speculative = is_speculative;
    args.fill_tail = is_bounded();
    args.zero_tail = is_bounded() && flags.zero_tail;
    args.topk_idx = pointer_of<void>(routing.topk_idx);
    args.topk_weights = pointer_of<float>(routing.topk_weights);
    args.recv_channel_prefix_matrix = pointer_of<int32_t>(addresses.recv_channel_prefix);
    if (flags.expand) {
      args.send_row = pointer_of<int32_t>(numbering.at(numbering.layout.send_row));
      args.send_rows = pointer_of<int32_t>(numbering.at(numbering.layout.send_rows));
      args.num_expanded = pointer_of<int32_t>(numbering.at(numbering.layout.num_expanded));
    }
    return args;
  }

  void launch_dispatch(bool is_speculative) {
    const DispatchArgs args = dispatch_args(is_speculative);
    if (flags.expand) {
      return dispatch_expanded(*context, plan->dispatch, args,
                               {.expansion = make_expansion(),
                                .zero_padding = flags.zero_padding,
                                .fills_handle = is_bounded()},
                               plan->rings, order->stream());
    }
    context->launch([&] { context->engine.dispatch(plan->dispatch, args, order->stream()); });
  }

  // Received tokens that the handle has room for.
  int64_t num_recv_rows() const { return counts ? counts->num_recv_tokens : out.num_rows; }

  ExpansionRecord make_expansion() const {
    const NumberingLayout& at = numbering.layout;
    ExpansionRecord expansion;
    expansion.send_row = numbering.at(at.send_row);
    expansion.num_expanded = numbering.at(at.num_expanded);
    expansion.recv_rows = out.recv_rows;
    expansion.expert_offsets = numbering.at(at.expert_offsets);
    expansion.expert_counts = numbering.at(at.expert_counts);
    expansion.num_topk = routing.num_topk;
    expansion.num_local_experts = context->group.num_local_experts(routing.num_experts);
    expansion.num_tokens_limit = num_recv_rows();
    expansion.num_rows = out.num_rows;
    expansion.expert_alignment = routing.expert_alignment;
    expansion.numbering = PartMemory::of_words(numbering.storage);
    expansion.placed = out.placed;
    return expansion;
  }

  CallOrder* order;
  CastScratch scratch;
  Numbering numbering;  // of expanded outputs
  std::optional<Reservation> reservation;
  DispatchOutputs out;  // without rows as long as nobody knows how many there are
  MadeTensor storage;   // of the routing block; none: it lies in the region
  PartMemory block;     // the routing block
  RoutingAddresses addresses;
  std::optional<Counts> counts;  // empty before they are known, and with a bound of the rows
};

class LaunchedDispatch final : private ReservedDispatch, public LaunchedCall {
 public:
  explicit LaunchedDispatch(ReservedDispatch&& reserved) : ReservedDispatch(std::move(reserved)) {
    launch_first();
  }

  DispatchResult receive() override {
    if (!is_bounded()) receive_rows();
    context->region_use.note(&RegionUse::dispatch, out.block != nullptr,
                             form.layout(out.num_rows).num_bytes);
    const std::shared_ptr<DispatchRecord> record = make_record();
    DispatchResult result;
    fill_result(*context, payload, form, plan->rings.num_local_blocks, flags.defers_topk,
                std::move(out), *order, &result);
    result.has_counts = true;
    if (counts) result.num_recv_tokens_per_expert = std::move(counts->num_recv_tokens_per_expert);
    result.record = record;
    result.event = order->finish(inputs, nullptr);
    return result;
  }

 private:
  // Waits for the counts; rows that no early launch has moved are moved now.
  void receive_rows() {
    counts = context->wait_counts([&] { return context->engine.wait_counts(); });
    int64_t num_rows = counts->num_recv_tokens;
    RowForecast& forecast = context->forecast;
    if (flags.expand) {
      const std::vector<int>& per_expert = counts->num_recv_tokens_per_expert;
      num_rows = std::accumulate(per_expert.begin(), per_expert.end(), int64_t{0});
      forecast.learn_expanded(num_rows, counts->max_num_tokens);
    } else {
      forecast.learn(num_rows, counts->max_num_tokens);
    }
    Memory& memory = context->memory;
    if (counts->is_direct) {
      reservation->shrink(form, num_rows);
      out = reservation->outputs(memory, form);
      return;
    }
    // A rank lacked room, so the speculative dispatch sent nothing. All ranks launch it again.
    context->keep_step([&] {
      out = {};
      if (reservation) std::move(*reservation).keep_routing();
      reservation.reset();
      order->follow_caller();
      out = outputs_anywhere(memory, form, num_rows, counts->num_recv_tokens, *order);
      launch_dispatch(false);
    });
  }

  std::shared_ptr<DispatchRecord> make_record() const {
    const RecordSource source{routing,
                              addresses,
                              layout,
                              block,
                              mask,
                              payload.num_tokens,
                              plan->rings.channels.num_channels};
    std::shared_ptr<DispatchRecord> record = source.make(*context, *order);
    record->num_recv_rows = num_recv_rows();
    record->num_output_rows = out.num_rows;
    if (counts) {
      record->num_recv_tokens = counts->num_recv_tokens;
      record->max_num_tokens = counts->max_num_tokens;
    }
    record->has_default_sms = has_default_sms;
    record->parts.push_back({"recv_src_idx",
                             {},
                             out.src_idx,
                             TensorSpec::of(kInt32, {record->num_recv_rows}),
                             out.sources});
    if (flags.expand) record->expansion = make_expansion();
    const auto hold = [&](const Object& tensor) {
      if (tensor) record->held.tensors.push_back(tensor);
    };
    hold(out.sources.tensor);
    hold(numbering.storage.tensor);
    hold(out.placed.tensor);
    return record;
  }
};

}  // namespace

void fill_result(CallContext& context, const Payload& payload, const OutputForm& form,
                 int num_local_blocks, bool defers_topk, DispatchOutputs&& out, CallOrder& order,
                 DispatchResult* result) {
  Object by_column;
  if (payload.is_column_major) {
    by_column = transpose_scales(context, payload.form, std::exchange(out.scales, 0), out.num_rows,
                                 num_local_blocks, order);
  }
  DispatchOutputs::Tensors tensors = std::move(out).tensors(context.memory, form, defers_topk);
  result->recv_x = std::move(tensors.x);
  result->recv_scales = by_column ? std::move(by_column) : std::move(tensors.scales);
  result->recv_topk_idx = std::move(tensors.topk_idx);
  result->recv_topk_weights = std::move(tensors.topk_weights);
  result->deferred_topk_weights = std::move(tensors.deferred_topk_weights);
}

DispatchResult dispatch_in_node(CallContext& context, const DispatchRequest& request) {
  if (request.handle.is_given) {
    return run_call<CheckedCachedDispatch, ReservedCachedDispatch, LaunchedCachedDispatch>(context,
                                                                                           request);
  }
  return run_call<CheckedDispatch, ReservedDispatch, LaunchedDispatch>(context, request);
}

std::shared_ptr<PendingDispatch> begin_dispatch_in_node(CallContext& context,
                                                        const DispatchRequest& request) {
  CheckedDispatch checked(context, request);
  return launch_pending(context, request.streams, checked.kept_inputs(), [&](CallOrder& order) {
    return std::make_unique<LaunchedDispatch>(ReservedDispatch(std::move(checked), order));
  });
}

}  // namespace deep_comm
