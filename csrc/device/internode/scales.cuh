// dispatch: copies a token's scales into a message or a final row.
#pragma once

#include "device/internode/args.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// One warp: the caller's scales, packed.
DC_DEVICE void store_input_scales(const InternodeDispatchArgs& args, uint8_t* dst, int token) {
  for (int column = arch::lane_idx(); column < args.num_scales; column += kWarpSize) {
    const int64_t position = token * args.scale_token_stride + column * args.scale_column_stride;
    copy_element(dst + column * args.scale_bytes, args.x_scales + position * args.scale_bytes,
                 args.scale_bytes);
  }
}

// One warp: scales that this kernel has written.
DC_DEVICE void store_written_scales(const InternodeDispatchArgs& args, uint8_t* dst, int token) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(args.x_scales) +
                          static_cast<int64_t>(token) * args.num_scales;
  for (int column = arch::lane_idx(); column < args.num_scales; column += kWarpSize) {
    arch::st_weak(reinterpret_cast<uint32_t*>(dst) + column, arch::ld_weak(words + column));
  }
}

}  // namespace deep_comm
