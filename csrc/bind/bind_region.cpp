// The receive region's allocator, and tensors over memory that torch does not own.
//
// Both run in every call, so that microseconds count: an allocation, its tensor and its return take
// less than one of them. The GIL guards all state; Python is only called where the state is at
// rest, since a garbage collection in there may give blocks back.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>

#include "bind/bindings.hpp"
#include "bind/dlpack.hpp"
#include "bind/numbers.hpp"
#include "bind/region_blocks.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

// (block, events to wait for), or None. Events of stream `after` are left out: the caller's work is
// behind everything on it. `owner`: the current stream.
py::object take(const std::shared_ptr<Region>& region, size_t num_bytes,
                std::optional<uint64_t> after, uint64_t owner, bool is_captured, bool is_scratch) {
  num_bytes = align_block(num_bytes == 0 ? 1 : num_bytes);
  std::optional<Region::List::Hole> taken = region->take(num_bytes, is_captured);
  if (!taken) return py::none();
  py::object block = py::cast(
      std::make_unique<Block>(region, taken->offset, num_bytes, is_captured, is_scratch, owner));
  py::list events;
  // A capture may not wait for work outside of it, and begins with the device idle.
  const bool has_used = !taken->uses.empty();
  const uint64_t capture = is_captured && has_used ? region->capture_of(owner) : 0;
  if (!is_captured || capture != 0) {
    for (const Region::List::Use& use : taken->uses) {
      if (use.capture == capture && (!after || *after != use.stream)) events.append(use.event);
    }
  }
  return py::make_tuple(std::move(block), std::move(events));
}

// For callers who do not know what the current stream is doing.
py::object allocate(const std::shared_ptr<Region>& region, size_t num_bytes,
                    std::optional<uint64_t> after, bool is_scratch) {
  return take(region, num_bytes, after, region->current_stream(), region->is_capturing(),
              is_scratch);
}

// For those who do; all streams are there, `is_behind` says whether the caller's work is
// behind its own stream's.
py::object take_numbers(const std::shared_ptr<Region>& region,
                        const std::array<uint64_t, 5>& numbers) {
  const auto [num_bytes, owner, is_behind, is_captured, is_scratch] = numbers;
  return take(region, num_bytes, is_behind != 0 ? std::optional<uint64_t>(owner) : std::nullopt,
              owner, is_captured != 0, is_scratch != 0);
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
  py::class_<Block>(m, "Block", py::module_local(),
                    "Bytes of the heap, given back when the last reference goes.")
      .def_readonly("offset", &Block::offset)
      .def_readonly("num_bytes", &Block::num_bytes)
      .def("expose", &Block::expose)
      .def("shrink", &Block::shrink, py::arg("num_bytes"));
  py::class_<Region, std::shared_ptr<Region>>(m, "Region", py::module_local(),
                                              "First-fit allocator of blocks.")
      .def(py::init<size_t, size_t, py::object, py::object, py::object, py::object>(),
           py::arg("begin"), py::arg("end"), py::arg("mark"), py::arg("is_capturing"),
           py::arg("current_stream"), py::arg("mark_captured"))
      .def(
          "allocate",
          [](const std::shared_ptr<Region>& self, size_t num_bytes, std::optional<uint64_t> after) {
            return allocate(self, num_bytes, after, false);
          },
          py::arg("num_bytes"), py::arg("after") = py::none())
      .def(
          "allocate_scratch",
          [](const std::shared_ptr<Region>& self, size_t num_bytes, std::optional<uint64_t> after) {
            return allocate(self, num_bytes, after, true);
          },
          py::arg("num_bytes"), py::arg("after") = py::none(),
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
