#include "bind/interpreter.hpp"

#include <exception>

#include "bind/errors.hpp"
#include "host/interpreter.hpp"
#include "host/require.hpp"

namespace py = pybind11;

namespace deep_comm {

namespace {

void report(const char* where) {
  const py::gil_scoped_acquire lock;
  const py::error_scope kept;  // an error on its way is not this one's
  set_python_error(nullptr);
  const py::str place(where);
  PyErr_WriteUnraisable(place.ptr());
}

}  // namespace

void connect_interpreter() {
  Object::retain = [](void* pointer) { Py_INCREF(static_cast<PyObject*>(pointer)); };
  Object::release = [](void* pointer) { Py_DECREF(static_cast<PyObject*>(pointer)); };
  interpreter_lock.release = []() -> void* { return PyEval_SaveThread(); };
  interpreter_lock.acquire = [](void* state) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state));
  };
  has_interpreter = [] { return Py_IsInitialized() != 0; };
  report_unraisable = &report;
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const CallError&) {
      set_python_error(nullptr);
    }
  });
}

}  // namespace deep_comm
