#include "host/stream_order.hpp"

#include <algorithm>
#include <utility>

#include "host/interpreter.hpp"

namespace deep_comm {

StreamOrder::StreamOrder(std::shared_ptr<StreamTarget> target, std::shared_ptr<Framework> framework,
                         uint64_t comm)
    : target_(std::move(target)),
      framework_(std::move(framework)),
      comm_(comm),
      order_event_(target_->make_event()),
      last_call_event_(target_->make_event()) {}

void StreamOrder::synchronize() {
  const std::shared_ptr<Event> event = last_call_event_;
  const InterpreterUnlocked unlocked;
  if (last_stream_) event->synchronize();
  if (has_graphs_) target_->synchronize();
}

CallOrder::CallOrder(StreamOrder& order, const StreamOptions& options) : order_(&order) {
  StreamTarget& target = order.target();
  is_async_ = options.is_async;
  if (!target.has_streams()) {
    is_behind_caller_ = options.previous_event == nullptr;
    return;
  }
  device_.emplace(target);
  caller_ = stream_ = order.framework().current_stream();
  const bool has_previous = options.previous_event != nullptr;
  if (!has_previous && !is_async_ && !target.is_capturing(caller_)) {
    wait_done(caller_, false);
    return;
  }
  runs_on_comm_ = true;
  stream_ = order.comm();
  outputs_are_comms_ = options.allocates_on_comm || has_previous;
  is_behind_caller_ = !has_previous;
  if (has_previous) {
    order.framework().comm_waits_for(options.previous_event);
  } else if (caller_ != stream_) {
    order.order_event_->order(caller_, stream_);
  }
  is_captured_ = target.is_capturing(stream_);
  if (is_captured_) {
    order.has_graphs_ = true;
  } else {
    wait_done(stream_, is_behind_caller_);
  }
}

CallOrder::CallOrder(StreamOrder& order) : order_(&order), is_ordered_(false) {
  if (!order.target().has_streams()) return;
  device_.emplace(order.target());
  caller_ = stream_ = order.framework().current_stream();
}

CallOrder::~CallOrder() {
  try {
    if (!has_ended_ && order_->target().has_streams()) {
      // Kernels of a call that failed half-way may still read and write: what the caller's stream does
      // with their memory comes after them.
      if (!device_) device_.emplace(order_->target());
      Event& event = end();
      if (runs_on_comm_ && caller_ != stream_) event.wait(caller_);
    }
    leave();
  } catch (...) {
    if (report_unraisable != nullptr) report_unraisable("the end of a call that failed");
  }
}

// `stream` comes after the call before, unless it does so anyway.
void CallOrder::wait_done(uint64_t stream, bool is_after_caller) {
  const std::optional<uint64_t>& last = order_->last_stream_;
  if (!last || *last == stream || (is_after_caller && *last == caller_)) return;
  order_->last_call_event_->wait(stream);
}

void CallOrder::note_output(const Object& tensor) {
  if (runs_on_comm_) outputs_.push_back(tensor);
}

void CallOrder::leave() {
  if (interrupted_) {
    order_->framework().set_current_stream(interrupted_);
    interrupted_ = {};
  }
  device_.reset();
}

void CallOrder::prepare_pause() {
  if (order_->target().has_streams()) {
    caller_object_ = order_->framework().current_stream_object();
  }
}

void CallOrder::pause() {
  was_paused_ = true;
  leave();
}

void CallOrder::resume() {
  if (!order_->target().has_streams()) return;
  Framework& framework = order_->framework();
  device_.emplace(order_->target());
  if (framework.current_stream() != caller_) {
    interrupted_ = framework.current_stream_object();
    framework.set_current_stream(caller_object_);
  }
}

void CallOrder::follow_caller() {
  if (was_paused_ && caller_ != stream_) order_->order_event_->order(caller_, stream_);
}

// An event after the call.
Event& CallOrder::end() {
  Event& event = is_captured_ ? *order_->order_event_ : *order_->last_call_event_;
  if (!is_ordered_) return event;
  if (!is_captured_) order_->last_stream_ = stream_;
  event.record(stream_);
  return event;
}

// Tells the framework's allocator of the stream that uses outputs beside their owner.
void CallOrder::record_outputs() {
  for (const Object& tensor : outputs_) {
    if (outputs_are_comms_) {
      order_->framework().record_on_current(tensor.get());
    } else {
      order_->framework().record_on_comm(tensor.get());
    }
  }
  outputs_.clear();
}

void CallOrder::record_handle(HeldTensors& handle) {
  const auto record = [&](uint64_t stream, bool on_comm) {
    std::vector<uint64_t>& known = handle.recorded_on;
    if (std::find(known.begin(), known.end(), stream) != known.end()) return;
    for (const Object& tensor : handle.tensors) {
      if (on_comm) {
        order_->framework().record_on_comm(tensor.get());
      } else {
        order_->framework().record_on_current(tensor.get());
      }
    }
    known.push_back(stream);  // as long as the memory is in use
  };
  if (!runs_on_comm_) return record(stream_, false);
  record(stream_, true);
  if (outputs_are_comms_) record(caller_, false);
}

std::shared_ptr<Event> CallOrder::finish(const std::vector<const void*>& inputs,
                                         HeldTensors* handle) {
  if (!order_->target().has_streams()) {
    return is_async_ ? order_->target().make_event() : nullptr;
  }
  Event& event = end();
  const bool has_owner = handle != nullptr && handle->owner_stream && !handle->tensors.empty();
  std::shared_ptr<Event> result;
  if (is_async_) {
    for (const void* input : inputs) {
      if (input != nullptr) order_->framework().record_on_comm(input);
    }
    record_outputs();
    if (handle != nullptr && !handle->tensors.empty()) record_handle(*handle);
    result = order_->target().mark(stream_);
  } else {
    if (runs_on_comm_ && caller_ != stream_) event.wait(caller_);
    if (outputs_are_comms_) record_outputs();
    // The stream that would reuse the handle's memory does not wait for this call.
    if (has_owner && *handle->owner_stream != caller_ && *handle->owner_stream != stream_) {
      record_handle(*handle);
    }
  }
  has_ended_ = true;  // not before: all above may raise
  leave();
  return result;
}

}  // namespace deep_comm
