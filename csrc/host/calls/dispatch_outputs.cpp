#include "host/calls/dispatch_outputs.hpp"

#include <utility>

namespace deep_comm {

namespace {

TensorSpec rows_of(const PayloadForm& form, int64_t num_rows) {
  return TensorSpec::of(form.type, {num_rows, form.hidden});
}
TensorSpec scales_of(const PayloadForm& form, int64_t num_rows) {
  return TensorSpec::of(form.scale_type, {num_rows, form.num_scales});
}
// A number of each selection.
TensorSpec selections_of(const OutputForm& form, ElementType type, int64_t num_rows) {
  return form.is_expanded ? TensorSpec::of(type, {num_rows})
                          : TensorSpec::of(type, {num_rows, form.num_topk});
}

}  // namespace

void DispatchOutputs::lie_in(std::shared_ptr<Block> taken, const Memory& memory,
                             const OutputForm& form) {
  block = std::move(taken);
  output_offset = block->offset;
  const uintptr_t begin = memory.heap_base() + output_offset;
  const OutputLayout layout = form.layout(num_rows);
  x = begin + layout.x;
  if (form.payload.has_scales()) scales = begin + layout.scales;
  if (form.num_topk > 0) topk_idx = begin + layout.topk_idx;
  if (form.has_weights) topk_weights = begin + layout.topk_weights;
}

std::optional<Reservation> Reservation::take(Memory& memory, const OutputForm& form,
                                             int64_t num_rows, size_t routing_bytes,
                                             const CallOrder& order) {
  Reservation taken;
  taken.routing_bytes_ = routing_bytes;
  taken.num_rows_ = num_rows;
  // Only kernels use what the handle keeps, until somebody asks for its tensors.
  taken.sources_ = memory.take(routing_bytes + form.source_bytes(num_rows), order, true);
  if (taken.sources_ == nullptr) return std::nullopt;
  taken.output_ = memory.take(form.layout(num_rows).num_bytes, order, false);
  if (taken.output_ == nullptr) return std::nullopt;
  memory.poison(taken.output_->offset, taken.output_->num_bytes, order);
  memory.poison(taken.sources_->offset, taken.sources_->num_bytes, order);
  return taken;
}

void Reservation::keep_routing() && {
  output_.reset();
  sources_->shrink(routing_bytes_);
}

void Reservation::shrink(const OutputForm& form, int64_t num_rows) {
  if (num_rows == num_rows_) return;
  num_rows_ = num_rows;
  output_->shrink(form.layout(num_rows).num_bytes);
  sources_->shrink(routing_bytes_ + form.source_bytes(num_rows));
}

DispatchOutputs Reservation::outputs(const Memory& memory, const OutputForm& form) const {
  DispatchOutputs out;
  out.num_rows = num_rows_;
  out.lie_in(output_, memory, form);
  out.src_offset = src_offset();
  out.src_idx = memory.heap_base() + src_offset();
  out.sources = PartMemory::of(memory, sources_);
  if (form.is_expanded) {
    out.recv_rows = out.src_idx + SourceLayout::make(num_rows_, form.num_topk).recv_rows;
    out.placed = out.sources;
  }
  return out;
}

DispatchOutputs allocate_outputs(Memory& memory, const OutputForm& form, int64_t num_rows,
                                 int64_t num_tokens, CallOrder& order) {
  DispatchOutputs out;
  out.num_rows = num_rows;
  const auto make = [&](const TensorSpec& spec, MadeTensor* made) {
    *made = memory.empty(spec, order);
    return memory.non_null(made->address);
  };
  out.x = make(rows_of(form.payload, num_rows), &out.made_x);
  if (form.payload.has_scales()) {
    out.scales = make(scales_of(form.payload, num_rows), &out.made_scales);
  }
  if (form.num_topk > 0) {
    out.topk_idx = make(selections_of(form, form.idx_type(), num_rows), &out.made_idx);
  }
  if (form.has_weights) {
    out.topk_weights = make(selections_of(form, kFloat32, num_rows), &out.made_weights);
  }
  if (form.makes_handle) {
    MadeTensor sources;
    out.src_idx = make(TensorSpec::of(kInt32, {num_tokens}), &sources);
    out.sources = PartMemory::of_words(sources);
  }
  if (form.is_expanded && form.makes_handle) {
    MadeTensor placed;
    out.recv_rows = make(TensorSpec::of(kInt32, {num_tokens * form.num_topk}), &placed);
    out.placed = PartMemory::of_words(placed);
  }
  return out;
}

DispatchOutputs outputs_anywhere(Memory& memory, const OutputForm& form, int64_t num_rows,
                                 int64_t num_tokens, CallOrder& order) {
  if (const auto reserved = Reservation::take(memory, form, num_rows, 0, order)) {
    return reserved->outputs(memory, form);
  }
  return allocate_outputs(memory, form, num_rows, num_tokens, order);
}

DispatchOutputs cached_outputs(Memory& memory, const PayloadForm& form, int64_t num_rows,
                               CallOrder& order) {
  const OutputForm rows{.payload = form, .makes_handle = false};
  const OutputLayout layout = rows.layout(num_rows);
  std::shared_ptr<Block> block = memory.take(layout.num_bytes, order, false);
  if (block == nullptr) return allocate_outputs(memory, rows, num_rows, 0, order);
  memory.poison(block->offset, block->num_bytes, order);
  DispatchOutputs out;
  out.num_rows = num_rows;
  out.lie_in(std::move(block), memory, rows);
  return out;
}

DispatchOutputs::Tensors DispatchOutputs::tensors(Memory& memory, const OutputForm& form,
                                                  bool defers_topk) && {
  const TensorSpec weights = selections_of(form, kFloat32, num_rows);
  Tensors made;
  if (block == nullptr) {
    made.x = std::move(made_x.tensor);
    made.scales = std::move(made_scales.tensor);
    if (defers_topk) {
      made.deferred_topk_weights = {{}, std::move(made_weights.tensor), topk_weights, weights, {}};
      return made;
    }
    made.topk_idx = std::move(made_idx.tensor);
    made.topk_weights = std::move(made_weights.tensor);
    return made;
  }
  const PartMemory part = PartMemory::of(memory, std::move(block));
  const auto over = [&](uintptr_t address, const TensorSpec& spec) {
    return memory.over(address - memory.heap_base(), spec, part.keeper);
  };
  made.x = over(x, rows_of(form.payload, num_rows));
  // Scales by column are made elsewhere.
  if (scales != 0) made.scales = over(scales, scales_of(form.payload, num_rows));
  if (defers_topk) {
    made.deferred_topk_weights = {{}, {}, topk_weights, weights, part};
    return made;
  }
  if (topk_idx != 0) made.topk_idx = over(topk_idx, selections_of(form, form.idx_type(), num_rows));
  if (topk_weights != 0) made.topk_weights = over(topk_weights, weights);
  return made;
}

}  // namespace deep_comm
