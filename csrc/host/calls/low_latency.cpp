#include "host/calls/low_latency.hpp"

#include <algorithm>

#include "device/move/logfmt.cuh"
#include "host/calls/handle.hpp"

namespace deep_comm {

namespace {

using Which = GivenProperty::Which;

constexpr int kNumBuffers = 2;   // for rows of a kind: calls of it take turns
constexpr int kBf16Columns = 8;  // of 16 bytes

const char* name_of(LowLatencyKind kind) {
  return kind == LowLatencyKind::kDispatch ? "dispatch" : "combine";
}

bool has_same_shape(const TensorSpec& one, const TensorSpec& other) {
  return one.num_dims == other.num_dims &&
         std::equal(one.shape.begin(), one.shape.begin() + one.num_dims, other.shape.begin());
}

int require_num_max_tokens(const IntegerRef& given) {
  return static_cast<int>(
      require_integer("num_max_dispatch_tokens_per_rank", given, 1, kMaxLowLatencyTokens));
}

void require_hidden(int64_t hidden, int multiple) {
  if (hidden > 0 && hidden % multiple == 0) return;
  refuse_argument("x", "hidden " + std::to_string(hidden),
                  "must have a hidden size of a positive multiple of " + std::to_string(multiple));
}

void require_choices(const TensorRef& idx, const TensorRef& weights, int64_t num_tokens,
                     const std::string& device) {
  require_topk(idx, weights, num_tokens, device);
  if (!idx.is_given()) refuse_argument("topk_idx", {}, "must be given");
}

// A vector that a kernel adds to, if it is given.
void require_stats(const char* name, const TensorRef& given, int64_t size, ElementType type,
                   const std::string& device) {
  if (given.is_given()) require_tensor(name, given, {{size}, {type}}, device);
}

void require_global_scale(const TensorRef& given, bool use_nvfp4, const std::string& device) {
  if (!given.is_given()) return;
  if (!use_nvfp4) refuse_argument("x_global_scale", {}, "needs use_nvfp4");
  const bool is_tensor = given.kind == TensorRef::Kind::kTensor;
  if (is_tensor && given.is_on_device && given.type == kFloat32 && given.num_elements() == 1) {
    return;
  }
  refuse_argument(
      "x_global_scale",
      given_property(is_tensor ? Which::kTypeShapeDevice : Which::kTypeName, given.object),
      "must be one float32 on " + device);
}

void require_one_completion(bool is_async, bool has_hook) {
  if (is_async && has_hook) refuse_argument("return_recv_hook", true, "excludes async_finish");
}

void require_logfmt(int64_t hidden, const LowLatencyCombineRequest& request,
                    bool has_whole_pieces) {
  if (request.zero_copy) refuse_argument("use_logfmt", true, "excludes zero_copy");
  if (request.one_rounding) refuse_argument("use_logfmt", true, "excludes one_rounding");
  if (has_whole_pieces) return;
  refuse_argument("use_logfmt", "hidden " + std::to_string(hidden),
                  "needs a hidden size of a multiple of " + std::to_string(LogPiece::kElements));
}

PayloadFormat format_of(const LowLatencyDispatchRequest& request) {
  if (request.use_nvfp4) return PayloadFormat::kNvFp4;
  return request.use_fp8 ? PayloadFormat::kFp8 : PayloadFormat::kBfloat16;
}

// What a hook launches. `made`, and the caller's tensors, live until then.
template <class Call>
std::shared_ptr<LowLatencyPending> receive_phase(LowLatencyKind kind,
                                                 std::shared_ptr<const LowLatencyForm> form,
                                                 std::shared_ptr<LowLatencyDispatchRecord> record,
                                                 Call call, uint64_t stream,
                                                 const std::array<const void*, 6>& inputs,
                                                 std::initializer_list<Object> made) {
  call.send = false;
  call.receive = true;
  auto phase = std::make_shared<LowLatencyPending>(LowLatencyPending{
      kind, std::move(form), std::move(record), call, stream, borrow_all(inputs)});
  phase->kept.insert(phase->kept.end(), made);
  return phase;
}

CallOrder begin_order(CallContext& context, bool is_async) {
  if (is_async) return {context.order, {.is_async = true}};
  return CallOrder::unordered(context.order);
}

}  // namespace

int LowLatencyCalls::num_blocks(const IntegerRef& num_max_tokens, const IntegerRef& hidden,
                                const IntegerRef& num_topk, const IntegerRef& num_experts) const {
  context_.require_open();
  LowLatencyOptions options{};
  options.num_max_tokens = require_num_max_tokens(num_max_tokens);
  options.hidden = static_cast<int>(require_integer("hidden", hidden, 1, kLargestInteger));
  options.num_topk = static_cast<int>(require_integer("num_topk", num_topk, 1, kMaxTopk));
  options.num_experts = require_num_experts(num_experts, context_.group.num_max_experts);
  options.format = PayloadFormat::kBfloat16;
  return checked_num_blocks(options);
}

// ---- what every call begins and ends with -----------------------------------------------------------

void LowLatencyCalls::begin(LowLatencyKind kind) {
  context_.begin_unordered();
  const std::vector<int>& absent = context_.absent;
  if (!absent.empty() && !settings_.can_shrink) {
    std::string ranks;
    for (const int rank : absent) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    fail(CallError::Class::kUnsupported,
         "low-latency calls of a Buffer that goes on without ranks [" + ranks +
             "] need enable_shrink=True, so that they can do without ranks, too");
  }
  // A call may be sent while one of its kind waits for its hook, not the next: it has the same buffer.
  const Pending& pending = pending_of(kind);
  const bool is_overtaken = std::any_of(
      pending.begin(), pending.end(),
      [](const std::shared_ptr<LowLatencyPending>& each) { return each->is_overtaken; });
  if (pending.size() >= kNumBuffers || is_overtaken) {
    refuse_argument("return_recv_hook", {},
                    std::string("allows two low_latency_") + name_of(kind) +
                        " calls from one on whose hooks have not run: call the hook of an earlier "
                        "one first");
  }
}

void LowLatencyCalls::run(const LowLatencyForm& form, const LowLatencyDispatchCall& call,
                          uint64_t stream) {
  has_report_ = has_report_ || (call.receive && call.is_reporting);
  context_.launch([&] { context_.engine.low_latency_dispatch(form.plan, call, stream); });
}

void LowLatencyCalls::run(const LowLatencyForm& form, const LowLatencyCombineCall& call,
                          uint64_t stream) {
  context_.launch([&] { context_.engine.low_latency_combine(form.plan, call, stream); });
}

// Launches a call, or its send phase and leaves the other to the hook.
template <class Reserved>
LowLatencyCompletion LowLatencyCalls::launch_phases(Reserved& reserved, LowLatencyKind kind) {
  CallOrder& order = reserved.order_;
  const std::array<const void*, 6>& inputs = reserved.checked_.inputs_;
  const bool has_hook = reserved.pending_ != nullptr;
  Pending& pending = pending_of(kind);
  pending.reserve(pending.size() + 1);
  auto call = reserved.checked_.call_;
  call.send = true;
  call.receive = !has_hook;
  run(*reserved.checked_.form_, call, order.stream());
  for (const std::shared_ptr<LowLatencyPending>& earlier : pending) earlier->is_overtaken = true;
  if (has_hook) pending.push_back(std::move(reserved.pending_));
  LowLatencyCompletion completion;
  if (order.is_async()) {
    completion.owner_stream = order.owner_stream();
    std::vector<const void*> told(inputs.begin(), inputs.end());
    // An event of a capture cannot be asked whether it has passed.
    if (context_.order.target().has_streams() && !order.is_captured()) {
      completion.tensors = order.take_outputs();
      for (const void* input : std::exchange(told, {})) {
        if (input != nullptr) completion.tensors.push_back(Object::borrow(input));
      }
    }
    completion.event = order.finish(told, nullptr);
  } else {
    order.finish({}, nullptr);
  }
  if (!has_hook) context_.end();
  return completion;
}

void LowLatencyCalls::receive(LowLatencyPending& pending) {
  context_.require_open();
  if (!pending.is_waiting) {
    refuse_argument("hook", {}, "may be called once, and not after reset()");
  }
  // Its tensors live until it is launched: whoever gets their memory comes after on that stream.
  const std::vector<Object> kept = std::exchange(pending.kept, {});
  pending.is_waiting = false;
  Pending& others = pending_of(pending.kind);
  std::erase_if(others, [&](const std::shared_ptr<LowLatencyPending>& each) {
    return each.get() == &pending;
  });
  using State = LowLatencyDispatchRecord::State;
  const auto record = std::exchange(pending.record, nullptr);
  const bool is_dispatch = pending.kind == LowLatencyKind::kDispatch;
  if (is_dispatch) record->state = State::kFailed;  // until it is known
  // It cannot be called again, so that a launch that fails leaves the peers waiting.
  context_.keep_step([&] {
    const DeviceScope device(context_.order.target());
    std::visit([&](const auto& call) { run(*pending.form, call, pending.stream); }, pending.call);
  });
  context_.end();
  if (is_dispatch) record->state = State::kReceived;
}

void LowLatencyCalls::forget_pending(bool was_destroyed) {
  if (was_destroyed) combine_buffers_.clear();
  has_report_ = false;
  for (Pending& of_kind : pending_) {
    for (const std::shared_ptr<LowLatencyPending>& each : std::exchange(of_kind, {})) {
      each->is_waiting = false;
      each->kept.clear();
      if (each->kind == LowLatencyKind::kDispatch) {
        each->record->state = LowLatencyDispatchRecord::State::kForgotten;
      }
      each->record = nullptr;
    }
  }
}

int LowLatencyCalls::wait_num_tokens() {
  context_.require_open();
  if (!has_report_) {
    refuse_argument("report_num_tokens", false,
                    "must be True in a low_latency_dispatch before, whose hook has run");
  }
  const std::optional<int> most =
      context_.wait([&] { return context_.engine.wait_low_latency_num_tokens(); });
  if (most) return *most;
  context_.check();
  fail(CallError::Class::kGeneral, "low_latency_dispatch failed and left no error record");
}

// ---- dispatch -------------------------------------------------------------------------------------

CheckedLowLatencyDispatch LowLatencyCalls::check(const LowLatencyDispatchRequest& request) {
  begin(LowLatencyKind::kDispatch);
  const std::string& device = context_.device_name;
  const Memory& memory = context_.memory;
  const TensorRef &x = request.x, &idx = request.topk_idx, &weights = request.topk_weights;
  require_tensor("x", x, {{-1, -1}, {kBfloat16}}, device);
  const int64_t num_tokens = x.shape[0], hidden = x.shape[1];
  require_choices(idx, weights, num_tokens, device);
  LowLatencyOptions options{};
  options.num_max_tokens = require_num_max_tokens(request.num_max_tokens);
  options.format = format_of(request);
  require_hidden(hidden, options.format == PayloadFormat::kNvFp4 ? kFp4ScaleWord
                         : options.format == PayloadFormat::kFp8 ? kScaleBlockColumns
                                                                 : kBf16Columns);
  options.hidden = static_cast<int>(hidden);
  options.num_topk = static_cast<int>(idx.shape[1]);
  options.num_experts = require_num_experts(request.num_experts, context_.group.num_max_experts);
  const bool use_fp8 = options.format == PayloadFormat::kFp8;
  if (request.use_ue8m0 && !(request.round_scale && use_fp8)) {
    refuse_argument("use_ue8m0", true, "needs use_fp8 and round_scale");
  }
  if (request.round_scale && !use_fp8) refuse_argument("round_scale", true, "needs use_fp8");
  options.round_scale = request.round_scale;
  options.use_ue8m0 = request.use_ue8m0;
  options.is_compact = request.is_compact;
  options.has_weights = weights.is_given();
  std::shared_ptr<const LowLatencyForm> form = form_of(options);
  if (num_tokens > options.num_max_tokens) {
    refuse_argument("x", std::to_string(num_tokens) + " tokens",
                    "must have at most " + std::to_string(options.num_max_tokens) +
                        " (num_max_dispatch_tokens_per_rank)");
  }
  require_aligned("x", x);
  require_stats("cumulative_local_expert_recv_stats", request.cumulative_stats,
                form->num_local_experts, kInt32, device);
  require_stats("dispatch_wait_recv_cost_stats", request.wait_stats, context_.group.num_ranks,
                kInt64, device);
  require_global_scale(request.global_scale, request.use_nvfp4, device);
  require_one_completion(request.is_async, request.has_hook);
  if (request.has_global_idx && !request.is_compact) {
    refuse_argument("global_topk_idx", true, "needs compact");
  }
  // On all ranks, also on those that could do it.
  if (request.has_global_idx && (context_.group.num_ranks == 1 || options.num_experts == 1)) {
    refuse_argument("global_topk_idx", true, "needs two ranks that have experts");
  }

  CheckedLowLatencyDispatch checked;
  checked.form_ = std::move(form);
  LowLatencyDispatchCall& call = checked.call_;
  call.x = memory.non_null(x.address);
  call.topk_idx = memory.non_null(idx.address);
  call.topk_idx_bytes = idx.type.num_bytes;
  call.topk_weights = memory.address_of(weights);
  call.num_tokens = static_cast<int>(num_tokens);
  call.cumulative_stats = request.cumulative_stats.address;
  call.wait_stats = request.wait_stats.address;
  call.global_scale = request.global_scale.address;
  call.has_ticket = request.has_hook;
  call.is_reporting = request.is_reporting;
  call.has_global_idx = request.has_global_idx;
  checked.inputs_ = {x.object,
                     idx.object,
                     weights.object,
                     request.cumulative_stats.object,
                     request.wait_stats.object,
                     request.global_scale.object};
  checked.is_async_ = request.is_async;
  checked.has_hook_ = request.has_hook;
  checked.is_flat_ = request.is_flat;
  return checked;
}

ReservedLowLatencyDispatch::ReservedLowLatencyDispatch(CallContext& context,
                                                       CheckedLowLatencyDispatch checked)
    : checked_(std::move(checked)), order_(begin_order(context, checked_.is_async_)) {
  const LowLatencyForm& form = *checked_.form_;
  Memory& memory = context.memory;
  LowLatencyDispatchCall& call = checked_.call_;
  // Rows and scales have memory of their own, since the rest is kept until combine.
  const TensorSpec flat = TensorSpec::of(
      form.recv_x.type, {form.num_local_experts * form.num_rows, form.options().hidden});
  MadeTensor rows = memory.empty(checked_.is_flat_ ? flat : form.recv_x, order_);
  call.recv_x = memory.non_null(rows.address);
  result.recv_x = std::move(rows.tensor);
  if (form.has_scales()) {
    MadeTensor scales = memory.empty(form.recv_scales, order_);
    call.recv_scales = memory.non_null(scales.address);
    result.recv_scales = std::move(scales.tensor);
  }
  MadeTensor metadata = memory.empty(form.metadata, order_);
  call.metadata = metadata.address;
  result.record = std::make_shared<LowLatencyDispatchRecord>(LowLatencyDispatchRecord{
      checked_.form_, context.token, context.group.rank, call.num_tokens, std::move(metadata)});
  result.recv_count = result.record->part("recv_count");
  if (!checked_.has_hook_) return;
  result.record->state = LowLatencyDispatchRecord::State::kWaits;
  pending_ = result.pending =
      receive_phase(LowLatencyKind::kDispatch, checked_.form_, result.record, call, order_.stream(),
                    checked_.inputs_, {result.recv_x, result.recv_scales});
}

LowLatencyCompletion LowLatencyCalls::launch(ReservedLowLatencyDispatch&& reserved) {
  return launch_phases(reserved, LowLatencyKind::kDispatch);
}

// ---- combine --------------------------------------------------------------------------------------

void LowLatencyCalls::require_handle(const LowLatencyDispatchRecord* handle,
                                     const void* handle_object) const {
  if (handle == nullptr) {
    refuse_argument("handle", given_property(Which::kTypeName, handle_object),
                    "must be what low_latency_dispatch returned");
  }
  if (handle->owner != context_.token) require_same_group(context_, handle->rank, *handle->owner);
}

// Combine reads the rows' slots from the metadata: until dispatch's receive phase has run they are
// whatever the memory held before.
void LowLatencyCalls::require_received(const LowLatencyDispatchRecord& handle) const {
  using State = LowLatencyDispatchRecord::State;
  const char* rule = "must be of a dispatch whose hook has run: call it first";
  switch (handle.state) {
    case State::kReceived:
      return;
    case State::kWaits:
      break;
    case State::kForgotten:
      rule = "must be of a dispatch whose hook ran: reset() has forgotten this one's";
      break;
    case State::kFailed:
      rule = "must be of a dispatch that succeeded: the hook of this one raised";
      break;
  }
  refuse_argument("handle", "rows not received yet", rule);
}

const MadeTensor* LowLatencyCalls::combine_buffer(const LowLatencyForm& form) const {
  for (const auto& [shape, buffer] : combine_buffers_) {
    if (has_same_shape(shape, form.rows)) return &buffer;
  }
  return nullptr;
}

void LowLatencyCalls::keep_combine_buffer(const LowLatencyForm& form, MadeTensor buffer) {
  combine_buffers_.emplace_back(form.rows, std::move(buffer));
}

CheckedLowLatencyCombine LowLatencyCalls::check(const LowLatencyCombineRequest& request) {
  begin(LowLatencyKind::kCombine);
  require_handle(request.handle.get(), request.handle_object);
  require_received(*request.handle);
  const std::string& device = context_.device_name;
  const Memory& memory = context_.memory;
  const TensorRef &idx = request.topk_idx, &weights = request.topk_weights, &out = request.out;
  std::shared_ptr<const LowLatencyForm> form = form_of(request.handle->form->options());
  const LowLatencyOptions& options = form->options();
  const int64_t num_tokens = request.handle->num_tokens, hidden = options.hidden;
  if (request.use_logfmt) require_logfmt(hidden, request, form->plan.has_whole_log_pieces);
  TensorRef x = request.x;
  const bool is_contiguous = !request.zero_copy;
  if (request.is_flat) {
    require_tensor("x", x, {{form->num_local_experts * form->num_rows, hidden}, {kBfloat16}},
                   device);
  } else if (options.is_compact) {
    require_tensor("x", x, {{form->num_rows, hidden}, {kBfloat16}, is_contiguous}, device);
  } else {
    require_tensor("x", x,
                   {{form->num_local_experts, form->num_rows, hidden}, {kBfloat16}, is_contiguous},
                   device);
  }
  if (request.zero_copy) {
    const MadeTensor* buffer = combine_buffer(*form);
    if (buffer == nullptr) {
      refuse_argument("zero_copy", true,
                      "needs rows in get_next_low_latency_combine_buffer(handle)");
    }
    x.object = buffer->tensor.get();
    x.address = buffer->address;
  }
  require_aligned("x", x);
  require_choices(idx, weights, num_tokens, device);
  if (idx.shape[1] != options.num_topk) {
    refuse_handle(std::to_string(options.num_topk) + " selections a token",
                  "must be of this topk_idx (" + std::to_string(idx.shape[1]) + " columns)");
  }
  CombineRows rows = options.is_compact ? CombineRows::kReduced : CombineRows::kSums;
  bool needs_weights = !(options.is_compact || options.has_weights);
  if (request.one_rounding) {
    if (options.is_compact) {
      refuse_argument("one_rounding", true, "needs rows that are not compact");
    }
    if (!form->plan.has_room_for_selections) {
      LowLatencyOptions of_rows = options;
      of_rows.format = PayloadFormat::kBfloat16;
      require_room(of_rows, true);
    }
    rows = CombineRows::kSelections;
    needs_weights = true;
  }
  if (needs_weights && !weights.is_given()) {
    refuse_argument("topk_weights", {},
                    request.one_rounding ? "must be given with one_rounding"
                                         : "must be given, here or to low_latency_dispatch");
  }
  if (out.is_given()) {
    require_tensor("out", out, {{num_tokens, hidden}, {kBfloat16}}, device);
    require_aligned("out", out);
  }
  require_stats("combine_wait_recv_cost_stats", request.wait_stats, context_.group.num_ranks,
                kInt64, device);
  require_one_completion(request.is_async, request.has_hook);

  CheckedLowLatencyCombine checked;
  checked.form_ = std::move(form);
  checked.record_ = request.handle;
  LowLatencyCombineCall& call = checked.call_;
  call.x = memory.non_null(x.address);
  call.metadata = request.handle->metadata.address;
  call.topk_idx = memory.non_null(idx.address);
  call.topk_idx_bytes = idx.type.num_bytes;
  call.topk_weights = needs_weights ? memory.address_of(weights) : 0;
  call.num_tokens = static_cast<int>(num_tokens);
  call.rows = rows;
  call.use_logfmt = request.use_logfmt;
  call.combined_x = memory.address_of(out);
  call.wait_stats = request.wait_stats.address;
  checked.inputs_ = {x.object,
                     idx.object,
                     weights.object,
                     out.object,
                     request.wait_stats.object,
                     request.handle->metadata.tensor.get()};
  checked.out_ = out.object;
  checked.is_async_ = request.is_async;
  checked.has_hook_ = request.has_hook;
  return checked;
}

ReservedLowLatencyCombine::ReservedLowLatencyCombine(CallContext& context,
                                                     CheckedLowLatencyCombine checked)
    : checked_(std::move(checked)), order_(begin_order(context, checked_.is_async_)) {
  Memory& memory = context.memory;
  LowLatencyCombineCall& call = checked_.call_;
  if (checked_.out_ != nullptr) {
    result.combined_x = Object::borrow(checked_.out_);
  } else {
    MadeTensor sums = memory.empty(
        TensorSpec::of(kBfloat16, {call.num_tokens, checked_.form_->options().hidden}), order_);
    call.combined_x = memory.non_null(sums.address);
    result.combined_x = std::move(sums.tensor);
  }
  if (!checked_.has_hook_) return;
  MadeTensor ticket = memory.empty(TensorSpec::of(kInt32, {1}), order_);
  call.ticket = ticket.address;
  pending_ = result.pending =
      receive_phase(LowLatencyKind::kCombine, checked_.form_, checked_.record_, call,
                    order_.stream(), checked_.inputs_, {result.combined_x, ticket.tensor});
}

LowLatencyCompletion LowLatencyCalls::launch(ReservedLowLatencyCombine&& reserved) {
  return launch_phases(reserved, LowLatencyKind::kCombine);
}

}  // namespace deep_comm
