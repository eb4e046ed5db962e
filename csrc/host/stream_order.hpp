// The order of a Buffer's calls among the caller's streams and its own communication stream
// (docs/design/0016).
//
// Calls of normal mode run one at a time, in the order in which they are made. A call runs on the
// caller's stream if that waits for it anyway and it starts after no other event; otherwise, and in a
// CUDA graph, it runs on the communication stream. Eager calls wait for last_call_event_, which lies
// after the call before; those of graphs have their order from the communication stream. Low-latency
// calls are unordered.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "host/framework.hpp"
#include "host/streams.hpp"

namespace deep_comm {

// As callers choose; see Buffer.dispatch.
struct StreamOptions {
  const void* previous_event = nullptr;  // deep_comm.events.EventHandle, borrowed; null: none
  bool is_async = false;
  bool allocates_on_comm = false;
};

// Streams that torch's allocator has been told of, for tensors that a call keeps using: those of a
// handle that are the framework's memory.
struct HeldTensors {
  std::vector<Object> tensors;
  std::optional<uint64_t> owner_stream;  // whose memory they are; empty: nobody need be told
  std::vector<uint64_t> recorded_on;
};

// Of one Buffer.
class StreamOrder {
 public:
  StreamOrder(std::shared_ptr<StreamTarget> target, std::shared_ptr<Framework> framework,
              uint64_t comm);

  StreamTarget& target() const { return *target_; }
  Framework& framework() const { return *framework_; }
  const std::shared_ptr<Framework>& shared_framework() const { return framework_; }
  uint64_t comm() const { return comm_; }
  // Waits for the last call, which all others come before, and for what may be graphs. Lets go of
  // the interpreter's lock.
  void synchronize();

 private:
  friend class CallOrder;
  std::shared_ptr<StreamTarget> target_;
  std::shared_ptr<Framework> framework_;
  uint64_t comm_;
  std::shared_ptr<Event> order_event_;      // from the caller's stream, and back in a capture
  std::shared_ptr<Event> last_call_event_;  // after the last call; never of a capture
  std::optional<uint64_t> last_stream_;     // the stream of that call; empty: there was none
  bool has_graphs_ = false;                 // which run on streams that nobody tells of
};

// One call among the streams: begins when it is made and ends in `finish`. If the call throws first,
// the destructor makes the caller's stream wait, so that memory outlives launched kernels.
class CallOrder {
 public:
  CallOrder(StreamOrder& order, const StreamOptions& options);
  // On the caller's stream, without order among the Buffer's calls: the caller orders them.
  static CallOrder unordered(StreamOrder& order) { return CallOrder(order); }
  CallOrder(const CallOrder&) = delete;
  CallOrder& operator=(const CallOrder&) = delete;
  ~CallOrder();

  uint64_t stream() const { return stream_; }  // of the call's kernels
  uint64_t caller() const { return caller_; }  // the current one when it began
  bool is_behind_caller() const { return is_behind_caller_; }
  bool is_captured() const { return is_captured_; }
  bool is_async() const { return is_async_; }
  // Outputs belong to the communication stream: when the caller asks for that, and when the call
  // waits for an event instead of the caller's stream, since memory that this one hands out may still
  // be in use by work that it has queued after the event.
  bool outputs_are_comms() const { return outputs_are_comms_; }
  uint64_t owner_stream() const { return outputs_are_comms_ ? stream_ : caller_; }

  // Of Memory::empty.
  void note_output(const Object& tensor);
  // Of a call on the communication stream: the framework's allocator will not be told of its outputs.
  // Whoever takes them keeps them until the stream that owns their memory comes after the call.
  std::vector<Object> take_outputs() { return std::exchange(outputs_, {}); }

  // Asynchronous calls: the scope of the call ends without finish, and will go on after resume, with
  // memory as if the caller's stream were still the same. prepare_pause, before the launch, does all
  // that may raise.
  void prepare_pause();
  void pause();
  void resume();
  // Before memory is taken that the kernels launched so far do not write: the caller's stream may
  // have got work since the call began that still uses it.
  void follow_caller();

  // The end of the call: its `inputs` (framework tensors, null ones are skipped) and its handle's
  // tensors outlive it. Returns the event of an asynchronous call, else null.
  std::shared_ptr<Event> finish(const std::vector<const void*>& inputs, HeldTensors* handle);

 private:
  explicit CallOrder(StreamOrder& order);  // unordered
  void wait_done(uint64_t stream, bool is_after_caller);
  Event& end();
  void record_outputs();
  void record_handle(HeldTensors& handle);
  void leave();

  StreamOrder* order_;
  uint64_t stream_ = 0, caller_ = 0;
  bool is_behind_caller_ = true, is_captured_ = false, is_async_ = false;
  bool outputs_are_comms_ = false, is_ordered_ = true, runs_on_comm_ = false;
  bool has_ended_ = false, was_paused_ = false;
  std::optional<DeviceScope> device_;
  std::vector<Object> outputs_;
  Object caller_object_, interrupted_;
};

}  // namespace deep_comm
