// Sums of rows: 16 bytes of a row at a time, added in float32 in the caller's order, rounded once.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

enum class Dtype : int { kBfloat16, kFloat16, kFloat32 };

// How the elements of a dtype lie in a word of 4 bytes: the first in the lowest bits.
template <Dtype kDtype>
struct Format;

template <>
struct Format<Dtype::kFloat32> {
  using Element = float;
  static constexpr int kPerWord = 1;
  DC_DEVICE static float value(uint32_t word, int) { return bit_cast<float>(word); }
  DC_DEVICE static uint32_t bits(float value) { return bit_cast<uint32_t>(value); }
};

template <>
struct Format<Dtype::kBfloat16> {
  using Element = Bf16;
  static constexpr int kPerWord = 2;
  DC_DEVICE static float value(uint32_t word, int idx) {  // the upper half of a float32
    return bit_cast<float>(idx == 0 ? word << 16 : word & 0xffff0000u);
  }
  DC_DEVICE static uint32_t bits(float value) { return arch::float_to_bf16(value).bits; }
};

template <>
struct Format<Dtype::kFloat16> {
  using Element = Fp16;
  static constexpr int kPerWord = 2;
  DC_DEVICE static float value(uint32_t word, int idx) {
    return arch::fp16_to_float({static_cast<uint16_t>(word >> 16 * idx)});
  }
  DC_DEVICE static uint32_t bits(float value) { return arch::float_to_fp16(value).bits; }
};

template <Dtype kDtype>
struct Numeric {
  using Words = Format<kDtype>;
  using Element = typename Words::Element;
  static constexpr int kPerWord = Words::kPerWord, kPerVec = 4 * kPerWord;

  DC_DEVICE static void add(float* sum, const Vec16& vec) {
    DC_UNROLL
    for (int idx = 0; idx < kPerVec; ++idx) {
      sum[idx] += Words::value(vec.words[idx / kPerWord], idx % kPerWord);
    }
  }
  // The product is rounded before it is added: no fused multiply-add.
  DC_DEVICE static void add_weighted(float* sum, const Vec16& vec, float weight) {
    DC_UNROLL
    for (int idx = 0; idx < kPerVec; ++idx) {
      sum[idx] += arch::multiply(weight, Words::value(vec.words[idx / kPerWord], idx % kPerWord));
    }
  }
  DC_DEVICE static Vec16 round(const float* sum) {
    Vec16 vec;
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {
      vec.words[word] = Words::bits(sum[kPerWord * word]);
      if constexpr (kPerWord == 2) vec.words[word] |= Words::bits(sum[2 * word + 1]) << 16;
    }
    return vec;
  }
};

inline constexpr int kVecsOfReduceStep = 2 * kWarpSize;  // vectors that a warp adds per step

// One warp: dst = round(((0 + rows[0]) + rows[1]) + …). The order is the numerical contract. Loads
// of up to kInFlight rows are issued before the first row is added: otherwise each row would cost a
// trip to memory. `rows` is in shared memory, which leaves registers for loads. num_parts warps
// share the row; this is number `part`.
template <Dtype kDtype>
DC_DEVICE void reduce_rows(uint8_t* dst, const uint8_t* const* rows, int num_rows, int num_vecs,
                           int part = 0, int num_parts = 1) {
  using Type = Numeric<kDtype>;
  constexpr int kInFlight = 4, kUnroll = kVecsOfReduceStep / kWarpSize;
  for (int base = part * kVecsOfReduceStep + arch::lane_idx(); base < num_vecs;
       base += num_parts * kVecsOfReduceStep) {
    float sums[kUnroll][Type::kPerVec] = {};
    for (int first = 0; first < num_rows; first += kInFlight) {
      Vec16 vecs[kInFlight][kUnroll];
      DC_UNROLL
      for (int idx = 0; idx < kInFlight; ++idx) {
        if (first + idx >= num_rows) continue;
        const Vec16* src = reinterpret_cast<const Vec16*>(rows[first + idx]) + base;
        DC_UNROLL
        for (int step = 0; step < kUnroll; ++step) {
          if (base + step * kWarpSize < num_vecs) {
            vecs[idx][step] = arch::ld_weak(src + step * kWarpSize);
          }
        }
      }
      DC_UNROLL
      for (int idx = 0; idx < kInFlight; ++idx) {
        if (first + idx >= num_rows) continue;
        DC_UNROLL
        for (int step = 0; step < kUnroll; ++step) {
          if (base + step * kWarpSize < num_vecs) Type::add(sums[step], vecs[idx][step]);
        }
      }
    }
    Vec16* out = reinterpret_cast<Vec16*>(dst) + base;
    DC_UNROLL
    for (int step = 0; step < kUnroll; ++step) {
      if (base + step * kWarpSize < num_vecs) {
        arch::st_streaming(out + step * kWarpSize, Type::round(sums[step]));
      }
    }
  }
}

}  // namespace deep_comm
