// What a Python class keeps in its __slots__ or __dict__, without going through Python: attributes, and
// instances made without their __init__, which takes as long as a third of a call's other steps.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace deep_comm {

// One slot, in every instance of the class that has it.
class Slot {
 public:
  Slot(const pybind11::object& type, const char* name) {
    const pybind11::object found = type.attr(name);
    if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type) {
      throw std::invalid_argument(std::string(name) + " is no slot");
    }
    offset_ = reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member->offset;
  }

  // Borrowed; null: nothing is there.
  PyObject* get(const pybind11::object& instance) const { return *place(instance); }
  void set(const pybind11::object& instance, pybind11::object value) const {
    PyObject* before = std::exchange(*place(instance), value.release().ptr());
    Py_XDECREF(before);
  }

 private:
  PyObject** place(const pybind11::object& instance) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(instance.ptr()) + offset_);
  }
  Py_ssize_t offset_;
};

// An instance of a class of Python's, without its __init__.
inline pybind11::object without_init(const pybind11::object& type) {
  auto* made_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  PyObject* made = made_type->tp_new(made_type, pybind11::tuple().ptr(), nullptr);
  if (made == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(made);
}

// An instance of a class of Python's with these attributes, whatever its constructor would do.
inline pybind11::object instance_of(const pybind11::object& type, const pybind11::dict& held) {
  auto* made_of = reinterpret_cast<PyTypeObject*>(type.ptr());
  auto made = pybind11::reinterpret_steal<pybind11::object>(made_of->tp_alloc(made_of, 0));
  static PyObject* const name = PyUnicode_InternFromString("__dict__");
  if (!made || PyObject_GenericSetAttr(made.ptr(), name, held.ptr()) != 0) {
    throw pybind11::error_already_set();
  }
  return made;
}

// Of a class of tuples.
template <size_t kCount>
pybind11::object tuple_of(const pybind11::object& type,
                          std::array<pybind11::object, kCount> items) {
  auto* made_of = reinterpret_cast<PyTypeObject*>(type.ptr());
  auto made = pybind11::reinterpret_steal<pybind11::object>(made_of->tp_alloc(made_of, kCount));
  if (!made) throw pybind11::error_already_set();
  for (size_t item = 0; item < kCount; ++item) {
    PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(item), items[item].release().ptr());
  }
  return made;
}

template <size_t kCount>
class SlottedType {
 public:
  // `slots`: all of the class.
  SlottedType(pybind11::object type, std::array<Slot, kCount> slots)
      : type_(std::move(type)), slots_(slots) {}

  pybind11::object make(std::array<pybind11::object, kCount> values) const {
    auto* type = reinterpret_cast<PyTypeObject*>(type_.ptr());
    auto made = pybind11::reinterpret_steal<pybind11::object>(type->tp_alloc(type, 0));
    if (!made) throw pybind11::error_already_set();
    for (size_t slot = 0; slot < kCount; ++slot) slots_[slot].set(made, std::move(values[slot]));
    return made;
  }

 private:
  pybind11::object type_;
  std::array<Slot, kCount> slots_;
};

}  // namespace deep_comm
