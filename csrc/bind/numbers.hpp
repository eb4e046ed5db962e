// Functions of plain numbers, for the host's hot path. pybind11 looks at names, types and overloads
// first, about 50 ns an argument; these are CPython's own builtin functions, a tenth of that.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace deep_comm {

namespace detail {

// Of the capsules that hold functions.
inline constexpr char kFunctionName[] = "deep_comm.function";

// What a builtin function needs for as long as it lives: a table entry, and whose function it is.
template <class Object>
struct BuiltinFunction {
  PyMethodDef method;
  Object object;
};

template <class Object>
BuiltinFunction<Object>* function_of(PyObject* self) {
  return static_cast<BuiltinFunction<Object>*>(PyCapsule_GetPointer(self, kFunctionName));
}

template <class Object, size_t kCount, auto kBody>
PyObject* call_with_numbers(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(kCount)) {
    PyErr_Format(PyExc_TypeError, "%zu numbers are wanted, %zd were given", kCount, count);
    return nullptr;
  }
  std::array<uint64_t, kCount> numbers;
  for (size_t position = 0; position < kCount; ++position) {
    numbers[position] = PyLong_AsUnsignedLongLongMask(arguments[position]);
    if (numbers[position] == ~uint64_t{0} && PyErr_Occurred() != nullptr) return nullptr;
  }
  using Result = decltype(kBody(std::declval<Object&>(), numbers));
  try {
    Object& object = function_of<Object>(self)->object;
    if constexpr (std::is_void_v<Result>) {
      kBody(object, numbers);
      Py_RETURN_NONE;
    } else if constexpr (std::is_same_v<Result, bool>) {
      return PyBool_FromLong(kBody(object, numbers) ? 1 : 0);
    } else {
      return kBody(object, numbers).release().ptr();
    }
  } catch (pybind11::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (...) {
    pybind11::detail::try_translate_exceptions();  // as pybind11 does behind its own functions
    return nullptr;
  }
}

}  // namespace detail

// A Python function of exactly kCount integers, of which the low 64 bits count: kBody(object,
// numbers), where numbers is a std::array to be taken apart by a structured binding; it returns
// nothing, a bool or an object. The function keeps `owner` alive, which `object` may point into.
template <size_t kCount, auto kBody, class Object>
pybind11::object number_function(const char* name, Object object, pybind11::object owner) {
  using Function = detail::BuiltinFunction<Object>;
  auto function = std::make_unique<Function>(Function{{}, std::move(object)});
  function->method.ml_name = name;
  function->method.ml_meth = reinterpret_cast<PyCFunction>(
      reinterpret_cast<void*>(&detail::call_with_numbers<Object, kCount, kBody>));
  function->method.ml_flags = METH_FASTCALL;
  PyMethodDef* method = &function->method;
  // The capsule's context holds the owner; its destructor lets go of both.
  auto capsule = pybind11::reinterpret_steal<pybind11::object>(
      PyCapsule_New(function.get(), detail::kFunctionName, [](PyObject* self) {
        delete detail::function_of<Object>(self);
        Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(self)));
      }));
  if (!capsule) throw pybind11::error_already_set();
  function.release();
  PyCapsule_SetContext(capsule.ptr(), owner.release().ptr());
  auto made = pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(method, capsule.ptr()));
  if (!made) throw pybind11::error_already_set();
  return made;
}

}  // namespace deep_comm
