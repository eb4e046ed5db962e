// Quotients of many small numbers by one of them: a multiplication each instead of a division,
// which has no instruction on GPUs.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

// Exact for numerators below kMaxNumerator: the quotient with half a unit added to its numerator is
// at least half a divisor's part away from a whole number, which is more than what the roundings of
// the reciprocal and of the product take away: 3 units of 2^-24 of it.
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

}  // namespace deep_comm
