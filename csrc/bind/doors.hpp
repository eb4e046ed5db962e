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

template <class Held>
pybind11::object door_of(std::shared_ptr<Held> held) {
  auto shared = std::make_unique<std::shared_ptr<Held>>(std::move(held));
  pybind11::capsule door(shared.get(), DoorName<Held>::kName, [](PyObject* self) {
    delete static_cast<std::shared_ptr<Held>*>(PyCapsule_GetPointer(self, DoorName<Held>::kName));
  });
  shared.release();
  return door;
}

// Raises ValueError for a capsule of another name, and for what is none.
template <class Held>
std::shared_ptr<Held> behind(pybind11::handle door) {
  void* found = PyCapsule_GetPointer(door.ptr(), DoorName<Held>::kName);
  if (found == nullptr) throw pybind11::error_already_set();
  return *static_cast<std::shared_ptr<Held>*>(found);
}

}  // namespace deep_comm
