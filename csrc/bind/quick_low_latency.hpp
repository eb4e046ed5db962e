// Whole low-latency calls in one step, for the host's hot path: tensors are looked at, outputs made
// and the kernel launched here, in the place of some sixty steps of Python: on the caller's stream or,
// with async_finish, on the communication stream. Only calls of a form that was called before, with
// arguments that are beyond doubt: everything else is left to Python, untouched, which says what is
// wrong with it.
#pragma once

#include <deque>

#include "bind/arguments.hpp"
#include "bind/numbers.hpp"
#include "bind/quick_streams.hpp"
#include "bind/slots.hpp"
#include "bind/torch_tensors.hpp"

namespace deep_comm {

// A plan with the engine it is for, which lives as long.
template <class Target>
struct BoundLowLatencyPlan {
  Engine<Target>* engine;
  LowLatencyPlan plan;
};

// A form of calls, and what Python knows it by.
struct QuickForm {
  LowLatencyPlan plan;
  pybind11::object shape;  // LowLatencyShape
  bool use_fp8;
  bool use_nvfp4;
  int num_local_experts;
  TensorForm recv_x;
  TensorBlock<3> outputs;  // scales, if there are, metadata, and recv_count, a part of it
  bool has_scales;
};

// What Python gives such calls, beside torch.
struct QuickParts {
  uintptr_t empty_address;       // of tensors without elements
  pybind11::list pending[2];     // of dispatches, of combines: what hooks that have not run keep
  pybind11::object refuse_hook;  // () raises: the hook has run, or the Buffer is destroyed
  pybind11::object end;          // () behind every call, or None
  pybind11::object bfloat16;
  SlottedType<4> handle_type;      // shape, metadata, num_tokens, _parts
  pybind11::object event_type;     // of synchronous calls; needs no __init__
  pybind11::object outputs_event;  // (outputs) of asynchronous ones, which see to these
  pybind11::object asynchronous;   // of StreamParts::begin, for async_finish
  quick::StreamParts streams;
};

template <class Target>
struct QuickLowLatency {
  Engine<Target>* engine;
  TorchTensors torch;
  QuickParts parts;
  TensorForm ticket;
  pybind11::object zero;
  std::deque<QuickForm> forms;  // a handful; their addresses stay
  PyObject* self = nullptr;     // this object as Python knows it, borrowed
  bool is_served = true;        // false: ranks are absent that calls cannot do without

  uintptr_t given(uintptr_t address) const { return address == 0 ? parts.empty_address : address; }
  // The Buffer can be used from here.
  bool is_ready(int kind) const {
    return is_served && PyList_GET_SIZE(parts.pending[kind].ptr()) < 2 && engine->is_sound() &&
           Target::is_current(torch.device_index());
  }
  // And no call of the kind waits for its hook: how many may be sent meanwhile Python counts
  // (LowLatencyState.require_half), for calls that come through it.
  bool is_alone(int kind) const {
    return PyList_GET_SIZE(parts.pending[kind].ptr()) == 0 && is_ready(kind);
  }
  void end() const {
    if (!parts.end.is_none()) parts.end();
  }
};

// The receive phase of a call: a function without arguments, to be called once.
template <class Target, class Call>
struct QuickHook {
  QuickLowLatency<Target>* calls;
  const QuickForm* form;
  Call call;
  uint64_t stream;
  int kind;              // of pending
  pybind11::tuple kept;  // what the phases work on, and which hook this is
};

namespace detail {

// A number that needs no conversion; false for anything else.
inline bool as_int(PyObject* object, int* value) {
  if (!PyLong_CheckExact(object)) return false;
  const long long number = PyLong_AsLongLong(object);
  if (number < 0 || number > INT32_MAX) {
    PyErr_Clear();
    return false;
  }
  *value = static_cast<int>(number);
  return true;
}

inline bool as_bool(PyObject* object, bool* value) {
  *value = object == Py_True;
  return *value || object == Py_False;
}

// topk_idx [num_tokens, num_topk] and its optional weights; num_topk < 0: any.
inline bool routing(const TorchTensors& torch, PyObject* idx, PyObject* weights, int64_t num_tokens,
                    int64_t num_topk, TensorView* idx_view, TensorView* weights_view) {
  if (!torch.view(idx, idx_view) || !(idx_view->is(kDlInt64) || idx_view->is(kDlInt32)) ||
      idx_view->num_dims() != 2 || idx_view->extent(0) != num_tokens ||
      (num_topk >= 0 && idx_view->extent(1) != num_topk) || !idx_view->is_contiguous()) {
    return false;
  }
  return weights == Py_None ||
         torch.matrix(weights, kDlFloat32, num_tokens, idx_view->extent(1), weights_view);
}

// An optional vector; false if it is not what is wanted.
inline bool optional_vector(const TorchTensors& torch, PyObject* object, DlDataType dtype,
                            int64_t size, uintptr_t* address) {
  *address = 0;
  if (object == Py_None) return true;
  TensorView view;
  if (!torch.vector(object, dtype, size, &view)) return false;
  *address = view.address();
  return true;
}

// An optional float32 of any shape that has one element.
inline bool optional_scalar(const TorchTensors& torch, PyObject* object, uintptr_t* address) {
  *address = 0;
  if (object == Py_None) return true;
  TensorView view;
  if (!torch.view(object, &view) || !view.is(kDlFloat32)) return false;
  for (int dim = 0; dim < view.num_dims(); ++dim) {
    if (view.extent(dim) != 1) return false;
  }
  *address = view.address();
  return true;
}

inline bool is_aligned(uintptr_t address) { return address % 16 == 0; }

}  // namespace detail

template <class Target>
void run_quick(const QuickLowLatency<Target>& self, const QuickForm& form,
               const LowLatencyDispatchCall& call, uint64_t stream) {
  const MaybeRelease<Target::kIsSynchronous> release(self.engine->launches_last());
  self.engine->low_latency_dispatch(form.plan, call, stream);
}

template <class Target>
void run_quick(const QuickLowLatency<Target>& self, const QuickForm& form,
               const LowLatencyCombineCall& call, uint64_t stream) {
  const MaybeRelease<Target::kIsSynchronous> release(self.engine->launches_last());
  self.engine->low_latency_combine(form.plan, call, stream);
}

template <class Target, class Call>
pybind11::object quick_hook(QuickHook<Target, Call>& hook, PyObject* const* /*arguments*/) {
  QuickLowLatency<Target>& self = *hook.calls;
  PyObject* pending = self.parts.pending[hook.kind].ptr();
  Py_ssize_t place = PyList_GET_SIZE(pending) - 1;
  while (place >= 0 && PyList_GET_ITEM(pending, place) != hook.kept.ptr()) --place;
  if (place < 0 || !self.engine->is_open()) return self.parts.refuse_hook();
  if (PyList_SetSlice(pending, place, place + 1, nullptr) != 0) throw pybind11::error_already_set();
  {
    typename Target::DeviceScope scope(self.torch.device_index());
    run_quick(self, *hook.form, hook.call, hook.stream);
  }
  self.end();
  return pybind11::none();
}

// How a call is launched, and where.
struct QuickLaunch {
  bool has_hook;
  bool is_async;
  quick::Order order;

  // False: the call cannot run at once. Where it can, the communication stream is behind the
  // caller's already: from here on nothing is left to Python.
  template <class Target>
  bool begin(const QuickLowLatency<Target>& self) {
    if (!is_async) {
      order.stream = self.torch.current_stream();
      return true;
    }
    return !has_hook && self.parts.streams.begin(self.parts.asynchronous.ptr(), &order);
  }
  // The event of a call that has been launched. Of an asynchronous one torch's allocator is told
  // what else it works on than `outputs`, to which the event sees (OutputsEvent in events.py); in
  // both null is nothing.
  template <class Target>
  pybind11::object event(const QuickLowLatency<Target>& self,
                         std::initializer_list<PyObject*> given,
                         std::initializer_list<pybind11::object> outputs) const {
    if (!is_async) return without_init(self.parts.event_type);
    for (PyObject* tensor : given) record(self, tensor);
    try {
      pybind11::list kept;
      for (const pybind11::object& output : outputs) {
        if (output) kept.append(output);
      }
      return self.parts.outputs_event(kept);
    } catch (...) {  // a signal's handler may raise: the kernel writes nevertheless
      for (const pybind11::object& output : outputs) record(self, output.ptr());
      throw;
    }
  }

 private:
  // Null and None: nothing.
  template <class Target>
  static void record(const QuickLowLatency<Target>& self, PyObject* tensor) {
    TensorView view;
    if (tensor == nullptr || tensor == Py_None) return;
    // A version of torch may not know how to describe a type that others do.
    if (!self.torch.view(tensor, &view) || !view.is_empty()) self.parts.streams.record(tensor);
  }
};

// Launches a call, or its send phase and then makes the hook of the other.
template <class Target, class Call>
pybind11::object launch_quick(QuickLowLatency<Target>& self, const QuickForm& form, Call call,
                              int kind, const QuickLaunch& launch, pybind11::tuple kept) {
  namespace py = pybind11;
  const uint64_t stream = launch.order.stream;
  call.send = true;
  call.receive = !launch.has_hook;
  run_quick(self, form, call, stream);
  if (!launch.has_hook) {
    if (launch.is_async) self.parts.streams.end(launch.order);
    self.end();
    return py::none();
  }
  // What the send phase may have recorded is raised by the hook: peers count on its receive phase.
  call.send = false;
  call.receive = true;
  self.parts.pending[kind].append(kept);
  return object_function<0, &quick_hook<Target, Call>>(
      "hook", QuickHook<Target, Call>{&self, &form, call, stream, kind, std::move(kept)},
      py::reinterpret_borrow<py::object>(self.self));
}

// (x, topk_idx, num_max_tokens, num_experts, cumulative_stats, wait_stats, use_fp8, round_scale,
//  use_ue8m0, return_recv_hook, topk_weights, compact, report_num_tokens, use_nvfp4, x_global_scale,
//  async_finish)
//   -> (recv_x or (recv_x, scales), recv_count, handle, event, hook), or None.
template <class Target>
pybind11::object quick_dispatch(QuickLowLatency<Target>* calls, PyObject* const* arguments) {
  namespace py = pybind11;
  QuickLowLatency<Target>& self = *calls;
  const TorchTensors& torch = self.torch;
  TensorView x, idx, weights;
  int num_max_tokens, num_experts;
  bool use_fp8, round_scale, use_ue8m0, is_compact, is_reporting, use_nvfp4;
  QuickLaunch launch{};
  using detail::as_bool, detail::as_int;
  if (!as_int(arguments[2], &num_max_tokens) || !as_int(arguments[3], &num_experts) ||
      !as_bool(arguments[6], &use_fp8) || !as_bool(arguments[7], &round_scale) ||
      !as_bool(arguments[8], &use_ue8m0) || !as_bool(arguments[9], &launch.has_hook) ||
      !as_bool(arguments[11], &is_compact) || !as_bool(arguments[12], &is_reporting) ||
      !as_bool(arguments[13], &use_nvfp4) || !as_bool(arguments[15], &launch.is_async) ||
      !torch.matrix(arguments[0], kDlBfloat16, -1, -1, &x) ||
      !detail::routing(torch, arguments[1], arguments[10], x.extent(0), -1, &idx, &weights)) {
    return py::none();
  }
  use_fp8 = use_fp8 && !use_nvfp4;
  const bool has_weights = arguments[10] != Py_None;
  const QuickForm* form = nullptr;
  for (const QuickForm& known : self.forms) {
    const LowLatencyOptions& options = known.plan.options;
    if (options.num_max_tokens == num_max_tokens && options.hidden == x.extent(1) &&
        options.num_topk == idx.extent(1) && options.num_experts == num_experts &&
        known.use_fp8 == use_fp8 && known.use_nvfp4 == use_nvfp4 &&
        options.round_scale == round_scale && options.use_ue8m0 == use_ue8m0 &&
        options.is_compact == is_compact && options.has_weights == has_weights) {
      form = &known;
      break;
    }
  }
  LowLatencyDispatchCall call{};
  if (form == nullptr || x.extent(0) > num_max_tokens || !detail::is_aligned(x.address()) ||
      !detail::optional_vector(torch, arguments[4], kDlInt32, form->num_local_experts,
                               &call.cumulative_stats) ||
      !detail::optional_vector(torch, arguments[5], kDlInt64, self.engine->num_group_ranks(),
                               &call.wait_stats) ||
      !detail::optional_scalar(torch, arguments[14], &call.global_scale) ||
      (arguments[14] != Py_None && !use_nvfp4) || !self.is_ready(0) || !launch.begin(self)) {
    return py::none();
  }
  py::object rows = torch.empty(form->recv_x, &call.recv_x), payload = rows;
  auto [tensors, addresses] = torch.pieces(form->outputs);
  auto& [scales, metadata, recv_count] = tensors;
  if (form->has_scales) payload = py::make_tuple(rows, scales);
  call.recv_scales = addresses[0];
  call.metadata = addresses[1];
  call.x = self.given(x.address());
  call.topk_idx = self.given(idx.address());
  call.topk_idx_bytes = idx.element_bytes();
  call.topk_weights = has_weights ? self.given(weights.address()) : 0;
  call.num_tokens = static_cast<int>(x.extent(0));
  call.recv_x = self.given(call.recv_x);
  call.has_ticket = launch.has_hook;
  call.is_reporting = is_reporting;
  py::tuple kept;
  if (launch.has_hook) {
    kept = py::make_tuple(payload, metadata, py::handle(arguments[0]), py::handle(arguments[1]),
                          py::handle(arguments[4]), py::handle(arguments[5]),
                          py::handle(arguments[10]), py::handle(arguments[14]));
  }
  py::object hook = launch_quick(self, *form, call, 0, launch, std::move(kept));
  py::object event = launch.event(
      self, {arguments[0], arguments[1], arguments[4], arguments[5], arguments[10], arguments[14]},
      {rows, scales, metadata});
  py::object handle = self.parts.handle_type.make(
      {form->shape, std::move(metadata), py::int_(call.num_tokens), py::dict()});
  return py::make_tuple(std::move(payload), std::move(recv_count), std::move(handle),
                        std::move(event), std::move(hook));
}

// (x, topk_idx, topk_weights, shape, metadata, num_tokens, return_recv_hook, out, wait_stats,
//  use_logfmt, one_rounding, rows, async_finish) -> (combined_x, event, hook), or None. rows: None,
// or the buffer that x only gives the shape of.
template <class Target>
pybind11::object quick_combine(QuickLowLatency<Target>* calls, PyObject* const* arguments) {
  namespace py = pybind11;
  QuickLowLatency<Target>& self = *calls;
  const TorchTensors& torch = self.torch;
  const QuickForm* form = nullptr;
  for (const QuickForm& known : self.forms) {
    if (known.shape.ptr() == arguments[3]) form = &known;
  }
  if (form == nullptr) return py::none();
  const LowLatencyOptions& options = form->plan.options;
  const int num_ranks = self.engine->num_group_ranks();
  const int64_t num_rows = int64_t{num_ranks} * options.num_max_tokens;
  TensorView x, idx, weights, metadata, out;
  int num_tokens;
  bool one_rounding;
  const bool has_buffer = arguments[11] != Py_None;
  QuickLaunch launch{};
  LowLatencyCombineCall call{};
  using detail::as_bool;
  if (!detail::as_int(arguments[5], &num_tokens) || !as_bool(arguments[6], &launch.has_hook) ||
      !as_bool(arguments[9], &call.use_logfmt) || !as_bool(arguments[10], &one_rounding) ||
      !as_bool(arguments[12], &launch.is_async) || !torch.view(arguments[0], &x) ||
      !x.is(kDlBfloat16) || !(has_buffer || x.is_contiguous()) ||
      !detail::routing(torch, arguments[1], arguments[2], num_tokens, options.num_topk, &idx,
                       &weights) ||
      !torch.view(arguments[4], &metadata) ||
      !detail::optional_vector(torch, arguments[8], kDlInt64, num_ranks, &call.wait_stats)) {
    return py::none();
  }
  // Rows as dispatch returned them: [N, hidden] or [L, N, hidden].
  const int num_dims = options.is_compact ? 2 : 3;
  const bool needs_weights = one_rounding || !(options.is_compact || options.has_weights);
  if (x.num_dims() != num_dims || x.extent(num_dims - 2) != num_rows ||
      x.extent(num_dims - 1) != options.hidden ||
      (num_dims == 3 && x.extent(0) != form->num_local_experts) ||
      (has_buffer && !(torch.view(arguments[11], &x) && x.is(kDlBfloat16) &&
                       x.num_dims() == num_dims && x.is_contiguous())) ||
      !detail::is_aligned(x.address()) || (needs_weights && arguments[2] == Py_None) ||
      (call.use_logfmt && (has_buffer || one_rounding || !form->plan.has_whole_log_pieces)) ||
      (one_rounding && (options.is_compact || !form->plan.has_room_for_selections))) {
    return py::none();
  }
  const bool has_out = arguments[7] != Py_None;
  if (has_out && !(torch.matrix(arguments[7], kDlBfloat16, num_tokens, options.hidden, &out) &&
                   detail::is_aligned(out.address()))) {
    return py::none();
  }
  if (!self.is_ready(1) || !launch.begin(self)) return py::none();
  py::object combined_x;
  if (has_out) {
    combined_x = py::reinterpret_borrow<py::object>(arguments[7]);
    call.combined_x = out.address();
  } else {
    combined_x =
        torch.empty_matrix(num_tokens, options.hidden, self.parts.bfloat16, &call.combined_x);
  }
  call.x = self.given(x.address());
  call.metadata = metadata.address();
  call.topk_idx = self.given(idx.address());
  call.topk_idx_bytes = idx.element_bytes();
  call.topk_weights = needs_weights ? self.given(weights.address()) : 0;
  call.num_tokens = num_tokens;
  call.rows = one_rounding         ? CombineRows::kSelections
              : options.is_compact ? CombineRows::kReduced
                                   : CombineRows::kSums;
  call.combined_x = self.given(call.combined_x);
  py::tuple kept;
  PyObject* const source = arguments[has_buffer ? 11 : 0];
  if (launch.has_hook) {
    py::object ticket = torch.empty(self.ticket, &call.ticket);
    kept = py::make_tuple(combined_x, std::move(ticket), py::handle(source),
                          py::handle(arguments[1]), py::handle(arguments[2]),
                          py::handle(arguments[4]), py::handle(arguments[8]));
  }
  py::object hook = launch_quick(self, *form, call, 1, launch, std::move(kept));
  py::object event = launch.event(self,
                                  {has_out ? combined_x.ptr() : nullptr, source, arguments[1],
                                   arguments[2], arguments[4], arguments[8]},
                                  {has_out ? py::object() : combined_x});
  return py::make_tuple(std::move(combined_x), std::move(event), std::move(hook));
}

template <class Target>
pybind11::class_<QuickLowLatency<Target>> bind_quick_low_latency(
    pybind11::module_& m, pybind11::class_<Engine<Target>>& engine) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Calls = QuickLowLatency<Target>;
  using Plan = BoundLowLatencyPlan<Target>;
  using Form = std::tuple<py::object, py::object, py::object>;
  py::class_<Calls> quick(m, "QuickLowLatency", py::module_local());
  quick
      .def(
          "add",
          [](Calls& self, const Plan& plan, py::object shape, bool use_fp8, bool use_nvfp4,
             int num_local_experts, const std::vector<Form>& forms) {
            const auto form = [&](size_t position) {
              const auto& [extents, strides, dtype] = forms.at(position);
              return TensorForm(py::tuple(extents), py::tuple(strides), dtype);
            };
            const bool has_scales = forms.size() == 4;
            // Rows have memory of their own, as a handle is kept until combine.
            TensorBlock<3> outputs(std::get<2>(forms.at(1)));
            if (has_scales) {
              const py::object scale = std::get<2>(forms[3]);
              outputs.put(0, form(3), scale.attr("itemsize").template cast<int>());
            }
            outputs.put(1, form(1), sizeof(int32_t));
            outputs.put_part(2, 1, form(2), 0);
            self.forms.push_back({.plan = plan.plan,
                                  .shape = std::move(shape),
                                  .use_fp8 = use_fp8,
                                  .use_nvfp4 = use_nvfp4,
                                  .num_local_experts = num_local_experts,
                                  .recv_x = form(0),
                                  .outputs = std::move(outputs),
                                  .has_scales = has_scales});
          },
          "plan"_a, "shape"_a, "use_fp8"_a, "use_nvfp4"_a, "num_local_experts"_a, "forms"_a)
      .def_readwrite("is_served", &Calls::is_served)
      .def_property_readonly("dispatch",
                             [](const py::object& self) {
                               return object_function<16, &quick_dispatch<Target>>(
                                   "quick_dispatch", self.cast<Calls*>(), self);
                             })
      .def_property_readonly("combine", [](const py::object& self) {
        return object_function<13, &quick_combine<Target>>("quick_combine", self.cast<Calls*>(),
                                                           self);
      });
  engine.def(
      "quick_low_latency",
      [](Engine<Target>& engine, py::object tensor_type, const py::object& exchange_api,
         py::object empty, py::object part, int device_type, int device_index,
         uintptr_t empty_address, py::list pending_dispatches, py::list pending_combines,
         py::object refuse_hook, py::object end, py::object bfloat16, py::object int32,
         const py::object& handle_type, py::object event_type, py::object outputs_event,
         py::object streams) {
        auto calls = std::make_unique<Calls>(
            Calls{.engine = &engine,
                  .torch = {std::move(tensor_type), exchange_api, std::move(empty), std::move(part),
                            device_type, device_index},
                  .parts = {empty_address,
                            {std::move(pending_dispatches), std::move(pending_combines)},
                            std::move(refuse_hook),
                            std::move(end),
                            std::move(bfloat16),
                            {handle_type,
                             {Slot(handle_type, "shape"), Slot(handle_type, "metadata"),
                              Slot(handle_type, "num_tokens"), Slot(handle_type, "_parts")}},
                            std::move(event_type),
                            std::move(outputs_event),
                            py::make_tuple(py::none(), false),
                            quick::StreamParts::make(std::move(streams))},
                  .ticket = TensorForm::vector(1, std::move(int32)),
                  .zero = py::int_(0),
                  .forms = {}});
        Calls* made = calls.get();
        py::object self = py::cast(std::move(calls));
        made->self = self.ptr();
        return self;
      },
      py::keep_alive<0, 1>(), "tensor_type"_a, "exchange_api"_a, "empty"_a, "part"_a,
      "device_type"_a, "device_index"_a, py::kw_only(), "empty_address"_a, "pending_dispatches"_a,
      "pending_combines"_a, "refuse_hook"_a, "end"_a, "bfloat16"_a, "int32"_a, "handle_type"_a,
      "event_type"_a, "outputs_event"_a, "streams"_a);
  return quick;
}

}  // namespace deep_comm
