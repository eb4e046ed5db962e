// Conversion to e4m3, bit by bit: the host's, and that of GPUs without an instruction for it.
#pragma once

#include "types.cuh"

namespace deep_comm::arch {

DC_HOST_DEVICE uint8_t float_to_e4m3(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 24 & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // >= 448, the largest
  if (magnitude < 0x3c800000u) {
    // Below 2^-6: adding 2^14 leaves the 2^-9 steps as the low bits of the sum, rounded to even.
    const float sum = bit_cast<float>(magnitude) + 16384.0f;
    return static_cast<uint8_t>(sign | (bit_cast<uint32_t>(sum) - 0x46800000u));
  }
  const uint32_t round_to_even = 0x7ffffu + (magnitude >> 20 & 1u);
  return static_cast<uint8_t>(sign | ((magnitude + round_to_even - (120u << 23)) >> 20));
}

}  // namespace deep_comm::arch
