#include "host/calls/expand.hpp"

namespace deep_comm {

Numbering Numbering::make(CallContext& context, int num_experts, int64_t num_tokens, int num_topk,
                          CallOrder& order) {
  const GroupShape& group = context.group;
  Numbering numbering;
  numbering.layout = NumberingLayout::make(
      group.num_ranks, num_experts, group.num_local_experts(num_experts), num_tokens, num_topk);
  const auto num_words = static_cast<int64_t>(numbering.layout.num_bytes / sizeof(int32_t));
  numbering.storage = context.memory.empty(TensorSpec::of(kInt32, {num_words}), order);
  return numbering;
}

ExpansionArgs Numbering::notify_args() const {
  return {
      pointer_of<int32_t>(at(layout.first_rows)), pointer_of<int32_t>(at(layout.expert_offsets)),
      pointer_of<int32_t>(at(layout.expert_counts)), pointer_of<int32_t>(at(layout.num_expanded))};
}

void number_rows(CallContext& context, const Numbering& numbering, const Selections& selections,
                 int num_local_blocks, uint64_t stream) {
  const NumberingLayout& layout = numbering.layout;
  NumberRowsArgs args{};
  args.topk_idx = pointer_of<void>(selections.topk_idx);
  args.topk_idx_bytes = selections.topk_idx_bytes;
  args.num_tokens = static_cast<int>(selections.num_tokens);
  args.num_topk = selections.num_topk;
  args.experts = context.group.experts(selections.num_experts);
  args.first_rows = pointer_of<int32_t>(numbering.at(layout.first_rows));
  args.send_row = pointer_of<int32_t>(numbering.at(layout.send_row));
  args.send_rows = pointer_of<int32_t>(numbering.at(layout.send_rows));
  context.launch([&] { context.engine.number_rows(args, {num_local_blocks, 1, 1}, stream); });
}

void dispatch_expanded(CallContext& context, const DispatchPlan& plan, const DispatchArgs& dispatch,
                       const ExpandRequest& request, const RingPlan& rings, uint64_t stream) {
  const ExpansionRecord& expansion = request.expansion;
  const DispatchOptions& options = plan.options;
  ExpandRowsArgs args{};
  args.rank_prefix_matrix = dispatch.rank_prefix_matrix;
  args.expert_offsets = pointer_of<int32_t>(expansion.expert_offsets);
  args.expert_counts = pointer_of<int32_t>(expansion.expert_counts);
  args.num_topk = expansion.num_topk;
  args.num_local_experts = expansion.num_local_experts;
  args.num_tokens_limit = static_cast<int>(expansion.num_tokens_limit);
  args.row_bytes = options.row_bytes;
  args.scale_row_bytes = options.num_scales * options.scale_bytes;
  args.expert_idx_bytes = dispatch.recv_topk_idx != nullptr ? dispatch.topk_idx_bytes : 0;
  args.zero_padding = request.zero_padding;
  args.output = {.num_rows = dispatch.num_recv_rows,
                 .x = dispatch.recv_x,
                 .scales = dispatch.recv_x_scales,
                 .expert_idx = dispatch.recv_topk_idx,
                 .weights = dispatch.recv_topk_weights,
                 .recv_rows = pointer_of<int32_t>(expansion.recv_rows)};
  args.follows_notify = dispatch.follows_notify;
  args.is_speculative = dispatch.is_speculative;
  args.num_expanded = dispatch.num_expanded;
  args.src_idx = dispatch.recv_src_idx;
  if (request.fills_handle) {
    args.fill_src_idx = dispatch.recv_src_idx;
    args.fill_rows = dispatch.recv_rows;
  }
  context.launch([&] {
    context.engine.dispatch_expanded(plan, dispatch, args, rings.num_local_blocks,
                                     rings.may_wait_beside, stream);
  });
}

}  // namespace deep_comm
