// Every primitive of device/arch at every width, each in a kernel of its own, so that a test can
// read the PTX of a kernel and say which instruction a primitive became. Compiled to PTX, never
// run.
#include "device/arch/arch.cuh"

namespace arch = deep_comm::arch;
using deep_comm::Bf16;
using deep_comm::Fp16;
using deep_comm::Vec16;

// A kernel named probe_<primitive>_<suffix>: extern "C" keeps the name readable in the PTX.
#define PROBE(name, ...) extern "C" __global__ void probe_##name(__VA_ARGS__)

#define PROBE_LOAD(op, suffix, T) \
  PROBE(op##_##suffix, T* out, const T* in) { arch::st_weak(out, arch::op(in)); }
#define PROBE_STORE(op, suffix, T) \
  PROBE(op##_##suffix, T* out, T value) { arch::op(out, value); }
#define PROBE_LOAD_WORDS(op) \
  PROBE_LOAD(op, 1, uint8_t) \
  PROBE_LOAD(op, 2, uint16_t) PROBE_LOAD(op, 4, int32_t) PROBE_LOAD(op, 8, uint64_t)
#define PROBE_STORE_WORDS(op) \
  PROBE_STORE(op, 1, uint8_t) \
  PROBE_STORE(op, 2, uint16_t) PROBE_STORE(op, 4, int32_t) PROBE_STORE(op, 8, uint64_t)

PROBE_LOAD_WORDS(ld_weak)
PROBE_LOAD(ld_weak, 16, Vec16)
PROBE_LOAD_WORDS(ld_nc)
PROBE_LOAD(ld_nc, 16, Vec16)
PROBE_STORE_WORDS(st_weak)
PROBE_STORE(st_weak, 16, Vec16)
PROBE_STORE_WORDS(st_streaming)
PROBE_STORE(st_streaming, 16, Vec16)

#define PROBE_SCOPES(scope)             \
  PROBE_LOAD_WORDS(ld_relaxed_##scope)  \
  PROBE_LOAD_WORDS(ld_acquire_##scope)  \
  PROBE_STORE_WORDS(st_relaxed_##scope) \
  PROBE_STORE_WORDS(st_release_##scope)
PROBE_SCOPES(cta)
PROBE_SCOPES(gpu)
PROBE_SCOPES(sys)

#define PROBE_ADD(op, suffix, T) \
  PROBE(op##_##suffix, T* word, T* out) { arch::st_weak(out, arch::op(word, 1)); }
#define PROBE_CAS(op, suffix, T) \
  PROBE(op##_##suffix, T* word, T* out) { arch::st_weak(out, arch::op(word, 0, 1)); }
#define PROBE_ATOMICS(scope)                           \
  PROBE_ADD(atomic_add_relaxed_##scope, s32, int32_t)  \
  PROBE_ADD(atomic_add_relaxed_##scope, u32, uint32_t) \
  PROBE_ADD(atomic_add_relaxed_##scope, u64, uint64_t) \
  PROBE_ADD(atomic_add_acq_rel_##scope, s32, int32_t)  \
  PROBE_ADD(atomic_add_acq_rel_##scope, u32, uint32_t) \
  PROBE_ADD(atomic_add_acq_rel_##scope, u64, uint64_t)
PROBE_ATOMICS(cta)
PROBE_ATOMICS(gpu)
PROBE_ATOMICS(sys)
PROBE_CAS(atomic_cas_relaxed_cta, b32, uint32_t)
PROBE_CAS(atomic_cas_relaxed_cta, b64, uint64_t)
PROBE_CAS(atomic_cas_relaxed_gpu, b32, uint32_t)
PROBE_CAS(atomic_cas_relaxed_gpu, b64, uint64_t)

PROBE(atomic_increment_relaxed_gpu, uint32_t* word, uint32_t* out) {
  arch::st_weak(out, arch::atomic_increment_relaxed_gpu(word));
}
PROBE(atomic_or_relaxed_gpu, uint32_t* word, uint32_t* out) {
  arch::st_weak(out, arch::atomic_or_relaxed_gpu(word, 4u));
}

PROBE(fence_acq_rel_cta) { arch::fence_acq_rel_cta(); }
PROBE(fence_acq_rel_gpu) { arch::fence_acq_rel_gpu(); }
PROBE(fence_acq_rel_sys) { arch::fence_acq_rel_sys(); }
PROBE(fence_proxy_async) { arch::fence_proxy_async(); }
PROBE(fence_proxy_async_shared) { arch::fence_proxy_async_shared(); }
PROBE(fence_proxy_async_global) { arch::fence_proxy_async_global(); }

#define PROBE_MULTIMEM_ADD(suffix, T)                                                \
  PROBE(multimem_add_relaxed_sys_##suffix, Vec16* out, uint8_t* window) {            \
    arch::st_weak(out, arch::multimem_add_relaxed_sys<T>({window, nullptr, 0, 64})); \
  }
PROBE_MULTIMEM_ADD(bf16, Bf16)
PROBE_MULTIMEM_ADD(fp16, Fp16)
PROBE_MULTIMEM_ADD(float, float)
PROBE(multimem_st_relaxed_sys, uint8_t* window, Vec16 vec) {
  arch::multimem_st_relaxed_sys({window, nullptr, 0, 64}, vec);
}
PROBE(fence_proxy_alias) { arch::fence_proxy_alias(); }

// A payload load after an acquire spin, and a payload store before a release: what a compiler must
// neither hoist, nor sink, nor delete, nor turn into a non-coherent load.
PROBE(spin_then_read, const uint32_t* tail, const Vec16* payload, Vec16* out) {
  while (arch::ld_acquire_sys(tail) == 0) {
  }
  arch::st_weak(out, arch::ld_weak(payload));
}
PROBE(write_then_release, uint32_t* tail, uint32_t* payload) {
  arch::st_weak(payload, 1);
  arch::st_release_sys(tail, 1);
  arch::st_weak(payload, 2);
  arch::st_release_sys(tail, 2);
}

// A block's own words may lie in shared memory: the _cta forms must work there.
PROBE(shared_words, uint32_t* out) {
  __shared__ uint32_t word;
  arch::st_relaxed_cta(&word, 0);
  arch::sync_block();
  arch::atomic_add_acq_rel_cta(&word, 1);
  arch::st_release_cta(&word, 3);
  arch::st_weak(out, arch::ld_acquire_cta(&word));
}

PROBE(identity, int* out) {
  const int values = arch::thread_idx() + arch::num_threads() + arch::block_idx() +
                     arch::num_blocks() + arch::lane_idx() + arch::warp_idx() + arch::num_warps();
  arch::st_weak(out, values);
}

PROBE(sync_warp) {
  arch::sync_warp();
  arch::sync_warp(0xffu);
}
#define PROBE_SHUFFLE(op)                                                                 \
  PROBE(op##_4, float* out, float value) { arch::st_weak(out, arch::op(~0u, value, 1)); } \
  PROBE(op##_8, int64_t* out, int64_t value) { arch::st_weak(out, arch::op(~0u, value, 1)); }
PROBE_SHUFFLE(shfl)
PROBE_SHUFFLE(shfl_xor)
PROBE_SHUFFLE(shfl_up)
PROBE_SHUFFLE(shfl_down)

PROBE(ballot, uint32_t* out, int value) {
  arch::st_weak(out, arch::ballot(~0u, arch::lane_idx() < value));
}
PROBE(any, uint32_t* out, int value) {
  arch::st_weak(out, arch::any(~0u, arch::lane_idx() < value) ? 1u : 0u);
}
PROBE(all, uint32_t* out, int value) {
  arch::st_weak(out, arch::all(~0u, arch::lane_idx() < value) ? 1u : 0u);
}
PROBE(match_any_4, uint32_t* out, int32_t value) {
  arch::st_weak(out, arch::match_any(~0u, value));
}
PROBE(match_any_8, uint32_t* out, int64_t value) {
  arch::st_weak(out, arch::match_any(~0u, value));
}
PROBE(reduce_or, uint32_t* out, uint32_t value) { arch::st_weak(out, arch::reduce_or(~0u, value)); }
PROBE(reduce_max, int* out, int value) { arch::st_weak(out, arch::reduce_max(~0u, value)); }
PROBE(bits, int* out, uint32_t value) {
  arch::st_weak(out, arch::popc(value) + arch::ffs(value) + arch::clz(value));
}
PROBE(elect_one, uint32_t* out) {
  if (arch::elect_one()) arch::st_weak(out, 1);
}

PROBE(sync_block) { arch::sync_block(); }
PROBE(sync_block_apart) { arch::sync_block_apart(); }
PROBE(sync_block_any, uint32_t* out, uint32_t value) {
  arch::st_weak(out, static_cast<uint32_t>(arch::sync_block_any(value != 0)));
}
PROBE(sync_named, int barrier) { arch::sync_named(barrier, 64); }
PROBE(arrive_named, int barrier) { arch::arrive_named(barrier, 64); }

__device__ arch::Mbarrier* probe_mbarrier() {
  return reinterpret_cast<arch::Mbarrier*>(arch::dynamic_smem());
}
PROBE(mbarrier_init) { arch::mbarrier_init(probe_mbarrier(), 1); }
PROBE(fence_mbarrier_init) { arch::fence_mbarrier_init(); }
PROBE(mbarrier_arrive) { arch::mbarrier_arrive(probe_mbarrier()); }
PROBE(mbarrier_try_wait_parity) {
  while (!arch::mbarrier_try_wait_parity(probe_mbarrier(), 0)) {
  }
}
PROBE(bulk_load, const void* in) {
  arch::bulk_load(arch::dynamic_smem() + 128, in, 256, probe_mbarrier());
}
PROBE(bulk_store, void* out) { arch::bulk_store(out, arch::dynamic_smem() + 128, 256); }
PROBE(bulk_prefetch, const void* in) { arch::bulk_prefetch(in, 256); }
PROBE(bulk_commit) { arch::bulk_commit(); }
PROBE(bulk_wait_read) { arch::bulk_wait_read<2>(); }
PROBE(bulk_wait) { arch::bulk_wait<0>(); }

// Both post a descriptor: post_rail.
PROBE(rail_put, deep_comm::RailPort port, const void* src) {
  arch::rail_put(port, 1, 0, 256, src, 128);
}
PROBE(rail_signal, deep_comm::RailPort port) { arch::rail_signal(port, 1, 0, 256, 7); }

PROBE(wait_hint, const uint32_t* word, const uint32_t* abort_word) {
  arch::wait_hint(word, 0, abort_word, 0);
}
PROBE(wait_note) {
  arch::wait_note({.kernel = "dispatch",
                   .stage = "ring_tail",
                   .word = "tail",
                   .rank = 0,
                   .peer = 1,
                   .channel = 0,
                   .expected = 1});
}
PROBE(globaltimer_ns, uint64_t* out) { arch::st_weak(out, arch::globaltimer_ns()); }
PROBE(nanosleep, uint32_t ns) { arch::nanosleep(ns); }
PROBE(await_earlier_launch, uint32_t*) { arch::await_earlier_launch(); }
PROBE(allow_later_launch, uint32_t*) { arch::allow_later_launch(); }
PROBE(trap, const uint32_t* word) {
  if (arch::ld_weak(word) != 0) arch::trap("probe");
}

PROBE(bf16_to_float, float* out, Bf16 value) { arch::st_weak(out, arch::bf16_to_float(value)); }
PROBE(fp16_to_float, float* out, Fp16 value) { arch::st_weak(out, arch::fp16_to_float(value)); }
PROBE(float_to_bf16, Bf16* out, float value) { arch::st_weak(out, arch::float_to_bf16(value)); }
PROBE(float_to_fp16, Fp16* out, float value) { arch::st_weak(out, arch::float_to_fp16(value)); }
PROBE(floats_to_e4m3x2, uint16_t* out, float low, float high) {
  arch::st_weak(out, arch::floats_to_e4m3x2(low, high));
}
PROBE(max_bf16x2, uint32_t* out, uint32_t left, uint32_t right) {
  arch::st_weak(out, arch::max_bf16x2(left, right));
}
PROBE(log2, float* out, float value) { arch::st_weak(out, arch::log2(value)); }
PROBE(reciprocal, float* out, float value) { arch::st_weak(out, arch::reciprocal(value)); }
PROBE(exp2, float* out, float value) { arch::st_weak(out, arch::exp2(value)); }
PROBE(ld_relaxed_sys_vec, Vec16* out, const Vec16* ptr) {
  arch::st_weak(out, arch::ld_relaxed_sys(ptr));
}
PROBE(st_relaxed_sys_vec, Vec16* ptr, Vec16 value) { arch::st_relaxed_sys(ptr, value); }
// A product that is added to something must stay two instructions.
PROBE(multiply, float* out, float left, float right, float addend) {
  arch::st_weak(out, arch::multiply(left, right) + addend);
}

static_assert(!arch::fault(deep_comm::Fault::kSkipCredit));
