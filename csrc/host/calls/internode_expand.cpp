#include "host/calls/internode_expand.hpp"

#include "device/layout/region.cuh"

namespace deep_comm {

ReceivedNumbering number_received(CallContext& context, const TierRows& received,
                                  uintptr_t num_received, int num_local_experts,
                                  int expert_alignment, int64_t num_rows, int num_local_blocks,
                                  CallOrder& order) {
  const OutputForm& form = received.form();
  RegionCursor cursor;
  const auto take = [&](int64_t num_words) {
    return cursor.take(static_cast<size_t>(num_words) * sizeof(int32_t));
  };
  const size_t counts = take(num_local_experts);
  const size_t offsets = take(num_local_experts + 1);
  const size_t recv_rows = take(received.num_rows() * form.num_topk);
  const auto num_words = static_cast<int64_t>(cursor.num_bytes() / sizeof(int32_t));

  ReceivedNumbering numbering;
  numbering.storage = context.memory.empty(TensorSpec::of(kInt32, {num_words}), order);
  const uintptr_t base = numbering.storage.address;
  ExpansionRecord& expansion = numbering.expansion;
  expansion.expert_counts = base + counts;
  expansion.expert_offsets = base + offsets;
  expansion.recv_rows = base + recv_rows;
  expansion.num_topk = form.num_topk;
  expansion.num_local_experts = num_local_experts;
  expansion.num_tokens_limit = received.num_rows();
  expansion.num_rows = num_rows;
  expansion.expert_alignment = expert_alignment;
  expansion.numbering = expansion.placed = PartMemory::of_words(numbering.storage);

  NumberReceivedArgs args{};
  args.rank_prefix_matrix = pointer_of<int32_t>(num_received);
  args.topk_idx = pointer_of<void>(received.output().topk_idx);
  args.topk_idx_bytes = form.topk_idx_bytes;
  args.num_tokens_limit = static_cast<int>(expansion.num_tokens_limit);
  args.num_topk = expansion.num_topk;
  args.num_experts = num_local_experts;
  args.expert_alignment = expert_alignment;
  args.num_rows = static_cast<int>(num_rows);
  args.expert_offsets = pointer_of<int32_t>(expansion.expert_offsets);
  args.expert_counts = pointer_of<int32_t>(expansion.expert_counts);
  args.recv_rows = pointer_of<int32_t>(expansion.recv_rows);
  context.launch([&] {
    context.engine.number_received(args, {num_local_blocks, 1, 1}, order.stream());
  });
  return numbering;
}

OutputForm expanded_form(const TierRows& received, bool needs_experts) {
  OutputForm form = received.form();
  form.is_expanded = true;
  form.makes_handle = false;
  if (!needs_experts || received.output().topk_idx == 0) form.num_topk = form.topk_idx_bytes = 0;
  return form;
}

DispatchOutputs expand_received(CallContext& context, const TierRows& received,
                                uintptr_t num_received, const ExpansionRecord& expansion,
                                bool zero_padding, bool needs_experts, int num_local_blocks,
                                CallOrder& order) {
  const OutputForm form = expanded_form(received, needs_experts);
  const DispatchOutputs& from = received.output();
  const int64_t num_rows = expansion.num_rows;
  DispatchOutputs rows = allocate_outputs(context.memory, form, num_rows, 0, order);

  ExpandReceivedArgs args{};
  args.rank_prefix_matrix = pointer_of<int32_t>(num_received);
  args.recv_x = pointer_of<uint8_t>(from.x);
  args.recv_scales = pointer_of<uint8_t>(from.scales);
  args.recv_weights = pointer_of<float>(from.topk_weights);
  args.expert_offsets = pointer_of<int32_t>(expansion.expert_offsets);
  args.expert_counts = pointer_of<int32_t>(expansion.expert_counts);
  args.num_topk = expansion.num_topk;
  args.num_local_experts = expansion.num_local_experts;
  args.num_tokens_limit = static_cast<int>(expansion.num_tokens_limit);
  args.row_bytes = form.payload.row_bytes();
  args.scale_row_bytes = form.payload.scale_row_bytes();
  args.expert_idx_bytes = form.topk_idx_bytes;
  args.zero_padding = zero_padding;
  args.output = {.num_rows = static_cast<int>(num_rows),
                 .x = pointer_of<uint8_t>(rows.x),
                 .scales = pointer_of<uint8_t>(rows.scales),
                 .expert_idx = pointer_of<void>(rows.topk_idx),
                 .weights = pointer_of<float>(rows.topk_weights),
                 .recv_rows = pointer_of<int32_t>(expansion.recv_rows)};
  context.launch([&] {
    context.engine.expand_received(args, {num_local_blocks, 1, 1}, order.stream());
  });
  return rows;
}

}  // namespace deep_comm
