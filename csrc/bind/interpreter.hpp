// What csrc/host asks of the interpreter, and its counted references as pybind11's.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

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
// Keeps an object until whoever holds the pointer has gone, in any thread.
inline std::shared_ptr<void> owner_of(pybind11::object kept) {
  return {kept.release().ptr(), [](void* object) {
            if (Py_IsInitialized() == 0) return;  // at exit the memory goes with the process
            const pybind11::gil_scoped_acquire gil;
            Py_DECREF(static_cast<PyObject*>(object));
          }};
}

}  // namespace deep_comm
