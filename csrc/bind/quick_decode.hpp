// The two calls of a layer's decode step (deep_comm/layer/quick_decode.py), each in one step from
// what the layer is given to what it hands out, the second also with what "auto" asks behind it: what
// a step costs beside its tensors and launches counts, because "auto" is held against it.
#pragma once

#include <memory>
#include <optional>

#include "bind/patient_words.hpp"
#include "bind/quick_low_latency.hpp"

namespace deep_comm {

// Of one layer: the form of all its calls, and what batches are made of.
template <class Target>
struct LayerDecode {
  QuickLowLatency<Target>* calls;
  const QuickForm* form;
  int64_t decode_tokens;        // the most that a step may have
  TensorForm rows;              // [L * N, hidden]: an expert's behind the other's
  pybind11::object batch_type;  // ExpertBatch, and what is alike in all of them
  pybind11::dict common;
  pybind11::object state_type;  // Decoded, a tuple
  std::optional<HostWords> words;
  pybind11::object words_owner;
  pybind11::object rule;  // ModeRule
  Slot num_steps;         // of the rule
  pybind11::object x_name, counts_name, state_name;

  const TorchTensors& torch() const { return calls->torch; }
  const LowLatencyOptions& options() const { return form->plan.options; }
};

template <class Target>
using SharedLayer = std::shared_ptr<const LayerDecode<Target>>;

// (x, topk_idx, topk_weights, is_asking) -> ExpertBatch, or None: nothing has happened. is_asking:
// of "auto". The ranks of the host are told of it here, behind all that can fail and ahead of the
// launch, so that they know by the time they ask.
template <class Target>
pybind11::object begin_layer(SharedLayer<Target>& shared, PyObject* const* arguments) {
  namespace py = pybind11;
  const LayerDecode<Target>& layer = *shared;
  QuickLowLatency<Target>& self = *layer.calls;
  TensorView x, idx, weights;
  if (!layer.torch().matrix(arguments[0], kDlBfloat16, -1, layer.options().hidden, &x) ||
      x.extent(0) > layer.decode_tokens || !detail::is_aligned(x.address()) ||
      arguments[2] == Py_None ||
      !detail::routing(layer.torch(), arguments[1], arguments[2], x.extent(0),
                       layer.options().num_topk, &idx, &weights) ||
      !self.is_alone(0)) {
    return py::none();
  }
  const uint64_t stream = layer.torch().current_stream();
  const bool is_asking = arguments[3] == Py_True;
  // Where a graph is captured, "auto" asks nobody.
  if (is_asking && !self.parts.streams.is_eager(stream)) return py::none();
  if (is_asking && layer.words) layer.words->claim();
  LowLatencyDispatchCall call{};
  py::object rows = layer.torch().empty(layer.rows, &call.recv_x);
  auto [tensors, addresses] = layer.torch().pieces(layer.form->outputs);
  auto& [no_scales, metadata, counts] = tensors;
  call.metadata = addresses[1];
  call.x = self.given(x.address());
  call.topk_idx = self.given(idx.address());
  call.topk_idx_bytes = idx.element_bytes();
  call.topk_weights = self.given(weights.address());
  call.num_tokens = static_cast<int>(x.extent(0));
  call.recv_x = self.given(call.recv_x);
  // To the host, which looks at words instead where there are some: a kernel that has stored to the
  // host's memory ends 0.8 us later.
  call.is_reporting = is_asking && !layer.words;
  call.send = call.receive = true;
  uint64_t exchange = 0;
  if (is_asking && layer.words) {
    exchange = layer.words->tell(static_cast<uint64_t>(call.num_tokens));
  }
  run_quick(self, *layer.form, call, stream);
  self.end();
  auto held = py::reinterpret_steal<py::dict>(PyDict_Copy(layer.common.ptr()));
  if (!held) throw py::error_already_set();
  held[layer.x_name] = std::move(rows);
  held[layer.counts_name] = std::move(counts);
  held[layer.state_name] = tuple_of<5>(
      layer.state_type, {layer.form->shape, std::move(metadata), py::int_(call.num_tokens),
                         py::reinterpret_borrow<py::object>(arguments[1]), py::int_(exchange)});
  return instance_of(layer.batch_type, held);
}

// (rows, Decoded) -> the sums, or None, likewise.
template <class Target>
pybind11::object end_layer(SharedLayer<Target>& shared, PyObject* const* arguments) {
  namespace py = pybind11;
  const LayerDecode<Target>& layer = *shared;
  QuickLowLatency<Target>& self = *layer.calls;
  PyObject* const state = arguments[1];
  if (Py_TYPE(state) != reinterpret_cast<PyTypeObject*>(layer.state_type.ptr()) ||
      PyTuple_GET_SIZE(state) != 5 || PyTuple_GET_ITEM(state, 0) != layer.form->shape.ptr()) {
    return py::none();
  }
  const int64_t num_rows = int64_t{self.engine->num_group_ranks()} * layer.options().num_max_tokens;
  TensorView x, idx, metadata, none;
  int num_tokens;
  // What the others have told is on its way here while this call launches.
  if (layer.words) {
    const uint64_t exchange = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(state, 4));
    if (exchange != 0) layer.words->prefetch(exchange);
  }
  if (!layer.torch().matrix(arguments[0], kDlBfloat16, layer.form->num_local_experts * num_rows,
                            layer.options().hidden, &x) ||
      !detail::is_aligned(x.address()) ||
      !layer.torch().view(PyTuple_GET_ITEM(state, 1), &metadata) ||
      !detail::as_int(PyTuple_GET_ITEM(state, 2), &num_tokens) ||
      !detail::routing(layer.torch(), PyTuple_GET_ITEM(state, 3), Py_None, num_tokens,
                       layer.options().num_topk, &idx, &none) ||
      !self.is_alone(1)) {
    return py::none();
  }
  const uint64_t stream = layer.torch().current_stream();
  LowLatencyCombineCall call{};
  py::object combined_x = layer.torch().empty_matrix(num_tokens, layer.options().hidden,
                                                     self.parts.bfloat16, &call.combined_x);
  call.x = self.given(x.address());
  call.metadata = metadata.address();
  call.topk_idx = self.given(idx.address());
  call.topk_idx_bytes = idx.element_bytes();
  call.num_tokens = num_tokens;
  call.rows = CombineRows::kSums;
  call.combined_x = self.given(call.combined_x);
  call.send = call.receive = true;
  run_quick(self, *layer.form, call, stream);
  self.end();
  return combined_x;
}

// (rows, Decoded) -> the sums of a step of "auto" that began with decode, or None, likewise. All ranks
// had as many tokens as decode takes, and the rule has learned it. Otherwise it has learned nothing:
// (the sums, the most tokens that any rank had, or None where the words do not tell it).
template <class Target>
pybind11::object finish_layer(SharedLayer<Target>& shared, PyObject* const* arguments) {
  namespace py = pybind11;
  const LayerDecode<Target>& layer = *shared;
  py::object sums = end_layer(shared, arguments);
  if (sums.is_none()) return sums;
  if (!layer.words) return py::make_tuple(std::move(sums), py::none());
  const uint64_t exchange = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(arguments[1], 4));
  // It is looked at last: no SM waits for the host.
  const std::optional<uint64_t> most = patient_most(*layer.words, exchange);
  if (!most) return py::make_tuple(std::move(sums), py::none());
  if (*most > static_cast<uint64_t>(layer.decode_tokens)) {
    return py::make_tuple(std::move(sums), *most);
  }
  const long long counted = PyLong_AsLongLong(layer.num_steps.get(layer.rule));
  layer.num_steps.set(layer.rule, py::int_(counted + 1));
  return sums;
}

// The three functions. `shape`: of a form that was added, of bfloat16 rows that travel with their
// weights. `words`: the arguments of HostWords and what keeps its memory, or None.
template <class Target>
pybind11::object layer_calls(const pybind11::object& calls, const pybind11::object& shape,
                             int64_t decode_tokens, const pybind11::tuple& rows,
                             pybind11::object batch_type, pybind11::dict common,
                             pybind11::object state_type, const pybind11::object& words,
                             const pybind11::object& rule) {
  namespace py = pybind11;
  auto* self = calls.cast<QuickLowLatency<Target>*>();
  const QuickForm* form = nullptr;
  for (const QuickForm& known : self->forms) {
    if (known.shape.is(shape)) form = &known;
  }
  if (form == nullptr) throw std::invalid_argument("shape is of no form that was added");
  std::optional<HostWords> told;
  if (!words.is_none()) {
    const auto [address, rank, num_ranks, owner] =
        words.cast<std::tuple<uintptr_t, int, int, py::object>>();
    told.emplace(address, rank, num_ranks);
  }
  auto layer = std::make_shared<const LayerDecode<Target>>(
      LayerDecode<Target>{.calls = self,
                          .form = form,
                          .decode_tokens = decode_tokens,
                          .rows = {py::tuple(rows[0]), py::tuple(rows[1]), rows[2]},
                          .batch_type = std::move(batch_type),
                          .common = std::move(common),
                          .state_type = std::move(state_type),
                          .words = told,
                          .words_owner = words,
                          .rule = rule,
                          .num_steps = Slot(py::type::of(rule), "num_steps"),
                          .x_name = py::str("x"),
                          .counts_name = py::str("num_tokens_per_expert"),
                          .state_name = py::str("state")});
  return py::make_tuple(
      object_function<4, &begin_layer<Target>>("begin", SharedLayer<Target>(layer), calls),
      object_function<2, &end_layer<Target>>("end", SharedLayer<Target>(layer), calls),
      object_function<2, &finish_layer<Target>>("finish", SharedLayer<Target>(layer), calls));
}

}  // namespace deep_comm
