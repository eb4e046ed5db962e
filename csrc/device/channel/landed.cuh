// The words by which a source tells a receiver that some of its rows have landed: staged combine by
// chunks of rows (docs/design/0047), an expanded dispatch by chunks of tokens (docs/design/0063).
// Both carry the generation of their own kernel, so they share the words.
#pragma once

#include "device/layout/divisor.cuh"
#include "device/layout/workspace.cuh"

namespace deep_comm {

inline constexpr int kMaxChunks = kMaxChannels * kChunksOfLine;  // of one pair of ranks

// The word by which `from` tells `owner` that a chunk has landed.
DC_DEVICE uint64_t* landed_word(const World& world, int owner, int from, int chunk) {
  return &world.recv_line(owner, chunk / kChunksOfLine, from)->landed[chunk % kChunksOfLine];
}

// The tokens of a rank in an expanded dispatch, in chunks of consecutive ones: a warp moves a chunk,
// and each receiver has a word for it. One token a chunk up to kMaxChunks of them.
struct TokenChunks {
  static constexpr int kMostTokens = 1 << 21;  // whose rows LandedRows can name

  int num_tokens;
  int shift;  // 1 << shift tokens, of the last chunk perhaps fewer

  DC_DEVICE static TokenChunks of(int num_tokens) {
    return {num_tokens, shift_for(max_of(1, ceil_div(num_tokens, kMaxChunks)))};
  }
  DC_DEVICE int num_chunks() const { return (num_tokens + (1 << shift) - 1) >> shift; }
  DC_DEVICE int first_token(int chunk) const { return chunk << shift; }
  DC_DEVICE int end_token(int chunk) const { return min_of((chunk + 1) << shift, num_tokens); }
};

// What the word of a chunk of tokens says: the rows of its tokens at this receiver, by their order
// among the tokens that it receives from this source.
struct LandedRows {
  static constexpr int kCountBits = 11;
  static_assert(TokenChunks::kMostTokens / kMaxChunks < 1 << kCountBits);
  static_assert(TokenChunks::kMostTokens <= 1 << (32 - kCountBits));

  uint32_t first;
  uint32_t count;

  DC_HOST_DEVICE uint32_t pack() const { return first << kCountBits | count; }
  DC_HOST_DEVICE static LandedRows unpack(uint32_t value) {
    return {value >> kCountBits, value & ((1u << kCountBits) - 1)};
  }
};

}  // namespace deep_comm
