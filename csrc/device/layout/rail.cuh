// What a rank's segment holds for the tier between nodes, behind the data region of the node's own
// tier, and the same on all ranks, so that an offset names a place at every peer.
//
//   [ arrived | tails | heads | places | landed | added | counts sent | counts received | counts in
//   the node | counters ] words [ send rings | receive rings ] num_rdma_bytes
//
// N nodes, M ranks a node, C channels. Node-tier words (rings, arrivals) are those of
// workspace.cuh.
#pragma once

#include "device/arch/types.cuh"
#include "device/layout/region.cuh"

namespace deep_comm {

inline constexpr int kMaxRailChannels = 256;
inline constexpr int kNumRailHeaderFields = 16;

// A word that a peer polls has its line to itself.
struct alignas(kLineBytes) RailLine {
  uint64_t word;  // Tagged
};

// Where rows from another node may lie when nobody returns credits: told by the rank that receives
// them before its arrival, by the generation's lowest bit, since it may be one kernel further when
// this is read.
struct alignas(kLineBytes) RailPlaceLine {
  uint64_t staging_line;  // Tagged: first line of that node's rows in the receiver's segment; 0: none
};

inline constexpr int kMaxRailChunks = 2048;  // of one node's rows to another

struct RailLayout {
  int num_nodes;
  int ranks_per_node;
  size_t arrived;  // RailLine [N], by node: the rank there has entered
  size_t tails;    // RailLine [kMaxRailChannels, N], by sending node: slots filled here
  size_t heads;    // RailLine [kMaxRailChannels, N], by receiving node: slots read there
  size_t places;   // RailPlaceLine [2, N], by generation parity and receiving node
  size_t landed;   // uint64 [N, kMaxRailChunks], by sending node: Tagged, the chunk's rows are here;
                   // always written through landed_qp(chunk)
  size_t added;    // uint32 [N, kMaxRailChunks], by receiving node: rows of the chunk that this rank
                   // has finished; zero at rest
  // int32 [2, N, counts_stride], by generation parity and node: header, tokens to the node [C],
  // tokens to each of its ranks [M, C] (both summed up over the channels), selections of each of
  // its experts
  size_t counts_sent;
  size_t counts_received;
  size_t counts_stride;
  // int32 [2, N * M, rank_counts_stride], by parity and source rank: header, tokens to this rank
  // [C], selections of its experts; written by the rank of the node that got them from the source
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
    layout.arrived = offset + cursor.take(sizeof(RailLine) * num_nodes);
    layout.tails = offset + cursor.take(sizeof(RailLine) * kMaxRailChannels * num_nodes);
    layout.heads = offset + cursor.take(sizeof(RailLine) * kMaxRailChannels * num_nodes);
    layout.places = offset + cursor.take(sizeof(RailPlaceLine) * 2 * num_nodes);
    layout.landed = offset + cursor.take(sizeof(uint64_t) * kMaxRailChunks * num_nodes);
    layout.added = offset + cursor.take(sizeof(uint32_t) * kMaxRailChunks * num_nodes);
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

  DC_HOST_DEVICE size_t arrived_of(int node) const { return arrived + sizeof(RailLine) * node; }
  DC_HOST_DEVICE size_t tail_of(int channel, int node) const {
    return tails + sizeof(RailLine) * (static_cast<size_t>(channel) * num_nodes + node);
  }
  DC_HOST_DEVICE size_t head_of(int channel, int node) const {
    return heads + sizeof(RailLine) * (static_cast<size_t>(channel) * num_nodes + node);
  }
  DC_HOST_DEVICE size_t place_of(int parity, int node) const {
    return places + sizeof(RailPlaceLine) * (static_cast<size_t>(parity) * num_nodes + node);
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

// One row of dispatch on its way, over the rail and inside the node alike:
//   slot = [ row | scales | expert ids int32[K] | weights float[K] | source token | mask of ranks |
//   pad to 16 ]
// Expert ids are global here: the ranks of a node share one copy.
struct RailMessage {
  int row_bytes;        // multiple of 16
  int scale_row_bytes;  // bytes of one token's scales, packed
  int num_topk;

  // Offsets in the metadata, which begins right behind the row.
  DC_HOST_DEVICE int scales_offset() const { return 0; }
  DC_HOST_DEVICE int topk_idx_offset() const { return align_up(scale_row_bytes, 4); }
  DC_HOST_DEVICE int topk_weights_offset() const { return topk_idx_offset() + 4 * num_topk; }
  DC_HOST_DEVICE int src_idx_offset() const { return topk_weights_offset() + 4 * num_topk; }
  DC_HOST_DEVICE int rank_mask_offset() const { return src_idx_offset() + 4; }
  DC_HOST_DEVICE int meta_bytes() const { return align_up(rank_mask_offset() + 4, 16); }
  // What of a slot is copied from ring to ring.
  DC_HOST_DEVICE int num_bytes() const { return row_bytes + meta_bytes(); }
  // Whole lines: a store of part of a line costs the link as much as two.
  DC_HOST_DEVICE int slot_bytes() const { return align_up(num_bytes(), 128); }
};

// One row of combine: slot = [ row | weights float[K] | pad to 128 ]
struct SumMessage {
  int row_bytes;
  int num_topk;

  DC_HOST_DEVICE int slot_bytes() const { return align_up(row_bytes + 4 * num_topk, 128); }
};

// The rings of one call: a pair a channel and node. A row is put from the send slot to the receive
// slot of the same number; rows for the own node are written into the receive slot at once.
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

// The order in which a channel takes the nodes; see docs/design on two tiers for why neither can
// deadlock.
struct NodeOrder {
  // dispatch: a rotation, in which at every step each node sends to one and receives from one.
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
