// The metadata of a row of dispatch in ring mode. It is the same for every rank that the row goes
// to, so one stage of shared memory serves all of them: experts and output rows of all top-k
// entries. The receiver picks its own. Loads of one row are in flight together, and the sender's one
// token ahead: a trip to memory for each kind took FP8 longer than the row.
#pragma once

#include "device/intranode/args.cuh"
#include "device/intranode/token_rows.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// Scales that a warp holds in its registers; others are copied one by one.
struct HeldScales {
  static constexpr int kOfLane = 4;

  DC_DEVICE static bool fit(const DispatchArgs& args) {
    return args.scale_bytes == sizeof(uint32_t) && args.num_scales <= kOfLane * kWarpSize;
  }
  // Calls visit(column, word) for those of this lane.
  template <class Visit>
  DC_DEVICE void for_each(const DispatchArgs& args, const Visit& visit) {
    DC_UNROLL
    for (int idx = 0; idx < kOfLane; ++idx) {
      const int column = idx * kWarpSize + arch::lane_idx();
      if (column < args.num_scales) visit(column, words[idx]);
    }
  }

  uint32_t words[kOfLane] = {};
};

inline constexpr int kEntriesOfLane = kMaxTopk / kWarpSize;  // top-k entries

template <class Form>
class SentMeta {
 public:
  DC_DEVICE void load(const DispatchArgs& args, int token, int end) {
    if (token >= end || args.message.meta_bytes == 0) return;
    const int lane = arch::lane_idx(), num_topk = args.message.num_topk;
    if (HeldScales::fit(args)) {
      scales_.for_each(args, [&](int column, uint32_t& word) {
        const uint32_t* src = reinterpret_cast<const uint32_t*>(args.x_scales) +
                              token * args.scale_token_stride + column * args.scale_column_stride;
        // quantised: written by this kernel
        word = Form::kQuantised ? arch::ld_weak(src) : arch::ld_nc(src);
      });
    }
    DC_UNROLL
    for (int idx = 0; idx < kEntriesOfLane; ++idx) {
      const int k = idx * kWarpSize + lane;
      if (k >= num_topk) continue;
      const int64_t position = static_cast<int64_t>(token) * num_topk + k;
      experts_[idx] = RawExpert::load(args.topk_idx, position, args.topk_idx_bytes);
      if (args.topk_weights != nullptr) weights_[idx] = arch::ld_nc(args.topk_weights + position);
      if constexpr (Form::kExpanded) rows_[idx] = arch::ld_nc(args.send_rows + position);
    }
    if constexpr (Form::kExpanded) {
      const int num_ranks = args.world.num_ranks;
      const int64_t position = static_cast<int64_t>(token) * num_ranks + lane;
      if (lane < num_ranks) first_row_ = arch::ld_nc(args.send_row + position);
    }
  }

  // The output row of the token's first row at `rank`, or -1. A whole warp; expanded only.
  DC_DEVICE int first_row_at(int rank) const { return arch::shfl(kFullMask, first_row_, rank); }

  // meta: in shared memory.
  DC_DEVICE void write(const DispatchArgs& args, uint8_t* meta, int token) const {
    const MessageLayout& message = args.message;
    const int lane = arch::lane_idx();
    uint8_t* scales = meta + message.scales_offset;
    if (HeldScales::fit(args)) {
      HeldScales held = scales_;
      held.for_each(args, [&](int column, uint32_t word) {
        reinterpret_cast<uint32_t*>(scales)[column] = word;
      });
    } else {
      write_each_scale(args, scales, token);
    }
    int32_t* experts = reinterpret_cast<int32_t*>(meta + message.topk_idx_offset);
    float* weights = reinterpret_cast<float*>(meta + message.topk_weights_offset);
    int32_t* rows = reinterpret_cast<int32_t*>(meta + message.topk_rows_offset);
    DC_UNROLL
    for (int idx = 0; idx < kEntriesOfLane; ++idx) {
      const int k = idx * kWarpSize + lane;
      if (k >= message.num_topk) continue;
      experts[k] = experts_[idx].value(args.topk_idx_bytes);
      weights[k] = weights_[idx];
      if constexpr (Form::kExpanded) rows[k] = rows_[idx];
    }
    if (lane == 0 && args.recv_src_idx != nullptr) {
      *reinterpret_cast<int32_t*>(meta + message.src_idx_offset) = token;
    }
    if constexpr (Form::kExpanded) {
      int32_t* first_rows = reinterpret_cast<int32_t*>(meta + message.first_rows_offset);
      if (lane < args.world.num_ranks) first_rows[lane] = first_row_;
    }
  }

 private:
  DC_DEVICE static void write_each_scale(const DispatchArgs& args, uint8_t* dst, int token) {
    for (int column = arch::lane_idx(); column < args.num_scales; column += kWarpSize) {
      const int64_t position = token * args.scale_token_stride + column * args.scale_column_stride;
      if constexpr (Form::kQuantised) {
        reinterpret_cast<uint32_t*>(dst)[column] =
            arch::ld_weak(reinterpret_cast<const uint32_t*>(args.x_scales) + position);
      } else {
        gather_element(dst + column * args.scale_bytes, args.x_scales + position * args.scale_bytes,
                       args.scale_bytes);
      }
    }
  }

  HeldScales scales_;
  RawExpert experts_[kEntriesOfLane];
  float weights_[kEntriesOfLane] = {};
  int32_t rows_[kEntriesOfLane] = {};
  int32_t first_row_ = -1;  // lane r: at rank r
};

enum class MetaPlace { kSlot, kStage };  // of a ring, written by a peer; or in shared memory

template <class Form, MetaPlace kPlace>
class ReceivedMeta {
 public:
  DC_DEVICE void load(const DispatchArgs& args, const uint8_t* meta) {
    const MessageLayout& message = args.message;
    const int lane = arch::lane_idx();
    if constexpr (Form::kExpanded) {
      first_row_ = read<int32_t>(meta + message.first_rows_offset, args.world.rank);
    }
    if (HeldScales::fit(args)) {
      scales_.for_each(args, [&](int column, uint32_t& word) {
        word = read<uint32_t>(meta + message.scales_offset, column);
      });
    }
    DC_UNROLL
    for (int idx = 0; idx < kEntriesOfLane; ++idx) {
      const int k = idx * kWarpSize + lane;
      if (k >= message.num_topk) continue;
      experts_[idx] = read<int32_t>(meta + message.topk_idx_offset, k);
      weights_[idx] = read<float>(meta + message.topk_weights_offset, k);
      if constexpr (Form::kExpanded) rows_[idx] = read<int32_t>(meta + message.topk_rows_offset, k);
    }
    if (lane == 0 && args.recv_src_idx != nullptr) {
      src_idx_ = read<int32_t>(meta + message.src_idx_offset, 0);
    }
  }

  // Where the row belongs. ordinal: among the received tokens.
  DC_DEVICE int row(int ordinal) const { return Form::kExpanded ? first_row_ : ordinal; }

  DC_DEVICE void store(const DispatchArgs& args, const uint8_t* meta, int ordinal, int row) {
    const int lane = arch::lane_idx(), num_topk = args.message.num_topk;
    const ExpertMap map{args.num_experts, args.world.num_ranks};
    const int first = map.first_expert(args.world.rank);
    const int count = map.num_local_experts(args.world.rank);
    DC_UNROLL
    for (int idx = 0; idx < kEntriesOfLane; ++idx) {
      const int k = idx * kWarpSize + lane;
      if (k >= num_topk) continue;
      const int64_t position = static_cast<int64_t>(ordinal) * num_topk + k;
      const int local = experts_[idx] - first;
      const bool is_here = local >= 0 && local < count;
      if constexpr (Form::kExpanded) {
        const int32_t place = is_here ? rows_[idx] : -1;
        arch::st_weak(args.recv_rows + position, place);
        if (args.recv_topk_weights != nullptr && place >= 0 && place < args.num_recv_rows) {
          arch::st_weak(args.recv_topk_weights + place, weights_[idx]);
        }
      } else {
        store_expert(args.recv_topk_idx, position, args.topk_idx_bytes, is_here ? local : -1);
        if (args.recv_topk_weights != nullptr) {
          arch::st_weak(args.recv_topk_weights + position, is_here ? weights_[idx] : 0.0f);
        }
      }
    }
    if (lane == 0 && args.recv_src_idx != nullptr) {
      arch::st_weak(args.recv_src_idx + ordinal, src_idx_);
    }
    if (row < 0 || row >= args.num_recv_rows || args.num_scales == 0) return;
    uint8_t* dst =
        args.recv_x_scales + static_cast<int64_t>(row) * args.num_scales * args.scale_bytes;
    if (HeldScales::fit(args)) {
      scales_.for_each(args, [&](int column, uint32_t word) {
        arch::st_weak(reinterpret_cast<uint32_t*>(dst) + column, word);
      });
    } else {
      store_each_scale(args, dst, meta + args.message.scales_offset);
    }
  }

 private:
  template <class T>
  DC_DEVICE static T read(const uint8_t* words, int index) {
    const T* word = reinterpret_cast<const T*>(words) + index;
    if constexpr (kPlace == MetaPlace::kSlot) {
      return arch::ld_weak(word);
    } else {
      return *word;
    }
  }
  DC_DEVICE static void store_each_scale(const DispatchArgs& args, uint8_t* dst,
                                         const uint8_t* scales) {
    for (int column = arch::lane_idx(); column < args.num_scales; column += kWarpSize) {
      const int offset = column * args.scale_bytes;
      if constexpr (kPlace == MetaPlace::kSlot) {
        move_element(dst + offset, scales + offset, args.scale_bytes);
      } else {
        scatter_element(dst + offset, scales + offset, args.scale_bytes);
      }
    }
  }

  HeldScales scales_;
  int32_t experts_[kEntriesOfLane] = {};
  float weights_[kEntriesOfLane] = {};
  int32_t rows_[kEntriesOfLane] = {};
  int32_t first_row_ = -1;
  int32_t src_idx_ = 0;
};

}  // namespace deep_comm
