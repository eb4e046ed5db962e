// A dispatch with new routing in two steps: launched, and received.
#pragma once

#include <optional>

#include "bind/quick_new_call.hpp"
#include "host/numbering_layout.hpp"

namespace deep_comm::quick {

inline SourceLayout source_layout_of(const NewDispatch& form, int64_t num_rows) {
  return SourceLayout::make(num_rows, static_cast<int>(form.num_topk));
}

// Blocks of a dispatch with new routing: its outputs, and what its handle keeps.
struct NewBlocks {
  py::object outputs, handle;
  uint64_t offset, slab_offset, src_offset;
  OutputLayout layout;

  bool take(const Parts& parts, const NewDispatch& form, uint64_t slab_bytes, int64_t num_rows,
            const Order& order) {
    layout = layout_of(form, num_rows);
    outputs = handle = py::none();  // of an attempt that found no room for both
    if (!parts.take_block(layout.num_bytes, order, false, &outputs, &offset) ||
        !parts.take_block(slab_bytes + source_bytes(form, num_rows), order, true, &handle,
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
    handle.cast<Block&>().shrink(slab_bytes + source_bytes(form, num_rows));
  }

  // Other blocks will hold the rows.
  void keep_slab(uint64_t slab_bytes) {
    outputs = py::none();
    handle.cast<Block&>().shrink(slab_bytes);
  }

 private:
  static uint64_t source_bytes(const NewDispatch& form, int64_t num_rows) {
    if (form.is_expanded) return source_layout_of(form, num_rows).num_bytes;
    return sizeof(int32_t) * static_cast<uint64_t>(num_rows);
  }
  // A row of an expanded output is of one selection.
  static OutputLayout layout_of(const NewDispatch& form, int64_t num_rows) {
    return OutputLayout::make(num_rows, form.rows.row_bytes(), form.rows.scale_row_bytes(),
                              form.is_expanded ? 1 : static_cast<int>(form.num_topk),
                              form.idx_bytes);
  }
};

// Where the rows of an expanded dispatch belong; nothing of one without `expand`.
struct Numbering {
  py::object storage;  // int32, laid out as NumberingLayout says
  py::object expert_offsets, expert_counts;
  uint64_t base = 0;
  NumberingLayout layout{};

  uint64_t at(size_t part) const { return base + part; }

  void make(const Parts& parts, const NewDispatch& form, int64_t num_tokens, const Order& order) {
    const int64_t num_local = form.num_local_experts;
    layout = NumberingLayout::make(parts.num_ranks, form.num_experts, num_local, num_tokens,
                                   form.num_topk);
    TensorBlock<3> block(parts.int32);
    const auto words = [](size_t bytes) { return static_cast<int64_t>(bytes / sizeof(int32_t)); };
    const auto vector = [&](int64_t size) { return TensorForm::vector(size, parts.int32); };
    block.put(0, vector(words(layout.num_bytes)), sizeof(int32_t));
    block.put_part(1, 0, vector(num_local + 1), words(layout.expert_offsets));
    block.put_part(2, 0, vector(num_local), words(layout.expert_counts));
    auto [tensors, addresses] = parts.pieces(block, order);
    storage = std::move(tensors[0]);
    expert_offsets = std::move(tensors[1]);
    expert_counts = std::move(tensors[2]);
    base = addresses[0];
  }

  // What Python makes the handle's Expansion of.
  py::object told() const {
    if (!storage) return py::none();
    return py::make_tuple(storage, expert_offsets, expert_counts);
  }
};

// Rows of a dispatch with new routing, which has been launched, and its handle.
struct NewRows {
  Shared calls;
  std::shared_ptr<const NewDispatch> form;
  NewBlocks blocks;
  Numbering numbering;
  Order order;
  uint64_t slab_bytes;
  int64_t num_rows;  // that there is room for
  bool is_bounded, has_weights, has_scales, has_layout, zero_padding;
  SlabParts slab_parts;
  uint64_t num_experts, token_mask;
  int64_t num_tokens;  // of this rank

  const Parts& parts() const { return calls->parts; }
  uint64_t recv_rows() const {
    return parts().heap_base + blocks.src_offset + source_layout_of(*form, num_rows).recv_rows;
  }

  uint64_t slab() const { return parts().heap_base + blocks.slab_offset; }
  uint64_t slab_at(uint64_t part) const { return slab() + part; }

  // The other rows of each token, behind the dispatch.
  void expand_all(int64_t num_recv_tokens) const {
    const uint64_t begin = parts().heap_base + blocks.offset;
    expand(parts(),
           {.rank_prefix = slab(),
            .expansion = {.send_row = 0,
                          .num_expanded = 0,
                          .recv_rows = recv_rows(),
                          .expert_offsets = numbering.at(numbering.layout.expert_offsets),
                          .expert_counts = numbering.at(numbering.layout.expert_counts),
                          .num_topk = form->num_topk,
                          .num_local_experts = form->num_local_experts,
                          .num_tokens_limit = num_recv_tokens},
            .num_rows = num_rows,
            .num_blocks = form->num_local_blocks,
            .zero_padding = zero_padding,
            .x = begin + blocks.layout.x,
            .scales = has_scales ? begin + blocks.layout.scales : 0,
            .expert_idx = begin + blocks.layout.topk_idx,
            .expert_idx_bytes = static_cast<uint64_t>(form->idx_bytes),
            .weights = has_weights ? begin + blocks.layout.topk_weights : 0,
            .fill_src_idx = is_bounded ? parts().heap_base + blocks.src_offset : 0,
            .fill_rows = is_bounded ? recv_rows() : 0},
           form->rows, order);
  }

  // Without a bound of rows: waits for the counts, a tuple, see Engine.counts_waiter; None if a
  // kernel failed. False: then, and where the rows have not moved because some rank had no room for
  // its own.
  bool wait(py::object* counts) {
    *counts = parts().wait_counts({});
    if (counts->is_none() || PyTuple_GET_ITEM(counts->ptr(), 2) != Py_True) {
      blocks.keep_slab(slab_bytes);
      return false;
    }
    const int64_t num_recv_tokens = PyLong_AsLongLong(PyTuple_GET_ITEM(counts->ptr(), 0));
    int64_t num_come = num_recv_tokens;
    if (form->is_expanded) {
      num_come = 0;
      for (const py::handle rows : py::handle(PyTuple_GET_ITEM(counts->ptr(), 3))) {
        num_come += PyLong_AsLongLong(rows.ptr());
      }
    }
    if (num_come < num_rows) blocks.shrink(*form, slab_bytes, num_come);
    num_rows = num_come;
    if (form->is_expanded) {
      expand_all(num_recv_tokens);
      parts().end(order);
    }
    return true;
  }

  // x, or (x, scales).
  py::object outputs() const {
    return received(parts(), form->rows, blocks.layout, num_rows, blocks.offset, blocks.outputs);
  }
  // One number a selection.
  py::object output(size_t part, DlDataType dtype) const {
    if (form->is_expanded) {
      return parts().vector(blocks.offset + part, num_rows, dtype, blocks.outputs);
    }
    return parts().matrix(blocks.offset + part, num_rows, form->num_topk, dtype, blocks.outputs);
  }
  py::object weights() const {
    if (!has_weights) return py::none();
    return output(blocks.layout.topk_weights, kDlFloat32);
  }
};

// What their handle says of rows that have come.
inline Known known_of(const NewRows& rows, int64_t num_recv_rows, bool has_default_sms) {
  const SlabParts& at = rows.slab_parts;
  Known known{.num_experts = rows.num_experts,
              .mask = rows.token_mask,
              .send_head = rows.slab_at(at.send_head),
              .rank_prefix = rows.slab(),
              .channel_prefix = rows.slab_at(at.channel_prefix),
              .recv_channel_prefix = rows.slab_at(at.recv_channel_prefix),
              .num_recv_rows = num_recv_rows,
              .num_tokens = rows.num_tokens,
              .num_rows = rows.num_rows,
              .num_channels = at.num_channels,
              .num_topk = rows.form->num_topk,
              .has_default_sms = has_default_sms,
              .expansion = std::nullopt};
  if (rows.form->is_expanded) {
    const NumberingLayout& numbers = rows.numbering.layout;
    const auto numbered = [&](size_t part) { return rows.numbering.at(part); };
    known.expansion = {.send_row = numbered(numbers.send_row),
                       .num_expanded = numbered(numbers.num_expanded),
                       .recv_rows = rows.recv_rows(),
                       .expert_offsets = numbered(numbers.expert_offsets),
                       .expert_counts = numbered(numbers.expert_counts),
                       .num_topk = rows.form->num_topk,
                       .num_local_experts = rows.form->num_local_experts,
                       .num_tokens_limit = num_recv_rows};
  }
  return known;
}

// (Context.owner, Handle.has_default_sms)
//   -> (rows, recv_topk_idx, recv_topk_weights, counts, num_rows, recv_rows, Handle._native), once;
// recv_rows is the address of an expanded dispatch's, or 0. Counts and when there are no rows: see
// NewRows::wait.
inline py::object receive_new(NewRows& self, PyObject* const* given) {
  py::object counts = py::none();
  if (!self.is_bounded && !self.wait(&counts)) {
    return py::make_tuple(py::none(), py::none(), py::none(), std::move(counts), 0, 0, py::none());
  }
  py::object rows = self.outputs();
  py::object recv_idx =
      self.output(self.blocks.layout.topk_idx, self.form->idx_bytes == 8 ? kDlInt64 : kDlInt32);
  py::object recv_weights = self.weights();
  const uint64_t recv_rows = self.form->is_expanded ? self.recv_rows() : 0;
  int64_t num_recv_rows = self.num_rows;  // a bound
  if (!self.is_bounded) num_recv_rows = PyLong_AsLongLong(PyTuple_GET_ITEM(counts.ptr(), 0));
  // The handle's tensors of torch's, which a stream may have to be recorded on.
  const bool has_home = self.has_layout || self.form->is_expanded;
  py::object known =
      FreshKnown::capsule(known_of(self, num_recv_rows, given[1] == Py_True),
                          py::reinterpret_borrow<py::object>(given[0]),
                          has_home ? self.parts().home_of(self.order) : py::object(py::none()));
  // Theirs who have the tensors and the handle.
  self.blocks.outputs = self.blocks.handle = py::none();
  return py::make_tuple(std::move(rows), std::move(recv_idx), std::move(recv_weights),
                        std::move(counts), self.num_rows, recv_rows, std::move(known));
}

// A call that has been read, launched as `asynchronous` says. Nothing: nothing has happened.
inline std::optional<NewRows> launch_new(const Shared& calls, const NewCall& call,
                                         PyObject* asynchronous) {
  const Parts& parts = calls->parts;
  const Payload& payload = call.payload;
  const Routing& routing = call.routing;
  const bool is_expanded = call.is_expanded;
  const auto form = call.find(calls->new_dispatches);
  Order order;
  if (form == nullptr || !parts.begin(asynchronous, &order)) return std::nullopt;
  const SlabParts parts_of_slab = form->slabs.of(payload.num_tokens());
  const uint64_t slab_bytes = parts_of_slab.num_bytes;
  const bool is_bounded = call.num_rows > 0;
  NewBlocks blocks;
  int64_t num_rows = 0;
  const auto take = [&](int64_t rows) {
    num_rows = rows;
    return blocks.take(parts, *form, slab_bytes, rows, order);
  };
  bool has_room = false;
  if (is_expanded && !is_bounded) {
    int64_t tried = 0;
    for (const int64_t rows : parts.likely.expanded(payload.num_tokens(), form->num_topk,
                                                    form->num_experts, call.alignment)) {
      has_room = has_room || (rows != tried && take(rows));
      tried = rows;
    }
  } else {
    const auto likely = [&] {
      return parts.likely_rows({static_cast<uint64_t>(payload.num_tokens())});
    };
    has_room = call.reserve(likely, take);
  }
  if (!has_room) return std::nullopt;
  Numbering numbering;
  if (is_expanded) numbering.make(parts, *form, payload.num_tokens(), order);
  const NumberingLayout& numbers = numbering.layout;
  const auto numbered = [&](size_t part) { return is_expanded ? numbering.at(part) : 0; };
  const uint64_t slab = parts.heap_base + blocks.slab_offset;
  const uint64_t begin = parts.heap_base + blocks.offset;
  const uint64_t token_mask =
      routing.has_layout ? parts.given(routing.mask.address()) : slab + parts_of_slab.mask;
  const uint64_t choices = parts.given(routing.idx.address());
  const uint64_t num_tokens = static_cast<uint64_t>(payload.num_tokens());
  const uint64_t channel_prefix = slab + parts_of_slab.channel_prefix;
  const uint64_t send_head = slab + parts_of_slab.send_head;
  form->notify({routing.has_layout ? 0 : choices,
                routing.has_layout ? routing.per_expert.address() : 0, token_mask, num_tokens,
                routing.has_weights ? uint64_t{1} : uint64_t{0}, blocks.offset, blocks.src_offset,
                static_cast<uint64_t>(num_rows), is_bounded ? uint64_t{0} : uint64_t{1}, slab,
                channel_prefix, send_head, slab + parts_of_slab.per_expert,
                slab + parts_of_slab.recv_counts, numbered(numbers.first_rows),
                numbered(numbers.expert_offsets), numbered(numbers.expert_counts),
                numbered(numbers.num_expanded), order.stream});
  if (is_expanded) {
    parts.number_rows({choices, static_cast<uint64_t>(form->idx_bytes), num_tokens,
                       static_cast<uint64_t>(form->num_topk),
                       static_cast<uint64_t>(form->num_experts), numbered(numbers.first_rows),
                       numbered(numbers.send_row), numbered(numbers.send_rows),
                       static_cast<uint64_t>(form->num_local_blocks), order.stream});
  }
  constexpr uint64_t kFillTail = 1, kZeroTail = 2, kFollowsNotify = 4, kIsSpeculative = 8;
  const uint64_t tail = kFillTail | (call.zero_tail ? kZeroTail : 0);
  const Sources sources(parts, payload, form->rows, order);
  form->launch({static_cast<uint64_t>(routing.num_experts),
                token_mask,
                send_head,
                slab,
                channel_prefix,
                sources.x,
                num_tokens,
                sources.x_scales,
                sources.token_stride,
                sources.column_stride,
                choices,
                routing.has_weights ? parts.given(routing.weights.address()) : 0,
                begin + blocks.layout.x,
                form->rows.num_scales > 0 ? begin + blocks.layout.scales : 0,
                begin + blocks.layout.topk_idx,
                routing.has_weights ? begin + blocks.layout.topk_weights : 0,
                parts.heap_base + blocks.src_offset,
                slab + parts_of_slab.recv_channel_prefix,
                static_cast<uint64_t>(num_rows),
                blocks.offset,
                blocks.src_offset,
                kFollowsNotify | (is_bounded ? tail : kIsSpeculative),
                numbered(numbers.send_row),
                numbered(numbers.send_rows),
                numbered(numbers.num_expanded),
                is_expanded ? parts.heap_base + blocks.src_offset +
                                  source_layout_of(*form, num_rows).recv_rows
                            : 0,
                sources.given_x,
                order.stream});
  NewRows rows{.calls = calls,
               .form = form,
               .blocks = std::move(blocks),
               .numbering = std::move(numbering),
               .order = order,
               .slab_bytes = slab_bytes,
               .num_rows = num_rows,
               .is_bounded = is_bounded,
               .has_weights = routing.has_weights,
               .has_scales = form->rows.num_scales > 0,
               .has_layout = routing.has_layout,
               .zero_padding = call.zero_padding,
               .slab_parts = parts_of_slab,
               .num_experts = static_cast<uint64_t>(routing.num_experts),
               .token_mask = token_mask,
               .num_tokens = payload.num_tokens()};
  if (is_expanded && is_bounded) rows.expand_all(num_rows);
  parts.end(order);
  call.keep(parts, order);
  return rows;
}

// The arguments of NewCall
//   -> (SlabLayout, its address, its block, routing, stream, num_topk, Numbering::told, what
//   receives: receive_new), or None. What the caller makes of it before it receives costs nothing:
//   the kernels are on their way.
inline py::object quick_new_dispatch(const Shared& calls, PyObject* const* arguments) {
  NewCall call;
  if (!call.read(calls->parts, arguments)) return py::none();
  std::optional<NewRows> rows = launch_new(calls, call, arguments[12]);
  if (!rows) return py::none();
  const SlabParts& at = rows->slab_parts;
  py::tuple routing =
      py::make_tuple(rows->num_experts, rows->token_mask, rows->slab_at(at.send_head), rows->slab(),
                     rows->slab_at(at.channel_prefix));
  const py::object layout = at.layout, block = rows->blocks.handle;
  const uint64_t slab = rows->slab();
  const int64_t num_topk = rows->form->num_topk;
  py::object home = calls->parts.home_of(rows->order), told = rows->numbering.told();
  return py::make_tuple(layout, slab, block, std::move(routing), std::move(home), num_topk,
                        std::move(told),
                        object_function<2, &receive_new>("receive", *std::move(rows), py::none()));
}

}  // namespace deep_comm::quick
