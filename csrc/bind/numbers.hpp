// Functions of plain numbers, or of plain objects, for the host's hot path. pybind11 looks at
// names, types and overloads first, about 50 ns an argument; these are CPython's own builtin
// functions, a tenth of that.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace deep_comm {

namespace detail {

// What a builtin function needs for as long as it lives: a table entry, and how native code of any
// of this package's modules calls it, with `count` numbers; not at all without `direct`.
struct BuiltinEntry {
  PyMethodDef method;
  size_t count;
  PyObject* (*direct)(BuiltinEntry* self, const uint64_t* numbers);  // a new reference, or an error
};

// The same, and whose function it is.
template <class Object>
struct BuiltinFunction : BuiltinEntry {
  Object object;
};

// Of the capsules that hold entries.
inline constexpr char kEntryName[] = "deep_comm.entry";

template <class Object>
BuiltinFunction<Object>* function_of(PyObject* self) {
  auto* entry = static_cast<BuiltinEntry*>(PyCapsule_GetPointer(self, kEntryName));
  return static_cast<BuiltinFunction<Object>*>(entry);
}

template <class Object, size_t kCount, auto kBody>
PyObject* call_body(BuiltinEntry* self, const uint64_t* given) {
  std::array<uint64_t, kCount> numbers;
  std::copy_n(given, kCount, numbers.begin());
  using Result = decltype(kBody(std::declval<Object&>(), numbers));
  try {
    Object& object = static_cast<BuiltinFunction<Object>*>(self)->object;
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
  return call_body<Object, kCount, kBody>(function_of<Object>(self), numbers.data());
}

template <class Object, size_t kCount, auto kBody>
PyObject* call_with_objects(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(kCount)) {
    PyErr_Format(PyExc_TypeError, "%zu arguments are wanted, %zd were given", kCount, count);
    return nullptr;
  }
  try {
    return kBody(function_of<Object>(self)->object, arguments).release().ptr();
  } catch (pybind11::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (...) {
    pybind11::detail::try_translate_exceptions();
    return nullptr;
  }
}

// A builtin function that is `entry`, with the object and its owner. `count`, `direct`: see
// BuiltinEntry.
template <class Object>
pybind11::object make_function(const char* name, void* entry, size_t count,
                               decltype(BuiltinEntry::direct) direct, Object object,
                               pybind11::object owner) {
  using Function = BuiltinFunction<Object>;
  auto function = std::make_unique<Function>(Function{{{}, count, direct}, std::move(object)});
  function->method.ml_name = name;
  function->method.ml_meth = reinterpret_cast<PyCFunction>(entry);
  function->method.ml_flags = METH_FASTCALL;
  PyMethodDef* method = &function->method;
  // The capsule's context holds the owner; its destructor lets go of both.
  auto capsule = pybind11::reinterpret_steal<pybind11::object>(
      PyCapsule_New(static_cast<BuiltinEntry*>(function.get()), kEntryName, [](PyObject* self) {
        delete function_of<Object>(self);
        Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(self)));
      }));
  if (!capsule) throw pybind11::error_already_set();
  function.release();
  PyCapsule_SetContext(capsule.ptr(), owner.release().ptr());
  auto made = pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(method, capsule.ptr()));
  if (!made) throw pybind11::error_already_set();
  return made;
}

}  // namespace detail

// A Python function of exactly kCount integers, of which the low 64 bits count: kBody(object,
// numbers), where numbers is a std::array to be taken apart by a structured binding; it returns
// nothing, a bool or an object. The function keeps `owner` alive, which `object` may point into.
template <size_t kCount, auto kBody, class Object>
pybind11::object number_function(const char* name, Object object, pybind11::object owner) {
  return detail::make_function(
      name, reinterpret_cast<void*>(&detail::call_with_numbers<Object, kCount, kBody>), kCount,
      &detail::call_body<Object, kCount, kBody>, std::move(object), std::move(owner));
}

// The same of exactly kCount objects, borrowed: kBody(object, arguments), a PyObject* const*; it
// returns an object.
template <size_t kCount, auto kBody, class Object>
pybind11::object object_function(const char* name, Object object, pybind11::object owner) {
  return detail::make_function(
      name, reinterpret_cast<void*>(&detail::call_with_objects<Object, kCount, kBody>), 0, nullptr,
      std::move(object), std::move(owner));
}

// A Python callable of kCount integers, for native callers: a function of numbers, whichever of
// this package's modules has made it, gets them as they are; anything else as Python's integers.
template <size_t kCount>
class NumberCall {
 public:
  explicit NumberCall(pybind11::object function) : function_(std::move(function)) {
    PyObject* object = function_.ptr();
    if (!PyCFunction_CheckExact(object)) return;
    PyObject* self = PyCFunction_GET_SELF(object);
    if (self == nullptr || PyCapsule_IsValid(self, detail::kEntryName) == 0) return;
    auto* entry =
        static_cast<detail::BuiltinEntry*>(PyCapsule_GetPointer(self, detail::kEntryName));
    if (entry->direct != nullptr && entry->count == kCount) entry_ = entry;
  }

  // What it returns; throws what it raises.
  pybind11::object operator()(const std::array<uint64_t, kCount>& numbers) const {
    PyObject* result =
        entry_ != nullptr ? entry_->direct(entry_, numbers.data()) : through_python(numbers);
    if (result == nullptr) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(result);
  }

 private:
  PyObject* through_python(const std::array<uint64_t, kCount>& numbers) const {
    std::array<pybind11::object, kCount> objects;
    std::array<PyObject*, kCount> pointers;
    for (size_t position = 0; position < kCount; ++position) {
      objects[position] = pybind11::reinterpret_steal<pybind11::object>(
          PyLong_FromUnsignedLongLong(numbers[position]));
      if (!objects[position]) return nullptr;
      pointers[position] = objects[position].ptr();
    }
    return PyObject_Vectorcall(function_.ptr(), pointers.data(), kCount, nullptr);
  }

  pybind11::object function_;  // keeps the entry
  detail::BuiltinEntry* entry_ = nullptr;
};

}  // namespace deep_comm
