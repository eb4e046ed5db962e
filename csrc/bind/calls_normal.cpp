// dispatch and combine as Python's functions: arguments become requests, results tuples.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/bindings.hpp"
#include "bind/buffer.hpp"
#include "bind/errors.hpp"
#include "bind/handle.hpp"
#include "host/calls/barrier.hpp"
#include "host/calls/combine.hpp"
#include "host/calls/dispatch.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

// Of a tuple or list; -1: it is none.
int num_items_of(PyObject* given) {
  if (!PyTuple_Check(given) && !PyList_Check(given)) return -1;
  return static_cast<int>(PySequence_Fast_GET_SIZE(given));
}

// The first two of such items, or the object itself as the first.
void read_pair(const TensorReader& reader, PyObject* given, int num_items, TensorRef* first,
               TensorRef* second) {
  if (num_items < 0) {
    *first = reader.read(given);
    return;
  }
  PyObject** items = PySequence_Fast_ITEMS(given);
  if (num_items > 0) *first = reader.read(items[0]);
  if (num_items > 1) *second = reader.read(items[1]);
}

// (recv_x or (recv_x, scales), recv_topk_idx, recv_topk_weights, counts of experts, handle, event)
py::object tuple_of(const BoundBuffer& buffer, DispatchResult result) {
  py::object rows = object_of(std::move(result.recv_x));
  if (result.recv_scales) rows = py::make_tuple(rows, object_of(std::move(result.recv_scales)));
  return py::make_tuple(
      std::move(rows), object_of(std::move(result.recv_topk_idx)),
      object_of(std::move(result.recv_topk_weights)),
      result.has_counts ? list_of(result.num_recv_tokens_per_expert) : py::object(py::none()),
      result.record ? handle_of(buffer, std::move(result.record)) : py::object(py::none()),
      buffer.overlap_of(std::move(result.event)));
}

// (x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert,
//  topk_idx, topk_weights, expert_alignment, num_worst_tokens, config, previous_event, async_finish,
//  allocate_on_comm_stream, num_experts, zero_tail, expand, zero_padding, use_fp8, round_scale,
//  use_ue8m0, column_major_scales, fallback): as of Buffer.dispatch; the last is what stands in for a
// Config, see read_config.
DispatchRequest read_dispatch(BoundBuffer& buffer, const Arguments<23>& given) {
  const auto [x, handle, per_rank, per_rdma_rank, mask, per_expert, topk_idx, topk_weights,
              expert_alignment, num_worst_tokens, config, event, async_finish, on_comm, num_experts,
              zero_tail, expand, zero_padding, use_fp8, round_scale, use_ue8m0, column_major,
              fallback] = given;
  const TensorReader& reader = buffer.reader;
  DispatchRequest request;
  PayloadRequest& payload = request.payload;
  payload.num_items = num_items_of(x);
  read_pair(reader, x, payload.num_items, &payload.x, &payload.scales);
  payload.scale_options = {read_flag(use_fp8), read_flag(round_scale), read_flag(use_ue8m0),
                           read_flag(column_major)};
  request.handle = read_handle(buffer, handle);
  request.num_tokens_per_rank = reader.read(per_rank);
  request.num_tokens_per_rdma_rank = reader.read(per_rdma_rank);
  request.is_token_in_rank = reader.read(mask);
  request.num_tokens_per_expert = reader.read(per_expert);
  request.topk_idx = reader.read(topk_idx);
  request.topk_weights = reader.read(topk_weights);
  request.expert_alignment = read_integer(expert_alignment);
  request.num_worst_tokens = read_integer(num_worst_tokens);
  request.num_experts = read_integer(num_experts);
  request.flags.zero_tail = read_flag(zero_tail);
  request.flags.expand = read_flag(expand);
  request.flags.zero_padding = read_flag(zero_padding);
  request.config = buffer.read_config(config, fallback);
  request.streams = buffer.read_streams(event, async_finish, on_comm);
  return request;
}

py::object call_dispatch(BoundBuffer& buffer, const Arguments<23>& given) {
  return tuple_of(buffer, dispatch(buffer.context, read_dispatch(buffer, given)));
}

// (x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream,
//  apply_weights, topk_idx, fallback) -> (combined_x, combined_topk_weights, event)
py::object call_combine(BoundBuffer& buffer, const Arguments<11>& given) {
  const auto [x, handle, topk_weights, bias, config, event, async_finish, on_comm, apply_weights,
              topk_idx, fallback] = given;
  const TensorReader& reader = buffer.reader;
  CombineRequest request;
  request.x = reader.read(x);
  request.handle = read_handle(buffer, handle);
  request.topk_weights = reader.read(topk_weights);
  request.num_bias_items = num_items_of(bias);
  read_pair(reader, bias, request.num_bias_items, &request.bias[0], &request.bias[1]);
  request.apply_weights = read_flag(apply_weights);
  request.topk_idx = reader.read(topk_idx);
  request.config = buffer.read_config(config, fallback);
  request.streams = buffer.read_streams(event, async_finish, on_comm);
  CombineResult result = combine(buffer.context, request);
  return py::make_tuple(object_of(std::move(result.combined_x)),
                        object_of(std::move(result.combined_topk_weights)),
                        buffer.overlap_of(std::move(result.event)));
}

// (digest: of what else the ranks must agree on)
py::object call_barrier(BoundBuffer& buffer, const Arguments<1>& given) {
  const auto [digest] = given;
  barrier(buffer.context, static_cast<int>(read_integer(digest).value));
  return py::none();
}

void end_calls(BoundBuffer& buffer, bool was_destroyed) {
  CallContext& context = buffer.context;
  context.early_dispatches = {};
  if (context.pending == nullptr) return;
  CallError error;
  error.error_class =
      was_destroyed ? CallError::Class::kBufferDestroyed : CallError::Class::kArgument;
  error.argument = "dispatch";
  error.rule = was_destroyed ? "the Buffer was destroyed before its dispatch had been received"
                             : "must be received before reset()";
  const std::shared_ptr<PendingCall> pending = context.pending;
  pending->forget(error);
}

}  // namespace

py::object list_of(const std::vector<int>& numbers) {
  py::list list(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyList_SET_ITEM(list.ptr(), i, PyLong_FromLong(numbers[i]));
  }
  return list;
}

void bind_normal_calls(py::module_& m, BufferClass& buffer) {
  def_call<&call_dispatch>(buffer, "dispatch");
  def_call<&call_combine>(buffer, "combine");
  def_call<&call_barrier>(buffer, "barrier");
  buffer
      .def(
          "warn_without_room",
          [](BoundBuffer& self, py::object warn) {
            self.context.region_use.warn = [warn = std::move(warn)](size_t num_bytes) {
              try {
                warn(num_bytes);
              } catch (py::error_already_set& error) {
                error.discard_as_unraisable("a warning of deep_comm");  // peers are in the call
              }
            };
          },
          py::arg("warn"), "Call `warn(bytes)` once, for a large call without room in the region.")
      .def_property_readonly(
          "region_use",
          [](const BoundBuffer& self) {
            const RegionUse& use = self.context.region_use;
            return py::make_tuple(use.dispatch.num_in_region, use.dispatch.num_without_room,
                                  use.combine.num_in_region, use.combine.num_without_room,
                                  use.most_bytes_without_room);
          },
          "Calls of dispatch with room in the region and without, of combine, most bytes without.")
      .def_property_readonly(
          "has_pending", [](const BoundBuffer& self) { return self.context.pending != nullptr; })
      .def(
          "set_members",
          [](BoundBuffer& self, std::vector<std::string> members) {
            self.context.set_members(std::move(members));
          },
          py::arg("members"), "Who makes handles from now on: see deep_comm/context/absent.py.")
      .def(
          "agree_on_tokens",
          [](BoundBuffer& self, int64_t num_tokens) {
            int64_t& agreed = self.context.forecast.agreed_tokens;
            agreed = std::max(agreed, num_tokens);
          },
          py::arg("num_tokens"), "The most tokens per rank that a layer's ranks agreed on.")
      .def("end_calls", &end_calls, py::kw_only(), py::arg("was_destroyed"),
           "Drops the pending dispatch and the early-dispatch history. Kernels must have ended.");
}

}  // namespace deep_comm
