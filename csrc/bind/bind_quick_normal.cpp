// Whole calls of normal mode, a layout or, along a known routing, a cached dispatch or a combine,
// in one step for the host's hot path. What a call consists of are the same functions that Python
// calls: the region's, the plan's, the streams'. Only plain calls, the latter two of a form that
// was called before; everything else is left to Python, untouched.
#include <pybind11/stl.h>

#include <array>

#include "bind/bindings.hpp"
#include "bind/numbers.hpp"
#include "bind/torch_tensors.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

// Of one Buffer.
struct Parts {
  TorchTensors torch;
  int device_index;
  uint64_t heap_base;
  py::object memory;             // of the heap
  NumberCall<5> take;            // Region.taker()
  py::object streams;            // Streams of the CUDA backend, or None
  NumberCall<1> current_stream;  // (device)
  NumberCall<2> is_ready;        // (device, stream)
  NumberCall<1> record;          // (stream) of streams.done
  py::object last_name, wait_name, offset_name;

  uint64_t given(uint64_t address) const { return address == 0 ? heap_base : address; }

  // The caller's stream, if the operation may run there at once: see CallerLaunch.
  bool begin(uint64_t* stream) const {
    *stream = 0;
    if (streams.is_none()) return true;
    const uint64_t device = static_cast<uint64_t>(device_index);
    *stream = PyLong_AsUnsignedLongLongMask(current_stream({device}).ptr());
    if (is_ready({device, *stream}).ptr() != Py_True) return false;
    const py::object last = streams.attr(last_name);
    return last.is_none() || PyLong_AsUnsignedLongLongMask(last.ptr()) == *stream;
  }

  // A block of the region, behind its last uses; false: there is no room.
  bool take_block(uint64_t num_bytes, uint64_t stream, bool is_scratch, py::object* block,
                  uint64_t* offset) const {
    const py::object taken =
        take({num_bytes, stream, 1, 0, is_scratch ? uint64_t{1} : uint64_t{0}});
    if (taken.is_none()) return false;
    *block = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(taken.ptr(), 0));
    const py::handle events = PyTuple_GET_ITEM(taken.ptr(), 1);
    for (const py::handle event : events) event.attr(wait_name)(stream);
    *offset = block->attr(offset_name).cast<uint64_t>();
    return true;
  }

  // A tensor over the heap.
  py::object matrix(uint64_t offset, int64_t num_rows, int64_t num_columns, DlDataType dtype,
                    const py::object& block) const {
    return torch.matrix_over(heap_base + offset, num_rows, num_columns, dtype,
                             py::make_tuple(memory, block));
  }

  void end(uint64_t stream) const {
    if (streams.is_none()) return;
    streams.attr(last_name) = py::int_(stream);
    record({stream});
  }
};

// (code, bits) of DLPack.
using TypeCode = std::pair<int, int>;
DlDataType dtype_of(TypeCode code) {
  return {static_cast<uint8_t>(code.first), static_cast<uint8_t>(code.second), 1};
}

struct QuickDispatch {
  std::shared_ptr<const Parts> parts;
  NumberCall<28> launch;  // of the plan
  py::object home_stream;
  std::array<uint64_t, 5> routing;
  DlDataType dtype, scale_dtype;
  int64_t num_tokens, hidden, num_scales;  // 0: without
  int64_t num_rows;
  uint64_t scales_offset, num_bytes;
};

struct QuickCombine {
  std::shared_ptr<const Parts> parts;
  NumberCall<15> launch;
  py::object home_stream;
  std::array<uint64_t, 5> way_back;
  DlDataType dtype;
  py::object torch_dtype;
  int64_t num_tokens, hidden, num_rows;
  uint64_t num_staging_bytes, num_staging_rows;
};

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

bool is_home(const py::object& home_stream, const Parts& parts, uint64_t stream) {
  return parts.streams.is_none() || home_stream.is_none() ||
         PyLong_AsUnsignedLongLongMask(home_stream.ptr()) == stream;
}

// (topk_idx, num_experts) -> num_tokens_per_rank, num_tokens_per_expert and is_token_in_rank, or
// None.
py::object quick_layout(QuickLayout& self, PyObject* const* arguments) {
  const Parts& parts = *self.parts;
  TensorView idx;
  if (!PyLong_CheckExact(arguments[1]) || !parts.torch.view(arguments[0], &idx) ||
      !(idx.is(kDlInt64) || idx.is(kDlInt32)) || idx.num_dims() != 2 || idx.extent(1) < 1 ||
      idx.extent(1) > self.num_max_topk || !idx.is_contiguous()) {
    return py::none();
  }
  int overflow = 0;
  const int64_t num_experts = PyLong_AsLongLongAndOverflow(arguments[1], &overflow);
  uint64_t stream;
  if (overflow != 0 || num_experts < 1 || num_experts > self.num_max_experts ||
      !parts.begin(&stream)) {
    return py::none();
  }
  const int64_t num_tokens = idx.extent(0);
  if (num_tokens != self.num_tokens || num_experts != self.num_experts) {
    self.set_forms(num_tokens, num_experts);
  }
  uintptr_t per_rank_address, per_expert_address, mask_address;
  py::object per_rank = parts.torch.empty(self.per_rank, &per_rank_address);
  py::object per_expert = parts.torch.empty(self.per_expert, &per_expert_address);
  py::object mask = parts.torch.empty(self.mask, &mask_address);
  self.launch({parts.given(idx.address()), static_cast<uint64_t>(idx.element_bytes()),
               static_cast<uint64_t>(num_tokens), static_cast<uint64_t>(idx.extent(1)),
               static_cast<uint64_t>(num_experts), static_cast<uint64_t>(self.num_ranks),
               per_rank_address, 0, per_expert_address, parts.given(mask_address), stream});
  parts.end(stream);
  return py::make_tuple(std::move(per_rank), std::move(per_expert), std::move(mask));
}

// (x or (x, scales)) -> the same of the rows that have come, or None.
py::object quick_dispatch(const QuickDispatch& self, PyObject* const* arguments) {
  const Parts& parts = *self.parts;
  PyObject* given = arguments[0];
  TensorView x, scales;
  if (self.num_scales > 0) {
    if (!PyTuple_CheckExact(given) || PyTuple_GET_SIZE(given) != 2 ||
        !parts.torch.view(PyTuple_GET_ITEM(given, 1), &scales) || !scales.is(self.scale_dtype) ||
        scales.num_dims() != 2 || scales.extent(0) != self.num_tokens ||
        scales.extent(1) != self.num_scales) {
      return py::none();
    }
    given = PyTuple_GET_ITEM(given, 0);
  }
  uint64_t stream, offset;
  py::object block;
  if (!parts.torch.matrix(given, self.dtype, self.num_tokens, self.hidden, &x) ||
      x.address() % 16 != 0 || !parts.begin(&stream) || !is_home(self.home_stream, parts, stream) ||
      !parts.take_block(self.num_bytes, stream, false, &block, &offset)) {
    return py::none();
  }
  py::object rows = parts.matrix(offset, self.num_rows, self.hidden, self.dtype, block);
  uint64_t x_scales = 0, token_stride = 0, column_stride = 0, recv_scales = 0;
  if (self.num_scales > 0) {
    const uint64_t begin = offset + self.scales_offset;
    rows = py::make_tuple(std::move(rows), parts.matrix(begin, self.num_rows, self.num_scales,
                                                        self.scale_dtype, block));
    recv_scales = parts.heap_base + begin;
    x_scales = parts.given(scales.address());
    token_stride = static_cast<uint64_t>(scales.stride(0));
    column_stride = static_cast<uint64_t>(scales.stride(1));
  }
  const auto [num_experts, mask, send_head, rank_prefix, channel_prefix] = self.routing;
  self.launch({num_experts,
               mask,
               send_head,
               rank_prefix,
               channel_prefix,
               parts.given(x.address()),
               static_cast<uint64_t>(self.num_tokens),
               x_scales,
               token_stride,
               column_stride,
               0,
               0,
               parts.heap_base + offset,
               recv_scales,
               0,
               0,
               0,
               0,
               static_cast<uint64_t>(self.num_rows),
               offset,
               0,
               0,
               0,
               0,
               0,
               0,
               0,
               stream});
  parts.end(stream);
  return rows;
}

// (x) -> combined_x, or None.
py::object quick_combine(const QuickCombine& self, PyObject* const* arguments) {
  const Parts& parts = *self.parts;
  TensorView x;
  uint64_t stream;
  if (!parts.torch.matrix(arguments[0], self.dtype, self.num_rows, self.hidden, &x) ||
      x.address() % 16 != 0 || !parts.begin(&stream) || !is_home(self.home_stream, parts, stream)) {
    return py::none();
  }
  uintptr_t sums = 0;
  py::object combined =
      parts.torch.empty_matrix(self.num_tokens, self.hidden, self.torch_dtype, &sums);
  py::object staging;  // given back behind the launch: whoever gets it writes behind this kernel
  uint64_t offset = 0;
  const bool has_staging =
      parts.take_block(self.num_staging_bytes, stream, true, &staging, &offset);
  const auto [num_recv_rows, rank_prefix, channel_prefix, recv_channel_prefix, send_head] =
      self.way_back;
  self.launch({num_recv_rows, rank_prefix, channel_prefix, recv_channel_prefix, send_head,
               parts.given(x.address()), 0, 0, 0, static_cast<uint64_t>(self.num_tokens),
               parts.given(sums), 0, offset, has_staging ? self.num_staging_rows : 0, stream});
  parts.end(stream);
  return combined;
}

}  // namespace

void bind_quick_normal(py::module_& m) {
  using namespace pybind11::literals;
  using Shared = std::shared_ptr<Parts>;
  py::class_<Parts, Shared>(m, "QuickNormal", py::module_local())
      .def(py::init([](py::object tensor_type, const py::object& exchange_api, py::object empty,
                       py::object part, int device_type, int device_index, uint64_t heap_base,
                       py::object memory, py::object take, py::object streams,
                       py::object current_stream, py::object is_ready, py::object record) {
             return std::make_shared<Parts>(
                 Parts{.torch = {std::move(tensor_type), exchange_api, std::move(empty),
                                 std::move(part), device_type, device_index},
                       .device_index = device_index,
                       .heap_base = heap_base,
                       .memory = std::move(memory),
                       .take = NumberCall<5>(std::move(take)),
                       .streams = std::move(streams),
                       .current_stream = NumberCall<1>(std::move(current_stream)),
                       .is_ready = NumberCall<2>(std::move(is_ready)),
                       .record = NumberCall<1>(std::move(record)),
                       .last_name = py::str("last"),
                       .wait_name = py::str("wait"),
                       .offset_name = py::str("offset")});
           }),
           "tensor_type"_a, "exchange_api"_a, "empty"_a, "part"_a, "device_type"_a,
           "device_index"_a, py::kw_only(), "heap_base"_a, "memory"_a, "take"_a, "streams"_a,
           "current_stream"_a, "is_ready"_a, "record"_a)
      .def(
          "layout",
          [](const Shared& self, py::object launch, int64_t num_ranks, int64_t num_max_experts,
             int64_t num_max_topk, py::object int32, py::object boolean) {
            return object_function<2, &quick_layout>(
                "quick_layout",
                QuickLayout{
                    .parts = self,
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
      .def(
          "dispatch",
          [](const Shared& self, py::object launch, py::object home_stream,
             const std::array<uint64_t, 5>& routing, TypeCode dtype, TypeCode scale_dtype,
             int64_t num_tokens, int64_t hidden, int64_t num_scales, int64_t num_rows,
             uint64_t scales_offset, uint64_t num_bytes) {
            return object_function<1, &quick_dispatch>(
                "quick_dispatch",
                QuickDispatch{self, NumberCall<28>(std::move(launch)), std::move(home_stream),
                              routing, dtype_of(dtype), dtype_of(scale_dtype), num_tokens, hidden,
                              num_scales, num_rows, scales_offset, num_bytes},
                py::none());
          },
          py::kw_only(), "launch"_a, "home_stream"_a, "routing"_a, "dtype"_a, "scale_dtype"_a,
          "num_tokens"_a, "hidden"_a, "num_scales"_a, "num_rows"_a, "scales_offset"_a,
          "num_bytes"_a)
      .def(
          "combine",
          [](const Shared& self, py::object launch, py::object home_stream,
             const std::array<uint64_t, 5>& way_back, TypeCode dtype, py::object torch_dtype,
             int64_t num_tokens, int64_t hidden, int64_t num_rows, uint64_t num_staging_bytes,
             uint64_t num_staging_rows) {
            return object_function<1, &quick_combine>(
                "quick_combine",
                QuickCombine{self, NumberCall<15>(std::move(launch)), std::move(home_stream),
                             way_back, dtype_of(dtype), std::move(torch_dtype), num_tokens, hidden,
                             num_rows, num_staging_bytes, num_staging_rows},
                py::none());
          },
          py::kw_only(), "launch"_a, "home_stream"_a, "way_back"_a, "dtype"_a, "torch_dtype"_a,
          "num_tokens"_a, "hidden"_a, "num_rows"_a, "num_staging_bytes"_a, "num_staging_rows"_a);
}

}  // namespace deep_comm
