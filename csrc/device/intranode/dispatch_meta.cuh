// What travels beside a row of dispatch: scales, local expert ids, weights, source token; straight
// from the inputs to the outputs of one receiver.
#pragma once

#include "device/intranode/args.cuh"
#include "device/intranode/dispatch_output.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// One warp: everything of `token` that rank `dst` gets, at row `row` of its outputs.
DC_DEVICE void store_token_meta(const DispatchArgs& args, const ExpertMap& experts, int token,
                                int dst, const PeerOutput& output, int64_t row) {
  const int lane = arch::lane_idx(), num_topk = args.message.num_topk;
  const int first = experts.first_expert(dst), count = experts.num_local_experts(dst);
  for (int k = lane; k < num_topk; k += kWarpSize) {
    const int64_t position = static_cast<int64_t>(token) * num_topk + k;
    const int local = load_expert(args.topk_idx, position, args.topk_idx_bytes) - first;
    const bool is_here = local >= 0 && local < count;
    store_expert(output.topk_idx, row * num_topk + k, args.topk_idx_bytes, is_here ? local : -1);
    if (args.topk_weights != nullptr) {
      arch::st_weak(output.topk_weights + row * num_topk + k,
                    is_here ? arch::ld_nc(args.topk_weights + position) : 0.0f);
    }
  }
  for (int column = lane; column < args.num_scales; column += kWarpSize) {
    const int64_t position = token * args.scale_token_stride + column * args.scale_column_stride;
    copy_element(output.scales + (row * args.num_scales + column) * args.scale_bytes,
                 args.x_scales + position * args.scale_bytes, args.scale_bytes);
  }
  if (lane == 0 && output.src_idx != nullptr) arch::st_weak(output.src_idx + row, token);
}

}  // namespace deep_comm
