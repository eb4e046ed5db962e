// The metadata of a row of dispatch: scales, local expert ids, weights, source token. Written
// straight from the inputs to the outputs of one receiver.
#pragma once

#include "device/intranode/args.cuh"
#include "device/intranode/dispatch_output.cuh"
#include "device/intranode/token_rows.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

enum class ScaleSource {
  kInput,
  kWrittenHere,
  kNone
};  // kWrittenHere: words that this kernel wrote

// One warp: copies the scales of `token` to `dst`.
template <ScaleSource kSource>
DC_DEVICE void store_token_scales(const DispatchArgs& args, uint8_t* dst, int token) {
  static_assert(kSource != ScaleSource::kWrittenHere);
  if constexpr (kSource == ScaleSource::kNone) return;
  for (int column = arch::lane_idx(); column < args.num_scales; column += kWarpSize) {
    const int64_t position = token * args.scale_token_stride + column * args.scale_column_stride;
    copy_element(dst + column * args.scale_bytes, args.x_scales + position * args.scale_bytes,
                 args.scale_bytes);
  }
}

// The scales of a token in a warp's registers, for as many as fit. With dependent trips to memory
// scales took longer than the rows of FP8.
template <ScaleSource kSource>
class TokenScales {
 public:
  DC_DEVICE static bool fits(const DispatchArgs& args) {
    return kSource == ScaleSource::kNone || args.num_scales == 0 ||
           (args.scale_bytes == sizeof(uint32_t) && args.num_scales <= kScalesOfLane * kWarpSize);
  }
  DC_DEVICE void load(const DispatchArgs& args, int token) {
    if constexpr (kSource == ScaleSource::kNone) return;
    const uint32_t* scale = reinterpret_cast<const uint32_t*>(args.x_scales) +
                            token * args.scale_token_stride +
                            arch::lane_idx() * args.scale_column_stride;
    // Step by step: with a product for each the addresses would take registers.
    DC_UNROLL
    for (int idx = 0; idx < kScalesOfLane; ++idx) {
      if (idx * kWarpSize + arch::lane_idx() < args.num_scales) {
        scales_[idx] = kSource == ScaleSource::kInput ? arch::ld_nc(scale) : arch::ld_weak(scale);
      }
      scale += kWarpSize * args.scale_column_stride;
    }
  }
  // smem: of a message.
  DC_DEVICE void write(const DispatchArgs& args, uint8_t* smem) const {
    if constexpr (kSource == ScaleSource::kNone) return;
    DC_UNROLL
    for (int idx = 0; idx < kScalesOfLane; ++idx) {
      const int column = idx * kWarpSize + arch::lane_idx();
      if (column < args.num_scales) reinterpret_cast<uint32_t*>(smem)[column] = scales_[idx];
    }
  }
  // row: of the output's scales.
  DC_DEVICE void store(const DispatchArgs& args, const PeerOutput& output, int64_t row) const {
    if constexpr (kSource == ScaleSource::kNone) return;
    uint32_t* scales = reinterpret_cast<uint32_t*>(output.scales) + row * args.num_scales;
    DC_UNROLL
    for (int idx = 0; idx < kScalesOfLane; ++idx) {
      const int column = idx * kWarpSize + arch::lane_idx();
      if (column < args.num_scales) arch::st_weak(scales + column, scales_[idx]);
    }
  }

 private:
  static constexpr int kScalesOfLane = 4;

  uint32_t scales_[kScalesOfLane] = {};
};

// One warp: writes all metadata of `token` for rank `dst`, at row `row` of its outputs.
template <ScaleSource kSource>
DC_DEVICE void store_token_meta(const DispatchArgs& args, int token, int dst,
                                const PeerOutput& output, int64_t row) {
  const int lane = arch::lane_idx(), num_topk = args.message.num_topk;
  const int first = args.experts.first_expert(dst), count = args.experts.num_local_experts(dst);
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
  store_token_scales<kSource>(args, output.scales + row * args.num_scales * args.scale_bytes,
                              token);
  if (lane == 0 && output.src_idx != nullptr) arch::st_weak(output.src_idx + row, token);
}

// The same in a warp's registers, so that one token's metadata can be loaded while another's is
// stored.
template <ScaleSource kSource>
class TokenMeta {
 public:
  DC_DEVICE static bool fits(const DispatchArgs& args) {
    return TokenScales<kSource>::fits(args) && args.message.num_topk <= kWarpSize;
  }

  DC_DEVICE void load(const DispatchArgs& args, int token) {
    if (token >= args.num_tokens) return;
    const int lane = arch::lane_idx(), num_topk = args.message.num_topk;
    if (lane < num_topk) {
      const int64_t position = static_cast<int64_t>(token) * num_topk + lane;
      expert_ = RawExpert::load(args.topk_idx, position, args.topk_idx_bytes);
      if (args.topk_weights != nullptr) weight_ = arch::ld_nc(args.topk_weights + position);
    }
    scales_.load(args, token);
  }

  DC_DEVICE void store(const DispatchArgs& args, int token, int dst, const PeerOutput& output,
                       int64_t row) const {
    const int lane = arch::lane_idx(), num_topk = args.message.num_topk;
    if (lane < num_topk) {
      const int local = expert_.value(args.topk_idx_bytes) - args.experts.first_expert(dst);
      const bool is_here = local >= 0 && local < args.experts.num_local_experts(dst);
      store_expert(output.topk_idx, row * num_topk + lane, args.topk_idx_bytes,
                   is_here ? local : -1);
      if (args.topk_weights != nullptr) {
        arch::st_weak(output.topk_weights + row * num_topk + lane, is_here ? weight_ : 0.0f);
      }
    }
    scales_.store(args, output, row);
    if (lane == 0 && output.src_idx != nullptr) arch::st_weak(output.src_idx + row, token);
  }

 private:
  RawExpert expert_;
  float weight_ = 0.0f;
  TokenScales<kSource> scales_;
};

// The same for expanded outputs: scales to the token's first row, each weight to the row of its
// top-k entry. The handle gets all rows, at the token's ordinal among the received tokens. One warp;
// all loads are in flight at once, of scales those that fit into registers.
template <ScaleSource kSource>
class ExpandedMeta {
 public:
  DC_DEVICE void load(const DispatchArgs& args, int token) {
    DC_UNROLL
    for (int idx = 0; idx < kEntriesOfLane; ++idx) {
      const int k = idx * kWarpSize + arch::lane_idx();
      if (k >= args.message.num_topk) continue;
      const int64_t position = static_cast<int64_t>(token) * args.message.num_topk + k;
      experts_[idx] = RawExpert::load(args.topk_idx, position, args.topk_idx_bytes);
      rows_[idx] = arch::ld_nc(args.send_rows + position);
      if (args.topk_weights != nullptr) weights_[idx] = arch::ld_nc(args.topk_weights + position);
    }
    if (TokenScales<kSource>::fits(args)) scales_.load(args, token);
  }

  DC_DEVICE void store(const DispatchArgs& args, int token, int dst, const PeerOutput& output,
                       int64_t ordinal, int64_t first_row) const {
    const int lane = arch::lane_idx(), num_topk = args.message.num_topk;
    const int first = args.experts.first_expert(dst), count = args.experts.num_local_experts(dst);
    DC_UNROLL
    for (int idx = 0; idx < kEntriesOfLane; ++idx) {
      const int k = idx * kWarpSize + lane;
      if (k >= num_topk) continue;
      const int local = experts_[idx].value(args.topk_idx_bytes) - first;
      const int32_t row = local >= 0 && local < count ? rows_[idx] : -1;
      arch::st_weak(output.recv_rows + ordinal * num_topk + k, row);
      if (args.topk_weights != nullptr && row >= 0 && row < output.num_rows) {
        arch::st_weak(output.topk_weights + row, weights_[idx]);
      }
    }
    if (first_row >= 0 && first_row < output.num_rows) {
      if (TokenScales<kSource>::fits(args)) {
        scales_.store(args, output, first_row);
      } else {
        store_token_scales<kSource>(
            args, output.scales + first_row * args.num_scales * args.scale_bytes, token);
      }
    }
    if (lane == 0 && output.src_idx != nullptr) arch::st_weak(output.src_idx + ordinal, token);
  }

 private:
  static constexpr int kEntriesOfLane = kMaxTopk / kWarpSize;

  RawExpert experts_[kEntriesOfLane];
  int32_t rows_[kEntriesOfLane] = {};
  float weights_[kEntriesOfLane] = {};
  TokenScales<kSource> scales_;
};

}  // namespace deep_comm
