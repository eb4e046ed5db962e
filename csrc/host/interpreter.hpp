// The interpreter's lock: calls hold it while they read and make tensors, and let go of it where they
// wait. This folder knows no interpreter; the bindings set the two functions.
#pragma once

namespace deep_comm {

struct InterpreterLock {
  void* (*release)() = nullptr;
  void (*acquire)(void* state) = nullptr;
};

// Set once by the bindings.
inline InterpreterLock interpreter_lock{};

// Whether there still is an interpreter: at exit what is left ends without one. Set likewise.
inline bool (*has_interpreter)() = nullptr;

// Called in the handler of an exception that nobody can be told of: prints it. Set likewise.
inline void (*report_unraisable)(const char* where) = nullptr;

// While one lives, this thread does not hold the lock.
class InterpreterUnlocked {
 public:
  explicit InterpreterUnlocked(bool is_needed = true)
      : is_held_(is_needed && interpreter_lock.release != nullptr) {
    if (is_held_) state_ = interpreter_lock.release();
  }
  ~InterpreterUnlocked() {
    if (is_held_) interpreter_lock.acquire(state_);
  }
  InterpreterUnlocked(const InterpreterUnlocked&) = delete;
  InterpreterUnlocked& operator=(const InterpreterUnlocked&) = delete;

 private:
  bool is_held_;
  void* state_ = nullptr;
};

}  // namespace deep_comm
