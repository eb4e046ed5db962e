// What a Python class keeps in its __slots__, without going through Python: attributes, and instances
// made without their __init__, which takes as long as a third of a call's other steps.
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
