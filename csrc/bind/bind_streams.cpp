// Streams and events of whichever target, for Python.
#include <pybind11/stl.h>

#include "bind/bindings.hpp"
#include "bind/doors.hpp"
#include "bind/function.hpp"
#include "bind/torch/reader.hpp"
#include "host/stream_order.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

using Target = std::shared_ptr<StreamTarget>;

// Of one device, as torch knows its current stream.
struct CurrentStream {
  Target target;
  py::object exchange_api;  // keeps the function
  int (*find)(int32_t device_type, int32_t device_index, void** stream);
  int32_t device;
};

int enter_call(CurrentStream& /*self*/) { return 0; }  // it is no call of a Buffer

py::object is_current_capturing(CurrentStream& current, const Arguments<0>& /*none*/) {
  constexpr int32_t kDlCuda = 2;
  void* stream = nullptr;
  if (current.find(kDlCuda, current.device, &stream) != 0) throw py::error_already_set();
  return py::bool_(current.target->is_capturing(reinterpret_cast<uint64_t>(stream)));
}

}  // namespace

// The interpreter's lock stays held except in waits: every call takes about a microsecond, and an
// event must not be recorded by one thread between another's record and wait.
void bind_streams(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Event, std::shared_ptr<Event>>(m, "Event", py::module_local(),
                                            "A point in the work of a stream.")
      .def("record", &Event::record, py::arg("stream"))
      .def("wait", &Event::wait, py::arg("stream"))
      .def("synchronize", &Event::synchronize, Unlocked())
      .def("has_passed", &Event::has_passed)
      .def("order", &Event::order, py::arg("first"), py::arg("then"));
  py::class_<StreamTarget, Target>(m, "Streams", py::module_local(), "Of one device.")
      .def(py::init([](const py::object& door) { return behind<StreamTarget>(door); }),
           py::arg("door"))
      .def_property_readonly("door", [](const Target& self) { return door_of(self); })
      .def("is_capturing", &StreamTarget::is_capturing, py::arg("stream"))
      .def(
          "capture_check",
          [](const Target& self, int device, py::object exchange_api) -> py::object {
            const DlExchangeApi* api = find_exchange_api(exchange_api);
            if (api == nullptr) return py::none();
            return method_function<&is_current_capturing>(
                "is_capturing",
                std::make_shared<CurrentStream>(
                    CurrentStream{self, std::move(exchange_api), api->current_stream, device}),
                py::none());
          },
          py::arg("device"), py::arg("exchange_api"))
      .def("mark", &StreamTarget::mark, py::arg("stream"))
      .def("synchronize", &StreamTarget::synchronize, Unlocked());
  py::class_<StreamOrder, std::shared_ptr<StreamOrder>>(
      m, "StreamOrder", py::module_local(), "Orders the calls of one Buffer among streams.")
      .def(py::init(
               [](const py::object& streams, std::shared_ptr<Framework> framework, uint64_t comm) {
                 return std::make_shared<StreamOrder>(behind<StreamTarget>(streams),
                                                      std::move(framework), comm);
               }),
           py::arg("streams"), py::arg("framework"), py::arg("comm"))
      .def_property_readonly(
          "door", [](std::shared_ptr<StreamOrder> self) { return door_of(std::move(self)); })
      .def("synchronize", &StreamOrder::synchronize);
  m.def("streams", [] { return door_of<StreamTarget>(std::make_shared<NoStreams>()); });
}

}  // namespace deep_comm
