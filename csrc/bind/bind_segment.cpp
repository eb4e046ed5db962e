#include <pybind11/stl.h>

#include <system_error>

#include "bind/bindings.hpp"
#include "host/segment.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

// A refusal of the operating system is an OSError with its errno, so that callers can tell a
// missing segment (FileNotFoundError) from a full file system.
void raise_os_error(std::exception_ptr exception) {
  try {
    if (exception) std::rethrow_exception(exception);
  } catch (const std::system_error& error) {
    const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

}  // namespace

void bind_segment(py::module_& m) {
  py::register_local_exception_translator(&raise_os_error);
  // Reserving, zeroing and releasing gigabytes takes a while; the GIL is free meanwhile.
  using Unlocked = py::call_guard<py::gil_scoped_release>;

  py::class_<Segment>(m, "Segment", py::module_local(),
                      "A POSIX shared memory segment, mode 0600, with an unguessable name.")
      .def_static("create", &Segment::create, py::arg("num_bytes"), Unlocked())
      .def_static("attach", &Segment::attach, py::arg("name"), py::arg("num_bytes"), Unlocked())
      .def_property_readonly("name", &Segment::name)
      .def_property_readonly("address", &Segment::address)
      .def_property_readonly("num_bytes", &Segment::num_bytes)
      .def("unlink", &Segment::unlink)
      .def("close", &Segment::close, Unlocked());
  m.def("remove_stale_segments", &remove_stale_segments, Unlocked(),
        "Remove this user's segments whose creating process is gone; returns their names.");
  m.def("allocate", &host_allocate, py::arg("num_bytes"), Unlocked(),
        "Zeroed, 4096-byte aligned memory of this process: the heap of ranks that are threads.");
  m.def("free", &host_free, py::arg("address"), Unlocked());
}

}  // namespace deep_comm
