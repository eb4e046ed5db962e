// The positions of scales of received rows in the outputs: words of 4 bytes, made of words of a
// message.
#pragma once

#include "device/low_latency/args.cuh"

namespace deep_comm {

// By column: [L, S, R*M], compact [S, R*M]; with UE8M0 four exponents per word.
template <PayloadFormat kFormat>
struct ScaleOutputs {
  int num_scales;
  int per_output;  // words of the message that make a word of the output
  int num_outputs;
  int num_slots;  // R*M

  DC_DEVICE static ScaleOutputs of(const LowLatencyShape& shape, const LowLatencyOutputs& out,
                                   int num_slots) {
    const int per_output = out.use_ue8m0 ? 4 : 1;
    // Only two divisors: a quotient by a variable would be a subroutine.
    return {shape.num_scales, per_output,
            out.use_ue8m0 ? ceil_div(shape.num_scales, 4) : shape.num_scales, num_slots};
  }
  DC_DEVICE int first_word(int output) const { return output * per_output; }
  DC_DEVICE int num_words(int output) const {
    return min_of(per_output, num_scales - first_word(output));
  }
  // The column of the row that the first word of an output belongs to.
  DC_DEVICE int first_column(int output) const { return first_word(output) * kScaleBlock; }
  // What the idx-th word of an output, as it arrived, contributes to it.
  DC_DEVICE uint32_t part(uint32_t bits, int idx) const {
    return per_output == 4 ? (bits >> 23 & 0xffu) << (8 * idx) : bits;
  }
  // group: local expert, 0 in the compact layout; row: in the group.
  DC_DEVICE int64_t position(int group, int row, int output) const {
    return (static_cast<int64_t>(group) * num_outputs + output) * num_slots + row;
  }
};

// The layout that grouped kernels with 4-bit operands read: [L, rows / 128, H / 64, 32, 4, 4],
// compact without L. The scales of row 128 a + 32 b + c, columns 64 d + 16 e and the next 15, are
// at [a, d, c, b, e]. A word has e = 0 to 3.
template <>
struct ScaleOutputs<PayloadFormat::kNvFp4> {
  static constexpr int kTileRows = 128, kGroupRows = 32;
  int num_outputs;
  int num_slots;

  DC_DEVICE static ScaleOutputs of(const LowLatencyShape& shape, const LowLatencyOutputs& /*out*/,
                                   int num_slots) {
    return {shape.num_scales, num_slots};
  }
  DC_DEVICE int first_word(int output) const { return output; }
  DC_DEVICE int num_words(int /*output*/) const { return 1; }
  DC_DEVICE int first_column(int output) const { return output * kFp4ScaleWord; }
  DC_DEVICE uint32_t part(uint32_t bits, int /*idx*/) const {
    return bits ^ Piece<PayloadFormat::kNvFp4>::kScaleKey;
  }
  DC_DEVICE int64_t position(int group, int row, int output) const {
    const int64_t num_tiles = ceil_div(num_slots, kTileRows);
    const int64_t tile = (group * num_tiles + row / kTileRows) * num_outputs + output;
    const int in_tile = row % kTileRows;
    return tile * kTileRows + in_tile % kGroupRows * (kTileRows / kGroupRows) +
           in_tile / kGroupRows;
  }
};

}  // namespace deep_comm
