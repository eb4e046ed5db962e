// The stages of a warp that casts bfloat16 rows to FP8 and stores them in bulk. Rows are read with
// ordinary loads: an SM is faster with fewer bulk operations (docs/design/0048).
//
// smem   StageLayout::kCastStages stages, each a piece of an FP8 row and the piece's scales
#pragma once

#include "device/layout/message.cuh"
#include "device/move/quantise.cuh"

namespace deep_comm {

// The scales that casting a piece of a row has left in its stage.
struct StageScales {
  const uint32_t* words;
  int first;  // word, among the row's
  int num_words;

  // One warp: stores them with the row's scales at a destination.
  DC_DEVICE void store(uint8_t* scales_of_row) const {
    uint32_t* dst = reinterpret_cast<uint32_t*>(scales_of_row) + first;
    for (int word = arch::lane_idx(); word < num_words; word += kWarpSize) {
      arch::st_weak(dst + word, words[word]);
    }
  }
};

// Whole warps call the methods.
class CastStages {
 public:
  DC_DEVICE CastStages(uint8_t* stages, const StageLayout& layout, const Pieces& pieces,
                       const ScaleFormat& format)
      : stages_(stages), stage_bytes_(layout.stage_bytes), pieces_(pieces), format_(format) {}

  // Casts a piece of a row into the next stage. is_storing: this lane has stored the earlier ones,
  // a bulk group each.
  DC_DEVICE void cast(const uint8_t* source_row, int piece, bool is_storing) {
    // The store before the last one has read it.
    if (is_storing) arch::bulk_wait_read<StageLayout::kCastStages - 1>();
    arch::sync_warp();
    const size_t first = static_cast<size_t>(piece) * pieces_.piece_bytes * sizeof(Bf16);
    quantise_into(current(), {scales_of_current(), format_}, source_row + first,
                  pieces_.bytes_of(piece));
    // The FP8 bytes before the bulk copies that read them.
    arch::fence_proxy_async_shared();
    arch::sync_warp();
  }
  DC_DEVICE uint8_t* current() const {
    return stages_ + num_stores_ % StageLayout::kCastStages * stage_bytes_;
  }
  DC_DEVICE StageScales scales(int piece) const {
    return {reinterpret_cast<const uint32_t*>(scales_of_current()),
            format_.num_words(pieces_.piece_bytes / kScaleBlock) * piece,
            format_.num_words(pieces_.bytes_of(piece) / kScaleBlock)};
  }
  DC_DEVICE uint32_t num_stores() const { return num_stores_; }
  DC_DEVICE void advance_store() { ++num_stores_; }

 private:
  DC_DEVICE uint8_t* scales_of_current() const { return current() + pieces_.piece_bytes; }

  uint8_t* stages_;
  int stage_bytes_;
  Pieces pieces_;
  const ScaleFormat& format_;
  uint32_t num_stores_ = 0;  // pieces, also those that a lane does not store
};

}  // namespace deep_comm
