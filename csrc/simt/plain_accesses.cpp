// Loads and stores of the kernels that are no primitives. Modules that find races are compiled with
// -fsanitize=thread, which makes the compiler call these functions at each of them; the library of
// that sanitizer is not used. Atomics come here as well; they get at least the order that they ask
// for. In other modules nobody calls what is here.
#include <cstddef>
#include <cstdint>

#include "fiber.hpp"
#include "ops.hpp"

namespace deep_comm::simt {
namespace {

bool g_is_instrumented = false;

inline void note(const void* address, size_t num_bytes, Races::Access access, const void* code) {
  const Fiber* self = t_state.current;
  if (!self) return;
  const Block& block = *self->warp->block;
  if (!block.owns(address) || !block.races) [[likely]]
    return;
  block.races->access(self, address, num_bytes, access, code);
}

void note_instrumented() { g_is_instrumented = true; }

}  // namespace

bool finds_races() { return g_is_instrumented; }

}  // namespace deep_comm::simt

// NOLINTBEGIN(bugprone-reserved-identifier): the compiler's names.
#pragma GCC diagnostic ignored "-Wmissing-declarations"
#pragma GCC visibility push(hidden)
extern "C" {

// Every instrumented file calls it when the module is loaded.
void __tsan_init() { deep_comm::simt::note_instrumented(); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

#define DC_NOTE(NAME, BYTES, ACCESS)                                              \
  void NAME(void* address) {                                                      \
    deep_comm::simt::note(address, BYTES, deep_comm::simt::Races::Access::ACCESS, \
                          __builtin_return_address(0));                           \
  }
#define DC_NOTE_BOTH(PREFIX, BYTES)          \
  DC_NOTE(PREFIX##read##BYTES, BYTES, kRead) \
  DC_NOTE(PREFIX##write##BYTES, BYTES, kWrite)
DC_NOTE_BOTH(__tsan_, 1)
DC_NOTE_BOTH(__tsan_, 2)
DC_NOTE_BOTH(__tsan_, 4)
DC_NOTE_BOTH(__tsan_, 8)
DC_NOTE_BOTH(__tsan_, 16)
DC_NOTE_BOTH(__tsan_unaligned_, 2)
DC_NOTE_BOTH(__tsan_unaligned_, 4)
DC_NOTE_BOTH(__tsan_unaligned_, 8)
DC_NOTE_BOTH(__tsan_unaligned_, 16)

void __tsan_read_range(void* address, size_t num_bytes) {
  deep_comm::simt::note(address, num_bytes, deep_comm::simt::Races::Access::kRead,
                        __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t num_bytes) {
  deep_comm::simt::note(address, num_bytes, deep_comm::simt::Races::Access::kWrite,
                        __builtin_return_address(0));
}

#define DC_ATOMICS(BITS)                                                                  \
  using Int##BITS = uint##BITS##_t;                                                       \
  Int##BITS __tsan_atomic##BITS##_load(const Int##BITS* word, int) {                      \
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);                                       \
  }                                                                                       \
  void __tsan_atomic##BITS##_store(Int##BITS* word, Int##BITS value, int order) {         \
    if (order != __ATOMIC_SEQ_CST) {                                                      \
      __atomic_store_n(word, value, __ATOMIC_RELEASE);                                    \
    } else {                                                                              \
      __atomic_store_n(word, value, __ATOMIC_SEQ_CST);                                    \
    }                                                                                     \
  }                                                                                       \
  Int##BITS __tsan_atomic##BITS##_exchange(Int##BITS* word, Int##BITS value, int) {       \
    return __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST);                            \
  }                                                                                       \
  Int##BITS __tsan_atomic##BITS##_fetch_add(Int##BITS* word, Int##BITS value, int) {      \
    return __atomic_fetch_add(word, value, __ATOMIC_SEQ_CST);                             \
  }                                                                                       \
  Int##BITS __tsan_atomic##BITS##_fetch_sub(Int##BITS* word, Int##BITS value, int) {      \
    return __atomic_fetch_sub(word, value, __ATOMIC_SEQ_CST);                             \
  }                                                                                       \
  Int##BITS __tsan_atomic##BITS##_fetch_and(Int##BITS* word, Int##BITS value, int) {      \
    return __atomic_fetch_and(word, value, __ATOMIC_SEQ_CST);                             \
  }                                                                                       \
  Int##BITS __tsan_atomic##BITS##_fetch_or(Int##BITS* word, Int##BITS value, int) {       \
    return __atomic_fetch_or(word, value, __ATOMIC_SEQ_CST);                              \
  }                                                                                       \
  int __tsan_atomic##BITS##_compare_exchange_strong(Int##BITS* word, Int##BITS* expected, \
                                                    Int##BITS desired, int, int) {        \
    return __atomic_compare_exchange_n(word, expected, desired, false, __ATOMIC_SEQ_CST,  \
                                       __ATOMIC_SEQ_CST);                                 \
  }                                                                                       \
  int __tsan_atomic##BITS##_compare_exchange_weak(Int##BITS* word, Int##BITS* expected,   \
                                                  Int##BITS desired, int, int) {          \
    return __atomic_compare_exchange_n(word, expected, desired, true, __ATOMIC_SEQ_CST,   \
                                       __ATOMIC_SEQ_CST);                                 \
  }
DC_ATOMICS(8)
DC_ATOMICS(16)
DC_ATOMICS(32)
DC_ATOMICS(64)

void __tsan_atomic_thread_fence(int order) {
  if (order != __ATOMIC_SEQ_CST) {
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
  } else {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
  }
}
void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

}  // extern "C"
#pragma GCC visibility pop
// NOLINTEND(bugprone-reserved-identifier)
