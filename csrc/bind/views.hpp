// Instances of the package's classes that are views of what native code keeps: it lies in their
// attribute `_record`.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace deep_comm {

// An instance whose __init__ has not run: its attributes are the class's until they are set.
inline pybind11::object new_instance(pybind11::handle type) {
  static const pybind11::tuple* const nothing = new pybind11::tuple();
  auto made = pybind11::reinterpret_steal<pybind11::object>(PyBaseObject_Type.tp_new(
      reinterpret_cast<PyTypeObject*>(type.ptr()), nothing->ptr(), nullptr));
  if (!made) throw pybind11::error_already_set();
  return made;
}

inline PyObject* name_of_record() {
  static PyObject* const name = PyUnicode_InternFromString("_record");
  return name;
}

// The classes may be frozen: this is set around that.
template <class Record>
void set_record(pybind11::handle view, std::shared_ptr<Record> record) {
  const pybind11::object held = pybind11::cast(std::move(record));
  if (PyObject_GenericSetAttr(view.ptr(), name_of_record(), held.ptr()) != 0) {
    throw pybind11::error_already_set();
  }
}

template <class Record>
pybind11::object view_of(pybind11::handle type, std::shared_ptr<Record> record) {
  pybind11::object view = new_instance(type);
  set_record(view, std::move(record));
  return view;
}

// Null: the object is no view of such a record.
template <class Record>
std::shared_ptr<Record> record_of_view(PyObject* object) {
  const auto found =
      pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(object, name_of_record()));
  if (!found) {
    PyErr_Clear();
    return nullptr;
  }
  if (!pybind11::isinstance<Record>(found)) return nullptr;
  return found.cast<std::shared_ptr<Record>>();
}

}  // namespace deep_comm
