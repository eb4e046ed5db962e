// What calls ask of the program's tensor library, for one Buffer on one device. Implemented in
// bind/torch, with public interfaces of torch only. All of it needs the interpreter's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "host/tensor.hpp"

namespace deep_comm {

class Framework {
 public:
  virtual ~Framework() = default;

  // The caller's stream on the Buffer's device.
  virtual uint64_t current_stream() const = 0;
  // The same as an object that set_current_stream takes.
  virtual Object current_stream_object() const = 0;
  virtual void set_current_stream(const Object& stream) = 0;
  // A tensor of the framework's own memory, of the current stream. The device must be current.
  virtual MadeTensor empty(const TensorSpec& spec) = 0;
  // The same of the memory of the Buffer's communication stream.
  virtual MadeTensor empty_on_comm(const TensorSpec& spec) = 0;
  // A tensor over memory that `owner` keeps until the last tensor over it has gone. An address of 0
  // is allowed if the tensor has no elements.
  virtual Object over(uintptr_t address, const TensorSpec& spec, std::shared_ptr<void> owner) = 0;
  // A tensor over a part of another one's memory, which begins `offset` bytes behind its first element.
  // `tensor` (borrowed) is flat and begins where its memory does; offset and the part's bytes are
  // multiples of both element sizes. A part with strides of its own is of the same type.
  virtual Object part(const void* tensor, const TensorSpec& spec, size_t offset) = 0;
  // While gradients are off for good (torch's inference mode), tensors that are made then can never
  // have any.
  virtual bool is_inference_mode() const = 0;
  // Leaves that mode until the result has gone.
  virtual std::shared_ptr<void> leave_inference_mode() = 0;
  // Tells the framework's allocator that the communication stream uses a tensor (borrowed), so that
  // its memory is not handed out before that has come so far. Nothing for an empty tensor.
  virtual void record_on_comm(const void* tensor) = 0;
  // The same of the current stream.
  virtual void record_on_current(const void* tensor) = 0;
  // Work that the communication stream gets from now on waits for an event of the caller's
  // (deep_comm.events.EventHandle, borrowed).
  virtual void comm_waits_for(const void* event) = 0;
};

}  // namespace deep_comm
