// The checks that calls of both tiers share, and what the sums of expanded rows need. Rules of
// x are in payload.cpp, those of handles in handle.cpp.
#include <string>

#include "host/calls/combine.hpp"
#include "host/calls/dispatch.hpp"

namespace deep_comm {

CheckedRouting check_routing(const CallContext& context, const DispatchRequest& request,
                             int64_t num_tokens) {
  const TensorRef& idx = request.topk_idx;
  const std::string& device = context.device_name;
  const Memory& memory = context.memory;
  require_topk(idx, request.topk_weights, num_tokens, device);
  request.flags.check(idx.is_given());
  CheckedRouting routing;
  const bool names_experts = request.num_experts.is_given;
  if (names_experts) {
    routing.num_experts = require_num_experts(request.num_experts, context.group.num_max_experts);
  }
  routing.expert_alignment = require_expert_alignment(request.expert_alignment);
  routing.num_worst_tokens =
      require_integer("num_worst_tokens", request.num_worst_tokens, 0, kLargestInteger);
  if (idx.is_given()) {
    routing.num_topk = static_cast<int>(idx.shape[1]);
    routing.topk_idx_bytes = idx.type.num_bytes;
  }
  routing.topk_idx = memory.address_of(idx);
  routing.topk_weights = memory.address_of(request.topk_weights);
  const TensorRef &per_rank = request.num_tokens_per_rank, &mask = request.is_token_in_rank,
                  &per_expert = request.num_tokens_per_expert;
  if (names_experts && !per_rank.is_given() && !mask.is_given() && !per_expert.is_given()) {
    if (!idx.is_given()) refuse_argument("topk_idx", {}, "is needed to compute the layout");
    return routing;
  }
  if (idx.is_given() && !names_experts && !per_rank.is_given() && !mask.is_given()) {
    refuse_argument("num_experts", {}, "is needed with topk_idx (or give get_dispatch_layout's)");
  }
  const std::pair<const char*, const TensorRef*> layout[] = {
      {"num_tokens_per_rank", &per_rank},
      {"is_token_in_rank", &mask},
      {"num_tokens_per_expert", &per_expert}};
  for (const auto& [name, tensor] : layout) {
    if (tensor->is_given()) continue;
    refuse_argument(name, {}, "is needed without a handle (or topk_idx and num_experts alone)");
  }
  const int64_t num_ranks = context.group.num_ranks;
  require_tensor("num_tokens_per_rank", per_rank, {{num_ranks}, {kInt32}}, device);
  require_tensor("num_tokens_per_expert", per_expert, {{-1}, {kInt32}}, device);
  require_tensor("is_token_in_rank", mask, {{num_tokens, num_ranks}, {kBool}}, device);
  const int64_t num_experts = per_expert.shape[0], num_max_experts = context.group.num_max_experts;
  if (num_experts < 1 || num_experts > num_max_experts) {
    refuse_argument("num_experts", num_experts,
                    "must be an integer of 1 to " + std::to_string(num_max_experts) +
                        " (num_max_experts of the Buffer)");
  }
  if (names_experts && routing.num_experts != num_experts) {
    refuse_argument("num_experts", static_cast<int64_t>(routing.num_experts),
                    "must be that of the layout (" + std::to_string(num_experts) + ")");
  }
  routing.num_experts = static_cast<int>(num_experts);
  routing.has_layout = true;
  routing.is_token_in_rank = memory.address_of(mask);
  routing.num_tokens_per_expert = memory.address_of(per_expert);
  return routing;
}

CachedDispatchCall::CachedDispatchCall(CallContext& context, const DispatchRequest& request)
    : context_(context), request_(request) {
  if (request.topk_idx.is_given() || request.topk_weights.is_given()) {
    refuse_argument(request.topk_idx.is_given() ? "topk_idx" : "topk_weights", {},
                    "must be left away with a handle");
  }
  context.begin();
  payload_ = check_payload(context, request.payload);
  handle_ = check_handle(context, request.handle);
  require_handle(*handle_, payload_.num_tokens, request.flags.expand || request.flags.zero_padding);
}

std::shared_ptr<DispatchRecord> RecordSource::make(const CallContext& context,
                                                   const CallOrder& order) const {
  auto record = std::make_shared<DispatchRecord>();
  record->owner = context.token;
  record->rank = context.group.rank;
  record->num_experts = routing.num_experts;
  record->num_topk = routing.num_topk;
  record->num_channels = num_channels;
  record->num_tokens = num_tokens;
  record->routing = addresses;
  record->framework = context.memory.shared_framework();
  record->layout = std::make_shared<const RoutingBlock>(layout);
  record->block = block;
  if (block.tensor) record->held.tensors.push_back(block.tensor);
  if (mask) {
    record->parts.push_back(RecordPart::of("is_token_in_rank", mask));
    record->held.tensors.push_back(mask);
  }
  if (context.order.target().has_streams()) record->held.owner_stream = order.owner_stream();
  return record;
}

std::vector<const void*> inputs_of(const Payload& payload, const DispatchRequest& request) {
  return {payload.x_object,
          payload.scales_object,
          request.topk_idx.object,
          request.topk_weights.object,
          request.num_tokens_per_rank.object,
          request.num_tokens_per_expert.object,
          request.is_token_in_rank.object};
}

void require_handle(const DispatchRecord& handle, int64_t num_tokens, bool needs_expansion) {
  if (needs_expansion && !handle.expansion) {
    refuse_handle("without expansion", "must be of a dispatch with expand=True");
  }
  if (handle.num_tokens != num_tokens) {
    refuse_handle(std::to_string(handle.num_tokens) + " tokens",
                  "must be of a dispatch of as many tokens as x has rows (" +
                      std::to_string(num_tokens) + ")");
  }
}

void require_channels(const DispatchRecord& handle, int num_channels, const char* sms_of_channels) {
  if (handle.num_channels == num_channels) return;
  refuse_handle(std::to_string(handle.num_channels) + " channels",
                "must have the config's " + std::to_string(num_channels) + " channels (" +
                    sms_of_channels + "); leave config away to take the handle's");
}

CheckedCombine check_combine(const CallContext& context, const CombineRequest& request) {
  const TensorRef& x = request.x;
  const std::string& device = context.device_name;
  const Memory& memory = context.memory;
  require_tensor("x", x, {{-1, -1}, {kBfloat16, kFloat16, kFloat32}}, device);
  CheckedCombine checked;
  checked.type = x.type;
  checked.dtype = x.type == kBfloat16  ? Dtype::kBfloat16
                  : x.type == kFloat16 ? Dtype::kFloat16
                                       : Dtype::kFloat32;
  checked.num_rows = x.shape[0];
  checked.hidden = x.shape[1];
  require_rows("x", checked.num_rows, checked.hidden * x.type.num_bytes);
  require_aligned("x", x);
  checked.row_bytes = static_cast<int>(checked.hidden * x.type.num_bytes);
  checked.x = memory.non_null(x.address);

  checked.handle = check_handle(context, request.handle);
  const DispatchRecord& handle = *checked.handle;
  if (handle.num_output_rows != checked.num_rows) {
    refuse_handle(std::to_string(handle.num_output_rows) + " received rows",
                  "must be of a dispatch that returned as many rows as x has (" +
                      std::to_string(checked.num_rows) + ")");
  }
  const TensorRef& weights = request.topk_weights;
  if (request.apply_weights) {
    if (!handle.expansion) {
      refuse_handle("without expansion", "must be of a dispatch with expand=True (apply_weights)");
    }
    if (!weights.is_given()) refuse_argument("topk_weights", {}, "is needed with apply_weights");
  }
  if (weights.is_given() && handle.expansion) {
    require_tensor("topk_weights", weights, {{checked.num_rows}, {kFloat32}}, device);
    (request.apply_weights ? checked.row_weights : checked.weights) = memory.address_of(weights);
    checked.num_topk = request.apply_weights ? 0 : handle.expansion->num_topk;
  } else if (weights.is_given()) {
    require_tensor("topk_weights", weights, {{checked.num_rows, -1}, {kFloat32}}, device);
    checked.weights = memory.address_of(weights);
    checked.num_topk = static_cast<int>(weights.shape[1]);
  }
  const int num_items = request.num_bias_items;
  if (num_items >= 0 && num_items != 2) {
    refuse_argument("bias", std::to_string(num_items) + " items",
                    "must be a tensor or a pair of tensors");
  }
  for (int item = 0; item < 2; ++item) {
    const TensorRef& bias = request.bias[item];
    if (!bias.is_given()) continue;
    const char* names[] = {"bias[0]", "bias[1]"};
    require_tensor(num_items < 0 ? "bias" : names[item], bias,
                   {{handle.num_tokens, checked.hidden}, {checked.type}}, device);
    checked.bias[item] = memory.address_of(bias);
  }
  const TensorRef& topk_idx = request.topk_idx;
  if (topk_idx.is_given()) {
    require_tensor("topk_idx", topk_idx, {{handle.num_tokens, -1}, {kInt64, kInt32}}, device);
    if (handle.num_experts == 0) refuse_handle("num_experts = 0", "must know it, for topk_idx");
    checked.order = SumOrder::of(
        {reinterpret_cast<const void*>(memory.non_null(topk_idx.address)), topk_idx.type.num_bytes,
         static_cast<int>(topk_idx.shape[1]), handle.num_experts},
        context.group.num_ranks, context.group.is_internode() ? context.group.ranks_per_node : 1);
  }
  return checked;
}

std::vector<const void*> inputs_of(const CombineRequest& request) {
  return {request.x.object, request.topk_weights.object, request.bias[0].object,
          request.bias[1].object, request.topk_idx.object};
}

ReducedRows ReducedRows::allocate(CallContext& context, CheckedCombine& combine,
                                  const DispatchRecord& handle, CallOrder& order) {
  ReducedRows reduced;
  if (!handle.expansion) return reduced;
  const ExpansionRecord& expansion = *handle.expansion;
  const int64_t num_tokens = expansion.num_tokens_limit;
  Memory& memory = context.memory;
  reduced.x = memory.empty(TensorSpec::of(combine.type, {num_tokens, combine.hidden}), order);
  const uintptr_t x = std::exchange(combine.x, memory.non_null(reduced.x.address));
  const uintptr_t weights = combine.weights;
  if (weights != 0) {
    reduced.weights =
        memory.empty(TensorSpec::of(kFloat32, {num_tokens, expansion.num_topk}), order);
    combine.weights = memory.non_null(reduced.weights.address);
  }
  // Between nodes these local kernels see one rank: how many tokens it has received.
  const RoutingAddresses& routing = handle.routing;
  ReduceExpertsArgs& args = reduced.args;
  args.rank_prefix_matrix = reinterpret_cast<const int32_t*>(
      context.group.is_internode() ? routing.num_received(context.group.num_ranks)
                                   : routing.rank_prefix);
  args.recv_rows = reinterpret_cast<const int32_t*>(expansion.recv_rows);
  args.num_topk = expansion.num_topk;
  args.num_rows = static_cast<int>(combine.num_rows);
  args.num_tokens_limit = static_cast<int>(num_tokens);
  args.row_bytes = combine.row_bytes;
  args.x = reinterpret_cast<const uint8_t*>(x);
  args.row_weights = reinterpret_cast<const float*>(combine.row_weights);
  args.reduced_x = reinterpret_cast<uint8_t*>(combine.x);
  args.weights = reinterpret_cast<const float*>(weights);
  args.reduced_weights = reinterpret_cast<float*>(weights != 0 ? combine.weights : 0);
  return reduced;
}

}  // namespace deep_comm
