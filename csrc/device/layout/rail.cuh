// What a rank's segment holds for the tier between nodes, after the data region of the tier inside
// the node. The layout is the same on all ranks, so an offset is valid at every peer.
//
//   words = [ arrived | tails | heads | staging lines | landed | added | announcements
//           | counts sent | counts received | rank counts | counters ]
//   data  = [ send rings | receive rings ], num_rdma_bytes
//           or, in a call whose rows all have a slot: RailStaging
//
// N nodes, M ranks per node, C channels. The words of the tier inside the node (rings, arrivals)
// are those of workspace.cuh.
#pragma once

#include "device/arch/types.cuh"
#include "device/layout/divisor.cuh"
#include "device/layout/region.cuh"

namespace deep_comm {

inline constexpr int kMaxRailChannels = 256;
inline constexpr int kNumRailHeaderFields = 16;

// A word that a peer polls has its line to itself.
struct alignas(kLineBytes) RailLine {
  uint64_t word;  // Tagged
};

// Where rows that go to the rank of this local index at a node belong in its outputs.
struct RailOutput {
  uint32_t output_line;  // see TierAnnouncement, like num_rows
  int32_t start;         // row: the first of those that this rank sends there
  int32_t num_rows;
};

// What the rank of this local index at a node announces at entry.
struct alignas(kLineBytes) RailArrivedLine {
  uint64_t word;  // Tagged: it has entered; value = operation signature
  // Tagged: 1 if this kernel's rows have room there, written before `word`. By parity of the
  // generation: the peer may be one kernel further when this is read.
  uint64_t has_room[2];
  // The same, stored where stores reach this rank.
  RailOutput outputs[2];
};

// Where another node's rows belong if nobody returns credits. The rank that receives them announces
// it before its arrival. By parity of the generation: it may be one kernel further when this is
// read.
struct alignas(kLineBytes) RailStagingLine {
  // Tagged: first line of that node's rows in the receiver's segment; 0: none
  uint64_t staging_line;
};

inline constexpr int kMaxRailChunks = 4096;  // of one node's rows to another

// Rows that one node sends to another, by ordinal, in chunks. Each chunk has a word at the
// receiver.
struct RailChunks {
  int num_rows;
  int shift;  // 1 << shift rows, of the last chunk perhaps fewer

  DC_DEVICE static RailChunks of(int num_rows, int min_chunk_rows) {
    return {num_rows, shift_for(max_of(min_chunk_rows, ceil_div(num_rows, kMaxRailChunks)))};
  }
  DC_DEVICE int num_chunks() const { return (num_rows + (1 << shift) - 1) >> shift; }
  DC_DEVICE int chunk_of(int row) const { return row >> shift; }
  DC_DEVICE int first_row(int chunk) const { return chunk << shift; }
  DC_DEVICE int rows_of(int chunk) const { return min_of(1 << shift, num_rows - first_row(chunk)); }
};

// What a rank announces to its neighbours when a kernel begins. Read after its arrival.
struct TierAnnouncement {
  uint32_t has_room;  // 1: all ranks of its rail do
  // dispatch: first line of its output block, from its segment's start; 0: elsewhere
  uint32_t output_line;
  uint32_t src_line;  // the same for the handle's part of the rows
  int32_t num_rows;   // rows that its output has
  uint64_t done;      // Tagged: everything it sends in this kernel has landed
};

struct RailLayout {
  int num_nodes;
  int ranks_per_node;
  size_t arrived;        // RailArrivedLine [N], by node
  size_t tails;          // RailLine [kMaxRailChannels, N], by sending node: slots filled here
  size_t heads;          // RailLine [kMaxRailChannels, N], by receiving node: slots read there
  size_t staging_lines;  // RailStagingLine [2, N], by parity of the generation and receiving node
  // uint64 [N, kMaxRailChunks], by sending node: Tagged, the chunk's rows are here; always written
  // through landed_qp(chunk)
  size_t landed;
  // uint32 [N, kMaxRailChunks], by receiving node: rows of the chunk that this rank has finished;
  // zero at rest
  size_t added;
  // [2, M], by parity of the generation and local rank: a TierAnnouncement to this rank, then int32
  // [N]: where the rows of node n's rank of this local index begin in its outputs
  size_t announcements;
  size_t announcement_stride;
  // int32 [2, N, counts_stride], by parity of the generation and node: header, tokens to the node
  // [C], tokens to each of its ranks [M, C] (both as prefix sums over the channels), top-k entries
  // of each of its experts
  size_t counts_sent;
  size_t counts_received;
  size_t counts_stride;
  // int32 [2, N * M, rank_counts_stride], by parity and source rank: header, tokens to this rank
  // [C], top-k entries of its experts; written by the rank of the node that received them from the
  // source
  size_t rank_counts;
  size_t rank_counts_stride;
  size_t counters;  // int32 [N * M + N + num_max_experts]: of get_dispatch_layout, zero at rest
  size_t data;      // rings

  DC_HOST_DEVICE static RailLayout make(size_t offset, int num_nodes, int ranks_per_node,
                                        int num_max_experts) {
    RailLayout layout{};
    const int num_ranks = num_nodes * ranks_per_node;
    const int max_local_experts = ceil_div(num_max_experts, num_ranks);
    RegionCursor cursor;
    layout.num_nodes = num_nodes;
    layout.ranks_per_node = ranks_per_node;
    layout.arrived = offset + cursor.take(sizeof(RailArrivedLine) * num_nodes);
    layout.tails = offset + cursor.take(sizeof(RailLine) * kMaxRailChannels * num_nodes);
    layout.heads = offset + cursor.take(sizeof(RailLine) * kMaxRailChannels * num_nodes);
    layout.staging_lines = offset + cursor.take(sizeof(RailStagingLine) * 2 * num_nodes);
    layout.landed = offset + cursor.take(sizeof(uint64_t) * kMaxRailChunks * num_nodes);
    layout.added = offset + cursor.take(sizeof(uint32_t) * kMaxRailChunks * num_nodes);
    layout.announcement_stride =
        align_up<size_t>(sizeof(TierAnnouncement) + 4 * num_nodes, kLineBytes);
    layout.announcements = offset + cursor.take(layout.announcement_stride * 2 * ranks_per_node);
    layout.counts_stride =
        align_up<size_t>(kNumRailHeaderFields + kMaxRailChannels * (1 + ranks_per_node) +
                             static_cast<size_t>(max_local_experts) * ranks_per_node,
                         kLineBytes / 4);
    layout.counts_sent = offset + cursor.take(layout.counts_stride * 4 * 2 * num_nodes);
    layout.counts_received = offset + cursor.take(layout.counts_stride * 4 * 2 * num_nodes);
    layout.rank_counts_stride = align_up<size_t>(
        kNumRailHeaderFields + kMaxRailChannels + max_local_experts, kLineBytes / 4);
    layout.rank_counts = offset + cursor.take(layout.rank_counts_stride * 4 * 2 * num_ranks);
    layout.counters =
        offset + cursor.take(4 * static_cast<size_t>(num_ranks + num_nodes + num_max_experts));
    layout.data = offset + align_up<size_t>(cursor.num_bytes(), 4096);
    return layout;
  }

  DC_HOST_DEVICE size_t arrived_of(int node) const {
    return arrived + sizeof(RailArrivedLine) * node;
  }
  DC_HOST_DEVICE size_t room_of(int node, int parity) const {
    return arrived_of(node) + offsetof(RailArrivedLine, has_room) + sizeof(uint64_t) * parity;
  }
  DC_HOST_DEVICE size_t rail_output_of(int node, int parity) const {
    return arrived_of(node) + offsetof(RailArrivedLine, outputs) + sizeof(RailOutput) * parity;
  }
  DC_HOST_DEVICE size_t announcement_of(int local, int parity) const {
    return announcements + announcement_stride * (parity * ranks_per_node + local);
  }
  DC_HOST_DEVICE size_t tail_of(int channel, int node) const {
    return tails + sizeof(RailLine) * (static_cast<size_t>(channel) * num_nodes + node);
  }
  DC_HOST_DEVICE size_t head_of(int channel, int node) const {
    return heads + sizeof(RailLine) * (static_cast<size_t>(channel) * num_nodes + node);
  }
  DC_HOST_DEVICE size_t staging_line_of(int parity, int node) const {
    return staging_lines +
           sizeof(RailStagingLine) * (static_cast<size_t>(parity) * num_nodes + node);
  }
  DC_HOST_DEVICE size_t landed_of(int node, int chunk) const {
    return landed + sizeof(uint64_t) * (static_cast<size_t>(node) * kMaxRailChunks + chunk);
  }
  DC_HOST_DEVICE size_t added_of(int node, int chunk) const {
    return added + sizeof(uint32_t) * (static_cast<size_t>(node) * kMaxRailChunks + chunk);
  }
  DC_HOST_DEVICE size_t sent_counts_of(int parity, int node) const {
    return counts_sent + 4 * counts_stride * (static_cast<size_t>(parity) * num_nodes + node);
  }
  DC_HOST_DEVICE size_t received_counts_of(int parity, int node) const {
    return counts_received + 4 * counts_stride * (static_cast<size_t>(parity) * num_nodes + node);
  }
  DC_HOST_DEVICE size_t rank_counts_of(int parity, int rank) const {
    return rank_counts + 4 * rank_counts_stride *
                             (static_cast<size_t>(parity) * num_nodes * ranks_per_node + rank);
  }
};

// Where a row lies at one of a node's ranks, and its position in the node's sum if this follows the
// token's selections (SumOrder): position << 28 | place. Negative: the row does not go there. What
// is added to the word is added to the place.
struct OrderedPlace {
  static constexpr int kPositionShift = 28;  // so many rows, in slots of 128 bytes, are 32 GiB

  DC_HOST_DEVICE static int pack(int place, int position) {
    return place < 0 ? -1 : position << kPositionShift | place;
  }
  DC_HOST_DEVICE static int place(int word) {
    return word < 0 ? -1 : word & ((1 << kPositionShift) - 1);
  }
  DC_HOST_DEVICE static int position(int word) { return word >> kPositionShift; }
};

// To which of a node's ranks a row goes, a bit each, and then its position at each, three bits.
struct OrderedRanks {
  static constexpr int kMaxLocal = 8, kPositionBits = 3;

  DC_HOST_DEVICE static uint32_t of(int local, int position) {
    return 1u << local | static_cast<uint32_t>(position) << (kMaxLocal + kPositionBits * local);
  }
  DC_HOST_DEVICE static uint32_t mask(uint32_t word) { return word & ((1u << kMaxLocal) - 1); }
  DC_HOST_DEVICE static int position(uint32_t word, int local) {
    return static_cast<int>(word >> (kMaxLocal + kPositionBits * local)) &
           ((1 << kPositionBits) - 1);
  }
};

// One row of dispatch, over the rail and inside the node alike:
//
//   slot = [ row | scales | expert ids int32[K] | weights float[K] | source token | OrderedRanks
//            | pad to 16 ]
//
// Expert ids are global here: the ranks of a node share one copy.
struct RailMessage {
  int row_bytes;        // multiple of 16
  int scale_row_bytes;  // bytes of one token's scales, packed
  int num_topk;

  // Offsets in the metadata, which follows the row.
  DC_HOST_DEVICE int scales_offset() const { return 0; }
  DC_HOST_DEVICE int topk_idx_offset() const { return align_up(scale_row_bytes, 4); }
  DC_HOST_DEVICE int topk_weights_offset() const { return topk_idx_offset() + 4 * num_topk; }
  DC_HOST_DEVICE int src_idx_offset() const { return topk_weights_offset() + 4 * num_topk; }
  DC_HOST_DEVICE int ranks_offset() const { return src_idx_offset() + 4; }
  DC_HOST_DEVICE int meta_bytes() const { return align_up(ranks_offset() + 4, 16); }
  // The part of a slot that is copied from ring to ring.
  DC_HOST_DEVICE int num_bytes() const { return row_bytes + meta_bytes(); }
  // Whole lines: a store of part of a line costs the link as much as two lines.
  DC_HOST_DEVICE int slot_bytes() const { return align_up(num_bytes(), 128); }
};

// One row of direct dispatch on the rail:
//
//   slot = [ scales | expert ids int32[K] | weights float[K] | source token | places int32[M]
//            | pad to 128 | row | pad to 128 ]
//
// The parts of the row and of its scales stay unused if these are stored straight to a final row of
// the slot's rank.
// places: an OrderedPlace for each rank of the node, the row's ordinal among those that its source
// sends there.
struct PlacedRailMessage {
  int row_bytes;
  int scale_row_bytes;
  int num_topk;
  int ranks_per_node;

  DC_HOST_DEVICE int scales_offset() const { return 0; }
  DC_HOST_DEVICE int topk_idx_offset() const { return align_up(scale_row_bytes, 4); }
  DC_HOST_DEVICE int topk_weights_offset() const { return topk_idx_offset() + 4 * num_topk; }
  DC_HOST_DEVICE int src_idx_offset() const { return topk_weights_offset() + 4 * num_topk; }
  DC_HOST_DEVICE int slots_offset() const { return src_idx_offset() + 4; }
  DC_HOST_DEVICE int meta_bytes() const {
    return align_up(slots_offset() + 4 * ranks_per_node, 128);
  }
  DC_HOST_DEVICE int slot_bytes() const { return meta_bytes() + align_up(row_bytes, 128); }
};

// The memory of the rings between nodes, used without credit: a slot for every row that arrives
// over the rail in one call. Rows of a node lie by ordinal, and each node has as many slots. If the
// NIC puts rows, a slot for every row that is sent follows.
struct RailStaging {
  size_t data;  // from the segment's start, the same at all ranks
  int num_nodes;
  int slot_bytes;
  int num_rows[2];  // of a node: without slots to put from, and with them

  // A part of num_bytes. On the host: GPUs have no instruction for division.
  static RailStaging make(size_t data, size_t num_bytes, int num_nodes, int slot_bytes) {
    const size_t area_bytes = static_cast<size_t>(max_of(1, num_nodes - 1)) * slot_bytes;
    const auto rows_in = [](size_t num) { return static_cast<int>(min_of<size_t>(num, 1 << 30)); };
    return {data,
            num_nodes,
            slot_bytes,
            {rows_in(num_bytes / area_bytes), rows_in(num_bytes / (2 * area_bytes))}};
  }
  DC_HOST_DEVICE int rows_per_node(bool has_send_slots) const {
    return num_rows[has_send_slots ? 1 : 0];
  }
  // Offset in `to`'s segment of row `row` that `from` sends.
  DC_HOST_DEVICE size_t recv_slot(bool has_send_slots, int to, int from, int64_t row) const {
    return slot_of(has_send_slots, from < to ? from : from - 1, row);
  }
  // Offset in `from`'s own segment, to be put from there.
  DC_HOST_DEVICE size_t send_slot(int from, int to, int64_t row) const {
    return slot_of(true, num_nodes - 1 + (to < from ? to : to - 1), row);
  }

 private:
  DC_HOST_DEVICE size_t slot_of(bool has_send_slots, int area, int64_t row) const {
    return data + (static_cast<size_t>(area) * rows_per_node(has_send_slots) + row) * slot_bytes;
  }
};

// The rings of one call: a pair per channel and node. A row is put from the send slot to the
// receive slot of the same number. Rows for the own node are written straight into the receive
// slot.
struct RailRings {
  int num_nodes;
  int num_channels;
  int num_slots;
  int slot_bytes;
  size_t data;  // from the segment's start

  DC_HOST_DEVICE size_t ring_bytes() const { return static_cast<size_t>(num_slots) * slot_bytes; }
  DC_HOST_DEVICE size_t num_bytes() const { return 2 * num_channels * num_nodes * ring_bytes(); }
  DC_HOST_DEVICE size_t send_ring(int channel, int node) const {
    return data + (static_cast<size_t>(channel) * num_nodes + node) * ring_bytes();
  }
  DC_HOST_DEVICE size_t recv_ring(int channel, int node) const {
    return send_ring(num_channels + channel, node);
  }
  DC_HOST_DEVICE size_t slot_offset(uint32_t row_idx) const {
    return static_cast<size_t>(row_idx % num_slots) * slot_bytes;
  }
};

// The order in which a channel serves the nodes. docs/design/0007 says why neither order can
// deadlock.
struct NodeOrder {
  // dispatch: a rotation. At every step each node sends to one node and receives from one.
  DC_HOST_DEVICE static int shift(int channel, int step, int num_nodes) {
    return (channel + step) % num_nodes;
  }
  DC_HOST_DEVICE static int dispatch_to(int node, int channel, int step, int num_nodes) {
    return (node + shift(channel, step, num_nodes)) % num_nodes;
  }
  DC_HOST_DEVICE static int dispatch_from(int node, int channel, int step, int num_nodes) {
    return (node + num_nodes - shift(channel, step, num_nodes)) % num_nodes;
  }
  // combine: the same order on all nodes, since a token's sum waits for all of its nodes.
  DC_HOST_DEVICE static int combine_to(int channel, int step, int num_nodes) {
    return (channel + step) % num_nodes;
  }
};

}  // namespace deep_comm
