// The primitives over the SIMT executor of csrc/simt/: every CUDA thread is a fiber.
//
// A direct grid uses real memory, which other processes share: its accesses are C++ atomics. On the
// simulated machine accesses pass through its memory model, and at each ordered access another
// fiber may run first.
#pragma once

#include "../../simt/faults.hpp"
#include "../../simt/ops.hpp"
#include "arch.cuh"
#include "host_numbers.cuh"

namespace deep_comm::arch {

using Mbarrier = uint64_t;

// ---- faults ---------------------------------------------------------------------------
static_assert(simt::kFaultNames[0].bit == static_cast<uint32_t>(Fault::kWeakenRelease));
static_assert(simt::kFaultNames[1].bit == static_cast<uint32_t>(Fault::kWeakenFence));
static_assert(simt::kFaultNames[2].bit == static_cast<uint32_t>(Fault::kSkipCredit));
static_assert(simt::kFaultNames[3].bit == static_cast<uint32_t>(Fault::kSkipBulkWait));
static_assert(simt::kFaultNames[4].bit == static_cast<uint32_t>(Fault::kSkipBulkWaitRead));
static_assert(simt::kFaultNames[5].bit == static_cast<uint32_t>(Fault::kSkipEntryBarrier));
static_assert(simt::kFaultNames[6].bit == static_cast<uint32_t>(Fault::kSkipArrival));
static_assert(simt::kFaultNames[7].bit == static_cast<uint32_t>(Fault::kSkipClear));
static_assert(simt::kFaultNames[8].bit == static_cast<uint32_t>(Fault::kReorderRail));
static_assert(simt::kFaultNames[9].bit == static_cast<uint32_t>(Fault::kSkipRailCredit));
static_assert(simt::kFaultNames[10].bit == static_cast<uint32_t>(Fault::kEarlyRailCredit));
static_assert(simt::kFaultNames[11].bit == static_cast<uint32_t>(Fault::kSkipRailFence));
static_assert(simt::kFaultNames[12].bit == static_cast<uint32_t>(Fault::kPlainWords));
static_assert(simt::kFaultNames[13].bit == static_cast<uint32_t>(Fault::kSkipLaunchWait));
static_assert(simt::kFaultNames[14].bit == static_cast<uint32_t>(Fault::kSkipVote));
static_assert(simt::kFaultNames[15].bit == static_cast<uint32_t>(Fault::kSkipAgreement));
static_assert(simt::kFaultNames[16].bit == static_cast<uint32_t>(Fault::kSharedRows));
static_assert(simt::kFaultNames[17].bit == static_cast<uint32_t>(Fault::kSkipAlive));
static_assert(simt::kFaultNames[18].bit == static_cast<uint32_t>(Fault::kPackedSources));
static_assert(simt::kFaultNames[19].bit == static_cast<uint32_t>(Fault::kEarlyRailDone));
static_assert(simt::kFaultNames[20].bit == static_cast<uint32_t>(Fault::kAwaitAbsent));
static_assert(simt::kFaultNames[21].bit == static_cast<uint32_t>(Fault::kIgnoreGeneration));
static_assert(simt::kFaultNames[22].bit == static_cast<uint32_t>(Fault::kEarlyGeneration));
static_assert(simt::kFaultNames[23].bit == static_cast<uint32_t>(Fault::kSkipExitBarrier));
static_assert(simt::kFaultNames[24].bit == static_cast<uint32_t>(Fault::kEarlyCredit));
static_assert(simt::kFaultNames[25].bit == static_cast<uint32_t>(Fault::kKeepProposal));
static_assert(simt::kFaultNames[26].bit == static_cast<uint32_t>(Fault::kSkipBlame));
static_assert(simt::kFaultNames[27].bit == static_cast<uint32_t>(Fault::kSkipSums));
static_assert(simt::kFaultNames[28].bit == static_cast<uint32_t>(Fault::kEarlySums));
static_assert(simt::kFaultNames[29].bit == static_cast<uint32_t>(Fault::kLostSums));
static_assert(simt::kFaultNames[30].bit == static_cast<uint32_t>(Fault::kEarlyLanded));
static_assert(simt::kFaultNames[31].bit == static_cast<uint32_t>(Fault::kReverseSums));

inline bool fault(Fault which) {
  return (simt::t_state.faults & static_cast<uint32_t>(which)) != 0;
}

namespace detail {

using simt::AtomicOrder;
using simt::Scope;

inline bool simulated() { return simt::t_state.simulated != nullptr; }

// An operation that orders something, and where in a kernel it stands: a simulation may weaken it.
struct Site {
  const char* op;
  simt::CallSite at;

  simt::Weakening weakening() const {
    simt::Sites* sites = simt::t_state.sites;
    return sites == nullptr ? simt::Weakening::kNone : sites->visit(op, at);
  }
  // True if the whole operation is left out.
  bool is_left_out() const { return weakening() == simt::Weakening::kRelaxed; }
  // Which order is left, and of which scope.
  template <class Order>
  Order weakened(Order strong, Order relaxed, Scope* scope) const {
    switch (weakening()) {
      case simt::Weakening::kRelaxed:
        return relaxed;
      case simt::Weakening::kNarrow:
        if (*scope != Scope::kCta) *scope = static_cast<Scope>(static_cast<int>(*scope) - 1);
        return strong;
      case simt::Weakening::kNone:
        break;
    }
    return strong;
  }
};

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

template <class T>
inline uint64_t to_bits(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "warp values have 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
inline T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
inline T shuffle(simt::WarpOp op, uint32_t mask, T value, int argument) {
  return from_bits<T>(
      simt::warp_collective(op, mask, to_bits(value), static_cast<uint32_t>(argument)));
}

}  // namespace detail

// ---- identity -------------------------------------------------------------------------

inline int thread_idx() { return simt::t_state.current->thread_idx; }
inline int num_threads() { return simt::grid_of(simt::t_state.current)->grid.num_threads; }
inline int block_idx() { return simt::block_of(simt::t_state.current)->index; }
inline int num_blocks() { return simt::grid_of(simt::t_state.current)->grid.num_blocks; }
inline int lane_idx() { return simt::t_state.current->lane; }
inline int warp_idx() { return simt::t_state.current->warp->index; }
inline int num_warps() { return simt::grid_of(simt::t_state.current)->num_warps_per_block; }
inline uint8_t* dynamic_smem() { return simt::block_of(simt::t_state.current)->smem.base; }

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

// ---- warp -----------------------------------------------------------------------------

inline void sync_warp(uint32_t mask = kFullMask, simt::CallSite site = simt::CallSite::here()) {
  if (detail::Site{"sync_warp", site}.is_left_out()) return;
  simt::warp_collective(simt::WarpOp::kSync, mask, 0, 0);
}
template <class T>
inline T shfl(uint32_t mask, T value, int src_lane) {
  return detail::shuffle(simt::WarpOp::kShfl, mask, value, src_lane);
}
template <class T>
inline T shfl_xor(uint32_t mask, T value, int lane_mask) {
  return detail::shuffle(simt::WarpOp::kShflXor, mask, value, lane_mask);
}
template <class T>
inline T shfl_up(uint32_t mask, T value, int delta) {
  return detail::shuffle(simt::WarpOp::kShflUp, mask, value, delta);
}
template <class T>
inline T shfl_down(uint32_t mask, T value, int delta) {
  return detail::shuffle(simt::WarpOp::kShflDown, mask, value, delta);
}
inline uint32_t ballot(uint32_t mask, bool predicate) {
  return static_cast<uint32_t>(simt::warp_collective(simt::WarpOp::kBallot, mask, predicate, 0));
}
inline bool any(uint32_t mask, bool predicate) {
  return simt::warp_collective(simt::WarpOp::kAny, mask, predicate, 0) != 0;
}
inline bool all(uint32_t mask, bool predicate) {
  return simt::warp_collective(simt::WarpOp::kAll, mask, predicate, 0) != 0;
}
template <class T>
inline uint32_t match_any(uint32_t mask, T value) {
  return static_cast<uint32_t>(
      simt::warp_collective(simt::WarpOp::kMatchAny, mask, detail::to_bits(value), 0));
}
inline int popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int clz(uint32_t bits) { return bits ? __builtin_clz(bits) : 32; }
inline bool elect_one() {
  return simt::warp_collective(simt::WarpOp::kElect, kFullMask, 0, 0) != 0;
}

// ---- block ----------------------------------------------------------------------------

inline void sync_block(simt::CallSite site = simt::CallSite::here()) {
  if (!detail::Site{"sync_block", site}.is_left_out()) simt::sync_block(site);
}
inline void sync_block_apart(simt::CallSite site = simt::CallSite::here()) {
  if (!detail::Site{"sync_block_apart", site}.is_left_out()) simt::sync_block();
}
inline bool sync_block_any(bool predicate, simt::CallSite site = simt::CallSite::here()) {
  return simt::sync_block_any(predicate, site);
}
inline void sync_named(int barrier, int num_threads) { simt::sync_named(barrier, num_threads); }
inline void arrive_named(int barrier, int num_threads) { simt::arrive_named(barrier, num_threads); }

// ---- bulk copies ----------------------------------------------------------------------

inline void mbarrier_init(Mbarrier* barrier, int num_arrivals) {
  simt::mbarrier_init(barrier, num_arrivals);
}
inline void fence_mbarrier_init() {}  // an mbarrier is plain memory of its block here
inline void mbarrier_arrive(Mbarrier* barrier) { simt::mbarrier_arrive(barrier, 0); }
inline bool mbarrier_try_wait_parity(Mbarrier* barrier, uint32_t parity,
                                     simt::CallSite site = simt::CallSite::here()) {
  if (detail::Site{"mbarrier_try_wait_parity", site}.is_left_out()) return true;
  return simt::mbarrier_try_wait_parity(barrier, parity);
}
inline void bulk_load(void* smem_dst, const void* global_src, uint32_t num_bytes,
                      Mbarrier* barrier) {
  simt::bulk_load(smem_dst, global_src, num_bytes, barrier);
}
inline void bulk_prefetch(const void* /*global_src*/, uint32_t /*num_bytes*/) {}
inline void bulk_store(void* global_dst, const void* smem_src, uint32_t num_bytes) {
  simt::bulk_store(global_dst, smem_src, num_bytes);
}
inline void bulk_commit() { simt::bulk_commit(); }
template <int N>
inline void bulk_wait_read(simt::CallSite site = simt::CallSite::here()) {
  const bool is_left_out = detail::Site{"bulk_wait_read", site}.is_left_out();
  if (!is_left_out && !fault(Fault::kSkipBulkWaitRead)) simt::bulk_wait(N, true);
}
template <int N>
inline void bulk_wait(simt::CallSite site = simt::CallSite::here()) {
  const bool is_left_out = detail::Site{"bulk_wait", site}.is_left_out();
  if (!is_left_out && !fault(Fault::kSkipBulkWait)) simt::bulk_wait(N, false);
}

// ---- rail -----------------------------------------------------------------------------

inline void rail_put(const RailPort& port, int peer, int qp, size_t dst_offset, const void* src,
                     uint32_t num_bytes) {
  // One host thread runs all fibers of the grid, so a plain addition is safe.
  if (port.num_bytes != nullptr) port.num_bytes[peer * port.num_qps + qp] += num_bytes;
  simt::rail_put(peer, qp, port.bases[peer] + dst_offset, src, num_bytes);
}
inline void rail_signal(const RailPort& port, int peer, int qp, size_t word_offset,
                        uint64_t value) {
  simt::rail_signal(peer, qp, reinterpret_cast<uint64_t*>(port.bases[peer] + word_offset), value);
}
inline void rail_put_warp(const RailPort& port, int peer, int qp, size_t dst_offset,
                          const void* src, uint32_t num_bytes) {
  if (lane_idx() == 0) rail_put(port, peer, qp, dst_offset, src, num_bytes);
}
inline uint8_t* rail_near(const RailPort& port, int peer) {
  return port.peers == nullptr ? nullptr : port.peers[peer].near;
}
inline void rail_count(const RailPort& port, int peer, int qp, uint64_t num_bytes) {
  port.num_bytes[peer * port.num_qps + qp] += num_bytes;
}
inline void rail_done(const RailPort&) { simt::rail_done(); }

// ---- launches -------------------------------------------------------------------------
// Outside of a simulation a launch begins when the one before it has ended.

inline void await_earlier_launch() {
  if (!fault(Fault::kSkipLaunchWait)) simt::await_earlier_launch();
}
inline void allow_later_launch() { simt::allow_later_launch(); }

// ---- waiting, time --------------------------------------------------------------------

template <class T>
inline void wait_hint(const T* word, T seen, const uint32_t* abort_word, uint64_t deadline_ns) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  simt::wait_word(word, sizeof(T), detail::to_bits(seen), abort_word, deadline_ns);
}
inline void wait_note(const WaitNote& note) {
  simt::Fiber* self = simt::t_state.current;
  self->note = simt::Note{note.kernel, note.stage,   note.word,    note.rank,
                          note.peer,   note.channel, note.expected};
  self->has_note = true;
}
inline uint64_t globaltimer_ns() { return simt::clock_ns(); }
inline void nanosleep(uint32_t duration_ns) { simt::sleep_ns(duration_ns); }
[[noreturn]] inline void trap(const char* why) { simt::trap(why); }

}  // namespace deep_comm::arch
