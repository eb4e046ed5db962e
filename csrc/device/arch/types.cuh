// Plain types and macros that both targets share. No instruction of either target lives here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define DEEP_COMM_TARGET_CUDA 1
#define DC_DEVICE __device__ __forceinline__
#define DC_HOST_DEVICE __host__ __device__ __forceinline__
#define DC_UNROLL _Pragma("unroll")
#else
#define DEEP_COMM_TARGET_CUDA 0
#define DC_DEVICE inline
#define DC_HOST_DEVICE inline
#define DC_UNROLL
#endif

namespace deep_comm {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kFullMask = 0xffffffffu;

// The unit of every vector access: 16 bytes, the widest load or store of one thread.
struct alignas(16) Vec16 {
  uint32_t words[4];
};

// Half-precision payload types are moved and converted by bits, so that no header of a vendor's
// type system reaches the protocol.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

template <class To, class From>
DC_HOST_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T>
DC_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
template <class T>
DC_HOST_DEVICE constexpr T align_up(T a, T b) {
  return ceil_div(a, b) * b;
}
template <class T>
DC_HOST_DEVICE constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
DC_HOST_DEVICE constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

}  // namespace deep_comm
