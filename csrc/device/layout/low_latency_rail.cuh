// Low-latency mode of a group of several nodes: words and payload of a rank's segment. The layout
// is the same on all ranks, so an offset is valid at every peer. R ranks of all nodes, M tokens per
// rank at most, K top-k.
//
//   words  = [ LowLatencyRailState | consumed | announced | counts | counts staged | masked | alive
//            | participants ]
//   region = two buffers for each of
//     weights         [R, M, K]       weights of a source's token: each beside its number
//     slots           [R, M]          messages of a source; zero at rest
//     rows            [M, min(K, R)]  answers of a token's expert ranks, ascending; zero at rest
//                                     one rounding: [M, K], by top-k entry
//                                     masks: [R, M], or [R, M, K]: see ReturnRows
//     weights_staged  [M, K]          from these the NIC puts them
//     slots_staged    [M]
//     rows_staged     [R, M]          one rounding: [R, M, K]
//   slot   = [ Route [K] | SlotWord [K] | token | zeros | row | scales | zeros up to 16 bytes ]
//
// A message is the same for all ranks that get it. So it is staged once, and a rank that has
// received it can forward it. Its routes hold global expert indices. For every top-k entry a
// SlotWord says which slot of the expert's rank holds the message. Messages straight from their
// source fill its slots there from the first one up; messages that another rank of the node
// forwards fill them from the last one down.
#pragma once

#include "device/layout/low_latency.cuh"

namespace deep_comm {

// This rank alone, in stream order.
struct alignas(kLineBytes) LowLatencyRailState {
  uint32_t sequence[2];     // by kind: number of the last operation sent
  uint32_t sent[2][2];      // by kind and buffer: the last one that used the buffer
  uint32_t received[2][2];  // by kind and buffer: the last one whose receive phase was launched
  uint32_t num_entered_blocks[2][2];  // by kind and phase
  // by kind and buffer: the last operation that peers were told has been received
  uint32_t credited[2][2];
};

struct LowLatencyRailWords {
  // In a line of counts. kNumForwarded: those of kNumRows that another rank of the node forwards.
  static constexpr int kAnnounced = 0, kNumRows = 1, kNumForwarded = 2, kExperts = 3;

  size_t state;  // LowLatencyRailState
  // Tagged [kind, buffer, R], a line each: the last operation of which that peer has read
  // everything
  size_t consumed;
  // combine: Tagged [buffer, R]: the source has begun; value = signature, its tokens
  size_t announced;
  // dispatch: Tagged [buffer, R, counts_stride], by source: announced, rows for this rank, …, rows
  // for each of its experts
  size_t counts;
  size_t counts_staged;  // the same by destination, from where the NIC puts them
  size_t counts_stride;
  // uint64 [R]: not zero: the rank is masked here. Written by this rank's waits, its host, and any
  // rank.
  size_t masked;
  size_t alive;  // uint64 [R]: a number that the rank changes while it waits
  // Tagged [ceil(R / 32)], a bit per rank: ranks whose rows the dispatch of that number places
  size_t participants;
  size_t num_bytes;

  DC_HOST_DEVICE static LowLatencyRailWords make(size_t offset, int num_ranks,
                                                 int num_max_experts) {
    LowLatencyRailWords words{};
    RegionCursor cursor;
    words.counts_stride = align_up<size_t>(kExperts + ceil_div(num_max_experts, num_ranks),
                                           kLineBytes / sizeof(uint64_t));
    const size_t counts_bytes = sizeof(uint64_t) * 2 * num_ranks * words.counts_stride;
    words.state = offset + cursor.take(sizeof(LowLatencyRailState));
    words.consumed = offset + cursor.take(2 * 2 * num_ranks * kLineBytes);
    words.announced = offset + cursor.take(sizeof(uint64_t) * 2 * num_ranks);
    words.counts = offset + cursor.take(counts_bytes);
    words.counts_staged = offset + cursor.take(counts_bytes);
    words.masked = offset + cursor.take(sizeof(uint64_t) * num_ranks);
    words.alive = offset + cursor.take(sizeof(uint64_t) * num_ranks);
    words.participants = offset + cursor.take(sizeof(uint64_t) * ceil_div(num_ranks, kWarpSize));
    words.num_bytes = cursor.num_bytes();
    return words;
  }
};

// The slot that holds the message at the rank of a top-k entry. It is sent as a word that is not
// zero.
struct SlotWord {
  int slot;
  bool is_forwarded;  // by the rank of the token's first entry on that node

  DC_HOST_DEVICE uint32_t pack() const {
    return static_cast<uint32_t>(slot + 1) | (is_forwarded ? 1u << 31 : 0u);
  }
  DC_HOST_DEVICE static SlotWord unpack(uint32_t word) {
    return {static_cast<int>(word & ~(1u << 31)) - 1, (word >> 31 & 1u) != 0};
  }
};

// A message of dispatch. A Route's row_ordinal is for the rank of its top-k entry.
struct LowLatencySlot {
  int num_topk;
  int row_bytes;
  int num_scales;

  DC_HOST_DEVICE static LowLatencySlot of(const LowLatencyShape& shape) {
    return {shape.num_topk, shape.row_bytes, shape.num_scales};
  }
  DC_HOST_DEVICE int words_offset() const { return num_topk * static_cast<int>(sizeof(Vec16)); }
  DC_HOST_DEVICE int num_words() const { return num_topk + 1; }  // the last: the source's token + 1
  DC_HOST_DEVICE int num_padded_words() const { return align_up(num_words(), 4); }
  DC_HOST_DEVICE int row_offset() const {
    return words_offset() + num_padded_words() * static_cast<int>(sizeof(uint32_t));
  }
  DC_HOST_DEVICE int scales_offset() const { return row_offset() + row_bytes; }
  DC_HOST_DEVICE int end_offset() const {
    return scales_offset() + num_scales * static_cast<int>(sizeof(float));
  }
  DC_HOST_DEVICE int num_bytes() const {
    return align_up(end_offset(), static_cast<int>(sizeof(Vec16)));
  }
};

enum class LowLatencyPart : int {
  kWeights,
  kWeightsStaged,
  kSlots,
  kSlotsStaged,
  kRows,
  kRowsStaged,
  kCount
};
inline constexpr int kNumLowLatencyParts = static_cast<int>(LowLatencyPart::kCount);

// Where the rows that return for a token lie at its source. With masks each expert rank has a part
// of its own, whatever the shape: what a masked rank has sent may arrive when nobody waits for it,
// and must not arrive where another rank's rows are awaited.
struct ReturnRows {
  bool is_by_rank;
  int num_ranks;
  int num_topk;
  bool is_by_topk_entry;  // one rounding

  DC_HOST_DEVICE int num_per_token() const {
    if (is_by_rank) return is_by_topk_entry ? num_ranks * num_topk : num_ranks;
    return is_by_topk_entry ? num_topk : min_of(num_topk, num_ranks);
  }
  // Bytes from the first row. order: how many expert ranks of the token come before this one, or
  // the top-k entry.
  DC_HOST_DEVICE size_t offset(const LowLatencyShape& shape, int token, int rank, int order) const {
    const size_t row_bytes = shape.hidden * sizeof(Bf16);
    if (!is_by_rank) return (static_cast<size_t>(token) * num_per_token() + order) * row_bytes;
    const int num_of_rank = is_by_topk_entry ? num_topk : 1;
    const int idx = is_by_topk_entry ? order : 0;
    if (arch::fault(Fault::kPackedSources)) {
      return (static_cast<size_t>(token) * num_per_token() + rank * num_of_rank + idx) * row_bytes;
    }
    return rank * shape.source_strides[static_cast<int>(LowLatencyKind::kCombine)] +
           (static_cast<size_t>(token) * num_of_rank + idx) * row_bytes;
  }
};

// Every part has a fixed position, whatever the shape. Slots and rows must be zero unless something
// is in flight, and nothing else may be written over the numbers of weights.
struct LowLatencyRailRegion {
  size_t begins[kNumLowLatencyParts][2];  // from the segment's start

  // The share of one part; the region is divided by the sum of all shares.
  DC_HOST_DEVICE static size_t share_of(int part, int num_ranks, bool can_shrink) {
    constexpr size_t kUnit = 16;  // of a weight's part
    const size_t ranks = static_cast<size_t>(num_ranks);
    switch (static_cast<LowLatencyPart>(part)) {
      case LowLatencyPart::kWeights:
        return ranks;
      case LowLatencyPart::kWeightsStaged:
        return 1;
      case LowLatencyPart::kSlots:
        return kUnit * ranks;
      case LowLatencyPart::kSlotsStaged:
        return kUnit;
      case LowLatencyPart::kRows:
        return kUnit * (can_shrink ? ranks : min_of<size_t>(ranks, 2 * kWarpSize));
      default:
        return kUnit * ranks;
    }
  }
  DC_HOST_DEVICE static size_t sum_of_shares(int num_ranks, bool can_shrink) {
    size_t sum = 0;
    for (int part = 0; part < kNumLowLatencyParts; ++part)
      sum += share_of(part, num_ranks, can_shrink);
    return sum;
  }
  DC_HOST_DEVICE static LowLatencyRailRegion make(size_t offset, size_t num_bytes, int num_ranks,
                                                  bool can_shrink) {
    LowLatencyRailRegion region{};
    const size_t num_lines = num_bytes / 2 / kLineBytes, sum = sum_of_shares(num_ranks, can_shrink);
    RegionCursor cursor;
    for (int part = 0; part < kNumLowLatencyParts; ++part) {
      const size_t part_bytes =
          num_lines * share_of(part, num_ranks, can_shrink) / sum * kLineBytes;
      for (size_t& buffer : region.begins[part]) buffer = offset + cursor.take(part_bytes);
    }
    return region;
  }
  DC_HOST_DEVICE static size_t bytes_of(int part, const LowLatencyShape& shape, int num_ranks,
                                        bool one_rounding, bool can_shrink) {
    const size_t ranks = static_cast<size_t>(num_ranks),
                 tokens = static_cast<size_t>(shape.num_max_tokens);
    const size_t topk = static_cast<size_t>(shape.num_topk), row = shape.hidden * sizeof(Bf16);
    const size_t slot = static_cast<size_t>(LowLatencySlot::of(shape).num_bytes());
    // A source's part is rounded down to lines: see spread.
    const auto of_source = [](size_t num_bytes) { return align_up<size_t>(num_bytes, kLineBytes); };
    switch (static_cast<LowLatencyPart>(part)) {
      case LowLatencyPart::kWeights:
        return ranks * of_source(tokens * topk * sizeof(uint64_t));
      case LowLatencyPart::kWeightsStaged:
        return tokens * topk * sizeof(uint64_t);
      case LowLatencyPart::kSlots:
        return ranks * of_source(tokens * slot);
      case LowLatencyPart::kSlotsStaged:
        return tokens * slot;
      case LowLatencyPart::kRows:
        if (can_shrink) return ranks * of_source(tokens * row * (one_rounding ? topk : 1));
        return tokens * row *
               ReturnRows{false, num_ranks, shape.num_topk, one_rounding}.num_per_token();
      default:
        return ranks * tokens * (one_rounding ? topk : 1) * row;
    }
  }
  // The smallest region that serves a shape; one_rounding: including combine(one_rounding).
  DC_HOST_DEVICE static size_t bytes_for(const LowLatencyShape& shape, int num_ranks,
                                         bool one_rounding, bool can_shrink) {
    size_t num_lines = 1;
    for (int part = 0; part < kNumLowLatencyParts; ++part) {
      const size_t needed =
          ceil_div<size_t>(bytes_of(part, shape, num_ranks, one_rounding, can_shrink), kLineBytes);
      // make rounds down.
      num_lines = max_of(num_lines, ceil_div<size_t>(needed * sum_of_shares(num_ranks, can_shrink),
                                                     share_of(part, num_ranks, can_shrink)) +
                                        1);
    }
    return 2 * num_lines * kLineBytes;
  }
  // Strides from source to source in slots and weights, and from rank to rank in rows. With masks
  // they do not depend on the shape: see LowLatencyRegion::spread.
  void spread(LowLatencyShape* shape, int num_ranks, bool can_shrink) const {
    const auto share = [&](LowLatencyPart part) {
      const auto& begin = begins[static_cast<int>(part)];
      return (begin[1] - begin[0]) / num_ranks / kLineBytes * kLineBytes;
    };
    const size_t slots = static_cast<size_t>(LowLatencySlot::of(*shape).num_bytes());
    const size_t weights = shape->num_topk * sizeof(uint64_t);
    shape->source_strides[static_cast<int>(LowLatencyKind::kDispatch)] =
        can_shrink ? share(LowLatencyPart::kSlots) : slots * shape->num_max_tokens;
    shape->source_strides[static_cast<int>(LowLatencyKind::kCombine)] =
        share(LowLatencyPart::kRows);  // without masks rows lie by token
    shape->weights_stride =
        can_shrink ? share(LowLatencyPart::kWeights) : weights * shape->num_max_tokens;
  }
};

// The ranks of the group and how this rank reaches them: those of its node over NVLink, all others
// over the rail.
struct LowLatencyGroup {
  int rank;
  int num_ranks;
  int first_near;  // ranks [first_near, first_near + num_near) are the World's
  int num_near;
  int first_peer;  // of the port: rank r is its peer first_peer + r
  RailPort port;

  DC_HOST_DEVICE bool is_near(int peer) const {
    return peer >= first_near && peer < first_near + num_near;
  }
  DC_HOST_DEVICE int node_of(int peer) const { return peer / num_near; }
  // The order in which this rank serves its peers. Ranks of other nodes come first, since their way
  // is longer. Each rank begins with another one.
  DC_HOST_DEVICE int rank_at(int position) const {
    const int num_far = num_ranks - num_near;
    if (position >= num_far)
      return first_near + (rank - first_near + position - num_far) % num_near;
    // First the ranks of this local index, then those of the next.
    const int num_others = num_ranks / num_near - 1, node = first_near / num_near;
    const int other = (node + 1 + position % num_others) % (num_others + 1);
    return other * num_near + (rank + position / num_others) % num_near;
  }
  // Payload uses all queues except the last, which carries the words that payload waits for.
  DC_HOST_DEVICE int word_qp() const { return port.num_qps - 1; }
  DC_HOST_DEVICE int data_qp(int number) const { return number % max_of(1, port.num_qps - 1); }
};

// Offsets of one operation's words and payload, from the segment's start.
struct LowLatencyRailBuffer {
  const World& world;
  const LowLatencyGroup& group;
  const LowLatencyRailWords& words;
  const LowLatencyRailRegion& region;
  const LowLatencyShape& shape;
  LowLatencyKind kind;
  int buffer_idx;

  DC_HOST_DEVICE LowLatencyRailState* rail_state() const {
    return own<LowLatencyRailState>(words.state);
  }
  template <class T>
  DC_HOST_DEVICE T* own(size_t offset) const {
    return reinterpret_cast<T*>(world.bases[world.rank] + offset);
  }
  // In the segment of a rank of this node.
  template <class T>
  DC_HOST_DEVICE T* near(int peer, size_t offset) const {
    return reinterpret_cast<T*>(world.bases[peer - group.first_near] + offset);
  }

  DC_HOST_DEVICE size_t consumed(int by) const { return consumed(buffer_idx, by); }
  DC_HOST_DEVICE size_t consumed(int idx, int by) const {
    return words.consumed +
           ((static_cast<size_t>(kind) * 2 + idx) * group.num_ranks + by) * kLineBytes;
  }
  DC_HOST_DEVICE size_t counts(int source) const { return counts_line(words.counts, source); }
  DC_HOST_DEVICE size_t counts_staged(int destination) const {
    return counts_line(words.counts_staged, destination);
  }
  DC_HOST_DEVICE size_t announced(int source) const {
    if (kind == LowLatencyKind::kDispatch) return counts(source);
    return words.announced +
           (static_cast<size_t>(buffer_idx) * group.num_ranks + source) * sizeof(uint64_t);
  }
  DC_HOST_DEVICE size_t slot(int source, int idx) const {
    const size_t stride = arch::fault(Fault::kPackedSources)
                              ? shape.num_max_tokens * slot_bytes()
                              : shape.source_strides[static_cast<int>(LowLatencyKind::kDispatch)];
    return begin(LowLatencyPart::kSlots) + source * stride + idx * slot_bytes();
  }
  DC_HOST_DEVICE size_t slot_staged(int token) const {
    return begin(LowLatencyPart::kSlotsStaged) + static_cast<size_t>(token) * slot_bytes();
  }
  DC_HOST_DEVICE size_t weights(int source, int token) const {
    const size_t token_bytes = shape.num_topk * sizeof(uint64_t);
    const size_t stride = arch::fault(Fault::kPackedSources) ? shape.num_max_tokens * token_bytes
                                                             : shape.weights_stride;
    return begin(LowLatencyPart::kWeights) + source * stride + token * token_bytes;
  }
  DC_HOST_DEVICE size_t weights_staged(int token) const {
    return begin(LowLatencyPart::kWeightsStaged) +
           static_cast<size_t>(token) * shape.num_topk * sizeof(uint64_t);
  }
  // order: see ReturnRows::offset.
  DC_HOST_DEVICE size_t row(const ReturnRows& layout, int token, int rank, int order) const {
    return begin(LowLatencyPart::kRows) + layout.offset(shape, token, rank, order);
  }
  // num_per_slot: 1, or K with one rounding.
  DC_HOST_DEVICE size_t row_staged(int source, int slot_idx, int idx, int num_per_slot) const {
    const size_t number = static_cast<size_t>(source) * shape.num_max_tokens + slot_idx;
    return begin(LowLatencyPart::kRowsStaged) + (number * num_per_slot + idx) * row_bytes();
  }

  DC_HOST_DEVICE size_t row_bytes() const { return shape.hidden * sizeof(Bf16); }
  DC_HOST_DEVICE size_t slot_bytes() const { return LowLatencySlot::of(shape).num_bytes(); }

 private:
  DC_HOST_DEVICE size_t begin(LowLatencyPart part) const {
    return region.begins[static_cast<int>(part)][buffer_idx];
  }
  DC_HOST_DEVICE size_t counts_line(size_t first, int rank) const {
    return first + (static_cast<size_t>(buffer_idx) * group.num_ranks + rank) *
                       words.counts_stride * sizeof(uint64_t);
  }
};

}  // namespace deep_comm
