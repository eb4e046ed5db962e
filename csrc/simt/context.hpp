// The switch between two stacks of one OS thread, without a system call.
#pragma once

#include <cstddef>

#if (defined(__x86_64__) || defined(__aarch64__)) && defined(__ELF__) && \
    !defined(DEEP_COMM_PORTABLE_CONTEXT)
#define DEEP_COMM_ASSEMBLY_CONTEXT 1
#else
#define DEEP_COMM_ASSEMBLY_CONTEXT 0
#include <ucontext.h>

#include <csetjmp>
#endif

namespace deep_comm::simt {

#if DEEP_COMM_ASSEMBLY_CONTEXT

// Everything else is on the stack that the pointer names (context.S).
struct Context {
  void* stack_pointer = nullptr;
};

extern "C" void deep_comm_simt_switch(void** save_stack_pointer, void* load_stack_pointer);

inline void switch_context(Context& from, Context& to) {
  deep_comm_simt_switch(&from.stack_pointer, to.stack_pointer);
}

#else

struct Context {
  jmp_buf registers;
  ucontext_t first_entry;
  bool entered = true;  // the OS thread's own context has been
};

void switch_context(Context& from, Context& to);

#endif

// Prepares `context` so that the first switch to it calls `entry` on the given stack. `entry` never
// returns.
void prepare_context(Context& context, void* stack_low, size_t stack_bytes, void (*entry)());

}  // namespace deep_comm::simt
