#include "host/calls/internode_rows.hpp"

#include "device/layout/tier_output.cuh"

namespace deep_comm {

void poison_block(CallContext& context, const Block& block, const CallOrder& order) {
  if (order.is_captured() || context.rail_reads.overlaps(block)) return;
  context.memory.poison(block.offset, block.num_bytes, order);
}

std::optional<TierRows> TierRows::in_region(CallContext& context, const OutputForm& form,
                                            bool is_scratch, int64_t num_rows,
                                            int64_t num_forward_rows, const CallOrder& order) {
  if (!context.has_region()) return std::nullopt;
  Memory& memory = context.memory;
  TierRows rows(context.group, form, num_rows, num_forward_rows);
  if (form.makes_handle) {
    // First: it is small, lives longer, and must not part the region.
    rows.source_block_ = memory.take(rows.num_source_bytes(), order, true);
    if (rows.source_block_ == nullptr) return std::nullopt;
  }
  std::shared_ptr<Block> block = memory.take(form.layout(num_rows).num_bytes, order, is_scratch);
  if (block == nullptr) return std::nullopt;
  for (const Block* part : {rows.source_block_.get(), block.get()}) {
    if (part != nullptr) poison_block(context, *part, order);
  }
  rows.output_.lie_in(std::move(block), memory, form);
  if (form.makes_handle) {
    rows.lay_out_sources(memory.heap_base() + rows.source_block_->offset);
  }
  return rows;
}

TierRows TierRows::allocate(CallContext& context, const OutputForm& form, bool is_scratch,
                            int64_t num_rows, int64_t num_forward_rows, CallOrder& order) {
  std::optional<TierRows> rows =
      in_region(context, form, is_scratch, num_rows, num_forward_rows, order);
  if (rows) return *std::move(rows);
  Memory& memory = context.memory;
  TierRows made(context.group, form, num_rows, num_forward_rows);
  OutputForm without_sources = form;
  without_sources.makes_handle = false;
  made.output_ = allocate_outputs(memory, without_sources, num_rows, 0, order);
  if (form.makes_handle) {
    made.source_storage_ = memory.empty(
        TensorSpec::of(kUint8, {static_cast<int64_t>(made.num_source_bytes())}), order);
    made.lay_out_sources(memory.non_null(made.source_storage_.address));
  }
  return made;
}

void TierRows::shrink(const CallContext& context, int64_t num_rows, int64_t num_forward_rows) {
  const Memory& memory = context.memory;
  output_.num_rows = num_rows;
  num_forward_rows_ = num_forward_rows;
  output_.block->shrink(form_.layout(num_rows).num_bytes);
  source_block_->shrink(num_source_bytes());
  output_.lie_in(output_.block, memory, form_);
  lay_out_sources(memory.heap_base() + source_block_->offset);
}

void TierRows::give_sources(CallContext& context, DispatchRecord& record) {
  record.num_recv_rows = num_rows();
  record.num_forward_rows = num_forward_rows_;
  record.routing.send_rank_head = send_rank_head_;
  record.routing.recv_src_meta = recv_src_meta_;
  PartMemory memory;
  if (source_block_ != nullptr) {
    memory = PartMemory::of(context.memory, std::move(source_block_));
  } else {
    memory = PartMemory::of_bytes(source_storage_);
    record.held.tensors.push_back(std::move(source_storage_.tensor));
  }
  const auto add = [&](std::string_view name, uintptr_t address, const TensorSpec& spec) {
    record.parts.push_back({name, {}, address, spec, memory});
  };
  add("send_nvl_head", send_rank_head_,
      TensorSpec::of(kInt32, {num_forward_rows_, context.group.ranks_per_node}));
  add("recv_src_idx", output_.src_idx, TensorSpec::of(kInt32, {num_rows()}));
  add("recv_src_meta", recv_src_meta_, TensorSpec::of(kUint8, {num_rows(), 8}));
}

TierRows::TierRows(const GroupShape& group, const OutputForm& form, int64_t num_rows,
                   int64_t num_forward_rows)
    : form_(form),
      output_{.num_rows = num_rows},
      num_forward_rows_(num_forward_rows),
      num_head_bytes_(align_block(static_cast<size_t>(num_forward_rows) *
                                  static_cast<size_t>(group.ranks_per_node) * sizeof(int32_t))) {}

// Of the block [ send_rank_head | recv_src_idx | recv_src_meta ].
size_t TierRows::num_source_bytes() const {
  return num_head_bytes_ + TierSourceLayout::make(num_rows()).num_bytes;
}

void TierRows::lay_out_sources(uintptr_t base) {
  send_rank_head_ = base;
  output_.src_idx = base + num_head_bytes_;
  if (source_block_ != nullptr) output_.src_offset = source_block_->offset + num_head_bytes_;
  recv_src_meta_ = output_.src_idx + TierSourceLayout::make(num_rows()).src_meta;
}

}  // namespace deep_comm
