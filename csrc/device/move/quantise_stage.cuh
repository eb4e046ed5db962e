// Rows cast to FP8 in a stage of a pipeline, between its load and its stores.
#pragma once

#include "device/layout/message.cuh"
#include "device/move/quantise.cuh"
#include "device/move/stage_pipe.cuh"

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

// One warp, when the current stage has landed: casts it to FP8 in place, half as many bytes, with
// the scales after the loaded bytes. The stages are those of StageLayout::make_quantised.
DC_DEVICE StageScales quantise_stage(const StagePipe& pipe, const Pieces& pieces, int piece,
                                     const ScaleFormat& format) {
  constexpr int kSourceBlockBytes = kScaleBlock * static_cast<int>(sizeof(Bf16));
  uint8_t* stage = pipe.current();
  uint8_t* scales = stage + pieces.piece_bytes;
  const int num_bytes = pieces.bytes_of(piece);
  quantise_in_place(stage, num_bytes / static_cast<int>(sizeof(Bf16)), {scales, format});
  // The FP8 bytes before the bulk copies that read them.
  arch::fence_proxy_async_shared();
  arch::sync_warp();
  return {reinterpret_cast<const uint32_t*>(scales),
          format.num_words(pieces.piece_bytes / kSourceBlockBytes) * piece,
          format.num_words(num_bytes / kSourceBlockBytes)};
}

}  // namespace deep_comm
