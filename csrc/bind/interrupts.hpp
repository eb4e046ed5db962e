// Python's signal handlers run during waits of the main thread, as they do in Python's own.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>

#include "host/interrupt.hpp"

namespace deep_comm {

namespace detail {

// What a handler has raised: KeyboardInterrupt, as a rule.
struct PythonInterrupted : Interrupted {
  pybind11::error_already_set error;
};

inline void run_signal_handlers() {
  if (syscall(SYS_gettid) != getpid()) return;  // handlers run in the main thread alone
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw PythonInterrupted();
}

}  // namespace detail

// Once for each module.
inline void bind_interrupts() {
  interrupt_check = &detail::run_signal_handlers;
  pybind11::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (detail::PythonInterrupted& interrupted) {
      interrupted.error.restore();
    }
  });
}

}  // namespace deep_comm
