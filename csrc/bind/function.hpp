// Builtin functions of a fixed number of positional arguments, for calls whose arguments Python has
// put in order. pybind11 looks at names, types and overloads first, some 50 ns per argument.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include "bind/errors.hpp"
#include "host/calls/call_context.hpp"

namespace deep_comm {

template <size_t kCount>
using Arguments = std::array<PyObject*, kCount>;  // borrowed

// Lives as long as a call. Of what has calls of its own over a Buffer; others have overloads.
template <class Calls>
CallContext::InCall enter_call(Calls& self) {
  return CallContext::InCall(self.buffer->context);
}

namespace detail {

template <class T>
struct MethodFunction {
  static constexpr char kName[] = "deep_comm.method";

  PyMethodDef method;
  std::shared_ptr<T> self;
  pybind11::object raise_recorded;
};

template <class Method>
struct MethodTraits;
template <class T, size_t kCount>
struct MethodTraits<pybind11::object (T::*)(const Arguments<kCount>&)> {
  using Self = T;
  static constexpr size_t kNumArguments = kCount;
};
template <class T, size_t kCount>
struct MethodTraits<pybind11::object (*)(T&, const Arguments<kCount>&)> {
  using Self = T;
  static constexpr size_t kNumArguments = kCount;
};

template <auto kMethod>
PyObject* call_method(PyObject* capsule, PyObject* const* given, Py_ssize_t count) {
  using Traits = MethodTraits<decltype(kMethod)>;
  using Function = MethodFunction<typename Traits::Self>;
  constexpr size_t kCount = Traits::kNumArguments;
  if (count != static_cast<Py_ssize_t>(kCount)) {
    PyErr_Format(PyExc_TypeError, "expected %zu arguments, got %zd", kCount, count);
    return nullptr;
  }
  auto* function = static_cast<Function*>(PyCapsule_GetPointer(capsule, Function::kName));
  Arguments<kCount> arguments;
  for (size_t position = 0; position < kCount; ++position) arguments[position] = given[position];
  return translate(function->raise_recorded.ptr(), [&] {
    [[maybe_unused]] const auto in_call = enter_call(*function->self);
    return std::invoke(kMethod, *function->self, arguments);
  });
}

}  // namespace detail

// A function of Python's that calls kMethod with N arguments: a method of T,
// `pybind11::object method(const Arguments<N>&)`, or a function of `(T&, const Arguments<N>&)`. It
// keeps `self`, for which there is an enter_call. `name` is a literal. raise_recorded: see set_python_error; None
// for calls that need none.
//
// NOTE: Python's collector of cycles does not see what the function holds: neither `self` nor
// raise_recorded may own, by however many steps, the object that keeps the function.
template <auto kMethod>
pybind11::object method_function(
    const char* name, std::shared_ptr<typename detail::MethodTraits<decltype(kMethod)>::Self> self,
    pybind11::object raise_recorded) {
  namespace py = pybind11;
  using Function = detail::MethodFunction<typename detail::MethodTraits<decltype(kMethod)>::Self>;
  if (raise_recorded.is_none()) raise_recorded = {};
  auto function = std::make_unique<Function>();
  function->method = {name, reinterpret_cast<PyCFunction>(&detail::call_method<kMethod>),
                      METH_FASTCALL, nullptr};
  function->self = std::move(self);
  function->raise_recorded = std::move(raise_recorded);
  const py::capsule capsule(function.get(), Function::kName, [](PyObject* ended) {
    delete static_cast<Function*>(PyCapsule_GetPointer(ended, Function::kName));
  });
  PyMethodDef* method = &function.release()->method;
  auto made = py::reinterpret_steal<py::object>(PyCFunction_New(method, capsule.ptr()));
  if (!made) throw py::error_already_set();
  return made;
}

}  // namespace deep_comm
