// What the test kernels get, on both targets.
#pragma once

#include <cstdint>

#include "device/arch/arch.cuh"

namespace deep_comm::test {

struct Args {
  uint64_t* memory;  // every rank's
  int64_t rank;
  int64_t params[8];
};

}  // namespace deep_comm::test
