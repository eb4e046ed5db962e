// The receive region's allocator, and tensors over memory that torch does not own.
//
// Both run in every call, so that microseconds count: an allocation, its tensor and its return take
// less than one of them. The GIL guards all state; Python is only called where the state is at
// rest, since a garbage collection in there may give blocks back.
#include <pybind11/stl.h>

#include <memory>

#include "bind/bindings.hpp"
#include "bind/dlpack.hpp"
#include "bind/doors.hpp"
#include "bind/numbers.hpp"
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

// For callers who do not know what the current stream is doing.
py::object allocate(const std::shared_ptr<Region>& region, size_t num_bytes, bool is_behind_caller,
                    bool is_scratch) {
  StreamTarget& streams = region->streams();
  const uint64_t stream = streams.has_streams() ? region->framework().current_stream() : 0;
  return take(region,
              {num_bytes, stream, is_behind_caller, streams.is_capturing(stream), is_scratch});
}

// For those who do.
py::object take_numbers(const std::shared_ptr<Region>& region,
                        const std::array<uint64_t, 5>& numbers) {
  const auto [num_bytes, caller, is_behind, is_captured, is_scratch] = numbers;
  return take(region, {num_bytes, caller, is_behind != 0, is_captured != 0, is_scratch != 0});
}

// make_dlpack_matrix without pybind11's look at the arguments: seven numbers and the owner.
PyObject* matrix(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 8) {
    PyErr_Format(PyExc_TypeError, "matrix() takes 8 arguments, %zd were given", count);
    return nullptr;
  }
  int64_t numbers[7];
  for (int position = 0; position < 7; ++position) {
    numbers[position] = static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(arguments[position]));
    if (numbers[position] == -1 && PyErr_Occurred() != nullptr) return nullptr;
  }
  try {
    const DlDataType dtype = {static_cast<uint8_t>(numbers[3]), static_cast<uint8_t>(numbers[4]),
                              1};
    const DlDevice device = {static_cast<int32_t>(numbers[5]), static_cast<int32_t>(numbers[6])};
    return make_dlpack_matrix(static_cast<uintptr_t>(numbers[0]), numbers[1], numbers[2], dtype,
                              device, py::reinterpret_borrow<py::object>(arguments[7]))
        .release()
        .ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyMethodDef kMatrix = {"matrix", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&matrix)),
                       METH_FASTCALL,
                       "matrix(address, num_rows, num_columns, type_code, type_bits, device_type, "
                       "device_index, owner)"};

}  // namespace

void bind_region(py::module_& m) {
  py::class_<Block, std::shared_ptr<Block>>(
      m, "Block", py::module_local(), "Bytes of the heap, given back when the last reference goes.")
      .def_readonly("offset", &Block::offset)
      .def_readonly("num_bytes", &Block::num_bytes)
      .def("expose", &Block::expose)
      .def("shrink", &Block::shrink, py::arg("num_bytes"));
  py::class_<Region, std::shared_ptr<Region>>(m, "Region", py::module_local(),
                                              "First-fit allocator of blocks.")
      .def(py::init([](size_t begin, size_t end, const py::object& streams,
                       std::shared_ptr<Framework> framework) {
             return std::make_shared<Region>(begin, end, behind<StreamTarget>(streams),
                                             std::move(framework));
           }),
           py::arg("begin"), py::arg("end"), py::arg("streams"), py::arg("framework"))
      .def(
          "allocate",
          [](const std::shared_ptr<Region>& self, size_t num_bytes, bool is_behind_caller) {
            return allocate(self, num_bytes, is_behind_caller, false);
          },
          py::arg("num_bytes"), py::arg("is_behind_caller") = false)
      .def(
          "allocate_scratch",
          [](const std::shared_ptr<Region>& self, size_t num_bytes, bool is_behind_caller) {
            return allocate(self, num_bytes, is_behind_caller, true);
          },
          py::arg("num_bytes"), py::arg("is_behind_caller") = false,
          "A block that only the engine's kernels use. They run one behind the other, and all "
          "owners of blocks have "
          "them written by kernels, so that nobody has to wait for this one's end.")
      .def(
          "taker",
          [](const py::object& self) {
            return number_function<5, &take_numbers>("take", self.cast<std::shared_ptr<Region>>(),
                                                     py::none());
          },
          "take(num_bytes, stream, is_behind_stream, is_captured, is_scratch): allocate and "
          "allocate_scratch for "
          "callers who know the current stream.")
      .def_property_readonly("num_free_bytes", &Region::num_free_bytes);
  m.attr("matrix") = py::reinterpret_steal<py::object>(PyCFunction_New(&kMatrix, nullptr));
}

}  // namespace deep_comm
