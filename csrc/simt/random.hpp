// The one source of chance of a simulated machine: a seed gives the same numbers everywhere.
#pragma once

#include <cstdint>

namespace deep_comm::simt {

class Random {
 public:
  // Mixed, or one seed's numbers would be its neighbour's, one place on.
  explicit Random(uint64_t seed) : state_(mix(seed + 0x2545f4914f6cdd1du)) {}

  // splitmix64
  uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15u); }
  // Uniform in [0, bound); bound < 2^32.
  uint64_t below(uint64_t bound) { return (next() >> 32) * bound >> 32; }
  bool coin() { return next() >> 63; }

 private:
  static uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }

  uint64_t state_;
};

// True about once in `mean` calls, at one subtraction a call. A mean of 0: never.
class Whim {
 public:
  Whim(uint32_t mean, Random& random) : mean_(mean) { refill(random); }

  bool strikes(Random& random) {
    if (--left_ != 0) [[likely]]
      return false;
    refill(random);
    return mean_ != 0;
  }

 private:
  void refill(Random& random) {
    left_ = mean_ == 0 ? ~uint64_t{0} : 1 + random.below(2 * uint64_t{mean_} - 1);
  }

  uint32_t mean_;
  uint64_t left_ = 0;
};

}  // namespace deep_comm::simt
