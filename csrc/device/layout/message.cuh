// What a ring carries: rows with their metadata, cut into pieces that fit a stage of shared memory.
//
//   slot of dispatch = [ row | scales | local expert ids int32[K] | weights float[K]
//                        | source token int32 | pad to 16 ]
//     expanded rows (docs/design/0008): the output rows of the top-k entries instead of the ids,
//     and at the end the first of them, int32
//   slot of combine  = [ row | weights float[K] | pad to 16 ]
//   stage            = one piece of the row; the last piece carries the metadata as well
#pragma once

#include "device/arch/types.cuh"

namespace deep_comm {

struct MessageLayout {
  int row_bytes;  // multiple of 16
  int num_topk;
  // Offsets in the metadata, which follows the row, and its size, a multiple of 16.
  int scales_offset;
  int topk_idx_offset;
  int topk_weights_offset;
  int src_idx_offset;
  int dst_row_offset;  // expanded only: the output row
  int meta_bytes;

  static constexpr int kDstRowBytes = 16;  // at most so much it adds to meta_bytes

  // scale_row_bytes: of one token's scales, packed.
  DC_HOST_DEVICE static MessageLayout of_dispatch(int row_bytes, int scale_row_bytes, int num_topk,
                                                  bool has_src_idx, bool is_expanded) {
    MessageLayout message{};
    message.row_bytes = row_bytes;
    message.num_topk = num_topk;
    message.topk_idx_offset = align_up(scale_row_bytes, 4);
    message.topk_weights_offset = message.topk_idx_offset + 4 * num_topk;
    message.src_idx_offset = message.topk_weights_offset + 4 * num_topk;
    message.dst_row_offset = message.src_idx_offset + (has_src_idx ? 4 : 0);
    message.meta_bytes = align_up(message.dst_row_offset + (is_expanded ? 4 : 0), 16);
    return message;
  }
  DC_HOST_DEVICE static MessageLayout of_combine(int row_bytes, int num_topk) {
    MessageLayout message{};
    message.row_bytes = row_bytes;
    message.num_topk = num_topk;
    message.meta_bytes = align_up(4 * num_topk, 16);
    return message;
  }
  // Whole lines: a store of part of a line costs the link as much as two lines.
  DC_HOST_DEVICE size_t slot_bytes() const {
    return align_up<size_t>(static_cast<size_t>(row_bytes) + meta_bytes, 128);
  }
};

// How a row is cut so that the stages of every moving warp fit into a block's shared memory.
struct StageLayout {
  int piece_bytes;  // row bytes per stage, multiple of 16
  int stage_bytes;  // a piece and the metadata after it, multiple of 128
  int num_stages;   // of one warp

  // Shared memory of one warp's stages. Each stage has an mbarrier elsewhere.
  DC_HOST_DEVICE size_t warp_bytes() const { return static_cast<size_t>(num_stages) * stage_bytes; }
  DC_HOST_DEVICE size_t warp_barrier_bytes() const { return num_stages * sizeof(uint64_t); }
  // The least shared memory that a warp needs for this metadata.
  DC_HOST_DEVICE static int min_warp_bytes(int meta_bytes, int min_stages) {
    return bytes_of_stages(16, meta_bytes, min_stages);
  }
  // The reverse of that.
  DC_HOST_DEVICE static int most_meta_bytes(int warp_bytes, int min_stages) {
    return (warp_bytes / min_stages - static_cast<int>(sizeof(uint64_t))) / 128 * 128 - 16;
  }
  // What stages for pieces of so many bytes need.
  DC_HOST_DEVICE static int bytes_of_stages(int piece_bytes, int meta_bytes, int num_stages) {
    const int stage_bytes = align_up(piece_bytes + meta_bytes, 128);
    return num_stages * (stage_bytes + static_cast<int>(sizeof(uint64_t)));
  }
  // Stages for row_bytes and the metadata after them, in warp_bytes_limit. Whole rows if min_stages
  // of them fit, and then as many stages as fit; otherwise pieces.
  DC_HOST_DEVICE static StageLayout make(int row_bytes, int meta_bytes, int warp_bytes_limit,
                                         int min_stages, int max_stages) {
    const int barrier_bytes = static_cast<int>(sizeof(uint64_t));
    const int stage_limit = (warp_bytes_limit / min_stages - barrier_bytes) / 128 * 128;
    const int num_pieces = ceil_div(row_bytes, (stage_limit - meta_bytes) / 16 * 16);
    StageLayout stage{};
    // Whole lines, if the stages have room for the rounding.
    const int piece_bytes = align_up(ceil_div(row_bytes, num_pieces), 128);
    stage.piece_bytes = piece_bytes + meta_bytes <= stage_limit
                            ? piece_bytes
                            : align_up(ceil_div(row_bytes, num_pieces), 16);
    stage.stage_bytes = align_up(stage.piece_bytes + meta_bytes, 128);
    stage.num_stages = min_of(max_stages, warp_bytes_limit / (stage.stage_bytes + barrier_bytes));
    return stage;
  }
  // For rows that are cast to FP8 into their stage: pieces of whole words of four block scales,
  // which follow them. Empty (no stages) if there is no room.
  static constexpr int kCastStages = 2;
  DC_HOST_DEVICE static StageLayout make_cast(int row_bytes, int warp_bytes_limit) {
    constexpr int kUnitBytes = 4 * 128, kUnitScaleBytes = 4 * 4;
    const int num_units = ceil_div(row_bytes, kUnitBytes);
    const int stage_limit = warp_bytes_limit / kCastStages / 128 * 128;
    const int most_units = stage_limit / (kUnitBytes + kUnitScaleBytes);
    StageLayout stage{};
    if (most_units < 1) return stage;
    const int stage_units = ceil_div(num_units, ceil_div(num_units, most_units));
    stage.piece_bytes = min_of(stage_units * kUnitBytes, row_bytes);
    stage.stage_bytes = align_up(stage.piece_bytes + stage_units * kUnitScaleBytes, 128);
    stage.num_stages = kCastStages;
    return stage;
  }
};

// The pieces of one row.
struct Pieces {
  int num_pieces;
  int piece_bytes;
  int last_bytes;

  DC_HOST_DEVICE static Pieces of(int row_bytes, const StageLayout& stage) {
    const int num_pieces = ceil_div(row_bytes, stage.piece_bytes);
    return {num_pieces, stage.piece_bytes, row_bytes - (num_pieces - 1) * stage.piece_bytes};
  }
  DC_HOST_DEVICE bool is_last(int piece) const { return piece == num_pieces - 1; }
  DC_HOST_DEVICE int bytes_of(int piece) const { return is_last(piece) ? last_bytes : piece_bytes; }
};

}  // namespace deep_comm
