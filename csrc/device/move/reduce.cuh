// Sums of rows: 16 bytes of a row at a time, added in float32 in the caller's order, rounded once.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

enum class Dtype : int { kBfloat16, kFloat16, kFloat32 };

template <Dtype kDtype>
struct Numeric;

template <>
struct Numeric<Dtype::kFloat32> {
  using Element = float;
  static constexpr int kPerVec = 4;
  DC_DEVICE static void add(float* sum, const Vec16& vec) {
    DC_UNROLL
    for (int word = 0; word < 4; ++word) sum[word] += bit_cast<float>(vec.words[word]);
  }
  // The product is rounded before it is added: no fused multiply-add.
  DC_DEVICE static void add_weighted(float* sum, const Vec16& vec, float weight) {
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {
      sum[word] += arch::multiply(weight, bit_cast<float>(vec.words[word]));
    }
  }
  DC_DEVICE static Vec16 round(const float* sum) {
    Vec16 vec;
    DC_UNROLL
    for (int word = 0; word < 4; ++word) vec.words[word] = bit_cast<uint32_t>(sum[word]);
    return vec;
  }
};

template <>
struct Numeric<Dtype::kBfloat16> {
  using Element = Bf16;
  static constexpr int kPerVec = 8;
  DC_DEVICE static void add(float* sum, const Vec16& vec) {
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {  // bfloat16 is the upper half of a float32
      sum[2 * word] += bit_cast<float>(vec.words[word] << 16);
      sum[2 * word + 1] += bit_cast<float>(vec.words[word] & 0xffff0000u);
    }
  }
  DC_DEVICE static void add_weighted(float* sum, const Vec16& vec, float weight) {
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {
      sum[2 * word] += arch::multiply(weight, bit_cast<float>(vec.words[word] << 16));
      sum[2 * word + 1] += arch::multiply(weight, bit_cast<float>(vec.words[word] & 0xffff0000u));
    }
  }
  DC_DEVICE static Vec16 round(const float* sum) {
    Vec16 vec;
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {
      vec.words[word] = static_cast<uint32_t>(arch::float_to_bf16(sum[2 * word]).bits) |
                        static_cast<uint32_t>(arch::float_to_bf16(sum[2 * word + 1]).bits) << 16;
    }
    return vec;
  }
};

template <>
struct Numeric<Dtype::kFloat16> {
  using Element = Fp16;
  static constexpr int kPerVec = 8;
  DC_DEVICE static void add(float* sum, const Vec16& vec) {
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {
      sum[2 * word] += arch::fp16_to_float({static_cast<uint16_t>(vec.words[word])});
      sum[2 * word + 1] += arch::fp16_to_float({static_cast<uint16_t>(vec.words[word] >> 16)});
    }
  }
  DC_DEVICE static void add_weighted(float* sum, const Vec16& vec, float weight) {
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {
      const uint32_t bits = vec.words[word];
      sum[2 * word] += arch::multiply(weight, arch::fp16_to_float({static_cast<uint16_t>(bits)}));
      sum[2 * word + 1] +=
          arch::multiply(weight, arch::fp16_to_float({static_cast<uint16_t>(bits >> 16)}));
    }
  }
  DC_DEVICE static Vec16 round(const float* sum) {
    Vec16 vec;
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {
      vec.words[word] = static_cast<uint32_t>(arch::float_to_fp16(sum[2 * word]).bits) |
                        static_cast<uint32_t>(arch::float_to_fp16(sum[2 * word + 1]).bits) << 16;
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
