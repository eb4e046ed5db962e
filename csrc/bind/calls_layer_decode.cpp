// The calls of a layer's decode step (deep_comm/layer/decode.py): low-latency calls from what the layer
// is given to what it hands out, and with what "auto" asks after them. What a step costs beside its
// tensors and launches counts, because "auto" is held against it.
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "bind/bindings.hpp"
#include "bind/calls_low_latency.hpp"
#include "bind/patient_words.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

using Kind = TensorRef::Kind;

// What combine needs of a decode batch.
struct Decoded {
  std::shared_ptr<LowLatencyDispatchRecord> record;
  py::object topk_idx;
  uint64_t exchange;  // that its ranks have told of; 0: none
};

// Of one layer.
struct LayerDecode {
  std::shared_ptr<BoundLowLatency> low_latency;
  int64_t num_slots, hidden, num_topk, num_experts;  // of all its calls
  int64_t decode_tokens;                             // the most that a step may have
  py::object batch_of;                               // ExpertBatch.of(values)
  py::dict common;                                   // values that are alike in all batches
  std::optional<HostWords> words;
  py::object words_owner;
  py::object learn;  // ModeRule.learn(num_tokens)

  LowLatencyCalls& calls() const { return low_latency->calls; }
  CallContext& context() const { return low_latency->buffer->context; }
  const TensorReader& reader() const { return low_latency->buffer->reader; }
  bool is_capturing() const {
    const StreamOrder& order = context().order;
    return order.target().has_streams() &&
           order.target().is_capturing(order.framework().current_stream());
  }

  // (x, topk_idx, topk_weights, is_asking) -> ExpertBatch, or None: nothing has happened, and the
  // layer says why. is_asking: of "auto". The ranks of the host are told of it here, after all that
  // can fail and before the launch, so that they know by the time they ask.
  py::object begin(const Arguments<4>& given);
  // (rows, Decoded) -> the sums, or None, likewise.
  py::object end(const Arguments<2>& given) { return to_python(sums_of(given)); }
  // (rows, Decoded) -> the sums of a step of "auto" that began with decode, or None, likewise. All
  // ranks had as many tokens as decode takes, and the rule has learned it. Otherwise it has learned
  // nothing: (the sums, the most tokens that any rank had, or None where the words do not tell it).
  py::object finish(const Arguments<2>& given);

  Object sums_of(const Arguments<2>& given);
  static py::object to_python(Object sums) { return object_of(std::move(sums)); }
};

IntegerRef integer_of(int64_t value) {
  return {.is_given = true, .is_integer = true, .fits = true, .value = value};
}

py::object LayerDecode::begin(const Arguments<4>& given) {
  const auto [given_x, given_idx, given_weights, is_asking_object] = given;
  const TensorRef x = reader().read(given_x), idx = reader().read(given_idx);
  const TensorRef weights = reader().read(given_weights);
  const bool is_asking = is_asking_object == Py_True;
  const bool is_plain = x.kind == Kind::kTensor && idx.kind == Kind::kTensor &&
                        weights.kind == Kind::kTensor && x.type == kBfloat16 && x.num_dims == 2 &&
                        x.shape[1] == hidden && x.shape[0] <= decode_tokens && idx.num_dims == 2 &&
                        idx.shape[1] == num_topk;
  // Where a graph is captured, "auto" asks nobody.
  if (!is_plain || (is_asking && is_capturing())) return py::none();
  const bool tells = is_asking && words;
  if (tells) words->claim();
  // A kernel that stores to the host's memory ends 0.8 us later: it does so where there are no words.
  ReservedLowLatencyDispatch reserved =
      calls().reserve(calls().check({.x = x,
                                     .topk_idx = idx,
                                     .topk_weights = weights,
                                     .num_max_tokens = integer_of(num_slots),
                                     .num_experts = integer_of(num_experts),
                                     .is_reporting = is_asking && !words,
                                     .is_flat = true}));
  const uint64_t exchange = tells ? words->tell(static_cast<uint64_t>(x.shape[0])) : 0;
  LowLatencyDispatchResult sent = calls().launch(std::move(reserved));
  auto values = py::reinterpret_steal<py::dict>(PyDict_Copy(common.ptr()));
  if (!values) throw py::error_already_set();
  values["x"] = object_of(std::move(sent.recv_x));
  values["num_tokens_per_expert"] = object_of(std::move(sent.recv_count));
  values["state"] =
      Decoded{std::move(sent.record), py::reinterpret_borrow<py::object>(given_idx), exchange};
  return batch_of(std::move(values));
}

Object LayerDecode::sums_of(const Arguments<2>& given) {
  const auto [given_rows, given_state] = given;
  if (!py::isinstance<Decoded>(given_state)) return {};
  const auto& state = py::handle(given_state).cast<const Decoded&>();
  // What the others have told is on its way here while this call launches.
  if (words && state.exchange != 0) words->prefetch(state.exchange);
  const TensorRef rows = reader().read(given_rows);
  const LowLatencyForm& form = *state.record->form;
  const bool is_plain = rows.kind == Kind::kTensor && rows.is_on_device && rows.type == kBfloat16 &&
                        rows.num_dims == 2 &&
                        rows.shape[0] == form.num_local_experts * form.num_rows &&
                        rows.shape[1] == hidden && rows.is_contiguous();
  if (!is_plain) return {};
  return calls()
      .combine({.x = rows,
                .topk_idx = reader().read(state.topk_idx.ptr()),
                .handle = state.record,
                .is_flat = true})
      .combined_x;
}

py::object LayerDecode::finish(const Arguments<2>& given) {
  py::object sums = end(given);
  if (sums.is_none()) return sums;
  if (!words) return py::make_tuple(std::move(sums), py::none());
  const uint64_t exchange = py::handle(given[1]).cast<const Decoded&>().exchange;
  // It is looked at last: no SM waits for the host.
  const std::optional<uint64_t> most = patient_most(*words, exchange);
  if (!most) return py::make_tuple(std::move(sums), py::none());
  if (*most > static_cast<uint64_t>(decode_tokens)) return py::make_tuple(std::move(sums), *most);
  learn(*most);
  return sums;
}

}  // namespace

void bind_layer_decode(py::module_& m) {
  using namespace pybind11::literals;
  py::class_<Decoded>(m, "Decoded", py::module_local(), "What combine needs of a decode batch.")
      .def(py::init([](const py::object& handle, py::object topk_idx, uint64_t exchange) {
             return Decoded{
                 handle.attr("_record").cast<std::shared_ptr<LowLatencyDispatchRecord>>(),
                 std::move(topk_idx), exchange};
           }),
           "handle"_a, "topk_idx"_a, "exchange"_a)
      .def_readonly("record", &Decoded::record)
      .def_readonly("topk_idx", &Decoded::topk_idx)
      .def_readonly("exchange", &Decoded::exchange);
  m.def(
      "layer_decode",
      [](std::shared_ptr<BoundLowLatency> low_latency, int64_t num_slots, int64_t hidden,
         int64_t num_topk, int64_t num_experts, int64_t decode_tokens, py::object batch_of,
         py::dict common, const py::object& words, py::object learn) {
        std::optional<HostWords> told;
        if (!words.is_none()) {
          const auto [address, rank, num_ranks, owner] =
              words.cast<std::tuple<uintptr_t, int, int, py::object>>();
          told.emplace(address, rank, num_ranks);
        }
        const py::object raise_recorded = low_latency->buffer->python.raise_recorded;
        const auto layer = std::make_shared<LayerDecode>(LayerDecode{
            std::move(low_latency), num_slots, hidden, num_topk, num_experts, decode_tokens,
            std::move(batch_of), std::move(common), told, words, std::move(learn)});
        return py::make_tuple(
            method_function<&LayerDecode::begin>("begin", layer, raise_recorded),
            method_function<&LayerDecode::end>("end", layer, raise_recorded),
            method_function<&LayerDecode::finish>("finish", layer, raise_recorded));
      },
      py::kw_only(), "low_latency"_a, "num_slots"_a, "hidden"_a, "num_topk"_a, "num_experts"_a,
      "decode_tokens"_a, "batch_of"_a, "common"_a, "words"_a, "learn"_a,
      "begin, end and finish of one layer's decode steps. `words`: the arguments of HostWords and "
      "what keeps its memory, or None.");
}

}  // namespace deep_comm
