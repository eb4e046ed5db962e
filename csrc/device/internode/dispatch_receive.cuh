// dispatch, the last step: rows of a local rank's ring are copied to their final rows.
#pragma once

#include "device/channel/ring.cuh"
#include "device/internode/tiers.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/copy_row.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// All lanes: copies a row's metadata from its slot to the outputs. Expert ids become local ones.
DC_DEVICE void store_rail_meta(const InternodeDispatchArgs& args, const uint8_t* meta, int node,
                               int64_t row) {
  const RailMessage& parts = args.message;
  for (int column = arch::lane_idx(); column < args.num_scales; column += kWarpSize) {
    uint64_t element;
    load_element(&element, meta + parts.scales_offset() + column * args.scale_bytes,
                 args.scale_bytes);
    scatter_element(args.recv_x_scales + (row * args.num_scales + column) * args.scale_bytes,
                    reinterpret_cast<const uint8_t*>(&element), args.scale_bytes);
  }
  const ExpertMap& map = args.experts;
  const int first = map.first_expert(args.tiers.rank);
  const int count = map.num_local_experts(args.tiers.rank);
  const int32_t* experts = reinterpret_cast<const int32_t*>(meta + parts.topk_idx_offset());
  const float* weights = reinterpret_cast<const float*>(meta + parts.topk_weights_offset());
  for (int k = arch::lane_idx(); k < parts.num_topk; k += kWarpSize) {
    const int local = arch::ld_weak(experts + k) - first;
    const bool is_here = local >= 0 && local < count;
    store_expert(args.recv_topk_idx, row * parts.num_topk + k, args.topk_idx_bytes,
                 is_here ? local : -1);
    if (args.recv_topk_weights != nullptr) {
      arch::st_weak(args.recv_topk_weights + row * parts.num_topk + k,
                    is_here ? arch::ld_weak(weights + k) : 0.0f);
    }
  }
  if (arch::lane_idx() == 0) {
    if (args.recv_src_idx != nullptr) {
      arch::st_weak(args.recv_src_idx + row,
                    arch::ld_weak(reinterpret_cast<const int32_t*>(meta + parts.src_idx_offset())));
    }
    if (args.recv_src_meta != nullptr) {
      arch::st_weak(args.recv_src_meta + 2 * row, static_cast<int32_t>(node));
      arch::st_weak(args.recv_src_meta + 2 * row + 1,
                    static_cast<int32_t>(OrderedRanks::mask(arch::ld_weak(
                        reinterpret_cast<const uint32_t*>(meta + parts.ranks_offset())))));
    }
  }
}

// One warp: receives the rows that local rank `src`, or this one itself, forwards to this one, in
// the order in which it serves the nodes.
DC_DEVICE void receive_from_rank(const Context& node, const InternodeDispatchArgs& args,
                                 int channel, int src) {
  const int num_nodes = args.tiers.num_nodes(), num_local = args.tiers.ranks_per_node();
  const int row_bytes = args.message.row_bytes;
  const auto batch = static_cast<uint32_t>(min_of(args.num_send_tokens, args.ring.num_slots));
  RingReceiver ring(node, ring_slots(node.world, args.ring, channel, node.world.rank, src), channel,
                    src);
  uint64_t* head = ring_head(node.world, channel, src);
  uint32_t row_idx = 0, num_returned = 0;
  for (int step = 0; step < num_nodes; ++step) {
    const int source = NodeOrder::dispatch_from(args.tiers.rail.node, channel, step, num_nodes);
    const RowRange rows = received_rows(args, source * num_local + src, channel);
    for (int row = rows.begin; row < rows.end; ++row) {
      bool ok = true;
      if (arch::lane_idx() == 0) ok = ring.await_filled(row_idx);
      if (!arch::all(kFullMask, ok)) return;
      arch::sync_warp();  // hands the leader's acquire to all lanes
      const uint8_t* message = ring.slot(row_idx);
      if (row < args.num_recv_rows) {  // otherwise more arrive than fit: reported, and dropped
        copy_row(args.recv_x + static_cast<size_t>(row) * row_bytes, message, row_bytes);
        store_rail_meta(args, message + row_bytes, source, row);
      }
      if (++row_idx - num_returned < batch) continue;
      num_returned = row_idx;
      arch::sync_warp();  // every lane has read the slots
      if (arch::lane_idx() == 0) {
        // pairs with: RingSender::await_slot and ::poll_slot — the reads of slots [0, row_idx)
        arch::st_release_sys(head, Tagged::pack(node.generation, row_idx));
      }
    }
  }
}

}  // namespace deep_comm
