#include "host/calls/layout.hpp"

namespace deep_comm {

void launch_layout(CallContext& context, const TensorRef& topk_idx, int num_experts,
                   const LayoutAddresses& out, uint64_t stream) {
  const auto choices = reinterpret_cast<const void*>(context.memory.non_null(topk_idx.address));
  const int num_tokens = static_cast<int>(topk_idx.shape[0]);
  const int num_topk = static_cast<int>(topk_idx.shape[1]);
  if (context.group.is_internode()) {
    InternodeLayoutArgs args{};
    args.topk_idx = choices;
    args.topk_idx_bytes = topk_idx.type.num_bytes;
    args.num_tokens = num_tokens;
    args.num_topk = num_topk;
    args.experts = context.group.experts(num_experts);
    args.num_tokens_per_rank = pointer_of<int32_t>(out.num_tokens_per_rank);
    args.num_tokens_per_node = pointer_of<int32_t>(out.num_tokens_per_node);
    args.num_tokens_per_expert = pointer_of<int32_t>(out.num_tokens_per_expert);
    args.is_token_in_rank = pointer_of<uint8_t>(out.is_token_in_rank);
    return context.launch([&] { context.engine.internode_layout(args, stream); });
  }
  LayoutArgs args{};
  args.topk = {const_cast<void*>(choices), topk_idx.type.num_bytes, num_topk, num_experts};
  args.num_tokens = num_tokens;
  args.ranks_per_node = context.group.num_ranks;
  args.num_tokens_per_rank = pointer_of<int32_t>(out.num_tokens_per_rank);
  args.num_tokens_per_expert = pointer_of<int32_t>(out.num_tokens_per_expert);
  args.is_token_in_rank = pointer_of<uint8_t>(out.is_token_in_rank);
  context.launch([&] { context.engine.get_dispatch_layout(args, stream); });
}

LayoutResult get_dispatch_layout(CallContext& context, const LayoutRequest& request) {
  context.begin();
  const TensorRef& idx = request.topk_idx;
  require_tensor("topk_idx", idx, {{-1, -1}, {kInt64, kInt32}}, context.device_name);
  require_topk(idx, {}, -1, context.device_name);
  const int num_experts = require_num_experts(request.num_experts, context.group.num_max_experts);
  const GroupShape& group = context.group;

  CallOrder order(context.order, request.streams);
  Memory& memory = context.memory;
  MadeTensor per_rank = memory.empty(TensorSpec::of(kInt32, {group.num_ranks}), order);
  MadeTensor per_expert = memory.empty(TensorSpec::of(kInt32, {num_experts}), order);
  MadeTensor mask = memory.empty(TensorSpec::of(kBool, {idx.shape[0], group.num_ranks}), order);
  MadeTensor per_node;
  if (group.is_internode()) {
    per_node = memory.empty(TensorSpec::of(kInt32, {group.num_nodes}), order);
  }
  launch_layout(
      context, idx, num_experts,
      {per_rank.address, per_node.address, per_expert.address, memory.non_null(mask.address)},
      order.stream());
  std::shared_ptr<Event> event = order.finish({idx.object}, nullptr);
  context.end();
  return {std::move(per_rank.tensor), std::move(per_node.tensor), std::move(per_expert.tensor),
          std::move(mask.tensor), std::move(event)};
}

}  // namespace deep_comm
