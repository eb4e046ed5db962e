#include "bind/bindings.hpp"
#include "bind/numbers.hpp"
#include "host/stream_cuda.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

bool is_ready(int /*none*/, const std::array<uint64_t, 2>& numbers) {
  const auto [device, stream] = numbers;
  return cuda_is_ready(static_cast<int>(device), stream);
}

bool is_current(int /*none*/, const std::array<uint64_t, 1>& numbers) {
  return cuda_is_current(static_cast<int>(numbers[0]));
}

}  // namespace

// The GIL stays held but in waits: every call takes about a microsecond, and an event must not be
// recorded by one thread between another's record and wait.
void bind_stream_cuda(py::module_& m) {
  py::class_<CudaEvent>(m, "Event", py::module_local(), "A point in the work of a stream.")
      .def(py::init<int>(), py::arg("device"))
      .def("record", &CudaEvent::record, py::arg("stream"))
      .def("wait", &CudaEvent::wait, py::arg("stream"))
      .def("synchronize", &CudaEvent::synchronize, py::call_guard<py::gil_scoped_release>())
      .def("order", &CudaEvent::order, py::arg("first"), py::arg("then"));
  m.def("mark", &cuda_mark, py::arg("device"), py::arg("stream"));
  m.def("is_capturing", &cuda_is_capturing, py::arg("stream"));
  m.attr("is_ready") = number_function<2, &is_ready>("is_ready", 0, py::none());
  m.attr("is_current") = number_function<1, &is_current>("is_current", 0, py::none());
  m.def("current_device", &cuda_current_device);
}

}  // namespace deep_comm
