// The primitives of arch.cuh that need sm_90: bulk copies by the async proxy, mbarriers that count
// bytes, multicast, launches that begin early, 8-bit conversions. cuda_sm80.cuh has them without.
#pragma once

#include "arch.cuh"

namespace deep_comm::arch {

DC_DEVICE bool elect_one() {
  uint32_t is_elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(is_elected)::"memory");
  return is_elected != 0;
}

// ---- proxies ------------------------------------------------------------------------------------

DC_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DC_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// For a bulk load: it reads global memory and writes shared memory, and ordinary accesses may just
// have touched both.
DC_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- bulk copies --------------------------------------------------------------------------------

// Orders the inits before the async proxy of the bulk copies; cluster is its only scope.
DC_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// The hardware may suspend the thread for a bounded time before it returns false.
DC_DEVICE bool mbarrier_try_wait_parity(Mbarrier* mbarrier, uint32_t parity) {
  uint32_t is_complete;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(is_complete)
      : "r"(detail::smem_address(mbarrier)), "r"(parity)
      : "memory");
  return is_complete != 0;
}

// Without a cluster launch, a shared::cta address is its own shared::cluster address.
DC_DEVICE void bulk_load(void* smem_dst, const void* global_src, uint32_t num_bytes,
                         Mbarrier* mbarrier) {
  const uint32_t mbarrier_address = detail::smem_address(mbarrier);
  asm volatile(
      "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier_address),
      "r"(num_bytes)
      : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(detail::smem_address(smem_dst)),
      "l"(global_src), "r"(num_bytes), "r"(mbarrier_address)
      : "memory");
}
DC_DEVICE void bulk_store(void* global_dst, const void* smem_src, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global_dst),
               "r"(detail::smem_address(smem_src)), "r"(num_bytes)
               : "memory");
}
DC_DEVICE void bulk_prefetch(const void* global_src, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global_src), "r"(num_bytes));
}
DC_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
DC_DEVICE void bulk_wait_read() {
  static_assert(N >= 0);
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N>
DC_DEVICE void bulk_wait() {
  static_assert(N >= 0);
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// ---- multicast ----------------------------------------------------------------------------------

#define DC_MULTIMEM_ADD(TYPE)                                                                   \
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add" TYPE " {%0, %1, %2, %3}, [%4];"      \
               : "=r"(sum.words[0]), "=r"(sum.words[1]), "=r"(sum.words[2]), "=r"(sum.words[3]) \
               : "l"(from.window + from.offset)                                                 \
               : "memory")

template <class T>
DC_DEVICE Vec16 multimem_add_relaxed_sys(const Multicast& from) {
  static_assert(std::is_same_v<T, Bf16> || std::is_same_v<T, Fp16> || std::is_same_v<T, float>);
  Vec16 sum;
  if constexpr (std::is_same_v<T, Bf16>) {
    DC_MULTIMEM_ADD(".acc::f32.v4.bf16x2");
  } else if constexpr (std::is_same_v<T, Fp16>) {
    DC_MULTIMEM_ADD(".acc::f32.v4.f16x2");
  } else {
    DC_MULTIMEM_ADD(".v4.f32");
  }
  return sum;
}
#undef DC_MULTIMEM_ADD

// Moves bits, whatever their type.
DC_DEVICE void multimem_st_relaxed_sys(const Multicast& to, const Vec16& vec) {
  asm volatile(
      "multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to.window + to.offset),
      "r"(vec.words[0]), "r"(vec.words[1]), "r"(vec.words[2]), "r"(vec.words[3])
      : "memory");
}
DC_DEVICE void fence_proxy_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// ---- launches -----------------------------------------------------------------------------------

inline constexpr bool kHasEarlyLaunches = true;
DC_DEVICE void await_earlier_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DC_DEVICE void allow_later_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- numbers ------------------------------------------------------------------------------------

DC_DEVICE uint16_t floats_to_e4m3x2(float low, float high) {
  uint16_t result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}

}  // namespace deep_comm::arch
