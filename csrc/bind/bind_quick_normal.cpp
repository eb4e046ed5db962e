// Whole calls of normal mode in one step for the host's hot path: layout, cached dispatch, dispatch
// with new routing, combine. What a call consists of are the same functions that Python calls: the
// region's, the plan's, the streams'. Only plain calls, all but layouts of a form that was called
// before; everything else is left to Python, untouched.
#include <pybind11/stl.h>

#include <array>

#include "bind/bindings.hpp"
#include "bind/quick_forms.hpp"
#include "device/layout/output.cuh"

namespace deep_comm {

namespace py = pybind11;

namespace {

using namespace quick;

struct QuickLayout {
  std::shared_ptr<const Parts> parts;
  NumberCall<11> launch;
  int64_t num_ranks, num_max_experts, num_max_topk;
  TensorForm per_rank;
  py::object boolean;
  // Of the outputs of the call before, whose forms most calls share.
  int64_t num_tokens = -1, num_experts = -1;
  TensorForm per_expert = {}, mask = {};

  void set_forms(int64_t tokens, int64_t experts) {
    per_expert = {py::make_tuple(experts), py::make_tuple(1), per_rank.dtype};
    mask = {py::make_tuple(tokens, num_ranks), py::make_tuple(num_ranks, 1), boolean};
    num_tokens = tokens;
    num_experts = experts;
  }
};

struct Calls {
  Parts parts;
  Forms<CachedDispatch> cached_dispatches;
  Forms<NewDispatch> new_dispatches;
  Forms<Combine> combines;
};
using Shared = std::shared_ptr<Calls>;

// (topk_idx, num_experts, asynchronous) -> num_tokens_per_rank, num_tokens_per_expert and is_token_in_rank, or
// None.
py::object quick_layout(QuickLayout& self, PyObject* const* arguments) {
  const Parts& parts = *self.parts;
  TensorView idx;
  if (!PyLong_CheckExact(arguments[1]) || !parts.torch.view(arguments[0], &idx) ||
      !is_indices(idx) || idx.extent(1) < 1 || idx.extent(1) > self.num_max_topk ||
      !is_asynchronous(arguments[2])) {
    return py::none();
  }
  int overflow = 0;
  const int64_t num_experts = PyLong_AsLongLongAndOverflow(arguments[1], &overflow);
  Order order;
  if (overflow != 0 || num_experts < 1 || num_experts > self.num_max_experts ||
      !parts.begin(arguments[2], &order)) {
    return py::none();
  }
  const int64_t num_tokens = idx.extent(0);
  if (num_tokens != self.num_tokens || num_experts != self.num_experts) {
    self.set_forms(num_tokens, num_experts);
  }
  uintptr_t per_rank_address, per_expert_address, mask_address;
  py::object per_rank = parts.empty(self.per_rank, order, &per_rank_address);
  py::object per_expert = parts.empty(self.per_expert, order, &per_expert_address);
  py::object mask = parts.empty(self.mask, order, &mask_address);
  self.launch({parts.given(idx.address()), static_cast<uint64_t>(idx.element_bytes()),
               static_cast<uint64_t>(num_tokens), static_cast<uint64_t>(idx.extent(1)),
               static_cast<uint64_t>(num_experts), static_cast<uint64_t>(self.num_ranks),
               per_rank_address, 0, per_expert_address, parts.given(mask_address), order.stream});
  parts.end(order);
  parts.keep(arguments[0], idx, order);
  return py::make_tuple(std::move(per_rank), std::move(per_expert), std::move(mask));
}

// What a dispatch sends and where it puts it, in the order of the plan's numbers.
struct Sources {
  uint64_t x_scales = 0, token_stride = 0, column_stride = 0;

  Sources(const Parts& parts, const Payload& payload) {
    if (!payload.has_scales) return;
    x_scales = parts.given(payload.scales.address());
    token_stride = static_cast<uint64_t>(payload.scales.stride(0));
    column_stride = static_cast<uint64_t>(payload.scales.stride(1));
  }
};

// x, or (x, scales), of a block.
py::object received(const Parts& parts, const Rows& form, const OutputLayout& layout,
                    int64_t num_rows, uint64_t offset, const py::object& block) {
  py::object rows = parts.matrix(offset + layout.x, num_rows, form.hidden, form.dtype, block);
  if (form.num_scales == 0) return rows;
  return py::make_tuple(std::move(rows), parts.matrix(offset + layout.scales, num_rows,
                                                      form.num_scales, form.scale_dtype, block));
}

// The rows that a dispatch was given.
void keep(const Parts& parts, PyObject* given, const Payload& payload, const Order& order) {
  if (!payload.has_scales) return parts.keep(given, payload.x, order);
  parts.keep(PyTuple_GET_ITEM(given, 0), payload.x, order);
  parts.keep(PyTuple_GET_ITEM(given, 1), payload.scales, order);
}

// (x or (x, scales), KnownHandle.numbers, home_stream, config, default, asynchronous) -> the same of
// the rows that have come, or None.
py::object quick_dispatch(const Shared& calls, PyObject* const* arguments) {
  const Parts& parts = calls->parts;
  Payload payload;
  Known known;
  if (!payload.read(parts.torch, arguments[0]) || !known.read(arguments[1]) ||
      payload.num_tokens() != known.num_tokens || !is_asynchronous(arguments[5])) {
    return py::none();
  }
  const auto form = calls->cached_dispatches.find([&](const CachedDispatch& other) {
    return other.num_channels == known.num_channels && payload.is(other.rows) &&
           other.named.is(arguments[3], arguments[4]);
  });
  Order order;
  uint64_t offset;
  py::object block;
  if (form == nullptr || !parts.begin(arguments[5], &order) ||
      !is_home(arguments[2], parts, order)) {
    return py::none();
  }
  const Rows& kind = form->rows;
  const OutputLayout layout =
      OutputLayout::make(known.num_rows, kind.row_bytes(), kind.scale_row_bytes(), 0, 0);
  if (!parts.take_block(layout.num_bytes, order, false, &block, &offset)) return py::none();
  py::object rows = received(parts, kind, layout, known.num_rows, offset, block);
  const Sources sources(parts, payload);
  const uint64_t begin = parts.heap_base + offset;
  form->launch({known.num_experts,
                known.mask,
                known.send_head,
                known.rank_prefix,
                known.channel_prefix,
                parts.given(payload.x.address()),
                static_cast<uint64_t>(known.num_tokens),
                sources.x_scales,
                sources.token_stride,
                sources.column_stride,
                0,
                0,
                begin + layout.x,
                payload.has_scales ? begin + layout.scales : 0,
                0,
                0,
                0,
                0,
                static_cast<uint64_t>(known.num_rows),
                offset,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                order.stream});
  parts.end(order);
  keep(parts, arguments[0], payload, order);
  return rows;
}

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
py::object receive_new(NewRows& self, PyObject* const* /*none*/) {
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
py::object quick_new_dispatch(const Shared& calls, PyObject* const* arguments) {
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

// (x, topk_weights, KnownHandle.numbers, home_stream, config, default, asynchronous)
//   -> (combined_x, combined_topk_weights), or None.
py::object quick_combine(const Shared& calls, PyObject* const* arguments) {
  const Parts& parts = calls->parts;
  TensorView x, weights;
  Known known;
  const bool has_weights = arguments[1] != Py_None;
  if (!parts.torch.view(arguments[0], &x) || x.num_dims() != 2 || !x.is_contiguous() ||
      x.address() % 16 != 0 || !known.read(arguments[2]) || x.extent(0) != known.num_rows ||
      !is_asynchronous(arguments[6]) ||
      (has_weights &&
       !parts.torch.matrix(arguments[1], kDlFloat32, known.num_rows, -1, &weights))) {
    return py::none();
  }
  const int64_t num_topk = has_weights ? weights.extent(1) : 0;
  const auto form = calls->combines.find([&](const Combine& other) {
    return x.is(other.dtype) && x.extent(1) == other.hidden && num_topk == other.num_topk &&
           other.num_channels == known.num_channels && other.named.is(arguments[4], arguments[5]);
  });
  Order order;
  if (form == nullptr || (has_weights && num_topk == 0) || !parts.begin(arguments[6], &order) ||
      !is_home(arguments[3], parts, order)) {
    return py::none();
  }
  uintptr_t sums = 0, weight_sums = 0;
  const auto matrix = [&](int64_t num_columns, const py::object& dtype, uintptr_t* address) {
    return parts.empty(TorchTensors::matrix_form(known.num_tokens, num_columns, dtype), order,
                       address);
  };
  py::object combined = matrix(form->hidden, form->torch_dtype, &sums);
  py::object combined_weights = py::none();
  if (has_weights) {
    combined_weights = matrix(num_topk, parts.float32, &weight_sums);
    weight_sums = parts.given(weight_sums);
  }
  // As ops/combine.py counts them.
  int64_t num_peers = parts.num_ranks - 1;
  if (known.num_topk > 0 && known.num_topk < num_peers) num_peers = known.num_topk;
  const uint64_t num_staging_rows = static_cast<uint64_t>(known.num_tokens * num_peers);
  py::object staging;  // given back behind the launch: whoever gets it writes behind this kernel
  uint64_t offset = 0;
  const bool has_staging =
      parts.take_block(num_staging_rows * form->staging_row_bytes, order, true, &staging, &offset);
  form->launch({static_cast<uint64_t>(known.num_recv_rows), known.rank_prefix, known.channel_prefix,
                known.recv_channel_prefix, known.send_head, parts.given(x.address()),
                has_weights ? parts.given(weights.address()) : 0, 0, 0,
                static_cast<uint64_t>(known.num_tokens), parts.given(sums), weight_sums, offset,
                has_staging ? num_staging_rows : 0, order.stream});
  parts.end(order);
  parts.keep(arguments[0], x, order);
  if (has_weights) parts.keep(arguments[1], weights, order);
  return py::make_tuple(std::move(combined), std::move(combined_weights));
}

}  // namespace

void bind_quick_normal(py::module_& m) {
  using namespace pybind11::literals;
  py::class_<Calls, Shared>(m, "QuickNormal", py::module_local())
      .def(py::init([](py::object tensor_type, const py::object& exchange_api, py::object empty,
                       py::object part, int device_type, int device_index, int num_ranks,
                       uint64_t heap_base, py::object memory, py::object take, py::object streams,
                       py::object current_stream, py::object is_ready, py::object record,
                       py::object likely_rows, py::object wait_counts, py::object float32) {
             const bool has_streams = !streams.is_none();
             return std::make_shared<Calls>(Calls{
                 .parts = {.torch = {std::move(tensor_type), exchange_api, std::move(empty),
                                     std::move(part), device_type, device_index},
                           .device_index = device_index,
                           .num_ranks = num_ranks,
                           .heap_base = heap_base,
                           .memory = std::move(memory),
                           .take = NumberCall<5>(std::move(take)),
                           .streams = streams,
                           .comm = has_streams ? py::object(streams.attr("comm")) : py::none(),
                           .raw_comm = has_streams ? streams.attr("raw_comm").cast<uint64_t>() : 0,
                           .current_stream = NumberCall<1>(std::move(current_stream)),
                           .is_ready = NumberCall<2>(std::move(is_ready)),
                           .record_done = NumberCall<1>(std::move(record)),
                           .likely_rows = NumberCall<1>(std::move(likely_rows)),
                           .wait_counts = NumberCall<0>(std::move(wait_counts)),
                           .last_name = py::str("last"),
                           .wait_name = py::str("wait"),
                           .record_name = py::str("record_stream"),
                           .float32 = std::move(float32)},
                 .cached_dispatches = {},
                 .new_dispatches = {},
                 .combines = {}});
           }),
           "tensor_type"_a, "exchange_api"_a, "empty"_a, "part"_a, "device_type"_a,
           "device_index"_a, py::kw_only(), "num_ranks"_a, "heap_base"_a, "memory"_a, "take"_a,
           "streams"_a, "current_stream"_a, "is_ready"_a, "record"_a, "likely_rows"_a,
           "wait_counts"_a, "float32"_a)
      .def(
          "layout",
          [](const Shared& self, py::object launch, int64_t num_ranks, int64_t num_max_experts,
             int64_t num_max_topk, py::object int32, py::object boolean) {
            return object_function<3, &quick_layout>(
                "quick_layout",
                QuickLayout{
                    .parts = {self, &self->parts},
                    .launch = NumberCall<11>(std::move(launch)),
                    .num_ranks = num_ranks,
                    .num_max_experts = num_max_experts,
                    .num_max_topk = num_max_topk,
                    .per_rank = {py::make_tuple(num_ranks), py::make_tuple(1), std::move(int32)},
                    .boolean = std::move(boolean)},
                py::none());
          },
          py::kw_only(), "launch"_a, "num_ranks"_a, "num_max_experts"_a, "num_max_topk"_a,
          "int32"_a, "boolean"_a)
      .def("calls",
           [](const Shared& self) {
             const auto call = [&]<size_t kCount, auto kBody>(const char* name) {
               return object_function<kCount, kBody>(name, self, py::none());
             };
             return py::make_tuple(
                 call.template operator()<6, &quick_dispatch>("quick_dispatch"),
                 call.template operator()<13, &quick_new_dispatch>("quick_new_dispatch"),
                 call.template operator()<7, &quick_combine>("quick_combine"));
           })
      .def(
          "add_dispatch",
          [](const Shared& self, py::object config, py::object standard, TypeCode dtype,
             TypeCode scale_dtype, int64_t hidden, int64_t num_scales, int64_t num_channels,
             py::object launch) {
            const Rows rows{dtype_of(dtype), dtype_of(scale_dtype), hidden, num_scales};
            const auto is_same = [&](const CachedDispatch& known) {
              return known.rows == rows && known.num_channels == num_channels &&
                     known.named.is(config.ptr(), standard.ptr());
            };
            if (self->cached_dispatches.find(is_same) != nullptr) return;
            self->cached_dispatches.add({{std::move(config), std::move(standard)},
                                         rows,
                                         num_channels,
                                         NumberCall<28>(std::move(launch))});
          },
          py::kw_only(), "config"_a, "default"_a, "dtype"_a, "scale_dtype"_a, "hidden"_a,
          "num_scales"_a, "num_channels"_a, "launch"_a)
      .def(
          "add_new_dispatch",
          [](const Shared& self, py::object config, py::object standard, TypeCode dtype,
             TypeCode scale_dtype, int64_t hidden, int64_t num_scales, int64_t num_topk,
             int64_t num_experts, int64_t alignment, int idx_bytes, bool has_layout,
             py::object notify, py::object launch, py::object slab_of) {
            NewDispatch form{.named = {std::move(config), std::move(standard)},
                             .rows = {dtype_of(dtype), dtype_of(scale_dtype), hidden, num_scales},
                             .num_topk = num_topk,
                             .num_experts = num_experts,
                             .alignment = alignment,
                             .idx_bytes = idx_bytes,
                             .has_layout = has_layout,
                             .notify = NumberCall<19>(std::move(notify)),
                             .launch = NumberCall<28>(std::move(launch)),
                             .slab_of = std::move(slab_of),
                             .slabs = {}};
            const auto is_same = [&](const NewDispatch& known) {
              return known.is_like(form) &&
                     known.named.is(form.named.config.ptr(), form.named.standard.ptr());
            };
            if (self->new_dispatches.find(is_same) == nullptr) {
              self->new_dispatches.add(std::move(form));
            }
          },
          py::kw_only(), "config"_a, "default"_a, "dtype"_a, "scale_dtype"_a, "hidden"_a,
          "num_scales"_a, "num_topk"_a, "num_experts"_a, "alignment"_a, "idx_bytes"_a,
          "has_layout"_a, "notify"_a, "launch"_a, "slab_of"_a)
      .def(
          "add_combine",
          [](const Shared& self, py::object config, py::object standard, TypeCode dtype,
             py::object torch_dtype, int64_t hidden, int64_t num_topk, int64_t num_channels,
             uint64_t staging_row_bytes, py::object launch) {
            const auto is_same = [&](const Combine& known) {
              return known.dtype == dtype_of(dtype) && known.hidden == hidden &&
                     known.num_topk == num_topk && known.num_channels == num_channels &&
                     known.named.is(config.ptr(), standard.ptr());
            };
            if (self->combines.find(is_same) != nullptr) return;
            self->combines.add({{std::move(config), std::move(standard)},
                                dtype_of(dtype),
                                std::move(torch_dtype),
                                hidden,
                                num_topk,
                                num_channels,
                                staging_row_bytes,
                                NumberCall<15>(std::move(launch))});
          },
          py::kw_only(), "config"_a, "default"_a, "dtype"_a, "torch_dtype"_a, "hidden"_a,
          "num_topk"_a, "num_channels"_a, "staging_row_bytes"_a, "launch"_a);
}

}  // namespace deep_comm
