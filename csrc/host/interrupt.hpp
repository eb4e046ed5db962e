// Signals during long waits of the host: the program's language looks for them now and then.
#pragma once

#include <chrono>

namespace deep_comm {

// What the check below throws when a signal's handler wants the wait to end.
struct Interrupted {
  virtual ~Interrupted() = default;
};

// Set once by the bindings; may throw something derived from Interrupted.
inline void (*interrupt_check)() = nullptr;

// Of one wait. The check may wait for a lock of the interpreter, so it is made rarely.
class InterruptWatch {
 public:
  static constexpr std::chrono::milliseconds kInterval{50};

  void look() {
    const auto now = Clock::now();
    if (now < next_) return;
    if (interrupt_check != nullptr) interrupt_check();
    next_ = now + kInterval;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point next_ = Clock::now() + kInterval;
};

}  // namespace deep_comm
