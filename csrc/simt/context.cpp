#undef _FORTIFY_SOURCE  // its longjmp refuses to jump to another stack
#include "context.hpp"

#include <cstdint>
#include <cstring>

namespace deep_comm::simt {

#if DEEP_COMM_ASSEMBLY_CONTEXT

#if defined(__x86_64__)

void prepare_context(Context& context, void* stack_low, size_t stack_bytes, void (*entry)()) {
  // From low to high: control words, six registers, the address to jump to, then a zero where a
  // caller's return address would be. At entry the stack pointer is 8 below a multiple of 16, as
  // after a call.
  uintptr_t high = (reinterpret_cast<uintptr_t>(stack_low) + stack_bytes) & ~uintptr_t{15};
  auto* frame = reinterpret_cast<uint64_t*>(high) - 9;
  memset(frame, 0, 9 * sizeof(uint64_t));
  const uint32_t mxcsr = 0x1f80, x87_control = 0x037f;
  frame[0] = mxcsr | uint64_t{x87_control} << 32;
  frame[7] = reinterpret_cast<uint64_t>(entry);
  context.stack_pointer = frame;
}

#else

void prepare_context(Context& context, void* stack_low, size_t stack_bytes, void (*entry)()) {
  uintptr_t high = (reinterpret_cast<uintptr_t>(stack_low) + stack_bytes) & ~uintptr_t{15};
  auto* frame = reinterpret_cast<uint64_t*>(high) - 22;
  memset(frame, 0, 22 * sizeof(uint64_t));
  frame[11] = reinterpret_cast<uint64_t>(entry);  // the link register
  context.stack_pointer = frame;
}

#endif

#else

void prepare_context(Context& context, void* stack_low, size_t stack_bytes, void (*entry)()) {
  context.entered = false;
  getcontext(&context.first_entry);
  context.first_entry.uc_stack.ss_sp = stack_low;
  context.first_entry.uc_stack.ss_size = stack_bytes;
  context.first_entry.uc_link = nullptr;
  makecontext(&context.first_entry, entry, 0);
}

void switch_context(Context& from, Context& to) {
  if (_setjmp(from.registers) != 0) return;
  if (to.entered) _longjmp(to.registers, 1);
  to.entered = true;
  setcontext(&to.first_entry);  // the one switch of a fiber that makes a system call
}

#endif

}  // namespace deep_comm::simt
