// The two calls of a layer's prefill step (deep_comm/layer/quick_prefill.py), each in one step from
// what the layer is given to what it hands out: the batch is made here, and what its handle says of
// it is kept as numbers, from which Python makes a handle for the few that ask.
#pragma once

#include "bind/context_state.hpp"
#include "bind/quick_combine.hpp"
#include "bind/quick_new_dispatch.hpp"

namespace deep_comm::quick {

// Of one layer inside a node.
struct LayerPrefill {
  Shared calls;
  py::object context, buffer;
  py::object default_of;           // ("dispatch" or "combine", None): Buffer._default
  py::object default_config_type;  // DefaultConfig
  py::object finish_unmoved;       // of rows that have not moved -> ExpertBatch
  py::object maker;                // of handles
  DlDataType dtype;
  int64_t hidden, max_tokens, num_topk;
  py::object num_experts, max_rows, alignment;  // as NewCall has them
  bool has_padding, is_synchronous;             // the latter: Backend.is_synchronous
  py::object batch_type;                        // ExpertBatch, and what is alike in all of them
  py::dict common;
  py::object state_type;                                           // Prefilled
  Slot made_slot, weights_slot;                                    // of it
  py::object rule;                                                 // ModeRule
  Slot decode_tokens, num_steps, num_changes, begins_with_decode;  // of the rule
  py::object zero{py::int_(0)};
  py::object x_name{py::str("x")}, counts_name{py::str("counts")}, state_name{py::str("state")},
      per_expert_name{py::str("num_tokens_per_expert")}, offsets_name{py::str("offsets")};

  // What calls without a Config take, of what a caller may change.
  struct Defaults {
    py::object num_sms;
    py::object dispatch, combine;
    bool has_default_sms = false;  // Handle.has_default_sms
  };
  Defaults defaults{};

  const Defaults& current_defaults() {
    static PyObject* const name = PyUnicode_InternFromString("num_sms");
    py::object num_sms = attribute(buffer, name);
    if (!defaults.num_sms || !num_sms.is(defaults.num_sms)) {
      py::object dispatch = default_of("dispatch", py::none());
      const bool is_default = py::isinstance(dispatch, default_config_type);
      defaults = {std::move(num_sms), std::move(dispatch), default_of("combine", py::none()),
                  is_default};
    }
    return defaults;
  }

  py::object owner() const {
    static PyObject* const name = PyUnicode_InternFromString("owner");
    return attribute(context, name);
  }

  // ModeRule.learn.
  void learn(int64_t max_num_tokens) const {
    const auto number = [&](const Slot& slot) { return PyLong_AsLongLong(slot.get(rule)); };
    const bool fits = max_num_tokens <= number(decode_tokens);
    num_steps.set(rule, py::int_(number(num_steps) + 1));
    if (fits == (begins_with_decode.get(rule) == Py_True)) return;
    num_changes.set(rule, py::int_(number(num_changes) + 1));
    begins_with_decode.set(rule, py::bool_(fits));
  }
};
using SharedPrefill = std::shared_ptr<LayerPrefill>;

// What a batch's handle would say, and what keeps its memory. Holds no Buffer.
struct MadeBatch {
  Known known;
  py::object owner, members, maker;  // Context.owner and .makers when it was made
  py::object block, storage, layout, expert_offsets, expert_counts, home;
  uint64_t raw_home;
  py::object counts;  // a tuple, see Engine.counts_waiter; None: bounded

  static constexpr char kName[] = "deep_comm.made_batch";
  static const MadeBatch* of(PyObject* capsule) {
    return static_cast<const MadeBatch*>(PyCapsule_GetPointer(capsule, kName));
  }
  static py::object capsule(std::unique_ptr<MadeBatch> made) {
    auto capsule =
        py::reinterpret_steal<py::object>(PyCapsule_New(made.get(), kName, [](PyObject* self) {
          delete static_cast<MadeBatch*>(PyCapsule_GetPointer(self, kName));
        }));
    if (!capsule) throw py::error_already_set();
    made.release();
    return capsule;
  }
};

// (made)
//   -> (maker, owner, members, SlabLayout, its address, its block, routing, stream, num_topk,
// (storage, expert_offsets, expert_counts), counts or None, num_rows, address of recv_rows,
// num_recv_rows, has_default_sms): what Python makes a handle of.
inline py::object told_of_batch(const py::object& capsule) {
  const MadeBatch* made = MadeBatch::of(capsule.ptr());
  if (made == nullptr) throw py::error_already_set();
  const Known& known = made->known;
  return py::make_tuple(
      made->maker, made->owner, made->members, made->layout, known.rank_prefix, made->block,
      py::make_tuple(known.num_experts, known.mask, known.send_head, known.rank_prefix,
                     known.channel_prefix),
      made->home, known.num_topk,
      py::make_tuple(made->storage, made->expert_offsets, made->expert_counts), made->counts,
      known.num_rows, known.expansion->recv_rows, known.num_recv_rows, known.has_default_sms);
}

// (x, topk_idx, topk_weights, is_bounded, is_learning) -> ExpertBatch, or None: nothing has happened.
// is_learning: the rule learns the most tokens of any rank.
inline py::object begin_prefill(SharedPrefill& shared, PyObject* const* given) {
  LayerPrefill& layer = *shared;
  const Parts& parts = layer.calls->parts;
  if (!is_boolean(given[3]) || given[2] == Py_None || !is_sound(layer.context)) return py::none();
  const bool is_bounded = given[3] == Py_True;
  const py::object standard = layer.current_defaults().dispatch;
  const bool has_default_sms = layer.defaults.has_default_sms;
  PyObject* const zero = layer.zero.ptr();
  const std::array<PyObject*, 16> arguments{
      given[0],
      given[1],
      given[2],
      Py_None,
      Py_None,
      Py_None,
      layer.num_experts.ptr(),
      is_bounded ? layer.max_rows.ptr() : zero,
      layer.alignment.ptr(),
      Py_False,
      Py_None,
      standard.ptr(),
      Py_None,
      Py_True,
      is_bounded || layer.has_padding ? Py_True : Py_False,
      zero,
  };
  NewCall call;
  // The Buffer may know forms of other layers.
  if (!call.read(parts, arguments.data()) || call.payload.has_scales ||
      !call.payload.x.is(layer.dtype) || call.payload.x.extent(1) != layer.hidden ||
      call.payload.num_tokens() > layer.max_tokens ||
      call.routing.idx.extent(1) != layer.num_topk) {
    return py::none();
  }
  std::optional<NewRows> rows = launch_new(layer.calls, call, Py_None);
  if (!rows) return py::none();
  // While the device counts.
  auto made = std::make_unique<MadeBatch>();
  made->owner = layer.owner();
  static PyObject* const makers = PyUnicode_InternFromString("makers");
  made->members = attribute(layer.context, makers);
  made->maker = layer.maker;
  made->block = rows->blocks.handle;
  made->storage = rows->numbering.storage;
  made->layout = rows->slab_parts.layout;
  made->expert_offsets = rows->numbering.expert_offsets;
  made->expert_counts = rows->numbering.expert_counts;
  made->home = parts.home_of(rows->order);
  made->raw_home = rows->order.home();
  auto held = py::reinterpret_steal<py::dict>(PyDict_Copy(layer.common.ptr()));
  if (!held) throw py::error_already_set();
  held[layer.per_expert_name] = made->expert_counts;
  held[layer.offsets_name] = made->expert_offsets;
  py::object counts = py::none();
  int64_t num_recv_rows = call.num_rows, max_num_tokens = 0;
  if (!is_bounded) {
    const bool has_moved = rows->wait(&counts);
    if (!has_moved) {
      py::object batch = layer.finish_unmoved(py::handle(given[0]), py::handle(given[1]),
                                              py::handle(given[2]), standard, made->layout,
                                              rows->slab(), made->block, counts, made->storage);
      if (given[4] == Py_True) layer.learn(PyLong_AsLongLong(PyTuple_GET_ITEM(counts.ptr(), 1)));
      return batch;
    }
    num_recv_rows = PyLong_AsLongLong(PyTuple_GET_ITEM(counts.ptr(), 0));
    max_num_tokens = PyLong_AsLongLong(PyTuple_GET_ITEM(counts.ptr(), 1));
    parts.likely.learn_expanded(rows->num_rows, max_num_tokens);
    held[layer.counts_name] = py::handle(PyTuple_GET_ITEM(counts.ptr(), 3));
  } else {
    held[layer.counts_name] = py::none();
  }
  made->known = known_of(*rows, num_recv_rows, has_default_sms);
  made->counts = std::move(counts);
  py::object weights = rows->weights();
  held[layer.x_name] = rows->outputs();
  end_call(layer.context, layer.is_synchronous);
  auto* state_type = reinterpret_cast<PyTypeObject*>(layer.state_type.ptr());
  auto state = py::reinterpret_steal<py::object>(state_type->tp_alloc(state_type, 0));
  if (!state) throw py::error_already_set();
  layer.made_slot.set(state, MadeBatch::capsule(std::move(made)));
  layer.weights_slot.set(state, std::move(weights));
  held[layer.state_name] = std::move(state);
  if (given[4] == Py_True && !is_bounded) layer.learn(max_num_tokens);
  return instance_of(layer.batch_type, held);
}

// (rows, Prefilled) -> the sums, or None, likewise.
inline py::object end_prefill(SharedPrefill& shared, PyObject* const* given) {
  LayerPrefill& layer = *shared;
  const Parts& parts = layer.calls->parts;
  if (Py_TYPE(given[1]) != reinterpret_cast<PyTypeObject*>(layer.state_type.ptr()) ||
      !is_sound(layer.context)) {
    return py::none();
  }
  const py::handle state = given[1];
  const auto held = py::reinterpret_borrow<py::object>(state);
  PyObject* const weights_object = layer.weights_slot.get(held);
  PyObject* const capsule = layer.made_slot.get(held);
  const py::object owner = layer.owner();
  Known known;
  bool is_at_home = true;
  Order order;
  py::object of_handle;
  const MadeBatch* made = nullptr;
  if (capsule != nullptr && PyCapsule_IsValid(capsule, MadeBatch::kName) != 0) {
    made = MadeBatch::of(capsule);
    if (!made->owner.is(owner)) return py::none();
    known = made->known;
  } else {  // of many steps
    of_handle = state.attr("handle").attr("known_to")(owner);
    if (of_handle.is_none()) return py::none();
    const py::object numbers = of_handle.attr("numbers");
    if (!known.read(numbers.ptr())) return py::none();
  }
  TensorView x, weights;
  if (weights_object == nullptr || !known.expansion ||
      !parts.torch.matrix(given[0], layer.dtype, known.num_rows, layer.hidden, &x) ||
      x.address() % 16 != 0 ||
      !parts.torch.vector(weights_object, kDlFloat32, known.num_rows, &weights)) {
    return py::none();
  }
  const py::object standard = layer.current_defaults().combine;
  const auto form = combine_form(*layer.calls, x, 0, known, Py_None, standard.ptr());
  if (form == nullptr || !parts.begin(Py_None, &order)) return py::none();
  if (made != nullptr) {
    is_at_home = parts.streams.is_none() || made->raw_home == order.stream;
  } else {
    const py::object home = of_handle.attr("home_stream");
    is_at_home = is_home(home.ptr(), parts, order);
  }
  if (!is_at_home) return py::none();
  const uint64_t weights_address = parts.given(weights.address());
  py::object sums = launch_combine(parts, *form, known, x, weights_address, 0, order).sums;
  end_call(layer.context, layer.is_synchronous);
  return sums;
}

}  // namespace deep_comm::quick
