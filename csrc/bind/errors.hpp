// Errors of calls as exceptions of Python: CallError becomes a class of deep_comm.errors.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace deep_comm {

// In a handler: sets the Python error that stands for the exception.
//
// raise_recorded: called for CallError::Class::kRecorded, with nothing; raises what the engine's
// record says. Borrowed, may be null.
void set_python_error(PyObject* raise_recorded) noexcept;

// What `body` returns, a pybind11::object, as CPython's functions return it: null if it throws, with
// the Python error set.
template <class Body>
PyObject* translate(PyObject* raise_recorded, Body&& body) noexcept {
  try {
    return std::forward<Body>(body)().release().ptr();
  } catch (...) {
    set_python_error(raise_recorded);
    return nullptr;
  }
}

}  // namespace deep_comm
