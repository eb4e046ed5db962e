// Memory for what a dispatch inside a node receives: blocks of the receive region while there is room,
// where peers write rows in place; else tensors of the framework's, which rows reach through rings.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "device/layout/output.cuh"
#include "host/calls/call_context.hpp"
#include "host/calls/payload_form.hpp"

namespace deep_comm {

// What outputs hold beside their rows' number.
struct OutputForm {
  PayloadForm payload;
  int num_topk = 0;  // of a received token; 0: no indices come
  int topk_idx_bytes = 0;
  bool has_weights = false;
  bool is_expanded = false;  // a row is of one selection
  bool makes_handle = true;  // there are source tokens

  ElementType idx_type() const { return topk_idx_bytes == 8 ? kInt64 : kInt32; }
  OutputLayout layout(int64_t num_rows) const {
    return OutputLayout::make(num_rows, payload.row_bytes(), payload.scale_row_bytes(),
                              is_expanded && num_topk > 0 ? 1 : num_topk, topk_idx_bytes);
  }
  // Of the handle's block: source tokens, and with expanded outputs the rows of each.
  size_t source_bytes(int64_t num_rows) const {
    if (!makes_handle) return 0;
    return is_expanded ? SourceLayout::make(num_rows, num_topk).num_bytes
                       : sizeof(int32_t) * static_cast<size_t>(num_rows);
  }
};

// Where a dispatch writes: addresses for the engine, 0 for what is not there, and who keeps them.
struct DispatchOutputs {
  int64_t num_rows = 0;
  size_t output_offset = 0, src_offset = 0;  // in the heap; 0: not in the receive region
  uintptr_t x = 0, scales = 0, topk_idx = 0, topk_weights = 0;
  uintptr_t src_idx = 0;
  uintptr_t recv_rows = 0;  // of expanded outputs
  std::shared_ptr<Block> block;
  MadeTensor made_x, made_scales, made_idx, made_weights;  // without a block
  PartMemory sources, placed;                              // of src_idx, of recv_rows

  // As many rows as num_rows, in the region.
  void lie_in(std::shared_ptr<Block> block, const Memory& memory, const OutputForm& form);

  // The caller's tensors.
  struct Tensors {
    Object x, scales, topk_idx, topk_weights;
    RecordPart deferred_topk_weights;  // instead of the last two
  };
  Tensors tensors(Memory& memory, const OutputForm& form, bool defers_topk) &&;
};

// Their addresses in the arguments of either tier's dispatch kernel.
template <class Args>
void set_outputs(const DispatchOutputs& out, Args* args) {
  args->recv_x = pointer_of<uint8_t>(out.x);
  args->recv_x_scales = pointer_of<uint8_t>(out.scales);
  args->recv_topk_idx = pointer_of<void>(out.topk_idx);
  args->recv_topk_weights = pointer_of<float>(out.topk_weights);
  args->recv_src_idx = pointer_of<int32_t>(out.src_idx);
  args->num_recv_rows = static_cast<int>(out.num_rows);
}

// Blocks for the outputs of a dispatch, of as many rows as there is room for.
class Reservation {
 public:
  // Filled if the Buffer poisons. Empty: the region has no room. routing_bytes: of a routing block in
  // front of the source tokens.
  static std::optional<Reservation> take(Memory& memory, const OutputForm& form, int64_t num_rows,
                                         size_t routing_bytes, const CallOrder& order);

  int64_t num_rows() const { return num_rows_; }
  size_t output_offset() const { return output_->offset; }
  size_t src_offset() const { return sources_->offset + routing_bytes_; }
  const std::shared_ptr<Block>& handle_block() const { return sources_; }
  // Keeps the routing block alone.
  void keep_routing() &&;
  // Of so many rows, at most num_rows(): gives back the rest.
  void shrink(const OutputForm& form, int64_t num_rows);
  DispatchOutputs outputs(const Memory& memory, const OutputForm& form) const;

 private:
  Reservation() = default;

  std::shared_ptr<Block> output_;
  // What the handle keeps, without the payload: the routing block, then the source tokens.
  std::shared_ptr<Block> sources_;
  size_t routing_bytes_ = 0;
  int64_t num_rows_ = 0;
};

// Of the framework's memory. num_tokens: received, at most; with expanded outputs there are more rows.
DispatchOutputs allocate_outputs(Memory& memory, const OutputForm& form, int64_t num_rows,
                                 int64_t num_tokens, CallOrder& order);

// In the region, if that has room, or else of the framework's memory.
DispatchOutputs outputs_anywhere(Memory& memory, const OutputForm& form, int64_t num_rows,
                                 int64_t num_tokens, CallOrder& order);

// Of a dispatch that repeats a handle's routing: rows and scales alone.
DispatchOutputs cached_outputs(Memory& memory, const PayloadForm& form, int64_t num_rows,
                               CallOrder& order);

}  // namespace deep_comm
