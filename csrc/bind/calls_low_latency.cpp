#include "bind/calls_low_latency.hpp"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bind/bindings.hpp"
#include "bind/interpreter.hpp"
#include "bind/views.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

using Record = LowLatencyDispatchRecord;

// The receive phase of a call, as a function without arguments.
struct BoundHook {
  std::shared_ptr<BoundLowLatency> of;
  std::shared_ptr<LowLatencyPending> pending;

  py::object receive(const Arguments<0>& /*none*/) {
    of->calls.receive(*pending);
    return py::none();
  }
};

CallContext::InCall enter_call(BoundHook& self) {
  return CallContext::InCall(self.of->buffer->context);
}

py::tuple tuple_of(const TensorSpec& spec) {
  py::tuple shape(spec.num_dims);
  for (int dim = 0; dim < spec.num_dims; ++dim) shape[dim] = spec.shape[dim];
  return shape;
}

}  // namespace

py::object BoundLowLatency::overlap_of(LowLatencyCompletion& completion) const {
  if (completion.tensors.empty()) return buffer->overlap_of(std::move(completion.event));
  try {
    py::tuple tensors(completion.tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i] = py::handle(static_cast<PyObject*>(completion.tensors[i].get()));
    }
    return buffer->python.event_overlap(tensors_event(py::cast(std::move(completion.event)),
                                                      std::move(tensors), completion.owner_stream));
  } catch (...) {  // a signal's handler may raise: the kernel runs nevertheless
    const py::error_scope kept;
    for (const Object& tensor : completion.tensors) {
      buffer->context.order.framework().record_on_comm(tensor.get());
    }
    throw;
  }
}

py::object BoundLowLatency::hook_of(std::shared_ptr<LowLatencyPending> pending) {
  if (pending == nullptr) return py::none();
  return method_function<&BoundHook::receive>(
      "hook", std::make_shared<BoundHook>(BoundHook{shared_from_this(), std::move(pending)}),
      buffer->python.raise_recorded);
}

// As Buffer.low_latency_dispatch, all by position
//   -> (recv_x or (recv_x, scales), recv_count, handle, event, hook)
py::object BoundLowLatency::dispatch(const Arguments<17>& given) {
  const auto [x, topk_idx, num_max_tokens, num_experts, cumulative_stats, wait_stats, use_fp8,
              round_scale, use_ue8m0, async_finish, return_recv_hook, topk_weights, compact,
              report_num_tokens, use_nvfp4, global_scale, global_topk_idx] = given;
  const TensorReader& reader = buffer->reader;
  ReservedLowLatencyDispatch reserved =
      calls.reserve(calls.check({.x = reader.read(x),
                                 .topk_idx = reader.read(topk_idx),
                                 .topk_weights = reader.read(topk_weights),
                                 .cumulative_stats = reader.read(cumulative_stats),
                                 .wait_stats = reader.read(wait_stats),
                                 .global_scale = reader.read(global_scale),
                                 .num_max_tokens = read_integer(num_max_tokens),
                                 .num_experts = read_integer(num_experts),
                                 .use_fp8 = read_flag(use_fp8),
                                 .round_scale = read_flag(round_scale),
                                 .use_ue8m0 = read_flag(use_ue8m0),
                                 .use_nvfp4 = read_flag(use_nvfp4),
                                 .is_compact = read_flag(compact),
                                 .has_global_idx = read_flag(global_topk_idx),
                                 .is_reporting = read_flag(report_num_tokens),
                                 .is_async = read_flag(async_finish),
                                 .has_hook = read_flag(return_recv_hook)}));
  // Before the launch: without its hook a call cannot go on, nor its peers.
  LowLatencyDispatchResult& result = reserved.result;
  py::object hook = hook_of(std::move(result.pending));
  py::object payload = object_of(std::move(result.recv_x));
  if (result.recv_scales) {
    payload = py::make_tuple(std::move(payload), object_of(std::move(result.recv_scales)));
  }
  py::object handle = view_of(handle_type, std::move(result.record));
  py::object count = object_of(std::move(result.recv_count));
  LowLatencyCompletion completion = calls.launch(std::move(reserved));
  return py::make_tuple(std::move(payload), std::move(count), std::move(handle),
                        overlap_of(completion), std::move(hook));
}

// As Buffer.low_latency_combine, all by position -> (combined_x, event, hook)
py::object BoundLowLatency::combine(const Arguments<11>& given) {
  const auto [x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish,
              return_recv_hook, out, wait_stats, one_rounding] = given;
  const TensorReader& reader = buffer->reader;
  ReservedLowLatencyCombine reserved =
      calls.reserve(calls.check({.x = reader.read(x),
                                 .topk_idx = reader.read(topk_idx),
                                 .topk_weights = reader.read(topk_weights),
                                 .out = reader.read(out),
                                 .wait_stats = reader.read(wait_stats),
                                 .handle = record_of_view<Record>(handle),
                                 .handle_object = handle,
                                 .use_logfmt = read_flag(use_logfmt),
                                 .zero_copy = read_flag(zero_copy),
                                 .one_rounding = read_flag(one_rounding),
                                 .is_async = read_flag(async_finish),
                                 .has_hook = read_flag(return_recv_hook)}));
  py::object hook = hook_of(std::move(reserved.result.pending));
  py::object sums = object_of(std::move(reserved.result.combined_x));
  LowLatencyCompletion completion = calls.launch(std::move(reserved));
  return py::make_tuple(std::move(sums), overlap_of(completion), std::move(hook));
}

py::object BoundLowLatency::wait_num_tokens(const Arguments<0>& /*none*/) {
  return py::int_(calls.wait_num_tokens());
}

void bind_low_latency_calls(py::module_& m) {
  using namespace pybind11::literals;
  m.def("low_latency_available_blocks", &low_latency_available_blocks, "num_sms"_a, "wanted"_a,
        "Blocks that a low-latency call may have; `wanted` is taken as it is, unless it is None.");
  py::class_<Record, std::shared_ptr<Record>>(m, "LowLatencyRecord", py::module_local(),
                                              "What a low-latency dispatch learned.")
      .def_readonly("num_tokens", &Record::num_tokens)
      .def_property_readonly("num_max_tokens",
                             [](const Record& self) { return self.form->options().num_max_tokens; })
      .def_property_readonly("hidden",
                             [](const Record& self) { return self.form->options().hidden; })
      .def_property_readonly("num_experts",
                             [](const Record& self) { return self.form->options().num_experts; })
      .def_property_readonly("num_topk",
                             [](const Record& self) { return self.form->options().num_topk; })
      .def_property_readonly("is_compact",
                             [](const Record& self) { return self.form->options().is_compact; })
      .def_property_readonly("rank", [](const Record& self) { return self.rank; })
      .def_property_readonly(
          "members", [](const Record& self) { return py::tuple(py::cast(self.owner->members)); })
      .def_property_readonly("rows_shape",
                             [](const Record& self) { return tuple_of(self.form->rows); })
      .def_property_readonly(
          "metadata", [](const Record& self) { return object_of(Object(self.metadata.tensor)); })
      .def(
          "part", [](Record& self, const std::string& name) { return object_of(self.part(name)); },
          "name"_a);

  py::class_<BoundLowLatency, std::shared_ptr<BoundLowLatency>> calls(
      m, "LowLatencyCalls", py::module_local(),
      "The low-latency calls of one Buffer; see csrc/host/calls/low_latency.hpp.");
  calls
      .def(py::init([](std::shared_ptr<BoundBuffer> buffer, std::shared_ptr<Framework> framework,
                       bool can_shrink, std::optional<int> num_wanted_blocks,
                       py::object handle_type, py::object tensors_event) {
             return std::make_shared<BoundLowLatency>(
                 std::move(buffer),
                 LowLatencySettings{std::move(framework), can_shrink, num_wanted_blocks},
                 std::move(handle_type), std::move(tensors_event));
           }),
           "buffer"_a, py::kw_only(), "framework"_a, "can_shrink"_a, "num_wanted_blocks"_a,
           "handle_type"_a, "tensors_event"_a)
      .def(
          "num_blocks",
          [](const BoundLowLatency& self, py::handle num_max_tokens, py::handle hidden,
             py::handle num_topk, py::handle num_experts) {
            return self.calls.num_blocks(read_integer(num_max_tokens.ptr()),
                                         read_integer(hidden.ptr()), read_integer(num_topk.ptr()),
                                         read_integer(num_experts.ptr()));
          },
          "num_max_tokens"_a, "hidden"_a, "num_topk"_a, "num_experts"_a)
      .def(
          "combine_buffer",
          [](const BoundLowLatency& self, py::handle handle) {
            const std::shared_ptr<Record> record = record_of_view<Record>(handle.ptr());
            self.calls.require_handle(record.get(), handle.ptr());
            const MadeTensor* found = self.calls.combine_buffer(*record->form);
            return found == nullptr ? py::object(py::none()) : object_of(Object(found->tensor));
          },
          "handle"_a)
      .def(
          "keep_combine_buffer",
          [](BoundLowLatency& self, py::handle handle, py::object buffer) {
            const std::shared_ptr<Record> record = record_of_view<Record>(handle.ptr());
            self.calls.require_handle(record.get(), handle.ptr());
            const uintptr_t address = self.buffer->reader.read(buffer.ptr()).address;
            self.calls.keep_combine_buffer(*record->form, {to_object(std::move(buffer)), address});
          },
          "handle"_a, "buffer"_a)
      .def_property_readonly("num_forms",
                             [](const BoundLowLatency& self) { return self.calls.num_forms(); })
      .def_property_readonly("has_pending",
                             [](const BoundLowLatency& self) { return self.calls.has_pending(); })
      .def(
          "forget_pending",
          [](BoundLowLatency& self, bool was_destroyed) {
            self.calls.forget_pending(was_destroyed);
          },
          py::kw_only(), "was_destroyed"_a);
  def_call<&BoundLowLatency::dispatch>(calls, "dispatch");
  def_call<&BoundLowLatency::combine>(calls, "combine");
  def_call<&BoundLowLatency::wait_num_tokens>(calls, "wait_num_tokens");
}

}  // namespace deep_comm
