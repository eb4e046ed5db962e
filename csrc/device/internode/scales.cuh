// dispatch: copies a token's scales into a message or a final row.
#pragma once

#include "device/internode/args.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// One warp: the caller's scales from column `first` on, packed.
DC_DEVICE void store_input_scales(const InternodeDispatchArgs& args, uint8_t* dst, int token,
                                  int first = 0) {
  for (int column = first + arch::lane_idx(); column < args.num_scales; column += kWarpSize) {
    const int64_t position = token * args.scale_token_stride + column * args.scale_column_stride;
    copy_element(dst + column * args.scale_bytes, args.x_scales + position * args.scale_bytes,
                 args.scale_bytes);
  }
}

// One warp: the same of one token for several destinations. The first scales wait in registers, so
// that their load overlaps the row's move.
class InputScales {
 public:
  DC_DEVICE void load(const InternodeDispatchArgs& args, int token) {
    DC_UNROLL
    for (int idx = 0; idx < kOfLane; ++idx) {
      const int column = idx * kWarpSize + arch::lane_idx();
      if (column >= args.num_scales) continue;
      const int64_t position = token * args.scale_token_stride + column * args.scale_column_stride;
      gather_element(reinterpret_cast<uint8_t*>(&scales_[idx]),
                     args.x_scales + position * args.scale_bytes, args.scale_bytes);
    }
  }
  // dst: the row's scales there.
  DC_DEVICE void store(const InternodeDispatchArgs& args, uint8_t* dst, int token) const {
    DC_UNROLL
    for (int idx = 0; idx < kOfLane; ++idx) {
      const int column = idx * kWarpSize + arch::lane_idx();
      if (column >= args.num_scales) continue;
      scatter_element(dst + column * args.scale_bytes,
                      reinterpret_cast<const uint8_t*>(&scales_[idx]), args.scale_bytes);
    }
    store_input_scales(args, dst, token, kOfLane * kWarpSize);
  }

 private:
  static constexpr int kOfLane = 2;

  uint64_t scales_[kOfLane];
};

// One warp: scales that this kernel has written.
DC_DEVICE void store_written_scales(const InternodeDispatchArgs& args, uint8_t* dst, int token) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(args.x_scales) +
                          static_cast<int64_t>(token) * args.num_scales;
  for (int column = arch::lane_idx(); column < args.num_scales; column += kWarpSize) {
    arch::st_weak(reinterpret_cast<uint32_t*>(dst) + column, arch::ld_weak(words + column));
  }
}

}  // namespace deep_comm
