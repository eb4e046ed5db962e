// The calls of a layer's steps (deep_comm/layer/calls.py): from what the layer is given to its batch,
// and from the experts' rows to sums. The calls below are those of the Buffer; what is here is the
// layer's own: its rules, what makes a batch, and what "auto" asks after decode.
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "bind/bindings.hpp"
#include "bind/calls_low_latency.hpp"
#include "bind/handle.hpp"
#include "bind/host_counters.hpp"
#include "bind/interpreter.hpp"
#include "bind/views.hpp"
#include "host/calls/combine.hpp"
#include "host/calls/dispatch.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

using Which = GivenProperty::Which;

// What combine needs of a decode batch.
struct Decoded {
  std::shared_ptr<LowLatencyDispatchRecord> record;
  py::object topk_idx;
  uint64_t exchange;  // that its ranks have told of; 0: none
};

// What combine needs of a prefill batch, and tensors of it that are made when they are asked for.
struct Prefilled {
  std::shared_ptr<BoundBuffer> buffer;
  std::shared_ptr<DispatchRecord> record;
  RecordPart weights;        // float32 [S], of each row
  py::object given_weights;  // instead of them: what autograd knows them by

  py::object tensor(const char* name) const { return object_of(record->part(name)); }
  py::object tensor_of_weights() {
    if (given_weights) return given_weights;
    weights.made = weights.make(*record->framework);
    return object_of(weights.made);
  }
  // As combine takes them.
  TensorRef read_weights() const {
    if (given_weights) return buffer->reader.read(given_weights.ptr());
    TensorRef ref;
    ref.object = weights.made.get();
    ref.kind = TensorRef::Kind::kTensor;
    ref.is_on_device = true;
    ref.type = weights.spec.type;
    ref.num_dims = weights.spec.num_dims;
    ref.shape = weights.spec.shape;
    ref.strides = weights.spec.strides;
    ref.address = weights.address;
    return ref;
  }
};

// All that batches and calls of one layer have in common.
struct LayerForm {
  int64_t hidden, num_topk, num_experts, max_tokens, decode_tokens;
  int64_t num_slots;  // tokens of a rank that decode has room for
  ElementType type;
  std::string type_name;  // as torch prints it
  bool use_fp8;
  int64_t alignment, max_recv_rows;

  // Of a MoEShape.
  static LayerForm of(const py::object& shape, int64_t alignment, int64_t max_recv_rows) {
    const auto number = [&](const char* name) { return shape.attr(name).cast<int64_t>(); };
    const py::object dtype = shape.attr("dtype");
    return {.hidden = number("hidden"),
            .num_topk = number("num_topk"),
            .num_experts = number("num_experts"),
            .max_tokens = number("max_tokens"),
            .decode_tokens = number("decode_tokens"),
            .num_slots = number("num_slots"),
            .type = TorchTypes::get().of_dtype(dtype.ptr()).value(),
            .type_name = py::str(dtype).cast<std::string>(),
            .use_fp8 = shape.attr("fp8").cast<bool>(),
            .alignment = alignment,
            .max_recv_rows = max_recv_rows};
  }
};

// Names of a batch's values.
struct Keys {
  PyObject* x = PyUnicode_InternFromString("x");
  PyObject* scales = PyUnicode_InternFromString("scales");
  PyObject* counts = PyUnicode_InternFromString("counts");
  PyObject* num_tokens_per_expert = PyUnicode_InternFromString("num_tokens_per_expert");
  PyObject* state = PyUnicode_InternFromString("state");
  PyObject* dict = PyUnicode_InternFromString("__dict__");

  static const Keys& get() {
    static const Keys* const keys = new Keys();
    return *keys;
  }
};

void set_value(const py::dict& values, PyObject* key, const py::object& value) {
  if (PyDict_SetItem(values.ptr(), key, value.ptr()) != 0) throw py::error_already_set();
}

py::dict copy_of(const py::dict& values) {
  auto made = py::reinterpret_steal<py::dict>(PyDict_Copy(values.ptr()));
  if (!made) throw py::error_already_set();
  return made;
}

IntegerRef integer_of(int64_t value) {
  return {.is_given = true, .is_integer = true, .fits = true, .value = value};
}

// x, topk_idx and topk_weights of a step, by the layer's rules.
struct Tokens {
  TensorRef x, topk_idx, topk_weights;
  py::object kept_idx;  // what topk_idx is of
};

struct LayerCalls : std::enable_shared_from_this<LayerCalls> {
  std::shared_ptr<BoundBuffer> buffer;
  std::shared_ptr<BoundLowLatency> low_latency;  // null: the layer does not decode
  LayerForm form;
  py::object batch_type;                   // ExpertBatch
  py::dict decode_values, prefill_values;  // alike in all batches of a mode
  // ("dispatch" or "combine") -> what stands in for a Config, see BoundBuffer::read_config
  py::object default_config;
  py::object learn;  // ModeRule.learn(num_tokens)
  // What a rank with too many tokens for a decode step sends: tokens that go nowhere.
  py::object nowhere_int64, nowhere_int32, no_weights;
  std::optional<HostCounters> counters;
  py::object counters_owner;

  // ---- functions of Python's
  // (x, topk_idx, topk_weights, asks) -> ExpertBatch. asks: of "auto", all ranks learn the most tokens
  // of any. The token count is published after every check and before the launch, so that the peers of
  // this host know it when they ask.
  py::object decode(const Arguments<4>& given) { return send_decode(given, false).batch; }
  // The same -> (ExpertBatch, hook), which receives.
  py::object begin_decode(const Arguments<4>& given) {
    SentDecode sent = send_decode(given, true);
    return py::make_tuple(std::move(sent.batch), std::move(sent.hook));
  }
  // (x, topk_idx, topk_weights, is_bounded) -> ExpertBatch
  py::object prefill(const Arguments<4>& given) {
    return prefill_batch(dispatch(buffer->context, read_prefill(given, false)), is_bounded(given));
  }
  // The same -> a function that receives and returns the batch. The host has not waited for counts.
  py::object begin_prefill(const Arguments<4>& given);
  // (rows, state) -> the sums
  py::object combine(const Arguments<2>& given) { return send_sums(given, false).sums; }
  // The same -> (the sums, a function that receives them)
  py::object begin_combine(const Arguments<2>& given) {
    Sums sent = send_sums(given, true);
    return py::make_tuple(std::move(sent.sums), std::move(sent.receive));
  }
  // (rows, Decoded) of a step that asks -> (the sums, had all ranks as many tokens as decode takes?).
  // The rule has learned it. None: it has not, since the counters do not tell.
  py::object finish(const Arguments<2>& given);

  void use_counters(const py::object& given) {
    counters.reset();
    counters_owner = given;
    if (!given.is_none()) counters = given.cast<HostCounters>();
  }

  // ---- batches
  py::object batch_of(const py::dict& values) const;

 private:
  struct SentDecode {
    py::object batch;
    py::object hook;  // None: it has been received
  };
  struct Sums {
    py::object sums, receive;
  };
  friend struct PrefillReceive;

  static bool is_bounded(const Arguments<4>& given) { return read_flag(given[3]); }

  void require_batch(int num_topk, int num_experts, bool can_take) const;
  Tokens read_tokens(PyObject* x, PyObject* topk_idx, PyObject* topk_weights) const;
  void fit_to_decode(Tokens* tokens, bool asks) const;
  TensorRef read_rows(PyObject* given, int64_t num_rows, py::object* kept) const;
  ConfigChoice config_of(PyObject* operation);
  SentDecode send_decode(const Arguments<4>& given, bool has_hook);
  py::object flat_scales(const py::object& by_expert) const;
  py::object hook_of_scales(py::object hook, py::object by_expert, py::object flat);
  Sums send_sums(const Arguments<2>& given, bool is_async);
  Sums send_sums(PyObject* given_rows, const Decoded& state, bool is_async);
  Sums send_sums(PyObject* given_rows, const Prefilled& state, bool is_async);
  DispatchRequest read_prefill(const Arguments<4>& given, bool is_async);
  py::object prefill_batch(DispatchResult result, bool is_bounded) const;
};

// ---- arguments --------------------------------------------------------------------------------------

// The layer's rules. The Buffer's own come after, in its calls.
Tokens LayerCalls::read_tokens(PyObject* given_x, PyObject* given_idx,
                               PyObject* given_weights) const {
  const TensorReader& reader = buffer->reader;
  Tokens tokens{reader.read(given_x), reader.read(given_idx), reader.read(given_weights),
                py::reinterpret_borrow<py::object>(given_idx)};
  const auto require_tensor = [](const char* name, const TensorRef& tensor) {
    if (tensor.kind == TensorRef::Kind::kTensor) return;
    refuse_argument(name, given_property(Which::kTypeName, tensor.object), "must be a tensor");
  };
  const TensorRef &x = tokens.x, &idx = tokens.topk_idx;
  require_tensor("x", x);
  require_tensor("topk_idx", idx);
  require_tensor("topk_weights", tokens.topk_weights);
  if (x.num_dims != 2 || x.shape[1] != form.hidden || !(x.type == form.type)) {
    refuse_argument("x", given_property(Which::kShapeAndType, x.object),
                    "must be [tokens, " + std::to_string(form.hidden) + "] of " + form.type_name);
  }
  if (x.shape[0] > form.max_tokens) {
    refuse_argument("x", std::to_string(x.shape[0]) + " tokens",
                    "must have at most " + std::to_string(form.max_tokens) + " (max_tokens)");
  }
  if (idx.num_dims != 2 || idx.shape[1] != form.num_topk) {
    refuse_argument("topk_idx", given_property(Which::kShape, idx.object),
                    "must be [tokens, " + std::to_string(form.num_topk) + "] (num_topk)");
  }
  return tokens;
}

// A rank with too many tokens for a step that asks says so: it sends one more than decode takes, which
// go nowhere.
void LayerCalls::fit_to_decode(Tokens* tokens, bool asks) const {
  TensorRef& x = tokens->x;
  if (x.shape[0] <= form.decode_tokens) return;
  if (!asks) {
    refuse_argument("x", std::to_string(x.shape[0]) + " tokens",
                    "must have at most " + std::to_string(form.decode_tokens) +
                        " (decode_tokens) in a decode step or in a captured one");
  }
  TensorRef& idx = tokens->topk_idx;
  // The prefill that follows takes them, when peers count on this rank.
  require_topk(idx, tokens->topk_weights, x.shape[0], buffer->context.device_name);
  x.shape[0] = form.decode_tokens + 1;
  tokens->kept_idx = idx.type == kInt64 ? nowhere_int64 : nowhere_int32;
  idx = buffer->reader.read(tokens->kept_idx.ptr());
  tokens->topk_weights = buffer->reader.read(no_weights.ptr());
}

// Of a batch that comes back, whose selections are `num_topk` of `num_experts`.
void LayerCalls::require_batch(int num_topk, int num_experts, bool can_take) const {
  if (num_topk == form.num_topk && num_experts == form.num_experts && can_take) return;
  std::string given =
      "one of top-" + std::to_string(num_topk) + " of " + std::to_string(num_experts) + " experts";
  std::string rule = "must be of a layer with top-" + std::to_string(form.num_topk) + " of " +
                     std::to_string(form.num_experts) + " experts";
  if (!can_take) {
    given = "a decode batch";
    rule = "must be a prefill batch: this layer does not decode";
  }
  refuse(CallError::Class::kHandleMismatch, "batch", std::move(given), std::move(rule));
}

// What experts made of a batch: its rows, contiguous, of the layer's type. *kept: a copy, if it took one.
TensorRef LayerCalls::read_rows(PyObject* given, int64_t num_rows, py::object* kept) const {
  TensorRef rows = buffer->reader.read(given);
  if (rows.kind != TensorRef::Kind::kTensor || rows.num_dims != 2 || rows.shape[0] != num_rows ||
      rows.shape[1] != form.hidden || !(rows.type == form.type)) {
    const bool is_tensor = rows.kind == TensorRef::Kind::kTensor;
    refuse_argument(
        "rows", given_property(is_tensor ? Which::kShapeAndType : Which::kTypeName, rows.object),
        "must be what experts made of the batch: [" + std::to_string(num_rows) + ", " +
            std::to_string(form.hidden) + "] of " + form.type_name);
  }
  if (rows.is_contiguous()) return rows;
  *kept = py::handle(given).attr("contiguous")();
  return buffer->reader.read(kept->ptr());
}

ConfigChoice LayerCalls::config_of(PyObject* operation) {
  const auto found =
      py::reinterpret_steal<py::object>(PyObject_CallOneArg(default_config.ptr(), operation));
  if (!found) throw py::error_already_set();
  return buffer->read_config(Py_None, found.ptr());
}

// ---- batches ----------------------------------------------------------------------------------------

// An ExpertBatch, which is frozen, over these values.
py::object LayerCalls::batch_of(const py::dict& values) const {
  py::object batch = new_instance(batch_type);
  if (PyObject_GenericSetAttr(batch.ptr(), Keys::get().dict, values.ptr()) != 0) {
    throw py::error_already_set();
  }
  return batch;
}

// Memory for scales [L, N, S] as a batch has them: [L * N, S].
py::object LayerCalls::flat_scales(const py::object& by_expert) const {
  const int num_columns = form.hidden / kScaleBlockColumns;
  const auto num_scales = by_expert.attr("numel")().cast<int64_t>();
  return by_expert.attr("new_empty")(py::make_tuple(num_scales / num_columns, num_columns));
}

// Once they have come. It allocates nothing: peers count on this rank by then.
void fill_scales(const py::object& flat, const py::object& by_expert) {
  flat.attr("view")(by_expert.attr("shape")).attr("copy_")(by_expert);
}

py::object LayerCalls::prefill_batch(DispatchResult result, bool is_bounded) const {
  const Keys& keys = Keys::get();
  const py::dict values = copy_of(prefill_values);
  set_value(values, keys.x, object_of(std::move(result.recv_x)));
  set_value(values, keys.scales, object_of(std::move(result.recv_scales)));
  set_value(values, keys.counts,
            is_bounded ? py::object(py::none()) : list_of(result.num_recv_tokens_per_expert));
  set_value(values, keys.state,
            py::cast(Prefilled{
                buffer, std::move(result.record), std::move(result.deferred_topk_weights), {}}));
  return batch_of(values);
}

// ---- decode -----------------------------------------------------------------------------------------

// The receive phase of a decode dispatch with scales.
struct ScalesHook {
  std::shared_ptr<LayerCalls> of;
  py::object hook;
  py::object by_expert, flat;

  py::object receive(const Arguments<0>& /*none*/) {
    hook();
    fill_scales(flat, by_expert);
    return py::none();
  }
};

CallContext::InCall enter_call(ScalesHook& self) {
  return CallContext::InCall(self.of->buffer->context);
}

py::object LayerCalls::hook_of_scales(py::object hook, py::object by_expert, py::object flat) {
  return method_function<&ScalesHook::receive>(
      "hook",
      std::make_shared<ScalesHook>(
          ScalesHook{shared_from_this(), std::move(hook), std::move(by_expert), std::move(flat)}),
      buffer->python.raise_recorded);
}

LayerCalls::SentDecode LayerCalls::send_decode(const Arguments<4>& given, bool has_hook) {
  const auto [given_x, given_idx, given_weights, given_asks] = given;
  const bool asks = read_flag(given_asks);
  Tokens tokens = read_tokens(given_x, given_idx, given_weights);
  fit_to_decode(&tokens, asks);
  const bool tells = asks && counters;
  if (tells) counters->claim();
  LowLatencyCalls& calls = low_latency->calls;
  // Without shared counters the kernel itself reports the count, which costs 0.8 us.
  ReservedLowLatencyDispatch reserved =
      calls.reserve(calls.check({.x = tokens.x,
                                 .topk_idx = tokens.topk_idx,
                                 .topk_weights = tokens.topk_weights,
                                 .num_max_tokens = integer_of(form.num_slots),
                                 .num_experts = integer_of(form.num_experts),
                                 .use_fp8 = form.use_fp8,
                                 .is_reporting = asks && !counters,
                                 .has_hook = has_hook,
                                 .is_flat = true}));
  // Everything is made before the launch: peers count on this rank after it.
  LowLatencyDispatchResult& result = reserved.result;
  const Keys& keys = Keys::get();
  const py::dict values = copy_of(decode_values);
  set_value(values, keys.x, object_of(std::move(result.recv_x)));
  set_value(values, keys.num_tokens_per_expert, object_of(std::move(result.recv_count)));
  auto made =
      std::make_unique<Decoded>(Decoded{std::move(result.record), std::move(tokens.kept_idx), 0});
  Decoded& state = *made;
  set_value(values, keys.state, py::cast(std::move(made)));
  const py::object by_expert = object_of(std::move(result.recv_scales));
  const bool has_scales = !by_expert.is_none();
  py::object scales;
  if (has_scales) set_value(values, keys.scales, scales = flat_scales(by_expert));
  SentDecode sent{batch_of(values), low_latency->hook_of(std::move(result.pending))};
  if (has_hook && has_scales) sent.hook = hook_of_scales(std::move(sent.hook), by_expert, scales);
  buffer->context.keep_step([&] {
    if (tells) state.exchange = counters->publish(static_cast<uint64_t>(tokens.x.shape[0]));
    calls.launch(std::move(reserved));
  });
  if (!has_hook && has_scales) fill_scales(scales, by_expert);
  return sent;
}

LayerCalls::Sums LayerCalls::send_sums(PyObject* given_rows, const Decoded& state, bool is_async) {
  // What the others have told is on its way here while this call launches.
  if (counters && state.exchange != 0) counters->prefetch(state.exchange);
  const LowLatencyForm& of_state = *state.record->form;
  require_batch(of_state.options().num_topk, of_state.options().num_experts,
                low_latency != nullptr);
  py::object kept;
  LowLatencyCalls& calls = low_latency->calls;
  ReservedLowLatencyCombine reserved = calls.reserve(calls.check(
      {.x = read_rows(given_rows, of_state.num_local_experts * of_state.num_rows, &kept),
       .topk_idx = buffer->reader.read(state.topk_idx.ptr()),
       .handle = state.record,
       .has_hook = is_async,
       .is_flat = true}));
  Sums sent{object_of(std::move(reserved.result.combined_x)),
            low_latency->hook_of(std::move(reserved.result.pending))};
  calls.launch(std::move(reserved));
  return sent;
}

py::object LayerCalls::finish(const Arguments<2>& given) {
  const auto& state = py::handle(given[1]).cast<const Decoded&>();
  py::object sums = send_sums(given[0], state, false).sums;
  py::object fits = py::none();
  if (counters) {
    // It is looked at last: no SM waits for the host.
    const std::optional<uint64_t> most = wait_for_max(*counters, state.exchange);
    // Peers learn it: without it this rank might take another mode than they in the next step.
    if (most) buffer->context.keep_step([&] { fits = learn(*most); });
  }
  return py::make_tuple(std::move(sums), std::move(fits));
}

// ---- prefill ----------------------------------------------------------------------------------------

DispatchRequest LayerCalls::read_prefill(const Arguments<4>& given, bool is_async) {
  static PyObject* const operation = PyUnicode_InternFromString("dispatch");
  const Tokens tokens = read_tokens(given[0], given[1], given[2]);
  DispatchRequest request;
  request.payload.x = tokens.x;
  request.payload.scale_options.use_fp8 = form.use_fp8;
  request.topk_idx = tokens.topk_idx;
  request.topk_weights = tokens.topk_weights;
  request.expert_alignment = integer_of(form.alignment);
  request.num_worst_tokens = integer_of(is_bounded(given) ? form.max_recv_rows : 0);
  request.num_experts = integer_of(form.num_experts);
  request.flags = {
      .expand = true, .zero_padding = is_bounded(given) || form.alignment > 1, .defers_topk = true};
  request.config = config_of(operation);
  request.streams.is_async = is_async;
  return request;
}

// The rest of an asynchronous prefill dispatch.
struct PrefillReceive {
  std::shared_ptr<LayerCalls> of;
  std::shared_ptr<PendingDispatch> pending;  // null: bounded, and `result` is there
  DispatchResult result;

  py::object receive(const Arguments<0>& /*none*/) {
    if (pending != nullptr) result = pending->result();
    const bool is_bounded = pending == nullptr;
    of->buffer->overlap_of(std::move(result.event)).attr("current_stream_wait")();
    return of->prefill_batch(std::move(result), is_bounded);
  }
};

CallContext::InCall enter_call(PrefillReceive& self) {
  return CallContext::InCall(self.of->buffer->context);
}

py::object LayerCalls::begin_prefill(const Arguments<4>& given) {
  CallContext& context = buffer->context;
  const DispatchRequest request = read_prefill(given, true);
  auto rest = std::make_shared<PrefillReceive>();
  rest->of = shared_from_this();
  if (is_bounded(given)) {
    rest->result = dispatch(context, request);
  } else {
    rest->pending = begin_dispatch(context, request);
  }
  return method_function<&PrefillReceive::receive>("receive", std::move(rest),
                                                   buffer->python.raise_recorded);
}

LayerCalls::Sums LayerCalls::send_sums(PyObject* given_rows, const Prefilled& state,
                                       bool is_async) {
  static PyObject* const operation = PyUnicode_InternFromString("combine");
  require_batch(state.record->num_topk, state.record->num_experts, true);
  py::object kept;
  CombineRequest request;
  request.x = read_rows(given_rows, state.record->num_output_rows, &kept);
  request.handle.is_given = true;
  request.handle.record = state.record;
  request.topk_weights = state.read_weights();
  request.apply_weights = true;
  request.config = config_of(operation);
  request.streams.is_async = is_async;
  CombineResult result = deep_comm::combine(buffer->context, request);
  Sums sent{object_of(std::move(result.combined_x)), {}};
  if (is_async) {
    sent.receive = buffer->overlap_of(std::move(result.event)).attr("current_stream_wait");
  }
  return sent;
}

LayerCalls::Sums LayerCalls::send_sums(const Arguments<2>& given, bool is_async) {
  const py::handle state = given[1];
  if (py::isinstance<Prefilled>(state)) {
    return send_sums(given[0], state.cast<const Prefilled&>(), is_async);
  }
  return send_sums(given[0], state.cast<const Decoded&>(), is_async);
}

}  // namespace

void bind_layer_calls(py::module_& m) {
  using namespace pybind11::literals;
  py::class_<Decoded>(m, "Decoded", py::module_local(), "What combine needs of a decode batch.")
      .def_readonly("record", &Decoded::record)
      .def_readonly("exchange", &Decoded::exchange);
  py::class_<Prefilled>(m, "Prefilled", py::module_local(),
                        "What combine needs of a prefill batch.")
      .def_property_readonly("num_tokens_per_expert",
                             [](const Prefilled& self) { return self.tensor("expert_counts"); })
      .def_property_readonly("offsets",
                             [](const Prefilled& self) { return self.tensor("expert_offsets"); })
      .def_property_readonly("weights", &Prefilled::tensor_of_weights)
      .def_property_readonly(
          "handle", [](const Prefilled& self) { return handle_of(*self.buffer, self.record); })
      .def_property_readonly("max_num_tokens",
                             [](const Prefilled& self) { return self.record->max_num_tokens; })
      .def(
          "weighed_by",
          [](const Prefilled& self, py::object weights) {
            return Prefilled{self.buffer, self.record, self.weights, std::move(weights)};
          },
          "weights"_a);

  py::class_<LayerCalls, std::shared_ptr<LayerCalls>> calls(
      m, "LayerCalls", py::module_local(),
      "What the steps of one layer are made of; see deep_comm/layer/calls.py.");
  calls
      .def(py::init([](std::shared_ptr<BoundBuffer> buffer,
                       std::shared_ptr<BoundLowLatency> low_latency, const py::object& shape,
                       int64_t alignment, int64_t max_recv_rows, py::object batch_type,
                       py::dict decode_values, py::dict prefill_values, py::object default_config,
                       py::object learn, std::array<py::object, 2> nowhere, py::object no_weights) {
             auto made = std::make_shared<LayerCalls>();
             made->buffer = std::move(buffer);
             made->low_latency = std::move(low_latency);
             made->form = LayerForm::of(shape, alignment, max_recv_rows);
             made->batch_type = std::move(batch_type);
             made->decode_values = std::move(decode_values);
             made->prefill_values = std::move(prefill_values);
             made->default_config = std::move(default_config);
             made->learn = std::move(learn);
             made->nowhere_int64 = std::move(nowhere[0]);
             made->nowhere_int32 = std::move(nowhere[1]);
             made->no_weights = std::move(no_weights);
             return made;
           }),
           py::kw_only(), "buffer"_a, "low_latency"_a, "shape"_a, "alignment"_a, "max_recv_rows"_a,
           "batch_type"_a, "decode_values"_a, "prefill_values"_a, "default_config"_a, "learn"_a,
           "nowhere"_a, "no_weights"_a)
      .def("use_counters", &LayerCalls::use_counters, "counters"_a,
           "`counters`: HostCounters, or None.");
  def_call<&LayerCalls::decode>(calls, "decode");
  def_call<&LayerCalls::begin_decode>(calls, "begin_decode");
  def_call<&LayerCalls::prefill>(calls, "prefill");
  def_call<&LayerCalls::begin_prefill>(calls, "begin_prefill");
  def_call<&LayerCalls::combine>(calls, "combine");
  def_call<&LayerCalls::begin_combine>(calls, "begin_combine");
  def_call<&LayerCalls::finish>(calls, "finish");
}

}  // namespace deep_comm
