// Rows encoded for a message, 16 bytes at a time: bfloat16 as it is, or cast to FP8 e4m3 with one
// float32 scale per block of 128 elements. No word of a row is zero on its way (sync/arrival.cuh):
// words are xored with a key that they never equal, and scales are positive.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

enum class PayloadFormat : int { kBfloat16, kFp8, kNvFp4 };

inline constexpr int kScaleBlock = 128;    // elements per scale
inline constexpr int kFp4ScaleBlock = 16;  // of NVFP4; four scales per word
inline constexpr int kFp4ScaleWord = 4 * kFp4ScaleBlock;

// How the scales of a row are stored, in words of 4 bytes.
struct ScaleFormat {
  bool round_scale;  // up to a power of two
  bool use_ue8m0;    // exponents only, four per word, zeros after the last

  bool operator==(const ScaleFormat&) const = default;

  DC_HOST_DEVICE int num_words(int num_scales) const {
    return use_ue8m0 ? ceil_div(num_scales, 4) : num_scales;
  }
};

template <PayloadFormat kFormat>
struct Piece;

template <>
struct Piece<PayloadFormat::kBfloat16> {
  static constexpr int kElements = 8;
  // Two signalling NaNs. A word with just these bits arrives with the first NaN quiet, as
  // arithmetic would make it.
  static constexpr uint32_t kKey = 0x7fa57f93u, kQuiet = 0x00400000u;
  Vec16 vec;

  DC_DEVICE void load(const uint8_t* row, int piece) {
    vec = arch::ld_nc(reinterpret_cast<const Vec16*>(row) + piece);
  }
  DC_DEVICE void encode(bool /*round_scale*/, const float* /*global_scale*/) {
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {
      vec.words[word] ^= kKey;
      if (vec.words[word] == 0) vec.words[word] = kQuiet;
    }
  }
  DC_DEVICE void send(uint8_t* slot, int /*row_bytes*/, int piece) const {
    // pairs with: await_arrivals in expand_rows — nothing but the words themselves.
    arch::st_relaxed_sys(reinterpret_cast<Vec16*>(slot) + piece, vec);
  }
  // Into a slot in shared memory.
  DC_DEVICE void put(uint8_t* stage, int /*row_bytes*/, int piece) const {
    reinterpret_cast<Vec16*>(stage)[piece] = vec;
  }
};

// amax: the largest magnitude of a block. Returns the factor that restores a stored element.
DC_DEVICE float inverse_scale(float amax, bool round_scale) {
  constexpr float kOneOverLargest = 1.0f / 448.0f;
  const float inverse = arch::multiply(amax, kOneOverLargest);
  if (!round_scale) return inverse;
  const uint32_t bits = bit_cast<uint32_t>(inverse);  // normal and positive: amax has a floor
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1 : 0);
  return bit_cast<float>(exponent << 23);
}

template <>
struct Piece<PayloadFormat::kFp8> {
  static constexpr int kElements = 16;
  // Four negative NaNs. If an element word is that, the last NaN becomes positive.
  static constexpr uint32_t kKey = 0xffffffffu, kOther = 0x80000000u;
  static constexpr int kLanesPerScale = kScaleBlock / kElements;
  Vec16 vec;    // FP8, after encode
  Vec16 rest;   // before encode: the upper half of the bfloat16 input
  float scale;  // inverse_scale of the block

  DC_DEVICE void load(const uint8_t* row, int piece) {
    const Vec16* src = reinterpret_cast<const Vec16*>(row) + 2 * piece;
    vec = arch::ld_nc(src);
    rest = arch::ld_nc(src + 1);
  }
  // The largest magnitudes of this lane's elements, as two bfloat16; the larger one counts. NaNs
  // are ignored.
  DC_DEVICE uint32_t largest() const {
    uint32_t pairs[4];
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {
      pairs[word] = arch::max_bf16x2(vec.words[word] & kMagnitudes, rest.words[word] & kMagnitudes);
    }
    return arch::max_bf16x2(arch::max_bf16x2(pairs[0], pairs[1]),
                            arch::max_bf16x2(pairs[2], pairs[3]));
  }
  // `pair`: largest() of the block. Returns the factor for its elements.
  DC_DEVICE float set_scale(uint32_t pair, bool round_scale) {
    float amax = 1e-4f;  // so that a block of zeros has a scale too
    const float low = bit_cast<float>(pair << 16), high = bit_cast<float>(pair & 0xffff0000u);
    amax = low > amax ? low : amax;
    amax = high > amax ? high : amax;
    scale = inverse_scale(amax, round_scale);
    // Not 1 / scale: this quotient is rounded once. A power of two is exact either way.
    return round_scale ? 1.0f / scale : 448.0f / amax;
  }
  DC_DEVICE void convert(float factor) {
    Vec16 converted;
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {
      const Vec16& source = word < 2 ? vec : rest;
      const uint32_t first = source.words[2 * (word % 2)];
      const uint32_t second = source.words[2 * (word % 2) + 1];
      const uint32_t low = convert_pair(first, factor), high = convert_pair(second, factor);
      converted.words[word] = low | high << 16;
    }
    vec = converted;
  }
  // The whole warp. The lanes of a block are neighbours, the first at a multiple of their number.
  // Several pieces per lane at a time, so that no piece waits for another's shuffles.
  template <int kCount>
  DC_DEVICE static void quantise_all(Piece* pieces, bool round_scale) {
    uint32_t pairs[kCount];
    DC_UNROLL
    for (int idx = 0; idx < kCount; ++idx) pairs[idx] = pieces[idx].largest();
    DC_UNROLL
    for (int lane_mask = 1; lane_mask < kLanesPerScale; lane_mask *= 2) {
      DC_UNROLL
      for (int idx = 0; idx < kCount; ++idx) {
        pairs[idx] = arch::max_bf16x2(pairs[idx], arch::shfl_xor(kFullMask, pairs[idx], lane_mask));
      }
    }
    float factors[kCount];
    DC_UNROLL
    for (int idx = 0; idx < kCount; ++idx) {
      factors[idx] = pieces[idx].set_scale(pairs[idx], round_scale);
    }
    DC_UNROLL
    for (int idx = 0; idx < kCount; ++idx) pieces[idx].convert(factors[idx]);
  }
  DC_DEVICE void quantise(bool round_scale) { quantise_all<1>(this, round_scale); }
  // The same, with words that are not zero.
  DC_DEVICE void encode(bool round_scale, const float* /*global_scale*/) {
    quantise(round_scale);
    DC_UNROLL
    for (int word = 0; word < 4; ++word) {
      const uint32_t keyed = vec.words[word] ^ kKey;
      vec.words[word] = keyed != 0 ? keyed : kOther;
    }
  }
  DC_DEVICE void send(uint8_t* slot, int row_bytes, int piece) const {
    // pairs with: await_arrivals in expand_rows, take_arrival in expand_scales — nothing but the words
    // themselves. Between nodes these are staged, and the put says whom it pairs with.
    arch::st_relaxed_sys(reinterpret_cast<Vec16*>(slot) + piece, vec);
    if (piece % kLanesPerScale == 0) {
      arch::st_relaxed_sys(reinterpret_cast<float*>(slot + row_bytes) + piece / kLanesPerScale,
                           scale);
    }
  }
  // Into a slot in shared memory.
  DC_DEVICE void put(uint8_t* stage, int row_bytes, int piece) const {
    reinterpret_cast<Vec16*>(stage)[piece] = vec;
    if (piece % kLanesPerScale == 0) {
      reinterpret_cast<float*>(stage + row_bytes)[piece / kLanesPerScale] = scale;
    }
  }

 private:
  static constexpr uint32_t kMagnitudes = 0x7fff7fffu;

  DC_DEVICE static uint32_t convert_pair(uint32_t pair, float factor) {
    return arch::floats_to_e4m3x2(arch::multiply(bit_cast<float>(pair << 16), factor),
                                  arch::multiply(bit_cast<float>(pair & 0xffff0000u), factor));
  }
};

// Restores what was sent from what arrived.
template <PayloadFormat kFormat>
DC_DEVICE Vec16 decode(Vec16 vec) {
  DC_UNROLL
  for (int word = 0; word < 4; ++word) vec.words[word] ^= Piece<kFormat>::kKey;
  return vec;
}

// The scales of a row, in shared or in global memory.
template <bool kShared>
struct ScaleRow {
  uint8_t* bytes;
  const ScaleFormat& format;

  template <class T>
  DC_DEVICE void store(int idx, T value) const {
    T* dst = reinterpret_cast<T*>(bytes) + idx;
    if constexpr (kShared) {
      *dst = value;
    } else {
      arch::st_weak(dst, value);
    }
  }
  // One lane, the first of a block.
  DC_DEVICE void set(int block, float scale) const {
    if (format.use_ue8m0) {
      store(block, static_cast<uint8_t>(bit_cast<uint32_t>(scale) >> 23));
    } else {
      store(block, scale);
    }
  }
  // The whole warp: zeroes the bytes of the last word that no block fills.
  DC_DEVICE void pad(int num_blocks) const {
    const int byte = num_blocks + arch::lane_idx();
    if (format.use_ue8m0 && byte < align_up(num_blocks, 4)) store(byte, uint8_t{0});
  }
};

// One warp: casts a bfloat16 row in global memory to FP8 in shared memory. num_elements: a multiple
// of kScaleBlock.
DC_DEVICE void quantise_into(uint8_t* stage, const ScaleRow<true>& scales, const uint8_t* source,
                             int num_elements) {
  using PieceType = Piece<PayloadFormat::kFp8>;
  constexpr int kTogether = 2;  // pieces per lane and step; the next step's are in flight
  const int num_pieces = num_elements / PieceType::kElements;
  PieceType ahead[kTogether]{};
  const auto load = [&](int first) {
    DC_UNROLL
    for (int idx = 0; idx < kTogether; ++idx) {
      const int piece = first + idx * kWarpSize + arch::lane_idx();
      if (piece < num_pieces) ahead[idx].load(source, piece);
    }
  };
  load(0);
  for (int first = 0; first < num_pieces; first += kTogether * kWarpSize) {
    PieceType loaded[kTogether];
    DC_UNROLL
    for (int idx = 0; idx < kTogether; ++idx) loaded[idx] = ahead[idx];
    load(first + kTogether * kWarpSize);
    PieceType::quantise_all<kTogether>(loaded, scales.format.round_scale);
    DC_UNROLL
    for (int idx = 0; idx < kTogether; ++idx) {
      const int piece = first + idx * kWarpSize + arch::lane_idx();
      if (piece >= num_pieces) continue;
      reinterpret_cast<Vec16*>(stage)[piece] = loaded[idx].vec;
      if (piece % PieceType::kLanesPerScale == 0) {
        scales.set(piece / PieceType::kLanesPerScale, loaded[idx].scale);
      }
    }
  }
  scales.pad(num_elements / kScaleBlock);
}

// One warp: casts a bfloat16 row to FP8 with its scales, in global memory.
DC_DEVICE void quantise_row(uint8_t* dst, const ScaleRow<false>& scales, const uint8_t* row,
                            int num_blocks) {
  using PieceType = Piece<PayloadFormat::kFp8>;
  constexpr int kPerBlock = PieceType::kLanesPerScale;
  for (int base = 0; base < num_blocks * kPerBlock; base += kWarpSize) {
    const int piece = base + arch::lane_idx();
    const bool is_active = piece < num_blocks * kPerBlock;
    PieceType loaded{};
    if (is_active) loaded.load(row, piece);
    loaded.quantise(scales.format.round_scale);
    if (!is_active) continue;
    arch::st_weak(reinterpret_cast<Vec16*>(dst) + piece, loaded.vec);
    if (piece % kPerBlock == 0) scales.set(piece / kPerBlock, loaded.scale);
  }
  scales.pad(num_blocks);
}

// Where the rows of a tensor are cast to, in global memory: [T, row_bytes] and packed scales.
struct QuantisedRows {
  uint8_t* rows;
  uint8_t* scales;
  const uint8_t* source;  // [T, H] bfloat16
  int row_bytes;
  int scale_row_bytes;
  const ScaleFormat& format;

  // The block: rows [begin, end), a row per warp.
  DC_DEVICE void cast(int begin, int end) const {
    for (int row = begin + arch::warp_idx(); row < end; row += arch::num_warps()) {
      quantise_row(rows + static_cast<size_t>(row) * row_bytes,
                   {scales + static_cast<size_t>(row) * scale_row_bytes, format},
                   source + static_cast<size_t>(row) * row_bytes * sizeof(Bf16),
                   row_bytes / kScaleBlock);
    }
  }
};

}  // namespace deep_comm
