// combine, inside the node: every expert rank returns its rows to the local ranks that forwarded
// them.
#pragma once

#include "device/internode/dispatch_forward.cuh"

namespace deep_comm {

// One warp: sends the rows that local rank `dst` forwarded to this one, in the order in which
// combine serves the nodes.
DC_DEVICE void send_to_forwarder(const Context& node, const InternodeCombineArgs& args, int channel,
                                 int dst) {
  const int num_nodes = args.tiers.num_nodes(), num_local = args.tiers.ranks_per_node();
  const int row_bytes = args.message.row_bytes, num_topk = args.message.num_topk;
  Outlet outlet(PublishingSender(node, args.ring, channel, dst), args.num_send_tokens);
  for (int step = 0; step < num_nodes; ++step) {
    const int source = NodeOrder::combine_to(channel, step, num_nodes);
    const RowRange rows = received_rows(args, source * num_local + dst, channel);
    const int end = min_of(rows.end, args.num_rows);  // a worst-case handle may name dropped rows
    for (int row = rows.begin; row < end; ++row) {
      uint8_t* slot = outlet.acquire();
      if (slot == nullptr) return;
      copy_row(slot, args.x + static_cast<size_t>(row) * row_bytes, row_bytes);
      float* weights = reinterpret_cast<float*>(slot + row_bytes);
      for (int k = arch::lane_idx(); k < num_topk; k += kWarpSize) {
        arch::st_weak(weights + k,
                      arch::ld_nc(args.topk_weights + static_cast<int64_t>(row) * num_topk + k));
      }
      outlet.commit();
    }
  }
  outlet.publish();
}

}  // namespace deep_comm
