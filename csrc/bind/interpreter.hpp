// Python's lock, and what cannot be raised, for csrc/host (host/interpreter.hpp, host/tensor.hpp).
#pragma once

#include <pybind11/pybind11.h>

#include "host/interpreter.hpp"
#include "host/tensor.hpp"

namespace deep_comm {

namespace detail {

// In the handler of an exception.
inline void report_to_python(const char* where) {
  const pybind11::gil_scoped_acquire gil;
  const pybind11::error_scope kept;  // an error on its way is not this one's
  try {
    throw;
  } catch (pybind11::error_already_set& error) {
    error.discard_as_unraisable(where);
    return;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "unknown error");
  }
  PyErr_WriteUnraisable(pybind11::str(where).ptr());
}

}  // namespace detail

// Once, in _core, which alone runs what needs them.
inline void connect_interpreter() {
  interpreter_lock.release = []() -> void* { return PyEval_SaveThread(); };
  interpreter_lock.acquire = [](void* state) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state));
  };
  has_interpreter = [] { return Py_IsInitialized() != 0; };
  report_unraisable = &detail::report_to_python;
  Object::retain = [](void* pointer) { Py_INCREF(static_cast<PyObject*>(pointer)); };
  Object::release = [](void* pointer) { Py_DECREF(static_cast<PyObject*>(pointer)); };
}

}  // namespace deep_comm
