// CallOrder as tests/cpu/test_call_order.py uses it: over the stand-in for CUDA of fake_streams.cpp,
// with a framework that writes down what its allocator is told.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bind/doors.hpp"
#include "host/stream_order.hpp"

namespace py = pybind11;

namespace deep_comm::test {

namespace {

py::handle as_handle(const void* object) {
  return static_cast<PyObject*>(const_cast<void*>(object));
}

// `log`: fake_cuda.Log; torch's part of it is in test_call_order.py.
class LoggedFramework final : public Framework {
 public:
  explicit LoggedFramework(py::object log) : log_(std::move(log)) {}
  uint64_t current_stream() const override { return log_.attr("current").cast<uint64_t>(); }
  Object current_stream_object() const override {
    return Object::steal(py::object(log_.attr("current")).release().ptr());
  }
  void set_current_stream(const Object& stream) override {
    log_.attr("current") = as_handle(stream.get());
  }
  MadeTensor empty(const TensorSpec& /*spec*/) override { refuse(); }
  MadeTensor empty_on_comm(const TensorSpec& /*spec*/) override { refuse(); }
  Object over(uintptr_t /*address*/, const TensorSpec& /*spec*/,
              std::shared_ptr<void> /*owner*/) override {
    refuse();
  }
  Object part(const void* /*tensor*/, const TensorSpec& /*spec*/, size_t /*offset*/) override {
    refuse();
  }
  bool is_inference_mode() const override { return false; }
  std::shared_ptr<void> leave_inference_mode() override { refuse(); }
  void record_on_comm(const void* tensor) override { tell("comm", tensor); }
  void record_on_current(const void* tensor) override { tell("current", tensor); }
  void comm_waits_for(const void* event) override { as_handle(event).attr("wait_on_comm")(); }

 private:
  [[noreturn]] static void refuse() { throw std::logic_error("makes no tensors"); }
  void tell(const char* stream, const void* tensor) {
    log_.attr("told").attr("append")(py::make_tuple(as_handle(tensor), stream));
  }
  py::object log_;
};

std::unique_ptr<CallOrder> begin(StreamOrder& order, const py::object& previous_event,
                                 bool is_async, bool allocates_on_comm) {
  const StreamOptions options{previous_event.is_none() ? nullptr : previous_event.ptr(), is_async,
                              allocates_on_comm};
  return std::make_unique<CallOrder>(order, options);
}

// What waits for the call on a stream; None of a synchronous one. `home`: whose memory the tensors of
// the handle are.
py::object finish(CallOrder& call, const std::vector<py::object>& inputs,
                  const std::vector<py::object>& of_handle, std::optional<uint64_t> home) {
  std::vector<const void*> given;
  for (const py::object& input : inputs) given.push_back(input.is_none() ? nullptr : input.ptr());
  HeldTensors held;
  held.owner_stream = home;
  for (const py::object& tensor : of_handle) held.tensors.push_back(Object::borrow(tensor.ptr()));
  std::shared_ptr<Event> event = call.finish(given, &held);
  if (event == nullptr) return py::none();
  return py::cpp_function([event](uint64_t stream) { event->wait(stream); });
}

}  // namespace

void bind_call_order(py::module_& m) {
  using namespace pybind11::literals;
  Object::retain = [](void* pointer) { Py_INCREF(static_cast<PyObject*>(pointer)); };
  Object::release = [](void* pointer) { Py_DECREF(static_cast<PyObject*>(pointer)); };
  py::class_<StreamOrder>(m, "StreamOrder", py::module_local())
      .def(py::init([](const py::object& streams, py::object log, uint64_t comm) {
             return std::make_unique<StreamOrder>(behind<StreamTarget>(streams),
                                                  std::make_shared<LoggedFramework>(std::move(log)),
                                                  comm);
           }),
           "streams"_a, "log"_a, "comm"_a)
      .def("synchronize", &StreamOrder::synchronize)
      .def("begin", &begin, py::keep_alive<0, 1>(), "previous_event"_a = py::none(),
           "is_async"_a = false, "allocates_on_comm"_a = false)
      .def(
          "begin_unordered",
          [](StreamOrder& self) {
            return std::unique_ptr<CallOrder>(new CallOrder(CallOrder::unordered(self)));
          },
          py::keep_alive<0, 1>());
  py::class_<CallOrder>(m, "CallOrder", py::module_local())
      .def_property_readonly("stream", &CallOrder::stream)
      .def_property_readonly("caller", &CallOrder::caller)
      .def_property_readonly("owner_stream", &CallOrder::owner_stream)
      .def_property_readonly("is_behind_caller", &CallOrder::is_behind_caller)
      .def_property_readonly("is_captured", &CallOrder::is_captured)
      .def("note_output",
           [](CallOrder& self, const py::object& tensor) {
             self.note_output(Object::borrow(tensor.ptr()));
           })
      .def("prepare_pause", &CallOrder::prepare_pause)
      .def("pause", &CallOrder::pause)
      .def("resume", &CallOrder::resume)
      .def("follow_caller", &CallOrder::follow_caller)
      .def("finish", &finish, "inputs"_a = std::vector<py::object>{},
           "of_handle"_a = std::vector<py::object>{}, "home"_a = py::none());
}

}  // namespace deep_comm::test
