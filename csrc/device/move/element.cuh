// Copies of single elements whose size is known only at run time (scales, top-k indices).
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

template <class Load>
DC_DEVICE void load_element_by(Load load, void* element, const uint8_t* src, int num_bytes) {
  switch (num_bytes) {
    case 1:
      *static_cast<uint8_t*>(element) = load(src);
      break;
    case 2:
      *static_cast<uint16_t*>(element) = load(reinterpret_cast<const uint16_t*>(src));
      break;
    case 4:
      *static_cast<uint32_t*>(element) = load(reinterpret_cast<const uint32_t*>(src));
      break;
    default:
      *static_cast<uint64_t*>(element) = load(reinterpret_cast<const uint64_t*>(src));
      break;
  }
}

// Read-only global input → shared memory or registers.
DC_DEVICE void gather_element(uint8_t* smem_dst, const uint8_t* src, int num_bytes) {
  load_element_by([](const auto* word) { return arch::ld_nc(word); }, smem_dst, src, num_bytes);
}

// Global memory that a peer has written → registers.
DC_DEVICE void load_element(void* element, const uint8_t* src, int num_bytes) {
  load_element_by([](const auto* word) { return arch::ld_weak(word); }, element, src, num_bytes);
}

// Shared memory or registers → global output.
DC_DEVICE void scatter_element(uint8_t* dst, const uint8_t* smem_src, int num_bytes) {
  switch (num_bytes) {
    case 1:
      arch::st_weak(dst, *smem_src);
      break;
    case 2:
      arch::st_weak(reinterpret_cast<uint16_t*>(dst), *reinterpret_cast<const uint16_t*>(smem_src));
      break;
    case 4:
      arch::st_weak(reinterpret_cast<uint32_t*>(dst), *reinterpret_cast<const uint32_t*>(smem_src));
      break;
    default:
      arch::st_weak(reinterpret_cast<uint64_t*>(dst), *reinterpret_cast<const uint64_t*>(smem_src));
      break;
  }
}

// Read-only global input → global output.
DC_DEVICE void copy_element(uint8_t* dst, const uint8_t* src, int num_bytes) {
  uint64_t element;
  gather_element(reinterpret_cast<uint8_t*>(&element), src, num_bytes);
  scatter_element(dst, reinterpret_cast<const uint8_t*>(&element), num_bytes);
}

// An expert index of either width, as it was loaded. Using the value waits for it, and loads after
// that start late, so the conversion is separate.
struct RawExpert {
  uint32_t low = 0, high = 0;  // high: of 8 bytes

  // Two loads of words: a value merged from two branches would be waited for right there.
  DC_DEVICE static RawExpert load(const void* topk_idx, int64_t position, int num_bytes) {
    const uint8_t* at = static_cast<const uint8_t*>(topk_idx) + position * num_bytes;
    RawExpert expert;
    expert.low = arch::ld_nc(reinterpret_cast<const uint32_t*>(at));
    if (num_bytes == 8) expert.high = arch::ld_nc(reinterpret_cast<const uint32_t*>(at + 4));
    return expert;
  }
  // Values outside the range of int become -2.
  DC_DEVICE int value(int num_bytes) const {
    const int narrow = static_cast<int>(low);
    return num_bytes == 4 || high == (narrow < 0 ? ~0u : 0u) ? narrow : -2;
  }
};

// As the caller gave it: for error records.
DC_DEVICE int64_t load_given_expert(const void* topk_idx, int64_t position, int num_bytes) {
  return num_bytes == 4 ? int64_t{arch::ld_nc(static_cast<const int32_t*>(topk_idx) + position)}
                        : arch::ld_nc(static_cast<const int64_t*>(topk_idx) + position);
}

DC_DEVICE int load_expert(const void* topk_idx, int64_t position, int num_bytes) {
  if (num_bytes == 4) return arch::ld_nc(static_cast<const int32_t*>(topk_idx) + position);
  const int64_t expert = arch::ld_nc(static_cast<const int64_t*>(topk_idx) + position);
  return expert == static_cast<int32_t>(expert) ? static_cast<int>(expert) : -2;
}

// `count` of them, at most kNum, with all loads in flight at once; the rest of `experts` is -1.
template <int kNum>
DC_DEVICE void load_experts(const void* topk_idx, int64_t position, int count, int num_bytes,
                            int (&experts)[kNum]) {
  if (num_bytes == 4) {
    const int32_t* src = static_cast<const int32_t*>(topk_idx) + position;
    DC_UNROLL
    for (int k = 0; k < kNum; ++k) experts[k] = k < count ? arch::ld_nc(src + k) : -1;
    return;
  }
  const int64_t* src = static_cast<const int64_t*>(topk_idx) + position;
  int64_t wide[kNum];
  DC_UNROLL
  for (int k = 0; k < kNum; ++k) wide[k] = k < count ? arch::ld_nc(src + k) : -1;
  DC_UNROLL
  for (int k = 0; k < kNum; ++k) {
    experts[k] = wide[k] == static_cast<int32_t>(wide[k]) ? static_cast<int>(wide[k]) : -2;
  }
}

// One thread: calls each(expert, position) for `count` of them, in order. Eight loads are in flight at
// once: otherwise each would cost a trip to memory. The loop over them is kept rolled: a kernel begins
// with cold instruction caches, and code that runs once costs more to fetch than to run.
template <class Each>
DC_DEVICE void for_each_expert(const void* topk_idx, int64_t begin, int count, int num_bytes,
                               const Each& each) {
  constexpr int kBatch = 8;
  for (int base = 0; base < count; base += kBatch) {
    const int num = min_of(kBatch, count - base);
    int experts[kBatch];
    load_experts<kBatch>(topk_idx, begin + base, num, num_bytes, experts);
    DC_NO_UNROLL
    for (int k = 0; k < num; ++k) {
      each(experts[0], begin + base + k);
      DC_UNROLL
      for (int next = 1; next < kBatch; ++next) experts[next - 1] = experts[next];
    }
  }
}

DC_DEVICE void store_expert(void* topk_idx, int64_t position, int num_bytes, int expert) {
  if (num_bytes == 4) {
    arch::st_weak(static_cast<int32_t*>(topk_idx) + position, static_cast<int32_t>(expert));
  } else {
    arch::st_weak(static_cast<int64_t*>(topk_idx) + position, static_cast<int64_t>(expert));
  }
}

}  // namespace deep_comm
