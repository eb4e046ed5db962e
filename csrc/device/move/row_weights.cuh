// The top-k weights that a combine's senders put behind the rows of x. Args: of a combine of either
// tier. combine_sums may have written them beside the kernel: not read-only memory.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

// The weights that follow rows of x in shared memory. Those of the next row are loaded ahead, up to
// one per lane: otherwise each row would wait for memory.
class RowWeights {
 public:
  template <class Args>
  DC_DEVICE void load(const Args& args, int64_t row) {
    const int lane = arch::lane_idx(), num_topk = args.message.num_topk;
    if (lane < num_topk) ahead_ = arch::ld_weak(args.topk_weights + row * num_topk + lane);
  }
  // Of the row loaded last.
  template <class Args>
  DC_DEVICE void write(const Args& args, uint8_t* meta, int64_t row) const {
    const int lane = arch::lane_idx(), num_topk = args.message.num_topk;
    float* dst = reinterpret_cast<float*>(meta);
    if (lane < num_topk) dst[lane] = ahead_;
    DC_NO_UNROLL
    for (int k = lane + kWarpSize; k < num_topk; k += kWarpSize) {
      dst[k] = arch::ld_weak(args.topk_weights + row * num_topk + k);
    }
  }

 private:
  float ahead_ = 0.0f;
};

}  // namespace deep_comm
