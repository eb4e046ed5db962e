// Rows cast to NVFP4: e2m1 elements, two per byte, an e4m3 scale for 16 of them, and one factor for
// the whole tensor that brings the scales into e4m3's range. (NVIDIA's format, here without
// instructions that only newer GPUs have.)
//
//   scale   = e4m3(largest magnitude of the 16 * (1 / 6) * global), at most 448
//   element = e2m1(x * (global / scale)), to nearest, ties to even, at most 6; scale 0: of x * 0
//
// So element * scale / global restores x. Each product is rounded on its own. No word is zero on
// its way (sync/arrival.cuh): elements are xored with eight negative zeros, and a word of just
// those gets its last zero positive; scales have a sign bit that is not needed otherwise.
#pragma once

#include "device/move/quantise.cuh"

namespace deep_comm {

// Codes 0 to 7: 0, 0.5, 1, 1.5, 2, 3, 4, 6; a NaN becomes 6. The sign is that of `of`, from which
// `value` was computed: GPUs do not keep the sign of a NaN.
DC_DEVICE uint32_t float_to_e2m1(float value, float of) {
  const float magnitude = bit_cast<float>(bit_cast<uint32_t>(value) & 0x7fffffffu);
  // Every second bound belongs to the code above it, the even one.
  uint32_t code = !(magnitude <= 0.25f) ? 1 : 0;
  code += !(magnitude < 0.75f) ? 1 : 0;
  code += !(magnitude <= 1.25f) ? 1 : 0;
  code += !(magnitude < 1.75f) ? 1 : 0;
  code += !(magnitude <= 2.5f) ? 1 : 0;
  code += !(magnitude < 3.5f) ? 1 : 0;
  code += !(magnitude <= 5.0f) ? 1 : 0;
  return (bit_cast<uint32_t>(of) >> 31) << 3 | code;
}

// Of a code without a sign.
DC_DEVICE float e4m3_to_float(uint32_t code) {
  constexpr float kLeast = 1.0f / 512.0f;
  const uint32_t exponent = code >> 3, mantissa = code & 7u;
  if (exponent == 0) return static_cast<float>(mantissa) * kLeast;
  return bit_cast<float>((exponent + 120) << 23 | mantissa << 20);
}

template <>
struct Piece<PayloadFormat::kNvFp4> {
  static constexpr int kElements = 32;
  static constexpr uint32_t kKey = 0x88888888u, kOther = 0x80000000u;
  static constexpr uint32_t kScaleKey = 0x80808080u;  // of four scales
  static constexpr int kLanesPerWord = kFp4ScaleWord / kElements;
  static_assert(kLanesPerWord == 2 && kFp4ScaleBlock * 2 == kElements);
  Vec16 vec;        // after encode: e2m1
  Vec16 rest[3];    // before encode: the bfloat16 input after vec
  uint32_t scales;  // after encode: four, in even lanes

  DC_DEVICE void load(const uint8_t* row, int piece) {
    const Vec16* src = reinterpret_cast<const Vec16*>(row) + 4 * piece;
    vec = arch::ld_nc(src);
    DC_UNROLL
    for (int idx = 0; idx < 3; ++idx) rest[idx] = arch::ld_nc(src + 1 + idx);
  }
  // The whole warp. Lanes are neighbours in the row, beginning at an even piece.
  DC_DEVICE void encode(bool /*round_scale*/, const float* global_scale) {
    const float global = global_scale == nullptr ? 1.0f : arch::ld_nc(global_scale);
    const Vec16 input[4] = {vec, rest[0], rest[1], rest[2]};
    float wanted[2];
    DC_UNROLL
    for (int block = 0; block < 2; ++block) {
      float amax = 0.0f;
      DC_UNROLL
      for (int idx = 0; idx < kFp4ScaleBlock; ++idx) {
        const float magnitude = bit_cast<float>(
            bit_cast<uint32_t>(element(input, block * kFp4ScaleBlock + idx)) & 0x7fffffffu);
        amax = magnitude > amax ? magnitude : amax;
      }
      wanted[block] = arch::multiply(arch::multiply(amax, 1.0f / 6.0f), global);
    }
    const uint32_t pair = arch::floats_to_e4m3x2(wanted[0], wanted[1]) & 0x7f7fu;
    DC_UNROLL
    for (int block = 0; block < 2; ++block) {
      const float scale = e4m3_to_float(pair >> 8 * block & 0xffu);
      const float factor = scale == 0.0f ? 0.0f : global / scale;
      DC_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int word = 2 * block + half;
        uint32_t codes = 0;
        DC_UNROLL
        for (int idx = 0; idx < 8; ++idx) {
          const float x = element(input, 8 * word + idx);
          codes |= float_to_e2m1(arch::multiply(x, factor), x) << 4 * idx;
        }
        vec.words[word] = codes != kKey ? codes ^ kKey : kOther;
      }
    }
    const uint32_t other = arch::shfl_xor(kFullMask, pair, 1);
    scales = (pair | other << 16) ^ kScaleKey;
  }
  DC_DEVICE void send(uint8_t* slot, int row_bytes, int piece) const {
    // pairs with: await_arrivals in expand_rows, take_arrival in expand_scales — nothing but the words
    // themselves. Between nodes these are staged, and the put says whom it pairs with.
    arch::st_relaxed_sys(reinterpret_cast<Vec16*>(slot) + piece, vec);
    if (piece % kLanesPerWord == 0) {
      arch::st_relaxed_sys(reinterpret_cast<uint32_t*>(slot + row_bytes) + piece / kLanesPerWord,
                           scales);
    }
  }

 private:
  DC_DEVICE static float element(const Vec16 (&input)[4], int idx) {
    const uint32_t word = input[idx / 8].words[idx % 8 / 2];
    return bit_cast<float>(idx % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
};

}  // namespace deep_comm
