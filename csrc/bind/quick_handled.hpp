// Synchronous calls along a handle, from what a Buffer's method is given to what it returns: what
// Python did around the native step takes as long as the step.
#pragma once

#include "bind/context_state.hpp"
#include "bind/quick_calls.hpp"

namespace deep_comm::quick {

struct HandledCalls {
  Shared calls;
  py::object event_type;  // EventOverlap; needs no __init__
  bool is_synchronous;    // Backend.is_synchronous
};

// What the Buffer knows of a handle; null: nothing yet, or nothing any more.
inline py::object known_to(py::handle handle, const py::object& owner) {
  static PyObject* const owner_name = PyUnicode_InternFromString("owner");
  static PyObject* const known_name = PyUnicode_InternFromString("_known");
  py::object known = attribute(handle, known_name);
  if (!known.is_none() && attribute(known, owner_name).is(owner)) return known;
  known = handle.attr("known_to")(owner);
  return known.is_none() ? py::object() : known;
}

// (Context, handle, *`kBody`'s arguments without the handle's two and `asynchronous`) -> what `kBody`
// returns, or None, likewise. kHandle: where the handle's two begin.
template <auto kBody, size_t kHandle, size_t kAsynchronous>
py::object handled(HandledCalls& self, PyObject* const* given) {
  static PyObject* const numbers_name = PyUnicode_InternFromString("numbers");
  static PyObject* const home_name = PyUnicode_InternFromString("home_stream");
  const py::handle context = given[0], handle = given[1];
  if (!is_sound(context)) return py::none();
  static PyObject* const native_name = PyUnicode_InternFromString("_native");
  static PyObject* const owner_name = PyUnicode_InternFromString("owner");
  const py::object owner = attribute(context, owner_name);
  py::object numbers = attribute(handle, native_name), home;
  const FreshKnown* const fresh = FreshKnown::of(numbers.ptr());
  if (fresh != nullptr && fresh->owner.is(owner)) {
    home = fresh->home;
  } else {
    const py::object known = known_to(handle, owner);
    if (!known) return py::none();
    numbers = attribute(known, numbers_name);
    home = attribute(known, home_name);
  }
  std::array<PyObject*, 8> arguments;
  size_t next = 2;
  for (size_t position = 0; position < arguments.size(); ++position) {
    arguments[position] = position == kHandle         ? numbers.ptr()
                          : position == kHandle + 1   ? home.ptr()
                          : position == kAsynchronous ? Py_None
                                                      : given[next++];
  }
  py::object made = kBody(self.calls, arguments.data());
  if (!made.is_none()) end_call(context, self.is_synchronous);
  return made;
}

// (Context, handle, x or (x, scales), config, default, zero_padding, cast) -> Buffer.dispatch's
// result along a handle.
template <auto kBody>
py::object handled_dispatch(HandledCalls& self, PyObject* const* given) {
  py::object rows = handled<kBody, 1, 5>(self, given);
  if (rows.is_none()) return rows;
  return py::make_tuple(std::move(rows), py::none(), py::none(), py::none(), py::none(),
                        without_init(self.event_type));
}

// (Context, handle, x, topk_weights, config, default, apply_weights) -> Buffer.combine's result.
template <auto kBody>
py::object handled_combine(HandledCalls& self, PyObject* const* given) {
  const py::object sums = handled<kBody, 2, 6>(self, given);
  if (sums.is_none()) return sums;
  const auto part = [&](Py_ssize_t place) {
    return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(sums.ptr(), place));
  };
  return py::make_tuple(part(0), part(1), without_init(self.event_type));
}

}  // namespace deep_comm::quick
