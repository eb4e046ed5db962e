// Low-latency calls of one Buffer as Python knows them: _core.LowLatencyCalls.
#pragma once

#include <memory>
#include <utility>

#include "bind/buffer.hpp"
#include "host/calls/low_latency.hpp"

namespace deep_comm {

struct BoundLowLatency : std::enable_shared_from_this<BoundLowLatency> {
  BoundLowLatency(std::shared_ptr<BoundBuffer> of, LowLatencySettings settings,
                  pybind11::object handle_type, pybind11::object tensors_event)
      : buffer(std::move(of)),
        handle_type(std::move(handle_type)),
        tensors_event(std::move(tensors_event)),
        calls(buffer->context, std::move(settings)) {}

  std::shared_ptr<BoundBuffer> buffer;
  pybind11::object handle_type;    // LowLatencyHandle
  pybind11::object tensors_event;  // TensorsEvent(event, tensors, the stream that owns these)
  LowLatencyCalls calls;

  pybind11::object dispatch(const Arguments<17>& given);
  pybind11::object combine(const Arguments<11>& given);
  pybind11::object wait_num_tokens(const Arguments<0>& none);

  pybind11::object overlap_of(LowLatencyCompletion& completion) const;
  pybind11::object hook_of(std::shared_ptr<LowLatencyPending> pending);
};

}  // namespace deep_comm
