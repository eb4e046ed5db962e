// Where the one-step calls of a Buffer run: the caller's stream or the communication stream, and what
// each is behind.
#pragma once

#include <memory>
#include <optional>

#include "bind/bindings.hpp"
#include "bind/doors.hpp"
#include "bind/torch_tensors.hpp"

namespace deep_comm::quick {

namespace py = pybind11;

// Where one call runs: as CallerLaunch and CommLaunch of backends/cuda_launch.py say.
struct Order {
  uint64_t stream = 0;  // of its kernels
  uint64_t caller = 0;  // the current one
  bool is_behind_caller = true;
  bool is_async = false;  // on the communication stream, and the caller's goes on
  bool on_comm = false;   // outputs belong to the communication stream

  uint64_t home() const { return on_comm ? stream : caller; }
};

// The streams of one Buffer.
struct StreamParts {
  py::object streams;                         // Streams of the CUDA backend, or None
  py::object comm;                            // its communication stream, torch's object
  std::shared_ptr<StreamOrder> stream_order;  // null: there are no streams
  py::object record_name;

  // `streams`: Backend.quick_streams.
  static StreamParts make(py::object streams) {
    const bool has_streams = !streams.is_none();
    return {.streams = streams,
            .comm = has_streams ? py::object(streams.attr("comm")) : py::none(),
            .stream_order =
                has_streams ? behind<StreamOrder>(streams.attr("order").attr("door")) : nullptr,
            .record_name = py::str("record_stream")};
  }

  // `asynchronous`: None, or (the event to be behind instead of the caller's stream, or None; are
  // outputs the communication stream's). False: the operation cannot run at once.
  bool begin(PyObject* asynchronous, Order* order) const {
    *order = {};
    PyObject* previous = Py_None;
    if (asynchronous != Py_None) {
      previous = PyTuple_GET_ITEM(asynchronous, 0);
      order->is_async = true;
      order->on_comm = PyTuple_GET_ITEM(asynchronous, 1) == Py_True;
      order->is_behind_caller = previous == Py_None;
    }
    if (streams.is_none()) return true;
    const uint64_t caller = stream_order->framework().current_stream();
    const uint64_t raw_comm = stream_order->comm();
    order->caller = order->stream = caller;
    if (!is_eager(caller)) return false;
    if (!order->is_async) {
      if (!is_last(caller)) wait_done(caller);
      return true;
    }
    order->stream = raw_comm;
    if (raw_comm != caller && !is_eager(raw_comm)) return false;
    if (!order->is_behind_caller) {
      py::handle(previous).attr("stream_wait")(comm);
    } else if (raw_comm != caller) {
      stream_order->hop()->order(caller, raw_comm);
    }
    if (!is_last(raw_comm) && !(order->is_behind_caller && is_last(caller))) {
      wait_done(raw_comm);
    }
    return true;
  }

  // No graph is captured on this stream of the device, which is the current one.
  bool is_eager(uint64_t stream) const {
    if (streams.is_none()) return true;
    const StreamTarget& target = stream_order->target();
    return target.is_device_current() && !target.is_capturing(stream);
  }

  // Kernels of an asynchronous call read what the caller gave.
  void keep(PyObject* tensor, const TensorView& view, const Order& order) const {
    if (order.is_async && !view.is_empty()) record(tensor);
  }

  // For torch's allocator: the communication stream uses the tensor.
  void record(PyObject* tensor) const {
    if (streams.is_none()) return;
    PyObject* const arguments[] = {tensor, comm.ptr()};
    PyObject* none = PyObject_VectorcallMethod(record_name.ptr(), arguments, 2, nullptr);
    if (none == nullptr) throw py::error_already_set();
    Py_DECREF(none);
  }

  void end(const Order& order) const {
    if (streams.is_none()) return;
    stream_order->set_last(order.stream);
    stream_order->done()->record(order.stream);
  }

 private:
  // Is there nothing to wait for after the operation before on this stream?
  bool is_last(uint64_t stream) const {
    const std::optional<uint64_t>& last = stream_order->last();
    return !last || *last == stream;
  }

  // The stream comes after the operation before.
  void wait_done(uint64_t stream) const { stream_order->done()->wait(stream); }
};

}  // namespace deep_comm::quick
