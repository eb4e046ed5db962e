// Conversions of half-precision payload on the host, bit by bit.
#pragma once

#include <cmath>

#include "e4m3.cuh"
#include "types.cuh"

namespace deep_comm::arch {

inline float bf16_to_float(Bf16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

inline Bf16 float_to_bf16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return Bf16{static_cast<uint16_t>(bits >> 16 | 0x40u)};  // quiet, whatever bits are cut off
  }
  const uint32_t round_to_even = 0x7fffu + (bits >> 16 & 1u);
  return Bf16{static_cast<uint16_t>((bits + round_to_even) >> 16)};
}

inline float fp16_to_float(Fp16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = value.bits >> 10 & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0x1f) return bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // zero and subnormals, exact
  return sign ? -magnitude : magnitude;
}

inline Fp16 float_to_fp16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return Fp16{static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu))};
  }
  if (magnitude >= 0x477ff000u) return Fp16{static_cast<uint16_t>(sign | 0x7c00u)};  // >= 65520
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the 2^-24 steps as the low bits of the sum, rounded to even.
    const float sum = bit_cast<float>(magnitude) + 0.5f;
    return Fp16{static_cast<uint16_t>(sign | (bit_cast<uint32_t>(sum) - 0x3f000000u))};
  }
  const uint32_t round_to_even = 0xfffu + (magnitude >> 13 & 1u);
  return Fp16{static_cast<uint16_t>(sign | ((magnitude + round_to_even - (112u << 23)) >> 13))};
}

inline uint16_t floats_to_e4m3x2(float low, float high) {
  return static_cast<uint16_t>(float_to_e4m3(low) | float_to_e4m3(high) << 8);
}
inline uint32_t max_bf16x2(uint32_t left, uint32_t right) {
  const auto larger = [](uint32_t left_bits, uint32_t right_bits) {
    const float left_value = bit_cast<float>(left_bits << 16);
    const float right_value = bit_cast<float>(right_bits << 16);
    if (left_value != left_value) return right_value != right_value ? 0x7fffu : right_bits;
    return right_value > left_value ? right_bits : left_bits;
  };
  return larger(left & 0xffffu, right & 0xffffu) | larger(left >> 16, right >> 16) << 16;
}

inline float log2(float value) { return std::log2(value); }
inline float exp2(float value) { return std::exp2(value); }
inline float multiply(float left, float right) {
  float product = left * right;
  // Hides the product from the compiler, which might fuse it with an addition.
  asm("" : "+m"(product));
  return product;
}
inline float reciprocal(float value) { return 1.0f / value; }

}  // namespace deep_comm::arch
