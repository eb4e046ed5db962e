// Low-latency mode: the layout of its payload, the share of each block, the addresses of its words.
//
//   region   = [ weights 0 | 1 | dispatch buffer 0 | 1 | combine buffer 0 | 1 ], whatever the shape
//   dispatch = by source rank: [ slot of token 0 … M-1 | routes of block 0 … B-1 ]
//   slot     = [ row | scales, words of 4 bytes | pad to a line ]
//   combine  = by expert rank: row of token 0 … M-1
//              one rounding: by token: row of top-k entry 0 … K-1; with masks by expert rank, too
//
// A token keeps its number: slot t of source s is token t of rank s. So no rank has to tell another
// where a row went. Dispatch and combine have two buffers each, used in turn: operation n uses
// buffer n % 2. All of them except the weights are zero at rest (sync/arrival.cuh). With masks a
// source's part of a buffer does not depend on the shape (LowLatencyRegion::spread).
#pragma once

#include "device/layout/divisor.cuh"
#include "device/layout/workspace.cuh"

namespace deep_comm {

inline constexpr int kColumnGroup = 512;  // columns that stay in one block

// One top-k entry of a token, as one rank sees it. It is sent as four words, none of them zero.
struct Route {
  int32_t local_expert;  // -1: not on this rank
  int32_t ordinal;       // earlier tokens of this source that select this expert; see repeated
  float weight;
  // earlier tokens of this source that are sent to this rank; -1: this one is not
  int32_t row_ordinal;

  // A token that selects an expert twice has one row there. The later entry refers to the row of
  // the first.
  DC_HOST_DEVICE static int32_t repeated(uint32_t ordinal) {
    return ~static_cast<int32_t>(ordinal);
  }
  DC_HOST_DEVICE bool is_repeated() const { return ordinal < 0; }
  DC_HOST_DEVICE int32_t row() const { return is_repeated() ? ~ordinal : ordinal; }

  // A signalling NaN. A weight with just these bits arrives as a quiet NaN, which is what
  // arithmetic would make of it.
  static constexpr uint32_t kWeightKey = 0x7fa5c963u;
  static constexpr uint32_t kQuiet = 0x00400000u;

  DC_HOST_DEVICE Vec16 pack() const {
    const uint32_t weight_bits = bit_cast<uint32_t>(weight) ^ kWeightKey;
    return {{static_cast<uint32_t>(local_expert + 2),
             static_cast<uint32_t>(row()) << 1 | (is_repeated() ? 1u : 0u) | 1u << 31,
             weight_bits != 0 ? weight_bits : kQuiet, static_cast<uint32_t>(row_ordinal + 2)}};
  }
  DC_HOST_DEVICE static Route unpack(const Vec16& vec) {
    const uint32_t row = (vec.words[1] & ~(1u << 31)) >> 1;
    return {static_cast<int32_t>(vec.words[0]) - 2,
            (vec.words[1] & 1u) != 0 ? repeated(row) : static_cast<int32_t>(row),
            bit_cast<float>(vec.words[2] ^ kWeightKey), static_cast<int32_t>(vec.words[3]) - 2};
  }
};

// What all ranks agree on in one call.
struct LowLatencyShape {
  int num_max_tokens;  // M
  int hidden;
  int num_topk;
  int num_experts;
  int num_blocks;
  int row_bytes;   // of a dispatched row
  int num_scales;  // of a dispatched row, in words of 4 bytes
  // From prepare:
  uint32_t slot_stride;
  int block_tokens;
  uint64_t routes_start;
  uint64_t source_strides[2];  // by kind
  uint64_t weights_stride;
  Divisor by_topk;
  Divisor by_blocks;
  int num_groups;  // of columns: LowLatencyShare

  // Computes once what kernels would compute in every thread.
  void prepare() {
    // Whole lines: a warp's store of 512 bytes is then four packets on the links instead of five.
    slot_stride = align_up<uint32_t>(static_cast<uint32_t>(row_bytes + sizeof(float) * num_scales),
                                     kLineBytes);
    block_tokens = ceil_div(num_max_tokens, num_blocks);
    routes_start = align_up<uint64_t>(uint64_t{slot_stride} * num_max_tokens, kLineBytes);
    for (const LowLatencyKind kind : {LowLatencyKind::kDispatch, LowLatencyKind::kCombine})
      source_strides[static_cast<int>(kind)] = source_bytes(kind);
    weights_stride = weights_bytes();
    by_topk = Divisor::make(num_topk);
    by_blocks = Divisor::make(num_blocks);
    num_groups = ceil_div(hidden, kColumnGroup);
  }

  DC_HOST_DEVICE size_t slot_bytes() const { return slot_stride; }
  DC_HOST_DEVICE int max_block_tokens() const { return block_tokens; }
  DC_HOST_DEVICE size_t routes_offset() const { return routes_start; }
  // Bytes from one source's part of a buffer, or one expert rank's, to the next.
  DC_HOST_DEVICE size_t stride(LowLatencyKind kind) const {
    return arch::fault(Fault::kPackedSources) ? source_bytes(kind)
                                              : source_strides[static_cast<int>(kind)];
  }
  DC_HOST_DEVICE size_t weights_source_stride() const {
    return arch::fault(Fault::kPackedSources) ? weights_bytes() : weights_stride;
  }
  // Bytes that one source needs there.
  DC_HOST_DEVICE uint64_t source_bytes(LowLatencyKind kind) const {
    const uint64_t num_routes = uint64_t{1} * num_blocks * block_tokens * num_topk;
    const uint64_t num_bytes = kind == LowLatencyKind::kDispatch
                                   ? routes_start + num_routes * sizeof(Vec16)
                                   : uint64_t{1} * num_max_tokens * hidden * sizeof(Bf16);
    return align_up<uint64_t>(num_bytes, kLineBytes);
  }
  DC_HOST_DEVICE uint64_t weights_bytes() const {
    return align_up<uint64_t>(uint64_t{1} * num_max_tokens * num_topk * sizeof(uint64_t),
                              kLineBytes);
  }
  // One rounding: [M, K] rows of one sender.
  DC_HOST_DEVICE uint64_t gather_source_bytes() const {
    return align_up<uint64_t>(uint64_t{1} * num_max_tokens * num_topk * hidden * sizeof(Bf16),
                              kLineBytes);
  }
  DC_HOST_DEVICE size_t gather_stride() const {
    return arch::fault(Fault::kPackedSources) ? gather_source_bytes()
                                              : stride(LowLatencyKind::kCombine);
  }
  // One rounding: bytes of a buffer, [num_senders, M, K] rows. Without masks all senders share one
  // part. With masks each sender has its own: rows of a masked rank may arrive late, when nobody
  // waits for them, so they must not arrive where another rank's rows are awaited.
  DC_HOST_DEVICE size_t gather_bytes(int num_senders) const {
    return num_senders * gather_source_bytes();
  }
};

struct LowLatencyRegion {
  // 1/32 of the region is for the weights. Their words carry generations, so nothing else may ever
  // be written there.
  static constexpr size_t kWeightsShare = 32;

  size_t weights[2];  // from the segment's start
  size_t dispatch[2];
  size_t combine[2];
  size_t weights_bytes;  // of one buffer's weights
  size_t buffer_bytes;   // of one buffer of a kind

  DC_HOST_DEVICE static LowLatencyRegion make(size_t offset, size_t num_bytes) {
    LowLatencyRegion region{};
    region.weights_bytes = num_bytes / kWeightsShare / 2 / kLineBytes * kLineBytes;
    region.buffer_bytes = (num_bytes - 2 * region.weights_bytes) / 4 / kLineBytes * kLineBytes;
    RegionCursor cursor;
    for (size_t& buffer : region.weights) buffer = offset + cursor.take(region.weights_bytes);
    for (size_t& buffer : region.dispatch) buffer = offset + cursor.take(region.buffer_bytes);
    for (size_t& buffer : region.combine) buffer = offset + cursor.take(region.buffer_bytes);
    return region;
  }
  // The smallest region that serves a shape; one_rounding: including combine(one_rounding).
  DC_HOST_DEVICE static size_t bytes_for(const LowLatencyShape& shape, int num_ranks,
                                         bool one_rounding, bool can_shrink) {
    const size_t weights = shape.weights_bytes() * num_ranks;
    const size_t buffer = max_of(max_of(shape.source_bytes(LowLatencyKind::kDispatch),
                                        shape.source_bytes(LowLatencyKind::kCombine)) *
                                     num_ranks,
                                 one_rounding ? shape.gather_bytes(can_shrink ? num_ranks : 1) : 0);
    // Four buffers in what the weights leave, and a line for each part that is rounded down.
    const size_t by_buffers =
        ceil_div<size_t>(4 * buffer * kWeightsShare, kWeightsShare - 1) + 8 * kLineBytes;
    const size_t by_weights = (weights + kLineBytes) * 2 * kWeightsShare;
    return align_up(max_of(by_buffers, by_weights), kLineBytes);
  }
  // With masks: gives every source a part of the buffer, and of the weights, that does not depend
  // on the shape. So what a masked rank still sends arrives in its own part, never in another
  // rank's.
  void spread(LowLatencyShape* shape, int num_ranks) const {
    const size_t stride = buffer_bytes / num_ranks / kLineBytes * kLineBytes;
    shape->source_strides[0] = shape->source_strides[1] = stride;
    shape->weights_stride = weights_bytes / num_ranks / kLineBytes * kLineBytes;
  }
};

// How the blocks share a number of tokens. With fewer tokens than blocks several blocks share a
// token, by groups of columns: whole scales, whole packs of scales. The host makes it for a rank's
// own tokens; ranks usually have as many as each other.
struct LowLatencySplit {
  int num_tokens;
  int each;        // whole tokens of a block,
  int num_more;    // and how many blocks, the first of them, have one more
  int num_strips;  // of a token; 0: blocks have whole tokens
  Divisor by_strips;

  DC_HOST_DEVICE static LowLatencySplit make(const LowLatencyShape& shape, int num_tokens) {
    LowLatencySplit split{num_tokens, 0, 0, 0, {}};
    if (num_tokens >= shape.num_blocks) {
      split.each = shape.by_blocks.quotient(num_tokens);
      split.num_more = num_tokens - split.each * shape.num_blocks;
      return split;
    }
    split.num_strips =
        min_of(shape.num_groups, Divisor::make(max_of(num_tokens, 1)).quotient(shape.num_blocks));
    split.by_strips = Divisor::make(split.num_strips);
    return split;
  }
};

// The tokens and columns of a rank that one of its blocks sends. The same block of every
// destination receives them.
struct LowLatencyShare {
  int begin;  // tokens
  int end;
  int column_begin;  // elements
  int column_end;
  bool is_leading;  // has the first columns, so it does what is done once per token

  DC_HOST_DEVICE static LowLatencyShare of(const LowLatencyShape& shape,
                                           const LowLatencySplit& split, int block) {
    if (split.num_strips == 0) {
      const auto first = [&](int of) { return of * split.each + min_of(of, split.num_more); };
      return {first(block), first(block + 1), 0, shape.hidden, true};
    }
    if (block >= split.num_tokens * split.num_strips) return {0, 0, 0, 0, false};
    const int token = split.by_strips.quotient(block), strip = block - token * split.num_strips;
    const auto column = [&](int of) {
      return split.by_strips.quotient(shape.num_groups * of) * kColumnGroup;
    };
    return {token, token + 1, column(strip), min_of(shape.hidden, column(strip + 1)), strip == 0};
  }
  DC_HOST_DEVICE int num_tokens() const { return end - begin; }
  DC_HOST_DEVICE int num_columns() const { return column_end - column_begin; }
};

// Addresses of one operation: its words and its buffer. `owner`: the rank whose memory it is.
struct LowLatencyBuffer {
  const World& world;
  const LowLatencyRegion& region;
  const LowLatencyShape& shape;
  LowLatencyKind kind;
  int buffer_idx;

  DC_HOST_DEVICE LowLatencyState* state() const { return world.low_latency_state(); }
  DC_HOST_DEVICE LowLatencyRecord* record(int block) const {
    return &state()->records[static_cast<int>(kind)][block];
  }
  DC_HOST_DEVICE uint64_t* consumed(int owner, int by) const {
    return consumed(owner, buffer_idx, by);
  }
  DC_HOST_DEVICE uint64_t* consumed(int owner, int idx, int by) const {
    const size_t line = (static_cast<size_t>(kind) * 2 + idx) * world.num_ranks + by;
    return reinterpret_cast<uint64_t*>(world.bases[owner] + world.layout.low_latency.consumed +
                                       line * kLineBytes);
  }
  DC_HOST_DEVICE uint64_t* announced(int owner, int source) const {
    return world.announced(owner, kind, buffer_idx, source);
  }
  DC_HOST_DEVICE uint64_t* counts(int owner, int source) const {
    return reinterpret_cast<uint64_t*>(world.bases[owner] + world.layout.low_latency.counts) +
           (static_cast<size_t>(buffer_idx) * world.num_ranks + source) *
               world.layout.low_latency.counts_stride;
  }
  // From the start of the buffer.
  DC_HOST_DEVICE size_t slot_offset(int source, int token) const {
    return source * shape.stride(kind) + token * shape.slot_bytes();
  }
  DC_HOST_DEVICE uint8_t* slot(int owner, int source, int token) const {
    return world.bases[owner] + region.dispatch[buffer_idx] + slot_offset(source, token);
  }
  // Routes [num_topk] of the token_idx-th token of a block.
  DC_HOST_DEVICE Vec16* routes(int owner, int source, int block, int token_idx) const {
    uint8_t* base = world.bases[owner] + region.dispatch[buffer_idx] + source * shape.stride(kind) +
                    shape.routes_offset();
    return reinterpret_cast<Vec16*>(base) +
           (static_cast<size_t>(block) * shape.max_block_tokens() + token_idx) * shape.num_topk;
  }
  DC_HOST_DEVICE uint8_t* combine_row(int owner, int expert_rank, int token) const {
    return world.bases[owner] + region.combine[buffer_idx] + expert_rank * shape.stride(kind) +
           static_cast<size_t>(token) * shape.hidden * sizeof(Bf16);
  }
  // sender: 0, or with masks the expert rank.
  DC_HOST_DEVICE uint8_t* gather_row(int owner, int sender, int token, int k) const {
    const size_t row = static_cast<size_t>(token) * shape.num_topk + k;
    return world.bases[owner] + region.combine[buffer_idx] + sender * shape.gather_stride() +
           row * shape.hidden * sizeof(Bf16);
  }
  DC_HOST_DEVICE uint64_t* weights(int owner, int source, int token) const {
    return reinterpret_cast<uint64_t*>(world.bases[owner] + region.weights[buffer_idx] +
                                       source * shape.weights_source_stride()) +
           static_cast<size_t>(token) * shape.num_topk;
  }
};

}  // namespace deep_comm
