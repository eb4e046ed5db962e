// A dispatch with new routing between nodes in two steps: launched, and received.
#pragma once

#include "bind/quick_new_call.hpp"
#include "device/layout/tier_output.cuh"

namespace deep_comm::quick {

// Blocks of a dispatch with new routing between nodes: its outputs, and what its handle keeps: slab
// | send_nvl_head [F, M] | recv_src_idx, recv_src_meta.
struct TierBlocks {
  py::object outputs, handle;
  uint64_t offset, slab_offset, head_offset, src_offset;
  OutputLayout layout;

  bool take(const Parts& parts, const NewForm& form, uint64_t slab_bytes, int64_t num_rows,
            int64_t num_forward_rows, const Order& order) {
    layout = layout_of(form, num_rows);
    const auto head_bytes =
        align_block(static_cast<size_t>(num_forward_rows) *
                    static_cast<size_t>(parts.ranks_per_node) * sizeof(int32_t));
    outputs = handle = py::none();  // of an attempt that found no room for both
    // The handle's first: it is small, lives longer, and must not part the region.
    before_sources_ = slab_bytes + head_bytes;
    if (!parts.take_block(before_sources_ + source_bytes(num_rows), order, true, &handle,
                          &slab_offset) ||
        !parts.take_block(layout.num_bytes, order, false, &outputs, &offset)) {
      return false;
    }
    head_offset = slab_offset + slab_bytes;
    src_offset = slab_offset + before_sources_;
    return true;
  }

  // Fewer rows have come.
  void shrink(const NewForm& form, int64_t num_rows) {
    layout = layout_of(form, num_rows);
    outputs.cast<Block&>().shrink(layout.num_bytes);
    handle.cast<Block&>().shrink(before_sources_ + source_bytes(num_rows));
  }

  // Other blocks will hold the rows.
  void keep_slab(uint64_t slab_bytes) {
    outputs = py::none();
    handle.cast<Block&>().shrink(slab_bytes);
  }

 private:
  uint64_t before_sources_ = 0;

  static uint64_t source_bytes(int64_t num_rows) {
    return TierSourceLayout::make(num_rows).num_bytes;
  }
  static OutputLayout layout_of(const NewForm& form, int64_t num_rows) {
    return OutputLayout::make(num_rows, form.rows.row_bytes(), form.rows.scale_row_bytes(),
                              static_cast<int>(form.num_topk), form.idx_bytes);
  }
};

// Rows of a dispatch with new routing between nodes, which has been launched.
struct NewTierRows {
  Shared calls;
  std::shared_ptr<const NewTierDispatch> form;
  TierBlocks blocks;
  uint64_t slab_bytes;
  int64_t num_rows;  // that there is room for
  bool is_bounded, has_weights;
};

// () -> (rows, recv_topk_idx, recv_topk_weights, counts), once. Without a bound of rows this waits
// for the counts: a tuple, see Engine.tier_counts_waiter; None if a kernel failed. Then, and where
// the rows have not moved because some rank had no room, there are no rows.
inline py::object receive_new_tiers(NewTierRows& self, PyObject* const* /*none*/) {
  const Parts& parts = self.calls->parts;
  const NewTierDispatch& form = *self.form;
  TierBlocks& blocks = self.blocks;
  py::object counts = py::none();
  if (!self.is_bounded) {
    counts = parts.wait_tier_counts({1});
    if (counts.is_none() || PyTuple_GET_ITEM(counts.ptr(), 2) != Py_True) {
      blocks.keep_slab(self.slab_bytes);
      return py::make_tuple(py::none(), py::none(), py::none(), std::move(counts));
    }
    const int64_t num_rows = PyLong_AsLongLong(PyTuple_GET_ITEM(counts.ptr(), 0));
    if (num_rows < self.num_rows) blocks.shrink(form, num_rows);
    self.num_rows = num_rows;
  }
  const OutputLayout& layout = blocks.layout;
  const auto output = [&](size_t part, DlDataType dtype) {
    return parts.matrix(blocks.offset + part, self.num_rows, form.num_topk, dtype, blocks.outputs);
  };
  py::object rows =
      received(parts, form.rows, layout, self.num_rows, blocks.offset, blocks.outputs);
  py::object recv_idx = output(layout.topk_idx, form.idx_bytes == 8 ? kDlInt64 : kDlInt32);
  py::object recv_weights = py::none();
  if (self.has_weights) recv_weights = output(layout.topk_weights, kDlFloat32);
  blocks.outputs = blocks.handle = py::none();  // theirs who have the tensors and the handle
  return py::make_tuple(std::move(rows), std::move(recv_idx), std::move(recv_weights),
                        std::move(counts));
}

// The arguments of NewCall, num_tokens_per_rdma_rank
//   -> (TierSlabLayout, its address, its block, KnownTierHandle.routing, addresses of send_nvl_head
//   and of recv_src_idx, rows that there is room for: received, forwarded; stream, num_topk, what
//   receives: receive_new_tiers), or None. What the caller makes of it before it receives costs
//   nothing: the kernels are on their way.
inline py::object quick_new_tier_dispatch(const Shared& calls, PyObject* const* arguments) {
  const Parts& parts = calls->parts;
  NewCall call;
  TensorView per_node;
  const int64_t num_nodes = parts.num_ranks / parts.ranks_per_node;
  if (!call.read(parts, arguments) ||
      (arguments[16] != Py_None &&
       !parts.torch.vector(arguments[16], kDlInt32, num_nodes, &per_node))) {
    return py::none();
  }
  const Payload& payload = call.payload;
  const Routing& routing = call.routing;
  const auto form = call.find(calls->new_tier_dispatches);
  Order order;
  if (form == nullptr || !parts.begin(arguments[12], &order)) return py::none();
  const auto num_tokens = static_cast<uint64_t>(payload.num_tokens());
  const TierSlabParts at = form->slabs.of(payload.num_tokens());
  const bool is_bounded = call.num_rows > 0;
  const int64_t num_forward =
      std::max(call.num_rows, parts.likely_forwarded({num_tokens}).cast<int64_t>());
  TierBlocks blocks;
  int64_t num_rows = 0;
  const auto likely = [&] { return parts.likely_rows({num_tokens}); };
  const bool has_room = call.reserve(likely, [&](int64_t rows) {
    num_rows = rows;
    return blocks.take(parts, *form, at.num_bytes, rows, num_forward, order);
  });
  if (!has_room) return py::none();
  const uint64_t slab = parts.heap_base + blocks.slab_offset;
  const uint64_t begin = parts.heap_base + blocks.offset;
  const uint64_t rank_head = parts.heap_base + blocks.head_offset;
  const uint64_t sources = parts.heap_base + blocks.src_offset;
  const uint64_t choices = parts.given(routing.idx.address());
  uint64_t mask = slab + at.mask, per_expert = slab + at.counts_per_expert;
  if (routing.has_layout) {
    mask = parts.given(routing.mask.address());
    per_expert = routing.per_expert.address();
  } else {
    parts.count_layout({choices, static_cast<uint64_t>(form->idx_bytes), num_tokens,
                        static_cast<uint64_t>(form->num_topk),
                        static_cast<uint64_t>(form->num_experts),
                        static_cast<uint64_t>(parts.num_ranks), slab + at.counts_per_rank,
                        slab + at.counts_per_node, per_expert, mask, order.stream});
  }
  form->notify({per_expert, mask, num_tokens, slab, slab + at.rank_prefix, slab + at.send_node_head,
                slab + at.send_places, slab + at.recv_node_prefix, slab + at.recv_node_sum,
                slab + at.recv_rank_start, slab + at.recv_rank_sum, slab + at.combine_start,
                slab + at.forward_places, slab + at.per_expert, slab + at.per_rank,
                routing.has_weights ? uint64_t{1} : uint64_t{0}, order.stream});
  constexpr uint64_t kFillTail = 1, kZeroTail = 2, kIsEarly = 4;
  const Sources given(parts, payload, form->rows, order);
  const std::array<uint64_t, 9> way = {static_cast<uint64_t>(form->num_experts),
                                       mask,
                                       slab + at.send_node_head,
                                       slab + at.recv_node_prefix,
                                       slab + at.recv_node_sum,
                                       slab + at.recv_rank_start,
                                       slab + at.recv_rank_sum,
                                       slab,
                                       slab + at.send_places};
  const OutputLayout& layout = blocks.layout;
  form->launch({way[0],
                way[1],
                way[2],
                way[3],
                way[4],
                way[5],
                way[6],
                way[7],
                way[8],
                given.x,
                num_tokens,
                given.x_scales,
                given.token_stride,
                given.column_stride,
                choices,
                routing.has_weights ? parts.given(routing.weights.address()) : 0,
                begin + layout.x,
                payload.has_scales ? begin + layout.scales : 0,
                begin + layout.topk_idx,
                routing.has_weights ? begin + layout.topk_weights : 0,
                static_cast<uint64_t>(num_rows),
                static_cast<uint64_t>(num_forward),
                blocks.offset,
                sources,
                sources + TierSourceLayout::make(num_rows).src_meta,
                rank_head,
                blocks.src_offset,
                slab + at.combine_start,
                slab + at.forward_places,
                is_bounded ? kFillTail | (call.zero_tail ? kZeroTail : 0) : kIsEarly,
                0,
                order.stream});
  parts.end(order);
  call.keep(parts, order);
  const py::object handle_block = blocks.handle;
  py::tuple way_of_handle(way.size());
  for (size_t part = 0; part < way.size(); ++part) way_of_handle[part] = way[part];
  return py::make_tuple(
      at.layout, slab, handle_block, way_of_handle, rank_head, sources, num_rows, num_forward,
      parts.home_of(order), form->num_topk,
      object_function<0, &receive_new_tiers>("receive",
                                             NewTierRows{.calls = calls,
                                                         .form = form,
                                                         .blocks = std::move(blocks),
                                                         .slab_bytes = at.num_bytes,
                                                         .num_rows = num_rows,
                                                         .is_bounded = is_bounded,
                                                         .has_weights = routing.has_weights},
                                             py::none()));
}

}  // namespace deep_comm::quick
