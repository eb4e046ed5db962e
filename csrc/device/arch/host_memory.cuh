// Loads, stores, atomics and fences on the host. A direct grid uses real memory, which other processes
// share: its accesses are C++ atomics. On the simulated machine accesses pass through its memory
// model, and at each ordered access another fiber may run first.
#pragma once

#include "host_numbers.cuh"
#include "host_site.cuh"

namespace deep_comm::arch {

namespace detail {

inline void count_poll() {
  if (--simt::t_state.polls_left == 0) [[unlikely]]
    simt::poll_yield();
}

template <class T>
constexpr void check_word() {
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8,
                "words with an order have 1, 2, 4 or 8 bytes");
}

template <class T>
inline T load_weak(const T* address) {
  static_assert(sizeof(T) <= 16);
  T value;
  if (simulated()) {
    simt::simulated_load(&value, address, sizeof(T));
  } else if constexpr (sizeof(T) == 16) {
    memcpy(&value, address, sizeof(T));
  } else {
    __atomic_load(const_cast<T*>(address), &value, __ATOMIC_RELAXED);
  }
  return value;
}

template <class T>
inline void store_weak(T* address, T value) {
  static_assert(sizeof(T) <= 16);
  if (simulated()) {
    simt::simulated_store(address, &value, sizeof(T));
  } else if constexpr (sizeof(T) == 16) {
    memcpy(address, &value, sizeof(T));
  } else {
    __atomic_store(address, &value, __ATOMIC_RELAXED);
  }
}

template <int kOrder, class T>
inline T load_ordered(const T* address, Scope scope, Site site) {
  check_word<T>();
  T value;
  if (simulated()) {
    const bool acquires = site.weakened(kOrder == __ATOMIC_ACQUIRE, false, &scope);
    simt::simulated_ordered_load(&value, address, sizeof(T), acquires, scope);
  } else {
    __atomic_load(const_cast<T*>(address), &value, kOrder);
    count_poll();
  }
  return value;
}

template <class T>
inline void store_relaxed(T* address, T value, Scope scope) {
  check_word<T>();
  if (simulated()) {
    simt::simulated_relaxed_store(address, &value, sizeof(T), scope);
  } else {
    __atomic_store(address, &value, __ATOMIC_RELAXED);
  }
}

// Vectors of four words. On the simulated machine one half of a vector may become visible before
// the other.
template <class T>
inline T load_words(const T* address) {
  static_assert(sizeof(T) == 16);
  T value;
  if (simulated()) {
    simt::simulated_ordered_load(&value, address, sizeof(T), false, Scope::kSys);
    return value;
  }
  uint32_t words[4];
  for (int word = 0; word < 4; ++word) {
    words[word] =
        __atomic_load_n(reinterpret_cast<const uint32_t*>(address) + word, __ATOMIC_RELAXED);
  }
  memcpy(&value, words, sizeof(T));
  count_poll();
  return value;
}

template <class T>
inline void store_words(T* address, T value) {
  static_assert(sizeof(T) == 16);
  if (simulated()) {
    simt::simulated_relaxed_store(address, &value, sizeof(T), Scope::kSys);
    return;
  }
  uint32_t words[4];
  memcpy(words, &value, sizeof(T));
  for (int word = 0; word < 4; ++word) {
    __atomic_store_n(reinterpret_cast<uint32_t*>(address) + word, words[word], __ATOMIC_RELAXED);
  }
}

template <class T>
inline void store_release(T* address, T value, Scope scope, Site site) {
  check_word<T>();
  if (!simulated()) {
    __atomic_store(address, &value, __ATOMIC_RELEASE);
  } else if (!site.weakened(true, false, &scope) || fault(Fault::kWeakenRelease)) {
    simt::simulated_relaxed_store(address, &value, sizeof(T), scope);
  } else {
    simt::simulated_release_store(address, &value, sizeof(T), scope);
  }
}

// Runs `update` on the word itself. On the simulated machine no other fiber runs meanwhile.
template <class T, class Update>
inline T atomic(T* address, AtomicOrder order, Scope scope, Site site, Update update) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if (!simulated()) return update(address);
  order = site.weakened(order, AtomicOrder::kRelaxed, &scope);
  if (fault(Fault::kWeakenRelease)) order = AtomicOrder::kRelaxed;
  simt::simulated_atomic_begin(address, sizeof(T), order, scope);
  const T old = update(address);
  simt::simulated_atomic_end(address, sizeof(T), order, scope);
  return old;
}

template <int kOrder, class T>
inline T atomic_add(T* address, T value, Scope scope, Site site) {
  constexpr auto kAtomicOrder =
      kOrder == __ATOMIC_ACQ_REL ? AtomicOrder::kAcqRel : AtomicOrder::kRelaxed;
  return atomic(address, kAtomicOrder, scope, site,
                [value](T* word) { return __atomic_fetch_add(word, value, kOrder); });
}

template <class T>
inline T atomic_cas(T* address, T expected, T desired, Scope scope, Site site) {
  return atomic(address, AtomicOrder::kRelaxed, scope, site, [expected, desired](T* word) {
    T old = expected;
    __atomic_compare_exchange_n(word, &old, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return old;
  });
}

inline void fence(Scope scope, Site site) {
  if (!simulated()) {
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
  } else if (site.weakened(true, false, &scope) && !fault(Fault::kWeakenFence)) {
    simt::simulated_fence(scope);
  }
}

}  // namespace detail

// ---- memory ---------------------------------------------------------------------------

template <class T>
inline T ld_weak(const T* address) {
  return detail::load_weak(address);
}
template <class T>
inline void st_weak(T* address, T value) {
  detail::store_weak(address, value);
}
template <class T>
inline T ld_nc(const T* address) {
  if (detail::simulated()) simt::simulated_touch(address);
  T value;
  memcpy(&value, address, sizeof(T));
  return value;
}
template <class T>
inline void st_streaming(T* address, T value) {
  detail::store_weak(address, value);
}

template <class T>
inline T ld_relaxed_cta(const T* address, simt::CallSite site = simt::CallSite::here()) {
  return detail::load_ordered<__ATOMIC_RELAXED>(address, detail::Scope::kCta,
                                                {"ld_relaxed_cta", site});
}
template <class T>
inline T ld_relaxed_gpu(const T* address, simt::CallSite site = simt::CallSite::here()) {
  return detail::load_ordered<__ATOMIC_RELAXED>(address, detail::Scope::kGpu,
                                                {"ld_relaxed_gpu", site});
}
template <class T>
inline T ld_relaxed_sys(const T* address, simt::CallSite site = simt::CallSite::here()) {
  if constexpr (sizeof(T) == 16) {
    return detail::load_words(address);
  } else {
    return detail::load_ordered<__ATOMIC_RELAXED>(address, detail::Scope::kSys,
                                                  {"ld_relaxed_sys", site});
  }
}
template <class T>
inline T ld_acquire_cta(const T* address, simt::CallSite site = simt::CallSite::here()) {
  return detail::load_ordered<__ATOMIC_ACQUIRE>(address, detail::Scope::kCta,
                                                {"ld_acquire_cta", site});
}
template <class T>
inline T ld_acquire_gpu(const T* address, simt::CallSite site = simt::CallSite::here()) {
  return detail::load_ordered<__ATOMIC_ACQUIRE>(address, detail::Scope::kGpu,
                                                {"ld_acquire_gpu", site});
}
template <class T>
inline T ld_acquire_sys(const T* address, simt::CallSite site = simt::CallSite::here()) {
  return detail::load_ordered<__ATOMIC_ACQUIRE>(address, detail::Scope::kSys,
                                                {"ld_acquire_sys", site});
}

template <class T>
inline void st_relaxed_cta(T* address, T value) {
  detail::store_relaxed(address, value, detail::Scope::kCta);
}
template <class T>
inline void st_relaxed_gpu(T* address, T value) {
  detail::store_relaxed(address, value, detail::Scope::kGpu);
}
template <class T>
inline void st_relaxed_sys(T* address, T value) {
  if constexpr (sizeof(T) == 16) {
    detail::store_words(address, value);
  } else {
    detail::store_relaxed(address, value, detail::Scope::kSys);
  }
}
template <class T>
inline void st_release_cta(T* address, T value, simt::CallSite site = simt::CallSite::here()) {
  detail::store_release(address, value, detail::Scope::kCta, {"st_release_cta", site});
}
template <class T>
inline void st_release_gpu(T* address, T value, simt::CallSite site = simt::CallSite::here()) {
  detail::store_release(address, value, detail::Scope::kGpu, {"st_release_gpu", site});
}
template <class T>
inline void st_release_sys(T* address, T value, simt::CallSite site = simt::CallSite::here()) {
  detail::store_release(address, value, detail::Scope::kSys, {"st_release_sys", site});
}

template <class T>
inline T atomic_add_relaxed_cta(T* address, T value, simt::CallSite site = simt::CallSite::here()) {
  return detail::atomic_add<__ATOMIC_RELAXED>(address, value, detail::Scope::kCta,
                                              {"atomic_add_relaxed_cta", site});
}
template <class T>
inline T atomic_add_relaxed_gpu(T* address, T value, simt::CallSite site = simt::CallSite::here()) {
  return detail::atomic_add<__ATOMIC_RELAXED>(address, value, detail::Scope::kGpu,
                                              {"atomic_add_relaxed_gpu", site});
}
template <class T>
inline T atomic_add_relaxed_sys(T* address, T value, simt::CallSite site = simt::CallSite::here()) {
  return detail::atomic_add<__ATOMIC_RELAXED>(address, value, detail::Scope::kSys,
                                              {"atomic_add_relaxed_sys", site});
}
template <class T>
inline T atomic_add_acq_rel_cta(T* address, T value, simt::CallSite site = simt::CallSite::here()) {
  return detail::atomic_add<__ATOMIC_ACQ_REL>(address, value, detail::Scope::kCta,
                                              {"atomic_add_acq_rel_cta", site});
}
template <class T>
inline T atomic_add_acq_rel_gpu(T* address, T value, simt::CallSite site = simt::CallSite::here()) {
  return detail::atomic_add<__ATOMIC_ACQ_REL>(address, value, detail::Scope::kGpu,
                                              {"atomic_add_acq_rel_gpu", site});
}
template <class T>
inline T atomic_add_acq_rel_sys(T* address, T value, simt::CallSite site = simt::CallSite::here()) {
  return detail::atomic_add<__ATOMIC_ACQ_REL>(address, value, detail::Scope::kSys,
                                              {"atomic_add_acq_rel_sys", site});
}

template <class T>
inline T atomic_cas_relaxed_cta(T* address, T expected, T desired,
                                simt::CallSite site = simt::CallSite::here()) {
  return detail::atomic_cas(address, expected, desired, detail::Scope::kCta,
                            {"atomic_cas_relaxed_cta", site});
}
template <class T>
inline T atomic_cas_relaxed_gpu(T* address, T expected, T desired,
                                simt::CallSite site = simt::CallSite::here()) {
  return detail::atomic_cas(address, expected, desired, detail::Scope::kGpu,
                            {"atomic_cas_relaxed_gpu", site});
}

inline uint32_t atomic_increment_relaxed_gpu(uint32_t* address,
                                             simt::CallSite site = simt::CallSite::here()) {
  return atomic_add_relaxed_gpu(address, 1u, site);
}
inline uint32_t atomic_or_relaxed_gpu(uint32_t* address, uint32_t value,
                                      simt::CallSite site = simt::CallSite::here()) {
  return detail::atomic(
      address, detail::AtomicOrder::kRelaxed, detail::Scope::kGpu, {"atomic_or_relaxed_gpu", site},
      [value](uint32_t* word) { return __atomic_fetch_or(word, value, __ATOMIC_RELAXED); });
}

inline void fence_acq_rel_cta(simt::CallSite site = simt::CallSite::here()) {
  detail::fence(detail::Scope::kCta, {"fence_acq_rel_cta", site});
}
inline void fence_acq_rel_gpu(simt::CallSite site = simt::CallSite::here()) {
  detail::fence(detail::Scope::kGpu, {"fence_acq_rel_gpu", site});
}
inline void fence_acq_rel_sys(simt::CallSite site = simt::CallSite::here()) {
  detail::fence(detail::Scope::kSys, {"fence_acq_rel_sys", site});
}

// Both proxies see one memory here, but a bulk copy does not see buffered stores: a fence of global
// memory empties this thread's buffer. That of shared memory is checked for (simt/races.hpp).
namespace detail {

inline void proxy_fence(bool of_shared, bool of_global, Site site) {
  if (!simulated()) {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
  } else if (!site.is_left_out()) {
    simt::simulated_proxy_fence(of_shared, of_global);
  }
}

}  // namespace detail

inline void fence_proxy_async(simt::CallSite site = simt::CallSite::here()) {
  detail::proxy_fence(true, true, {"fence_proxy_async", site});
}
inline void fence_proxy_async_shared(simt::CallSite site = simt::CallSite::here()) {
  detail::proxy_fence(true, false, {"fence_proxy_async_shared", site});
}
inline void fence_proxy_async_global(simt::CallSite site = simt::CallSite::here()) {
  detail::proxy_fence(false, true, {"fence_proxy_async_global", site});
}

// ---- multicast ------------------------------------------------------------------------
// Rank after rank. Here memory has one address for all, which needs no fence.

namespace detail {

inline float to_float(Bf16 value) { return bf16_to_float(value); }
inline float to_float(Fp16 value) { return fp16_to_float(value); }
inline float to_float(float value) { return value; }
inline void round_to(Bf16* to, float value) { *to = float_to_bf16(value); }
inline void round_to(Fp16* to, float value) { *to = float_to_fp16(value); }
inline void round_to(float* to, float value) { *to = value; }

}  // namespace detail

template <class T>
inline Vec16 multimem_add_relaxed_sys(const Multicast& from) {
  struct alignas(16) Elements {
    T values[sizeof(Vec16) / sizeof(T)];
  };
  constexpr int kCount = sizeof(Vec16) / sizeof(T);
  float sums[kCount] = {};
  for (int turn = 0; turn < from.num_ranks; ++turn) {
    const int rank = fault(Fault::kReverseSums) ? from.num_ranks - 1 - turn : turn;
    const auto elements =
        detail::load_words(reinterpret_cast<const Elements*>(from.bases[rank] + from.offset));
    for (int idx = 0; idx < kCount; ++idx) sums[idx] += detail::to_float(elements.values[idx]);
  }
  Elements rounded;
  for (int idx = 0; idx < kCount; ++idx) detail::round_to(&rounded.values[idx], sums[idx]);
  return bit_cast<Vec16>(rounded);
}
inline void multimem_st_relaxed_sys(const Multicast& to, const Vec16& vec) {
  for (int rank = 0; rank < to.num_ranks; ++rank) {
    detail::store_words(reinterpret_cast<Vec16*>(to.bases[rank] + to.offset), vec);
  }
}
inline void fence_proxy_alias() {}

}  // namespace deep_comm::arch
