// What travels through a ring: strips of rows, cut into pieces that fit a stage of shared memory.
//
// A row is split by columns into `num_strips` strips of equal size (the last may be shorter, or empty for short
// rows). Every strip of a channel has rings and a block of its own, so that a channel uses several SMs without
// any of them talking to another. Strip 0 carries the metadata.
//
//   row   = [ strip 0 | strip 1 | … ]
//   slot  = [ strip | scales | local expert ids int32[K] | weights float[K] | source token int32 | pad to 16 ]
//   stage = one piece of the strip; the last piece carries everything behind the strip as well
#pragma once

#include "device/arch/types.cuh"

namespace deep_comm {

struct MessageLayout {
  int row_bytes;        // multiple of 16
  int scale_row_bytes;  // bytes of one token's scales, packed
  int num_topk;
  int num_strips;

  // Offsets in the metadata, which begins right behind the strip.
  DC_HOST_DEVICE int scales_offset() const { return 0; }
  DC_HOST_DEVICE int topk_idx_offset() const { return align_up(scale_row_bytes, 4); }
  DC_HOST_DEVICE int topk_weights_offset() const { return topk_idx_offset() + 4 * num_topk; }
  DC_HOST_DEVICE int src_idx_offset() const { return topk_weights_offset() + 4 * num_topk; }
  DC_HOST_DEVICE int meta_bytes() const { return align_up(src_idx_offset() + 4, 16); }

  DC_HOST_DEVICE int max_strip_bytes() const {
    return align_up(ceil_div(row_bytes, num_strips), 16);
  }
  DC_HOST_DEVICE size_t slot_bytes() const {
    return static_cast<size_t>(max_strip_bytes()) + meta_bytes();
  }
};

// The columns one block moves.
struct Strip {
  int offset;  // in the row
  int num_bytes;
  int meta_bytes;  // behind the strip: all of the metadata, or none

  DC_HOST_DEVICE static Strip of(const MessageLayout& message, int strip) {
    const int offset = min_of(strip * message.max_strip_bytes(), message.row_bytes);
    return {offset, min_of(message.max_strip_bytes(), message.row_bytes - offset),
            strip == 0 ? message.meta_bytes() : 0};
  }
};

// How a strip is cut so that the stages of every moving warp fit into a block's shared memory.
struct StageLayout {
  int piece_bytes;  // row bytes a stage holds, multiple of 16
  int stage_bytes;  // a piece and the metadata behind it, multiple of 128
  int num_stages;   // of one warp

  // Shared memory of one warp's stages; each has an mbarrier beside it.
  DC_HOST_DEVICE size_t warp_bytes() const { return static_cast<size_t>(num_stages) * stage_bytes; }
  DC_HOST_DEVICE size_t warp_barrier_bytes() const { return num_stages * sizeof(uint64_t); }
  // The least a warp needs for this metadata.
  DC_HOST_DEVICE static int min_warp_bytes(int meta_bytes, int min_stages) {
    return min_stages * (align_up(16 + meta_bytes, 128) + static_cast<int>(sizeof(uint64_t)));
  }
  // strip_bytes, and metadata behind them, through stages in warp_bytes_limit: whole strips if min_stages of
  // them fit, and then as many as do; else pieces.
  DC_HOST_DEVICE static StageLayout make(int strip_bytes, int meta_bytes, int warp_bytes_limit,
                                         int min_stages, int max_stages) {
    const int barrier_bytes = static_cast<int>(sizeof(uint64_t));
    const int stage_limit = (warp_bytes_limit / min_stages - barrier_bytes) / 128 * 128;
    const int num_pieces = ceil_div(strip_bytes, (stage_limit - meta_bytes) / 16 * 16);
    StageLayout stage{};
    stage.piece_bytes = align_up(ceil_div(strip_bytes, num_pieces), 16);
    stage.stage_bytes = align_up(stage.piece_bytes + meta_bytes, 128);
    stage.num_stages = min_of(max_stages, warp_bytes_limit / (stage.stage_bytes + barrier_bytes));
    return stage;
  }
};

// The pieces of one strip.
struct Pieces {
  int num_pieces;
  int piece_bytes;
  int last_bytes;

  DC_HOST_DEVICE static Pieces of(const Strip& strip, const StageLayout& stage) {
    const int num_pieces = ceil_div(strip.num_bytes, stage.piece_bytes);
    return {num_pieces, stage.piece_bytes, strip.num_bytes - (num_pieces - 1) * stage.piece_bytes};
  }
  DC_HOST_DEVICE bool is_last(int piece) const { return piece == num_pieces - 1; }
  DC_HOST_DEVICE int bytes_of(int piece) const { return is_last(piece) ? last_bytes : piece_bytes; }
};

}  // namespace deep_comm
