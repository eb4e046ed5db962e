#include "host/calls/internode_rows.hpp"

#include "device/layout/tier_output.cuh"

namespace deep_comm {

void poison_block(CallContext& context, const Block& block, const CallOrder& order) {
  if (order.is_captured() || context.rail_reads.overlaps(block)) return;
  context.memory.poison(block.offset, block.num_bytes, order);
}

std::optional<TierRows> TierRows::in_region(CallContext& context, const TierRowForm& form,
                                            int64_t num_rows, int64_t num_forward_rows,
                                            const CallOrder& order) {
  if (!context.has_region()) return std::nullopt;
  Memory& memory = context.memory;
  TierRows rows(context.group, form, num_rows, num_forward_rows);
  if (form.makes_handle) {
    // First: it is small, lives longer, and must not part the region.
    rows.source_block_ = memory.take(rows.num_source_bytes(), order, true);
    if (rows.source_block_ == nullptr) return std::nullopt;
  }
  rows.block_ = memory.take(rows.layout().num_bytes, order, form.is_scratch);
  if (rows.block_ == nullptr) return std::nullopt;
  for (const Block* block : {rows.source_block_.get(), rows.block_.get()}) {
    if (block != nullptr) poison_block(context, *block, order);
  }
  rows.lay_out_rows(memory.heap_base() + rows.block_->offset);
  if (form.makes_handle) {
    rows.lay_out_sources(memory.heap_base() + rows.source_block_->offset);
  }
  return rows;
}

TierRows TierRows::allocate(CallContext& context, const TierRowForm& form, int64_t num_rows,
                            int64_t num_forward_rows, CallOrder& order) {
  std::optional<TierRows> rows = in_region(context, form, num_rows, num_forward_rows, order);
  if (rows) return *std::move(rows);
  TierRows made(context.group, form, num_rows, num_forward_rows);
  made.make_rows(context, order);
  if (form.makes_handle) {
    made.source_storage_ = context.memory.empty(
        TensorSpec::of(kUint8, {static_cast<int64_t>(made.num_source_bytes())}), order);
    made.lay_out_sources(context.memory.non_null(made.source_storage_.address));
  }
  return made;
}

void TierRows::shrink(const CallContext& context, int64_t num_rows, int64_t num_forward_rows) {
  num_rows_ = num_rows;
  num_forward_rows_ = num_forward_rows;
  block_->shrink(layout().num_bytes);
  source_block_->shrink(num_source_bytes());
  lay_out_rows(context.memory.heap_base() + block_->offset);
  lay_out_sources(context.memory.heap_base() + source_block_->offset);
}

uint32_t TierRows::output_line() const {
  return block_ == nullptr ? 0 : static_cast<uint32_t>(block_->offset / kLineBytes);
}

uint32_t TierRows::src_line(const CallContext& context) const {
  if (source_block_ == nullptr) return 0;
  return static_cast<uint32_t>((recv_src_idx_ - context.memory.heap_base()) / kLineBytes);
}

Object TierRows::take_x(CallContext& context) {
  return tensor(context, x_, form_.payload.type, form_.payload.hidden);
}

Object TierRows::take_scales(CallContext& context) {
  return tensor(context, scales_, form_.payload.scale_type, form_.payload.num_scales);
}

Object TierRows::take_topk_idx(CallContext& context) {
  return tensor(context, topk_idx_, form_.topk_idx_type(), form_.num_topk);
}

Object TierRows::take_topk_weights(CallContext& context) {
  return tensor(context, topk_weights_, kFloat32, form_.num_topk);
}

void TierRows::give_sources(CallContext& context, DispatchRecord& record) {
  record.num_recv_rows = num_rows_;
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
  add("recv_src_idx", recv_src_idx_, TensorSpec::of(kInt32, {num_rows_}));
  add("recv_src_meta", recv_src_meta_, TensorSpec::of(kUint8, {num_rows_, 8}));
}

TierRows::TierRows(const GroupShape& group, const TierRowForm& form, int64_t num_rows,
                   int64_t num_forward_rows)
    : form_(form),
      num_rows_(num_rows),
      num_forward_rows_(num_forward_rows),
      num_head_bytes_(align_block(static_cast<size_t>(num_forward_rows) *
                                  static_cast<size_t>(group.ranks_per_node) * sizeof(int32_t))) {}

OutputLayout TierRows::layout() const {
  return OutputLayout::make(num_rows_, form_.payload.row_bytes(), form_.payload.scale_row_bytes(),
                            form_.num_topk, form_.topk_idx_bytes);
}

// Of the block [ send_rank_head | recv_src_idx | recv_src_meta ].
size_t TierRows::num_source_bytes() const {
  return num_head_bytes_ + TierSourceLayout::make(num_rows_).num_bytes;
}

void TierRows::make_rows(CallContext& context, CallOrder& order) {
  const auto make = [&](MadeTensor& part, ElementType type, int64_t num_columns) {
    part = context.memory.empty(TensorSpec::of(type, {num_rows_, num_columns}), order);
    part.address = context.memory.non_null(part.address);
  };
  const PayloadForm& payload = form_.payload;
  make(x_, payload.type, payload.hidden);
  if (payload.has_scales()) make(scales_, payload.scale_type, payload.num_scales);
  if (form_.num_topk > 0) make(topk_idx_, form_.topk_idx_type(), form_.num_topk);
  if (form_.has_weights) make(topk_weights_, kFloat32, form_.num_topk);
}

void TierRows::lay_out_rows(uintptr_t base) {
  const OutputLayout parts = layout();
  x_.address = base + parts.x;
  if (form_.payload.has_scales()) scales_.address = base + parts.scales;
  if (form_.num_topk > 0) topk_idx_.address = base + parts.topk_idx;
  if (form_.has_weights) topk_weights_.address = base + parts.topk_weights;
}

void TierRows::lay_out_sources(uintptr_t base) {
  send_rank_head_ = base;
  recv_src_idx_ = base + num_head_bytes_;
  recv_src_meta_ = recv_src_idx_ + TierSourceLayout::make(num_rows_).src_meta;
}

Object TierRows::tensor(CallContext& context, MadeTensor& part, ElementType type,
                        int64_t num_columns) {
  if (part.address == 0) return {};
  if (block_ == nullptr) return std::move(part.tensor);
  if (keeper_ == nullptr) keeper_ = context.memory.keep(block_);
  return context.memory.over(part.address - context.memory.heap_base(),
                             TensorSpec::of(type, {num_rows_, num_columns}), keeper_);
}

}  // namespace deep_comm
