// A dispatch with new routing in two steps: launched, and received.
#pragma once

#include "bind/quick_calls.hpp"

namespace deep_comm::quick {

// Blocks of a dispatch with new routing: its outputs, and what its handle keeps.
struct NewBlocks {
  py::object outputs, handle;
  uint64_t offset, slab_offset, src_offset;
  OutputLayout layout;

  bool take(const Parts& parts, const NewDispatch& form, uint64_t slab_bytes, int64_t num_rows,
            const Order& order) {
    layout = layout_of(form, num_rows);
    if (!parts.take_block(layout.num_bytes, order, false, &outputs, &offset) ||
        !parts.take_block(slab_bytes + source_bytes(num_rows), order, true, &handle,
                          &slab_offset)) {
      return false;
    }
    src_offset = slab_offset + slab_bytes;
    return true;
  }

  // Fewer rows have come.
  void shrink(const NewDispatch& form, uint64_t slab_bytes, int64_t num_rows) {
    layout = layout_of(form, num_rows);
    outputs.cast<Block&>().shrink(layout.num_bytes);
    handle.cast<Block&>().shrink(slab_bytes + source_bytes(num_rows));
  }

  // Other blocks will hold the rows.
  void keep_slab(uint64_t slab_bytes) {
    outputs = py::none();
    handle.cast<Block&>().shrink(slab_bytes);
  }

 private:
  static uint64_t source_bytes(int64_t num_rows) {
    return sizeof(int32_t) * static_cast<uint64_t>(num_rows);
  }
  static OutputLayout layout_of(const NewDispatch& form, int64_t num_rows) {
    return OutputLayout::make(num_rows, form.rows.row_bytes(), form.rows.scale_row_bytes(),
                              static_cast<int>(form.num_topk), form.idx_bytes);
  }
};

// What the caller gives of the routing.
struct Routing {
  TensorView idx, weights, per_rank, per_expert, mask;
  bool has_weights, has_layout;
  int64_t num_experts = 0;

  bool read(const Parts& parts, PyObject* const* arguments, int64_t num_tokens) {
    constexpr DlDataType kDlBool = {6, 8, 1};
    const TorchTensors& torch = parts.torch;
    has_weights = arguments[2] != Py_None;
    has_layout = arguments[5] != Py_None;
    if (!torch.view(arguments[1], &idx) || !is_indices(idx) || idx.extent(0) != num_tokens ||
        (has_weights &&
         !torch.matrix(arguments[2], kDlFloat32, num_tokens, idx.extent(1), &weights))) {
      return false;
    }
    if (!has_layout) {
      return arguments[3] == Py_None && arguments[4] == Py_None &&
             as_number(arguments[6], &num_experts);
    }
    if (!torch.view(arguments[4], &per_expert) || per_expert.num_dims() != 1) return false;
    num_experts = per_expert.extent(0);
    int64_t named = num_experts;
    return torch.vector(arguments[3], kDlInt32, parts.num_ranks, &per_rank) &&
           torch.vector(arguments[4], kDlInt32, num_experts, &per_expert) &&
           torch.matrix(arguments[5], kDlBool, num_tokens, parts.num_ranks, &mask) &&
           (arguments[6] == Py_None || as_number(arguments[6], &named)) && named == num_experts;
  }

  void keep(const Parts& parts, PyObject* const* arguments, const Order& order) const {
    parts.keep(arguments[1], idx, order);
    if (has_weights) parts.keep(arguments[2], weights, order);
    if (!has_layout) return;
    parts.keep(arguments[3], per_rank, order);
    parts.keep(arguments[4], per_expert, order);
    parts.keep(arguments[5], mask, order);
  }
};

// Rows of a dispatch with new routing, which has been launched.
struct NewRows {
  Shared calls;
  std::shared_ptr<const NewDispatch> form;
  NewBlocks blocks;
  uint64_t slab_bytes;
  int64_t num_rows;  // that there is room for
  bool is_bounded, has_weights;
};

// () -> (rows, recv_topk_idx, recv_topk_weights, counts), once. Without a bound of rows this waits
// for the counts: a tuple, see Engine.counts_waiter; None if a kernel failed. Then, and where the
// rows have not moved because some rank had no room for its own, there are no rows.
inline py::object receive_new(NewRows& self, PyObject* const* /*none*/) {
  const Parts& parts = self.calls->parts;
  const NewDispatch& form = *self.form;
  NewBlocks blocks = std::move(self.blocks);
  py::object counts = py::none();
  int64_t num_rows = self.num_rows;
  if (!self.is_bounded) {
    counts = parts.wait_counts({});
    if (counts.is_none() || PyTuple_GET_ITEM(counts.ptr(), 2) != Py_True) {
      blocks.keep_slab(self.slab_bytes);
      return py::make_tuple(py::none(), py::none(), py::none(), std::move(counts));
    }
    num_rows = PyLong_AsLongLong(PyTuple_GET_ITEM(counts.ptr(), 0));
    if (num_rows < self.num_rows) blocks.shrink(form, self.slab_bytes, num_rows);
  }
  const OutputLayout& layout = blocks.layout;
  const auto matrix = [&](size_t part, DlDataType dtype) {
    return parts.matrix(blocks.offset + part, num_rows, form.num_topk, dtype, blocks.outputs);
  };
  py::object rows = received(parts, form.rows, layout, num_rows, blocks.offset, blocks.outputs);
  py::object recv_idx = matrix(layout.topk_idx, form.idx_bytes == 8 ? kDlInt64 : kDlInt32);
  py::object recv_weights = py::none();
  if (self.has_weights) recv_weights = matrix(layout.topk_weights, kDlFloat32);
  return py::make_tuple(std::move(rows), std::move(recv_idx), std::move(recv_weights),
                        std::move(counts));
}

// (x or (x, scales), topk_idx, topk_weights, num_tokens_per_rank, num_tokens_per_expert,
//  is_token_in_rank, num_experts, num_worst_tokens, expert_alignment, zero_tail, config, default,
//  asynchronous)
//   -> (SlabLayout, its address, its block, routing, stream, num_topk, what receives: receive_new),
//   or None. What the caller makes of it before it receives costs nothing: the kernels are on their
//   way.
inline py::object quick_new_dispatch(const Shared& calls, PyObject* const* arguments) {
  const Parts& parts = calls->parts;
  Payload payload;
  Routing routing;
  int64_t num_rows, alignment;
  const bool zero_tail = arguments[9] == Py_True;
  if (!payload.read(parts.torch, arguments[0]) ||
      !routing.read(parts, arguments, payload.num_tokens()) ||
      !as_number(arguments[7], &num_rows) || num_rows > INT32_MAX ||
      !as_number(arguments[8], &alignment) || (!zero_tail && arguments[9] != Py_False) ||
      !is_asynchronous(arguments[12])) {
    return py::none();
  }
  const TensorView& idx = routing.idx;
  const auto form = calls->new_dispatches.find([&](const NewDispatch& known) {
    return known.num_topk == idx.extent(1) && known.idx_bytes == idx.element_bytes() &&
           known.num_experts == routing.num_experts && known.alignment == alignment &&
           known.has_layout == routing.has_layout && payload.is(known.rows) &&
           known.named.is(arguments[10], arguments[11]);
  });
  Order order;
  if (form == nullptr || !parts.begin(arguments[12], &order)) return py::none();
  const SlabParts parts_of_slab = form->slab(payload.num_tokens());
  const uint64_t slab_bytes = parts_of_slab.num_bytes;
  const bool is_bounded = num_rows > 0;
  NewBlocks blocks;
  if (is_bounded) {
    if (!blocks.take(parts, *form, slab_bytes, num_rows, order)) return py::none();
  } else {
    const py::object likely = parts.likely_rows({static_cast<uint64_t>(payload.num_tokens())});
    for (const py::handle rows : likely) {
      num_rows = rows.cast<int64_t>();
      if (blocks.take(parts, *form, slab_bytes, num_rows, order)) break;
      num_rows = 0;
    }
    if (num_rows == 0) return py::none();
  }
  const uint64_t slab = parts.heap_base + blocks.slab_offset;
  const uint64_t begin = parts.heap_base + blocks.offset;
  const uint64_t token_mask =
      routing.has_layout ? parts.given(routing.mask.address()) : slab + parts_of_slab.mask;
  const uint64_t choices = parts.given(idx.address());
  const uint64_t num_tokens = static_cast<uint64_t>(payload.num_tokens());
  const uint64_t channel_prefix = slab + parts_of_slab.channel_prefix;
  const uint64_t send_head = slab + parts_of_slab.send_head;
  form->notify(
      {routing.has_layout ? 0 : choices, routing.has_layout ? routing.per_rank.address() : 0,
       routing.has_layout ? routing.per_expert.address() : 0, token_mask, num_tokens, blocks.offset,
       blocks.src_offset, static_cast<uint64_t>(num_rows), is_bounded ? uint64_t{0} : uint64_t{1},
       slab, channel_prefix, send_head, slab + parts_of_slab.per_expert,
       slab + parts_of_slab.recv_counts, 0, 0, 0, 0, order.stream});
  constexpr uint64_t kFillTail = 1, kZeroTail = 2, kFollowsNotify = 4, kIsSpeculative = 8;
  const uint64_t tail = kFillTail | (zero_tail ? kZeroTail : 0);
  const Sources sources(parts, payload);
  form->launch({static_cast<uint64_t>(routing.num_experts),
                token_mask,
                send_head,
                slab,
                channel_prefix,
                parts.given(payload.x.address()),
                num_tokens,
                sources.x_scales,
                sources.token_stride,
                sources.column_stride,
                choices,
                routing.has_weights ? parts.given(routing.weights.address()) : 0,
                begin + blocks.layout.x,
                payload.has_scales ? begin + blocks.layout.scales : 0,
                begin + blocks.layout.topk_idx,
                routing.has_weights ? begin + blocks.layout.topk_weights : 0,
                parts.heap_base + blocks.src_offset,
                slab + parts_of_slab.recv_channel_prefix,
                static_cast<uint64_t>(num_rows),
                blocks.offset,
                blocks.src_offset,
                kFollowsNotify | (is_bounded ? tail : kIsSpeculative),
                0,
                0,
                0,
                0,
                0,
                order.stream});
  parts.end(order);
  keep(parts, arguments[0], payload, order);
  routing.keep(parts, arguments, order);
  return py::make_tuple(
      parts_of_slab.layout, slab, blocks.handle,
      py::make_tuple(routing.num_experts, token_mask, send_head, slab, channel_prefix),
      parts.home_of(order), form->num_topk,
      object_function<0, &receive_new>(
          "receive",
          NewRows{calls, form, blocks, slab_bytes, num_rows, is_bounded, routing.has_weights},
          py::none()));
}

}  // namespace deep_comm::quick
