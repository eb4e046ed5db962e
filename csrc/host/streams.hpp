// Streams and events of a target, as the order of calls needs them. Streams are raw, 0 the default
// one. The CUDA module hands over its own (stream_cuda.hpp); the host target has none, and kernels
// have ended when a launch returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace deep_comm {

// A point in the work of a stream. Not for use by several threads at once: the interpreter's lock
// guards it.
class Event {
 public:
  virtual ~Event() = default;
  virtual void record(uint64_t stream) = 0;
  // Work that `stream` gets from now on waits for what was recorded.
  virtual void wait(uint64_t stream) const = 0;
  // The calling thread waits for it; a signal's handler may end that (Interrupted).
  virtual void synchronize() const = 0;
  // Whether what was recorded has happened.
  virtual bool has_passed() const = 0;

  // Work that `then` gets from now on waits for all that `first` has. The device must be current.
  virtual void order(uint64_t first, uint64_t then) {
    record(first);
    wait(then);
  }
};

// Of one device.
class StreamTarget {
 public:
  virtual ~StreamTarget() = default;
  virtual bool has_streams() const = 0;
  virtual bool is_device_current() const = 0;
  // Makes it current, and returns what restore_device takes.
  virtual int make_device_current() = 0;
  virtual void restore_device(int previous) = 0;
  virtual bool is_capturing(uint64_t stream) const = 0;
  // Which of the process's captures the stream takes part in; 0: none.
  virtual uint64_t capture_of(uint64_t stream) const = 0;
  // Of a pool: an event costs more to make than to record.
  virtual std::shared_ptr<Event> make_event() = 0;
  // Fills memory of the device behind the stream's work.
  virtual void fill(uintptr_t address, uint8_t byte, size_t num_bytes, uint64_t stream) = 0;
  // Waits for all work of the device.
  virtual void synchronize() = 0;

  // An event at this point of a stream, whichever device is current.
  virtual std::shared_ptr<Event> mark(uint64_t stream);
};

// Makes the device current while it lives.
class DeviceScope {
 public:
  explicit DeviceScope(StreamTarget& target) {
    if (target.is_device_current()) return;
    previous_ = target.make_device_current();
    changed_ = &target;
  }
  ~DeviceScope() {
    if (changed_ != nullptr) changed_->restore_device(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  StreamTarget* changed_ = nullptr;  // null: it was current
  int previous_ = 0;
};

inline std::shared_ptr<Event> StreamTarget::mark(uint64_t stream) {
  const DeviceScope scope(*this);  // stream 0 is the current device's
  std::shared_ptr<Event> event = make_event();
  event->record(stream);
  return event;
}

// The host target's.
class NoStreams final : public StreamTarget {
 public:
  bool has_streams() const override { return false; }
  bool is_device_current() const override { return true; }
  int make_device_current() override { return 0; }
  void restore_device(int /*previous*/) override {}
  bool is_capturing(uint64_t /*stream*/) const override { return false; }
  uint64_t capture_of(uint64_t /*stream*/) const override { return 0; }
  std::shared_ptr<Event> make_event() override { return std::make_shared<PassedEvent>(); }
  void fill(uintptr_t address, uint8_t byte, size_t num_bytes, uint64_t stream) override;
  void synchronize() override {}

 private:
  class PassedEvent final : public Event {
   public:
    void record(uint64_t /*stream*/) override {}
    void wait(uint64_t /*stream*/) const override {}
    void synchronize() const override {}
    bool has_passed() const override { return true; }
  };
};

}  // namespace deep_comm
