// The primitives of arch.cuh on NVIDIA GPUs: one instruction each, the only PTX of the project.
//
// Why `asm volatile` with a "memory" clobber even for weak accesses: a peer or a bulk copy writes
// what we read. A compiler that does not know this hoists payload loads above the acquire that
// guards them, or turns them into `.nc` loads. Only `ld_nc` has no clobber.
//
// Address spaces: words of gpu and sys scope, and payload, are in global memory. The `_cta` forms
// take generic addresses, since a block also waits on words in its shared memory. Only the relaxed
// addition is for a block's counters there.
//
// Needs sm_80. What sm_80 and sm_90 have different instructions for is in cuda_sm80.cuh and
// cuda_sm90.cuh.
#pragma once

#include <type_traits>

#include "arch.cuh"
#include "cuda_numbers.cuh"

namespace deep_comm::arch {

static_assert(sizeof(Vec16) == 16 && alignof(Vec16) == 16);
static_assert(sizeof(Bf16) == 2 && sizeof(Fp16) == 2);
static_assert(sizeof(void*) == 8, "PTX operands below assume 64-bit addresses");

// ---- identity -----------------------------------------------------------------------------------

DC_DEVICE int thread_idx() { return static_cast<int>(threadIdx.x); }
DC_DEVICE int num_threads() { return static_cast<int>(blockDim.x); }
DC_DEVICE int block_idx() { return static_cast<int>(blockIdx.x); }
DC_DEVICE int num_blocks() { return static_cast<int>(gridDim.x); }
DC_DEVICE int lane_idx() { return thread_idx() % kWarpSize; }
DC_DEVICE int warp_idx() { return thread_idx() / kWarpSize; }
DC_DEVICE int num_warps() { return num_threads() / kWarpSize; }

DC_DEVICE uint8_t* dynamic_smem() {
  extern __shared__ __align__(128) uint8_t deep_comm_dynamic_smem[];
  return deep_comm_dynamic_smem;
}

// ---- memory -------------------------------------------------------------------------------------

namespace detail {

template <class T>
constexpr bool kIsWord = std::is_trivially_copyable_v<T> &&
                         (sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
template <class T>
constexpr bool kIsWordOrVec = kIsWord<T> || (std::is_trivially_copyable_v<T> && sizeof(T) == 16);
// What a warp shuffle can carry.
template <class T>
constexpr bool kIsLaneValue = std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);

// T must not be deduced from the value: st_release_sys(tail, 0) must work on uint64.
template <class T>
using Same = std::type_identity_t<T>;

DC_DEVICE uint32_t smem_address(const void* ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

}  // namespace detail

// One body per access width. PTX has no 8-bit registers and lets narrow accesses use wider ones.
#define DC_DEFINE_LOAD_WORD(OP, CLOBBER)                               \
  if constexpr (sizeof(T) == 1) {                                      \
    uint32_t value;                                                    \
    asm volatile(OP ".u8 %0, [%1];" : "=r"(value) : "l"(ptr)CLOBBER);  \
    return bit_cast<T>(static_cast<uint8_t>(value));                   \
  } else if constexpr (sizeof(T) == 2) {                               \
    uint32_t value;                                                    \
    asm volatile(OP ".u16 %0, [%1];" : "=r"(value) : "l"(ptr)CLOBBER); \
    return bit_cast<T>(static_cast<uint16_t>(value));                  \
  } else if constexpr (sizeof(T) == 4) {                               \
    uint32_t value;                                                    \
    asm volatile(OP ".u32 %0, [%1];" : "=r"(value) : "l"(ptr)CLOBBER); \
    return bit_cast<T>(value);                                         \
  } else if constexpr (sizeof(T) == 8) {                               \
    uint64_t value;                                                    \
    asm volatile(OP ".u64 %0, [%1];" : "=l"(value) : "l"(ptr)CLOBBER); \
    return bit_cast<T>(value);                                         \
  }

#define DC_DEFINE_LOAD_VEC(OP, CLOBBER)                                                   \
  if constexpr (sizeof(T) == 16) {                                                        \
    Vec16 v;                                                                              \
    asm volatile(OP ".v4.u32 {%0, %1, %2, %3}, [%4];"                                     \
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3]) \
                 : "l"(ptr)CLOBBER);                                                      \
    return bit_cast<T>(v);                                                                \
  }

#define DC_DEFINE_STORE_WORD(OP)                                                             \
  if constexpr (sizeof(T) == 1) {                                                            \
    const uint32_t bits = bit_cast<uint8_t>(value);                                          \
    asm volatile(OP ".u8 [%0], %1;" ::"l"(ptr), "r"(bits) : "memory");                       \
  } else if constexpr (sizeof(T) == 2) {                                                     \
    const uint32_t bits = bit_cast<uint16_t>(value);                                         \
    asm volatile(OP ".u16 [%0], %1;" ::"l"(ptr), "r"(bits) : "memory");                      \
  } else if constexpr (sizeof(T) == 4) {                                                     \
    asm volatile(OP ".u32 [%0], %1;" ::"l"(ptr), "r"(bit_cast<uint32_t>(value)) : "memory"); \
  } else if constexpr (sizeof(T) == 8) {                                                     \
    asm volatile(OP ".u64 [%0], %1;" ::"l"(ptr), "l"(bit_cast<uint64_t>(value)) : "memory"); \
  }

#define DC_DEFINE_STORE_VEC(OP)                                                    \
  if constexpr (sizeof(T) == 16) {                                                 \
    const Vec16 v = bit_cast<Vec16>(value);                                        \
    asm volatile(OP ".v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(ptr), "r"(v.words[0]), \
                 "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])                 \
                 : "memory");                                                      \
  }

#define DC_CLOBBERS_MEMORY : "memory"
#define DC_CLOBBERS_NOTHING

// Of words, and of vectors of 16 bytes, each with its instruction.
#define DC_DEFINE_LOAD_ANY(NAME, OP, VEC_OP, CLOBBER) \
  template <class T>                                  \
  DC_DEVICE T NAME(const T* ptr) {                    \
    static_assert(detail::kIsWordOrVec<T>);           \
    DC_DEFINE_LOAD_WORD(OP, CLOBBER)                  \
    DC_DEFINE_LOAD_VEC(VEC_OP, CLOBBER)               \
  }
#define DC_DEFINE_STORE_ANY(NAME, OP)                  \
  template <class T>                                   \
  DC_DEVICE void NAME(T* ptr, detail::Same<T> value) { \
    static_assert(detail::kIsWordOrVec<T>);            \
    DC_DEFINE_STORE_WORD(OP)                           \
    DC_DEFINE_STORE_VEC(OP)                            \
  }

DC_DEFINE_LOAD_ANY(ld_weak, "ld.weak.global", "ld.weak.global", DC_CLOBBERS_MEMORY)
DC_DEFINE_STORE_ANY(st_weak, "st.weak.global")
// Narrow read-only inputs are metadata that several warps read, so they may use L1. 16-byte inputs
// are payload that is read once.
DC_DEFINE_LOAD_ANY(ld_nc, "ld.global.nc", "ld.global.nc.L1::no_allocate", DC_CLOBBERS_NOTHING)
DC_DEFINE_STORE_ANY(st_streaming, "st.weak.global.L1::no_allocate")
DC_DEFINE_LOAD_ANY(ld_relaxed_sys, "ld.relaxed.sys.global", "ld.relaxed.sys.global",
                   DC_CLOBBERS_MEMORY)
DC_DEFINE_STORE_ANY(st_relaxed_sys, "st.relaxed.sys.global")

#define DC_DEFINE_LOAD(NAME, OP)                \
  template <class T>                            \
  DC_DEVICE T NAME(const T* ptr) {              \
    static_assert(detail::kIsWord<T>);          \
    DC_DEFINE_LOAD_WORD(OP, DC_CLOBBERS_MEMORY) \
  }
#define DC_DEFINE_STORE(NAME, OP)                      \
  template <class T>                                   \
  DC_DEVICE void NAME(T* ptr, detail::Same<T> value) { \
    static_assert(detail::kIsWord<T>);                 \
    DC_DEFINE_STORE_WORD(OP)                           \
  }

DC_DEFINE_LOAD(ld_relaxed_cta, "ld.relaxed.cta")
DC_DEFINE_LOAD(ld_relaxed_gpu, "ld.relaxed.gpu.global")
DC_DEFINE_LOAD(ld_acquire_cta, "ld.acquire.cta")
DC_DEFINE_LOAD(ld_acquire_gpu, "ld.acquire.gpu.global")
DC_DEFINE_LOAD(ld_acquire_sys, "ld.acquire.sys.global")
DC_DEFINE_STORE(st_relaxed_cta, "st.relaxed.cta")
DC_DEFINE_STORE(st_relaxed_gpu, "st.relaxed.gpu.global")
DC_DEFINE_STORE(st_release_cta, "st.release.cta")
DC_DEFINE_STORE(st_release_gpu, "st.release.gpu.global")
DC_DEFINE_STORE(st_release_sys, "st.release.sys.global")

// SPACE, AT: the address as the instruction takes it.
#define DC_DEFINE_ATOMIC_ADD(NAME, OP, SPACE, AT)                                               \
  template <class T>                                                                            \
  DC_DEVICE T NAME(T* ptr, detail::Same<T> value) {                                             \
    static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, uint32_t> ||                  \
                  std::is_same_v<T, uint64_t>);                                                 \
    T old;                                                                                      \
    if constexpr (std::is_same_v<T, int32_t>) {                                                 \
      asm volatile(OP ".add.s32 %0, [%1], %2;" : "=r"(old) : SPACE(AT), "r"(value) : "memory"); \
    } else if constexpr (std::is_same_v<T, uint32_t>) {                                         \
      asm volatile(OP ".add.u32 %0, [%1], %2;" : "=r"(old) : SPACE(AT), "r"(value) : "memory"); \
    } else {                                                                                    \
      asm volatile(OP ".add.u64 %0, [%1], %2;" : "=l"(old) : SPACE(AT), "l"(value) : "memory"); \
    }                                                                                           \
    return old;                                                                                 \
  }
#define DC_DEFINE_ATOMIC_CAS(NAME, OP)                                          \
  template <class T>                                                            \
  DC_DEVICE T NAME(T* ptr, detail::Same<T> expected, detail::Same<T> desired) { \
    static_assert(std::is_same_v<T, uint32_t> || std::is_same_v<T, uint64_t>);  \
    T old;                                                                      \
    if constexpr (sizeof(T) == 4) {                                             \
      asm volatile(OP ".cas.b32 %0, [%1], %2, %3;"                              \
                   : "=r"(old)                                                  \
                   : "l"(ptr), "r"(expected), "r"(desired)                      \
                   : "memory");                                                 \
    } else {                                                                    \
      asm volatile(OP ".cas.b64 %0, [%1], %2, %3;"                              \
                   : "=l"(old)                                                  \
                   : "l"(ptr), "l"(expected), "l"(desired)                      \
                   : "memory");                                                 \
    }                                                                           \
    return old;                                                                 \
  }

DC_DEFINE_ATOMIC_ADD(atomic_add_relaxed_cta, "atom.relaxed.cta.shared", "r",
                     detail::smem_address(ptr))
DC_DEFINE_ATOMIC_ADD(atomic_add_relaxed_gpu, "atom.relaxed.gpu.global", "l", ptr)
DC_DEFINE_ATOMIC_ADD(atomic_add_relaxed_sys, "atom.relaxed.sys.global", "l", ptr)
DC_DEFINE_ATOMIC_ADD(atomic_add_acq_rel_cta, "atom.acq_rel.cta", "l", ptr)
DC_DEFINE_ATOMIC_ADD(atomic_add_acq_rel_gpu, "atom.acq_rel.gpu.global", "l", ptr)
DC_DEFINE_ATOMIC_ADD(atomic_add_acq_rel_sys, "atom.acq_rel.sys.global", "l", ptr)
DC_DEFINE_ATOMIC_CAS(atomic_cas_relaxed_cta, "atom.relaxed.cta")
DC_DEFINE_ATOMIC_CAS(atomic_cas_relaxed_gpu, "atom.relaxed.gpu.global")

// Not an addition of 1: ptxas merges such additions of a warp into one, and the warp then waits for
// its result.
DC_DEVICE uint32_t atomic_increment_relaxed_gpu(uint32_t* ptr) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0xffffffff;"
               : "=r"(old)
               : "l"(ptr)
               : "memory");
  return old;
}
DC_DEVICE uint32_t atomic_or_relaxed_gpu(uint32_t* ptr, uint32_t value) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.or.b32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(ptr), "r"(value)
               : "memory");
  return old;
}

DC_DEVICE void fence_acq_rel_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
DC_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DC_DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// ---- warp ---------------------------------------------------------------------------------------

DC_DEVICE void sync_warp(uint32_t mask = kFullMask) { __syncwarp(mask); }

#define DC_DEFINE_SHUFFLE(NAME, INTRINSIC)                                            \
  template <class T>                                                                  \
  DC_DEVICE T NAME(uint32_t mask, T value, int lane) {                                \
    static_assert(detail::kIsLaneValue<T>);                                           \
    if constexpr (sizeof(T) == 4) {                                                   \
      return bit_cast<T>(INTRINSIC(mask, bit_cast<unsigned int>(value), lane));       \
    } else {                                                                          \
      return bit_cast<T>(INTRINSIC(mask, bit_cast<unsigned long long>(value), lane)); \
    }                                                                                 \
  }
DC_DEFINE_SHUFFLE(shfl, __shfl_sync)
DC_DEFINE_SHUFFLE(shfl_xor, __shfl_xor_sync)
DC_DEFINE_SHUFFLE(shfl_up, __shfl_up_sync)
DC_DEFINE_SHUFFLE(shfl_down, __shfl_down_sync)

DC_DEVICE uint32_t ballot(uint32_t mask, bool predicate) { return __ballot_sync(mask, predicate); }
DC_DEVICE bool any(uint32_t mask, bool predicate) { return __any_sync(mask, predicate) != 0; }
DC_DEVICE bool all(uint32_t mask, bool predicate) { return __all_sync(mask, predicate) != 0; }

template <class T>
DC_DEVICE uint32_t match_any(uint32_t mask, T value) {
  static_assert(detail::kIsLaneValue<T>);
  if constexpr (sizeof(T) == 4) {
    return __match_any_sync(mask, bit_cast<unsigned int>(value));
  } else {
    return __match_any_sync(mask, bit_cast<unsigned long long>(value));
  }
}

DC_DEVICE uint32_t reduce_or(uint32_t mask, uint32_t value) {
  return __reduce_or_sync(mask, value);
}
DC_DEVICE int reduce_max(uint32_t mask, int value) { return __reduce_max_sync(mask, value); }

DC_DEVICE int popc(uint32_t bits) { return __popc(bits); }
DC_DEVICE int ffs(uint32_t bits) { return __ffs(static_cast<int>(bits)); }
DC_DEVICE int clz(uint32_t bits) { return __clz(static_cast<int>(bits)); }

// ---- block --------------------------------------------------------------------------------------

DC_DEVICE void sync_block() { __syncthreads(); }
DC_DEVICE bool sync_block_any(bool predicate) { return __syncthreads_or(predicate ? 1 : 0) != 0; }

// __syncthreads() is defined only where the whole block reaches the same call. Warps with different
// roles need the instruction itself.
DC_DEVICE void sync_block_apart() { asm volatile("barrier.sync 0;" ::: "memory"); }

// `barrier`, not `bar`: `bar` needs a converged warp, which a role's loop cannot promise.
DC_DEVICE void sync_named(int barrier, int num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}
DC_DEVICE void arrive_named(int barrier, int num_threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// ---- bulk copies --------------------------------------------------------------------------------
// The rest is in cuda_sm80.cuh and cuda_sm90.cuh.

using Mbarrier = uint64_t;

DC_DEVICE void mbarrier_init(Mbarrier* mbarrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(detail::smem_address(mbarrier)),
               "r"(num_arrivals)
               : "memory");
}
DC_DEVICE void mbarrier_arrive(Mbarrier* mbarrier) {
  asm volatile(
      "mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(detail::smem_address(mbarrier))
      : "memory");
}

// ---- waiting, time ------------------------------------------------------------------------------

// Nothing: on NVLink a poll costs about as much as the shortest sleep and sees the word sooner.
template <class T>
DC_DEVICE void wait_hint(const T* word, detail::Same<T> seen, const uint32_t* abort_word,
                         uint64_t deadline_ns) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
}
DC_DEVICE void wait_note(const WaitNote&) {}

DC_DEVICE uint64_t globaltimer_ns() {
  uint64_t now_ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now_ns)::"memory");
  return now_ns;
}
DC_DEVICE void nanosleep(uint32_t ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory"); }

// `why` is for readers of the code and for the host target. A device printf would cost every kernel
// a stack frame.
[[noreturn]] DC_DEVICE void trap(const char* why) {
  asm volatile("trap;" ::: "memory");
  __builtin_unreachable();
}

// ---- rail ---------------------------------------------------------------------------------------
// In cuda_rail.cuh or, for the kernels of the NVSHMEM module, in cuda_rail_nvshmem.cuh.

// ---- faults -------------------------------------------------------------------------------------

DC_HOST_DEVICE constexpr bool fault(Fault) { return false; }

#undef DC_DEFINE_LOAD_WORD
#undef DC_DEFINE_LOAD_VEC
#undef DC_DEFINE_STORE_WORD
#undef DC_DEFINE_STORE_VEC
#undef DC_DEFINE_LOAD
#undef DC_DEFINE_STORE
#undef DC_DEFINE_LOAD_ANY
#undef DC_DEFINE_STORE_ANY
#undef DC_DEFINE_ATOMIC_ADD
#undef DC_DEFINE_ATOMIC_CAS
#undef DC_DEFINE_SHUFFLE
#undef DC_CLOBBERS_MEMORY
#undef DC_CLOBBERS_NOTHING

}  // namespace deep_comm::arch

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#include "cuda_sm80.cuh"
#else
#include "cuda_sm90.cuh"
#endif

#if DEEP_COMM_RAIL_NVSHMEM
#include "cuda_rail_nvshmem.cuh"
#else
#include "cuda_rail.cuh"
#endif
