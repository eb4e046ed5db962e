// What native calls ask of a Buffer's Context (deep_comm/context.py), which they do not keep.
#pragma once

#include <pybind11/pybind11.h>

namespace deep_comm {

// An attribute. `name`: interned.
inline pybind11::object attribute(pybind11::handle object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object.ptr(), name);
  if (found == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(found);
}

// Context.is_sound.
inline bool is_sound(pybind11::handle context) {
  static PyObject* const pending = PyUnicode_InternFromString("pending");
  static PyObject* const has_failed = PyUnicode_InternFromString("_has_failed");
  if (!attribute(context, pending).is_none()) return false;
  const pybind11::object words = attribute(context, has_failed);
  PyObject* const word = PySequence_GetItem(words.ptr(), 0);
  if (word == nullptr) throw pybind11::error_already_set();
  return PyLong_AsLongLong(pybind11::reinterpret_steal<pybind11::object>(word).ptr()) == 0;
}

// Context.end, of a backend whose kernels have ended by now or not.
inline void end_call(pybind11::handle context, bool is_synchronous) {
  if (is_synchronous) context.attr("check")();
}

}  // namespace deep_comm
