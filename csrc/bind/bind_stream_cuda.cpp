#include "bind/bindings.hpp"
#include "bind/numbers.hpp"
#include "bind/torch_tensors.hpp"
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

bool is_capturing(int /*none*/, const std::array<uint64_t, 1>& numbers) {
  return cuda_is_capturing(numbers[0]);
}

// Of one device, as torch knows its current stream.
struct CurrentStream {
  py::object exchange_api;  // keeps the functions
  int (*find)(int32_t device_type, int32_t device_index, void** stream);
  int32_t device;
};

bool is_current_capturing(const CurrentStream& current, const std::array<uint64_t, 0>& /*none*/) {
  constexpr int32_t kDlCuda = 2;
  void* stream = nullptr;
  if (current.find(kDlCuda, current.device, &stream) != 0) throw py::error_already_set();
  return cuda_is_capturing(reinterpret_cast<uint64_t>(stream));
}

py::object mark(int /*none*/, const std::array<uint64_t, 2>& numbers) {
  const auto [device, stream] = numbers;
  const CudaDeviceScope scope(static_cast<int>(device));  // stream 0 is the current device's
  auto event = std::make_unique<CudaEvent>(static_cast<int>(device));
  event->record(stream);
  return py::cast(std::move(event));
}

py::object mark_eager(int device, const std::array<uint64_t, 1>& numbers) {
  std::unique_ptr<CudaEvent> event = cuda_mark(device, numbers[0]);
  if (event == nullptr) return py::none();
  return py::cast(std::move(event));
}

py::object mark_captured(int device, const std::array<uint64_t, 1>& numbers) {
  const CudaDeviceScope scope(device);
  const uint64_t capture = cuda_capture_id(numbers[0]);
  if (capture == 0) return py::none();
  auto event = std::make_unique<CudaEvent>(device);
  event->record(numbers[0]);
  return py::make_tuple(py::cast(std::move(event)), capture);
}

void record(CudaEvent* event, const std::array<uint64_t, 1>& numbers) { event->record(numbers[0]); }

}  // namespace

// The GIL stays held but in waits: every call takes about a microsecond, and an event must not be
// recorded by one thread between another's record and wait.
void bind_stream_cuda(py::module_& m) {
  py::class_<CudaEvent>(m, "Event", py::module_local(), "A point in the work of a stream.")
      .def(py::init<int>(), py::arg("device"))
      .def("record", &CudaEvent::record, py::arg("stream"))
      .def("recorder",
           [](const py::object& self) {
             return number_function<1, &record>("record", self.cast<CudaEvent*>(), self);
           })
      .def("wait", &CudaEvent::wait, py::arg("stream"))
      .def("synchronize", &CudaEvent::synchronize, py::call_guard<py::gil_scoped_release>())
      .def("has_passed", &CudaEvent::has_passed)
      .def("order", &CudaEvent::order, py::arg("first"), py::arg("then"));
  m.def(
      "marker",
      [](int device) { return number_function<1, &mark_eager>("mark", device, py::none()); },
      py::arg("device"));
  m.def(
      "capture_marker",
      [](int device) {
        return number_function<1, &mark_captured>("mark_captured", device, py::none());
      },
      py::arg("device"));
  m.def(
      "capture_check",
      [](int device, py::object exchange_api) {
        const DlExchangeApi* api = exchange_api_of(exchange_api);
        return number_function<0, &is_current_capturing>(
            "is_capturing", CurrentStream{std::move(exchange_api), api->current_stream, device},
            py::none());
      },
      py::arg("device"), py::arg("exchange_api"));
  m.attr("mark") = number_function<2, &mark>("mark", 0, py::none());
  m.attr("is_capturing") = number_function<1, &is_capturing>("is_capturing", 0, py::none());
  m.attr("is_ready") = number_function<2, &is_ready>("is_ready", 0, py::none());
  m.attr("is_current") = number_function<1, &is_current>("is_current", 0, py::none());
  m.def("current_device", &cuda_current_device);
}

}  // namespace deep_comm
