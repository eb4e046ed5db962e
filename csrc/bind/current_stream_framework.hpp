// A Framework that knows the current stream alone, from a function of Python's: for regions and stream
// orders while calls in Python still use them. It goes with those.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "bind/numbers.hpp"
#include "host/framework.hpp"

namespace deep_comm {

class CurrentStreamFramework final : public Framework {
 public:
  explicit CurrentStreamFramework(pybind11::object current_stream)
      : current_stream_(std::move(current_stream)) {}

  uint64_t current_stream() const override {
    const uint64_t stream = PyLong_AsUnsignedLongLongMask(current_stream_({}).ptr());
    if (stream == ~uint64_t{0} && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    return stream;
  }
  Object current_stream_object() const override { refuse_all(); }
  void set_current_stream(const Object& /*stream*/) override { refuse_all(); }
  MadeTensor empty(const TensorSpec& /*spec*/) override { refuse_all(); }
  MadeTensor empty_on_comm(const TensorSpec& /*spec*/) override { refuse_all(); }
  Object over(uintptr_t /*address*/, const TensorSpec& /*spec*/,
              std::shared_ptr<void> /*owner*/) override {
    refuse_all();
  }
  void record_on_comm(const void* /*tensor*/) override { refuse_all(); }
  void record_on_current(const void* /*tensor*/) override { refuse_all(); }
  void comm_waits_for(const void* /*event*/) override { refuse_all(); }

 private:
  [[noreturn]] static void refuse_all() {
    throw std::logic_error("this framework knows the current stream alone");
  }
  NumberCall<0> current_stream_;
};

}  // namespace deep_comm
