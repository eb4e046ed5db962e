// What csrc/host asks of the interpreter, and its counted references as pybind11's.
#pragma once

#include <pybind11/pybind11.h>

#include "host/tensor.hpp"

namespace deep_comm {

// Sets Object::retain and release, interpreter_lock and report_unraisable of this module, and lets
// functions of pybind11's translate CallError. Once for each module whose code makes calls.
void connect_interpreter();

inline Object to_object(pybind11::object object) { return Object::steal(object.release().ptr()); }
// A null one becomes a null one.
inline pybind11::object to_python(Object object) {
  return pybind11::reinterpret_steal<pybind11::object>(static_cast<PyObject*>(object.take()));
}

}  // namespace deep_comm
