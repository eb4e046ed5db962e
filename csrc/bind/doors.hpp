// What the native modules hand to each other: capsules around objects of classes that all of them
// know, named after the class.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "host/engine_calls.hpp"
#include "host/stream_order.hpp"
#include "host/streams.hpp"

namespace deep_comm {

template <class Held>
struct DoorName;
template <>
struct DoorName<EngineCalls> {
  static constexpr char kName[] = "deep_comm.EngineCalls";
};
template <>
struct DoorName<StreamTarget> {
  static constexpr char kName[] = "deep_comm.StreamTarget";
};
template <>
struct DoorName<StreamOrder> {
  static constexpr char kName[] = "deep_comm.StreamOrder";
};

namespace detail {

// Raises ValueError for a capsule of another name, and for what is none.
inline void* behind_door(pybind11::handle door, const char* name) {
  void* found = PyCapsule_GetPointer(door.ptr(), name);
  if (found == nullptr) throw pybind11::error_already_set();
  return found;
}

inline pybind11::object make_door(void* held, const char* name, PyCapsule_Destructor end) {
  PyObject* door = PyCapsule_New(held, name, end);
  if (door == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(door);
}

}  // namespace detail

// Engine.calls. The door keeps the engine: whoever uses the pointer keeps the door.
inline pybind11::object door_of_calls(EngineCalls& calls, pybind11::object owner) {
  pybind11::object door = detail::make_door(
      &calls, DoorName<EngineCalls>::kName,
      [](PyObject* self) { Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(self))); });
  PyCapsule_SetContext(door.ptr(), owner.release().ptr());
  return door;
}

inline EngineCalls& calls_behind(pybind11::handle door) {
  return *static_cast<EngineCalls*>(detail::behind_door(door, DoorName<EngineCalls>::kName));
}

// Of what is shared.
template <class Held>
pybind11::object door_of(std::shared_ptr<Held> held) {
  auto shared = std::make_unique<std::shared_ptr<Held>>(std::move(held));
  pybind11::object door =
      detail::make_door(shared.get(), DoorName<Held>::kName, [](PyObject* self) {
        delete static_cast<std::shared_ptr<Held>*>(
            PyCapsule_GetPointer(self, DoorName<Held>::kName));
      });
  shared.release();
  return door;
}

template <class Held>
std::shared_ptr<Held> behind(pybind11::handle door) {
  return *static_cast<std::shared_ptr<Held>*>(detail::behind_door(door, DoorName<Held>::kName));
}

}  // namespace deep_comm
