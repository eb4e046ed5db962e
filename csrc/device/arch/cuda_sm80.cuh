// What stands on sm_80 to sm_89 for the primitives of cuda_sm90.cuh. A bulk copy is the issuing
// thread's own copies of 16 bytes: right, but slower than the engine that newer GPUs have.
//
//   bulk load    cp.async, which the thread does not wait for, and an arrival at the mbarrier after
//                the last one; sm_80's mbarriers count arrivals, but no bytes
//   bulk store   loads and stores of the thread. They are done when the next instruction is issued,
//                as far as this thread can tell; a release orders them like all its stores. So
//                there are no groups to wait for.
//   proxies      there is only one: what a thread issues after an access of its own, or after a
//                barrier, is ordered after it. cp.async belongs to it, too.
//   launches     each begins when the one before it in the stream has ended
//   multicast    nothing: memory with multicast is refused, so that no kernel gets here
#pragma once

#include "arch.cuh"
#include "e4m3.cuh"

namespace deep_comm::arch {

namespace detail {

// Keeps the compiler's order, where the hardware needs nothing.
DC_DEVICE void compiler_fence() { asm volatile("" ::: "memory"); }

}  // namespace detail

DC_DEVICE bool elect_one() { return lane_idx() == 0; }

// ---- proxies ------------------------------------------------------------------------------------

DC_DEVICE void fence_proxy_async_shared() { detail::compiler_fence(); }
DC_DEVICE void fence_proxy_async_global() { detail::compiler_fence(); }
DC_DEVICE void fence_proxy_async() { detail::compiler_fence(); }

// ---- bulk copies --------------------------------------------------------------------------------

DC_DEVICE void fence_mbarrier_init() { detail::compiler_fence(); }
DC_DEVICE bool mbarrier_try_wait_parity(Mbarrier* mbarrier, uint32_t parity) {
  uint32_t is_complete;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(is_complete)
      : "r"(detail::smem_address(mbarrier)), "r"(parity)
      : "memory");
  return is_complete != 0;
}

// noinc: the arrival is one of those that the mbarrier was initialised for.
DC_DEVICE void bulk_load(void* smem_dst, const void* global_src, uint32_t num_bytes,
                         Mbarrier* mbarrier) {
  const uint32_t dst = detail::smem_address(smem_dst);
  const auto* src = static_cast<const uint8_t*>(global_src);
  DC_UNROLL_BY(4)
  for (uint32_t offset = 0; offset < num_bytes; offset += sizeof(Vec16)) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst + offset), "l"(src + offset)
                 : "memory");
  }
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(detail::smem_address(mbarrier))
      : "memory");
}
// Four at a time, so that a load's latency is paid for once.
DC_DEVICE void bulk_store(void* global_dst, const void* smem_src, uint32_t num_bytes) {
  constexpr uint32_t kVecs = 4;
  const auto* src = static_cast<const Vec16*>(smem_src);
  auto* dst = static_cast<Vec16*>(global_dst);
  const uint32_t num_vecs = num_bytes / sizeof(Vec16);
  DC_NO_UNROLL
  for (uint32_t first = 0; first < num_vecs; first += kVecs) {
    Vec16 vecs[kVecs];
    DC_UNROLL
    for (uint32_t idx = 0; idx < kVecs; ++idx) {
      if (first + idx < num_vecs) vecs[idx] = src[first + idx];
    }
    DC_UNROLL
    for (uint32_t idx = 0; idx < kVecs; ++idx) {
      if (first + idx < num_vecs) st_weak(dst + first + idx, vecs[idx]);
    }
  }
}
DC_DEVICE void bulk_prefetch(const void* global_src, uint32_t num_bytes) {
  constexpr uint32_t kLineBytes = 128;
  const auto* src = static_cast<const uint8_t*>(global_src);
  for (uint32_t offset = 0; offset < num_bytes; offset += kLineBytes) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(src + offset));
  }
}
DC_DEVICE void bulk_commit() {}
template <int N>
DC_DEVICE void bulk_wait_read() {
  static_assert(N >= 0);
  detail::compiler_fence();
}
template <int N>
DC_DEVICE void bulk_wait() {
  static_assert(N >= 0);
  detail::compiler_fence();
}

// ---- multicast ----------------------------------------------------------------------------------

template <class T>
DC_DEVICE Vec16 multimem_add_relaxed_sys(const Multicast&) {
  trap("multicast on sm_80");
}
DC_DEVICE void multimem_st_relaxed_sys(const Multicast&, const Vec16&) {
  trap("multicast on sm_80");
}
DC_DEVICE void fence_proxy_alias() { detail::compiler_fence(); }

// ---- launches -----------------------------------------------------------------------------------

// A launch must not be told that it may begin early: nothing here would make it wait.
inline constexpr bool kHasEarlyLaunches = false;
DC_DEVICE void await_earlier_launch() { detail::compiler_fence(); }
DC_DEVICE void allow_later_launch() {}

// ---- numbers ------------------------------------------------------------------------------------

DC_DEVICE uint16_t floats_to_e4m3x2(float low, float high) {
  return static_cast<uint16_t>(float_to_e4m3(low) | float_to_e4m3(high) << 8);
}

}  // namespace deep_comm::arch
