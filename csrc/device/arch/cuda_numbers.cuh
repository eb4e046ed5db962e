// Numbers of arch.cuh on NVIDIA GPUs: conversions and products of payload, one instruction each.
#pragma once

#include "types.cuh"

namespace deep_comm::arch {

DC_DEVICE float bf16_to_float(Bf16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
DC_DEVICE float fp16_to_float(Fp16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
DC_DEVICE Bf16 float_to_bf16(float value) {
  Bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
DC_DEVICE Fp16 float_to_fp16(float value) {
  Fp16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
DC_DEVICE uint32_t max_bf16x2(uint32_t left, uint32_t right) {
  uint32_t result;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(left), "r"(right));
  return result;
}
DC_DEVICE float log2(float value) {
  float result;
  asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DC_DEVICE float exp2(float value) {
  float result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DC_DEVICE float multiply(float left, float right) {
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(left), "f"(right));
  return result;
}
DC_HOST_DEVICE float reciprocal(float value) {
#ifdef __CUDA_ARCH__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#else
  return 1.0f / value;
#endif
}

}  // namespace deep_comm::arch
