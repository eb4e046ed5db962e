// LogFMT-10: sixteen numbers, each as a sign and nine bits of its logarithm, with the largest
// logarithm and the range of the sixteen. 24 bytes instead of 32 of bfloat16. (Logarithms instead
// of small floats for rows that are added later: DeepSeek-AI, "Insights into DeepSeek-V3", 2025.
// The layout here is our own.)
//
//   piece = [ 16 codes of 10 bits, xored with a key | header ]; no word is zero (sync/arrival.cuh)
//   code  = sign << 9 | level;  level 0: zero;  level m: 2 ^ (largest - (511 - m) * step)
//
// Error: at most a factor of 2 ^ (step / 2), where step = range / 510 and range is at most 32: 2.2
// %, or 0.3 % if the sixteen lie within a factor of 16. The range is rounded up by at most 1/64.
// Numbers below 2^-32 of the largest become zero. If one number is not finite, all become NaN.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

struct LogPiece {
  static constexpr int kElements = 16;
  static constexpr int kBits = 10;
  static constexpr uint32_t kNumLevels = 511;
  static constexpr float kMaxRange = 32.0f;
  static constexpr float kLargestScale = 128.0f, kLargestBias = 160.0f, kRangeScale = 256.0f;
  static constexpr uint32_t kNotFinite = 0x7fffu;  // as range

  Vec16 codes;       // words 0 to 3
  uint32_t last[2];  // word 4; header: largest << 16 | range << 1 | 1

  // The code words if all codes were minus zero. encode never makes that code, so no word equals
  // its key.
  DC_HOST_DEVICE static constexpr uint32_t key(int word) {
    uint32_t bits = 0;
    for (int code = 0; code < kElements; ++code) {
      const int at = code * kBits + kBits - 1 - 32 * word;
      if (at >= 0 && at < 32) bits |= 1u << at;
    }
    return bits;
  }

  DC_DEVICE static LogPiece encode(const float* values) {
    float logs[kElements];
    float largest = -kLargestBias, least = kLargestBias;
    bool is_finite = true;
    DC_UNROLL
    for (int idx = 0; idx < kElements; ++idx) {
      const uint32_t magnitude = bit_cast<uint32_t>(values[idx]) & 0x7fffffffu;
      is_finite = is_finite && magnitude < 0x7f800000u;
      logs[idx] = magnitude == 0 ? -1e9f : arch::log2(bit_cast<float>(magnitude));
      largest = logs[idx] > largest ? logs[idx] : largest;
      if (magnitude != 0) least = logs[idx] < least ? logs[idx] : least;
    }
    if (!is_finite) return pack({}, 0, kNotFinite);
    // Both are rounded up, so no element lies outside.
    const auto round_up = [](float value) { return static_cast<uint32_t>(value) + 1; };
    const uint32_t stored_largest = round_up((largest + kLargestBias) * kLargestScale);
    const float top = static_cast<float>(stored_largest) / kLargestScale - kLargestBias;
    const float range = least <= top ? top - least : 0.0f;
    const uint32_t stored_range = round_up((range < kMaxRange ? range : kMaxRange) * kRangeScale);
    const float levels_per_log =
        static_cast<float>(kNumLevels - 1) * kRangeScale / static_cast<float>(stored_range);
    uint32_t codes[kElements];
    DC_UNROLL
    for (int idx = 0; idx < kElements; ++idx) {
      const float below = arch::multiply(top - logs[idx], levels_per_log) + 0.5f;
      const uint32_t distance =
          below < static_cast<float>(kNumLevels) ? static_cast<uint32_t>(below) : kNumLevels;
      const uint32_t level = kNumLevels - distance;
      const uint32_t sign = bit_cast<uint32_t>(values[idx]) >> 31;
      codes[idx] = level == 0 ? 0u : sign << (kBits - 1) | level;
    }
    return pack(codes, stored_largest, stored_range);
  }

  DC_DEVICE static LogPiece pack(const uint32_t (&codes)[kElements], uint32_t largest,
                                 uint32_t range) {
    uint32_t words[5] = {};
    DC_UNROLL
    for (int idx = 0; idx < kElements; ++idx) {
      const int word = idx * kBits / 32, at = idx * kBits % 32;
      words[word] |= codes[idx] << at;
      if (at + kBits > 32) words[word + 1] |= codes[idx] >> (32 - at);
    }
    return {{{words[0] ^ key(0), words[1] ^ key(1), words[2] ^ key(2), words[3] ^ key(3)}},
            {words[4] ^ key(4), largest << 16 | range << 1 | 1u}};
  }

  DC_DEVICE void decode(float* values) const {
    const uint32_t words[5] = {codes.words[0] ^ key(0), codes.words[1] ^ key(1),
                               codes.words[2] ^ key(2), codes.words[3] ^ key(3), last[0] ^ key(4)};
    const uint32_t range = last[1] >> 1 & 0x7fffu;
    const float top = static_cast<float>(last[1] >> 16) / kLargestScale - kLargestBias;
    const float step =
        static_cast<float>(range) / (kRangeScale * static_cast<float>(kNumLevels - 1));
    DC_UNROLL
    for (int idx = 0; idx < kElements; ++idx) {
      const int word = idx * kBits / 32, at = idx * kBits % 32;
      uint32_t code = words[word] >> at;
      if (at + kBits > 32) code |= words[word + 1] << (32 - at);
      const uint32_t level = code & (kNumLevels);
      const float magnitude =
          arch::exp2(top - arch::multiply(static_cast<float>(kNumLevels - level), step));
      const float value = level == 0                        ? 0.0f
                          : (code >> (kBits - 1) & 1u) != 0 ? -magnitude
                                                            : magnitude;
      values[idx] = range == kNotFinite ? bit_cast<float>(0x7fc00000u) : value;
    }
  }
};

}  // namespace deep_comm
