// Bytes of the workspace, of rings and of rows in them. They are the same on every target: calls ask
// for them without knowing an engine's.
#pragma once

#include <cstddef>

#include "device/internode/args.cuh"
#include "device/intranode/args.cuh"
#include "device/low_latency/rail_args.cuh"

namespace deep_comm {

// ---- inside a node
// From the segment's start to the rings.
inline size_t workspace_bytes(int num_ranks, int num_max_experts) {
  return WorkspaceLayout::make(num_ranks, num_max_experts).data;
}

inline size_t ring_bytes(int num_ranks, int num_channels, int num_slots, int row_bytes,
                         int scale_row_bytes, int num_topk) {
  const MessageLayout message =
      MessageLayout::of_dispatch(row_bytes, scale_row_bytes, num_topk, true, false);
  return RingLayout{num_ranks, num_channels, num_slots, message.slot_bytes()}.num_bytes();
}

// One row in combine's staging.
inline size_t staging_row_bytes(int row_bytes, int num_topk) {
  return MessageLayout::of_combine(row_bytes, num_topk).slot_bytes();
}

// ---- between nodes
// Words beside the rings.
inline size_t rail_workspace_bytes(int num_nodes, int ranks_per_node, int num_max_experts) {
  return RailLayout::make(0, num_nodes, ranks_per_node, num_max_experts).data;
}

// Rings of the tier between nodes.
inline size_t rail_ring_bytes(int num_nodes, int num_channels, int num_slots, int row_bytes,
                              int scale_row_bytes, int num_topk) {
  const RailMessage message{row_bytes, scale_row_bytes, num_topk};
  return RailRings{num_nodes, num_channels, num_slots, message.slot_bytes(), 0}.num_bytes();
}

// Rings of the tier inside a node.
inline size_t two_tier_ring_bytes(int ranks_per_node, int num_channels, int num_slots,
                                  int row_bytes, int scale_row_bytes, int num_topk) {
  const RailMessage message{row_bytes, scale_row_bytes, num_topk};
  return RingLayout{ranks_per_node, num_channels, num_slots,
                    static_cast<size_t>(message.slot_bytes())}
      .num_bytes();
}

// ---- low latency
// Words beside the region, in a group of several nodes.
inline size_t low_latency_rail_workspace_bytes(int num_ranks, int num_max_experts) {
  return LowLatencyRailWords::make(0, num_ranks, num_max_experts).num_bytes;
}

inline size_t low_latency_region_bytes(const LowLatencyShape& shape, int num_ranks,
                                       bool one_rounding, bool is_internode, bool can_shrink) {
  return is_internode ? LowLatencyRailRegion::bytes_for(shape, num_ranks, one_rounding, can_shrink)
                      : LowLatencyRegion::bytes_for(shape, num_ranks, one_rounding, can_shrink);
}

}  // namespace deep_comm
