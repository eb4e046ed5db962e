// The receive region's allocator, and tensors over memory that torch does not own.
//
// The GIL guards all state of the allocator; Python is only called where the state is at rest, since
// a garbage collection in there may give blocks back.
#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "bind/bindings.hpp"
#include "bind/dlpack.hpp"
#include "bind/doors.hpp"
#include "bind/interpreter.hpp"
#include "host/memory.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

// (block, events to wait for), or None.
py::object take(const std::shared_ptr<Region>& region, const BlockRequest& request) {
  py::list events;
  std::shared_ptr<Block> block = take_block(
      region, request, [&](const std::shared_ptr<Event>& event) { events.append(event); });
  if (block == nullptr) return py::none();
  return py::make_tuple(std::move(block), std::move(events));
}

// On the current stream.
py::object allocate(const std::shared_ptr<Region>& region, size_t num_bytes,
                    bool is_behind_caller) {
  StreamTarget& streams = region->streams();
  const uint64_t stream = streams.has_streams() ? region->framework().current_stream() : 0;
  return take(region, {num_bytes, stream, is_behind_caller, streams.is_capturing(stream), false});
}

}  // namespace

void bind_region(py::module_& m) {
  py::class_<Block, std::shared_ptr<Block>>(
      m, "Block", py::module_local(), "Bytes of the heap, given back when the last reference goes.")
      .def_readonly("offset", &Block::offset)
      .def_readonly("num_bytes", &Block::num_bytes)
      .def("shrink", &Block::shrink, py::arg("num_bytes"));
  py::class_<Region, std::shared_ptr<Region>>(m, "Region", py::module_local(),
                                              "First-fit allocator of blocks.")
      .def(py::init([](size_t begin, size_t end, const py::object& streams,
                       std::shared_ptr<Framework> framework) {
             return std::make_shared<Region>(begin, end, behind<StreamTarget>(streams),
                                             std::move(framework));
           }),
           py::arg("begin"), py::arg("end"), py::arg("streams"), py::arg("framework"))
      .def("allocate", &allocate, py::arg("num_bytes"), py::arg("is_behind_caller") = false)
      .def_property_readonly("num_free_bytes", &Region::num_free_bytes);
  m.def(
      "bytes_capsule",
      [](uintptr_t address, int64_t num_bytes, int device_type, int device_index,
         py::object owner) {
        return make_dlpack_capsule(address, TensorSpec::of(kUint8, {num_bytes}), {1, 8, 1},
                                   {device_type, device_index}, owner_of(std::move(owner)));
      },
      py::arg("address"), py::arg("num_bytes"), py::arg("device_type"), py::arg("device_index"),
      py::arg("owner"));
}

}  // namespace deep_comm
