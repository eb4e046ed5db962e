// Division by a number of the call. GPUs have no instruction for it: many small numbers divided by the
// same one take a multiplication each, and what can be a power of two is one.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

// Exact for numerators below kMaxNumerator. Half a unit is added to the numerator, so the quotient
// is at least 1 / (2 * divisor) away from a whole number. Rounding the reciprocal and the product
// changes it by less: 3 * 2^-24 of its value.
struct Divisor {
  static constexpr int kMaxNumerator = 1 << 20;
  float inverse;

  DC_HOST_DEVICE static Divisor make(int divisor) {
    return {arch::reciprocal(static_cast<float>(divisor))};
  }
  DC_HOST_DEVICE int quotient(int numerator) const {
    return static_cast<int>((static_cast<float>(numerator) + 0.5f) * inverse);
  }
};

// The least shift with 1 << shift >= value, which is at least 1.
DC_DEVICE int shift_for(int value) {
  return kWarpSize - arch::clz(static_cast<uint32_t>(value - 1));
}

}  // namespace deep_comm
