// dispatch, direct mode: the metadata of rows at this node's ranks. That of its own tokens comes from
// the inputs, that of rows from other nodes from their slots, but scales of straight rows from this
// rank's final row. A warp writes that of a few rows at a time: they share the trips to memory.
#pragma once

#include "device/internode/direct_forward.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// One lane: what combine needs for a forwarded row, its ordinal in combine's ring of a local rank.
// word: OrderedPlace there. row: among `node`'s rows.
DC_DEVICE void write_rank_head(const InternodeDispatchArgs& args, int node, int row, int local,
                               int word) {
  const int num_channels = args.rail_rings.num_channels;
  const int num_nodes = args.tiers.num_nodes(), num_local = args.tiers.ranks_per_node();
  const int start = node == 0 ? 0 : arch::ld_nc(args.recv_node_prefix_sum + node - 1);
  const int64_t forwarded = static_cast<int64_t>(start) + row;
  if (forwarded >= args.num_forward_rows) return;
  const int32_t* prefix = args.recv_node_channel_prefix + node * num_channels;
  int channel = 0;  // of the row: as many channels end before it
  for (int other = 0; other < num_channels; ++other) {
    channel += static_cast<int>(arch::ld_nc(prefix + other) <= row);
  }
  // Converts the place among all rows of the rank to an ordinal in combine's ring.
  const int32_t* places = args.forward_slots;
  const int before = arch::ld_nc(places + node * num_local + local);
  const int shift =
      arch::ld_nc(places + ((1 + channel) * num_nodes + 1 + node) * num_local + local);
  arch::st_weak(args.send_rank_head + forwarded * num_local + local,
                word < 0 ? -1 : before + word - shift);
}

// This rank's tokens, in parts for MetaWriter. Senders store their scales.
class OwnRows {
 public:
  static constexpr bool kHaveScales = false;

  DC_DEVICE explicit OwnRows(const InternodeDispatchArgs& args) : args_(args) {}

  DC_DEVICE int num_parts(int part_rows) const { return ceil_div(args_.num_tokens, part_rows); }
  // Returns the number of the part's rows.
  DC_DEVICE int begin(int number, int part_rows) {
    first_ = number * part_rows;
    return min_of(args_.num_tokens - first_, part_rows);
  }
  DC_DEVICE int node() const { return args_.tiers.rail.node; }
  // Among the node's rows, or -1.
  DC_DEVICE int row(int idx) const { return arch::ld_nc(slots_of(args_, first_ + idx) + node()); }
  DC_DEVICE int source(int idx) const { return first_ + idx; }
  // The place at a local rank, or -1: an OrderedPlace, first in the sum.
  DC_DEVICE int word(int idx, int local) const {
    const TwoTier& tiers = args_.tiers;
    return arch::ld_nc(slots_of(args_, first_ + idx) + tiers.num_nodes() +
                       node() * tiers.ranks_per_node() + local);
  }
  // The same with its position. rank_mask: the node's ranks that get the token.
  DC_DEVICE int ordered(int idx, int local, int word, uint32_t rank_mask) const {
    const uint32_t positions =
        args_.order.positions(first_ + idx, rank_mask, node() * args_.tiers.ranks_per_node());
    return OrderedPlace::pack(word, positions >> (4 * local) & 15u);
  }
  DC_DEVICE int expert(int idx, int k) const {
    return load_expert(args_.topk_idx, position(idx, k), args_.topk_idx_bytes);
  }
  DC_DEVICE float weight(int idx, int k) const {
    return args_.topk_weights != nullptr ? arch::ld_nc(args_.topk_weights + position(idx, k))
                                         : 0.0f;
  }

 private:
  DC_DEVICE int64_t position(int idx, int k) const {
    return static_cast<int64_t>(first_ + idx) * args_.message.num_topk + k;
  }

  const InternodeDispatchArgs& args_;
  int first_ = 0;
};

// Rows that have come over the rail. Every row is waited for, also one without metadata: the kernel
// ends when all have arrived.
class ArrivedRows {
 public:
  static constexpr bool kHaveScales = true;

  DC_DEVICE ArrivedRows(const Context& rail, const InternodeDispatchArgs& args, DirectEntry* entry)
      : placed_(args.placed), rows_(rail, args, entry) {}

  DC_DEVICE int num_parts(int part_rows) const { return rows_.num_parts(part_rows); }
  // Waits for the part. Returns the number of its rows; negative: the wait has failed.
  DC_DEVICE int begin(int number, int part_rows) {
    part_ = rows_.part(number, part_rows);
    const int idx = arch::lane_idx();
    const bool ok = idx >= part_.num_rows || rows_.has_arrived(part_.node, row(idx), true);
    if (!arch::all(kFullMask, ok)) return -1;
    arch::sync_warp();  // hands each lane's acquire to all lanes
    return max_of(part_.num_rows, 0);
  }
  DC_DEVICE int node() const { return part_.node; }
  DC_DEVICE int row(int idx) const { return part_.first + idx; }
  DC_DEVICE int source(int idx) const {
    return arch::ld_weak(reinterpret_cast<const int32_t*>(slot(idx) + placed_.src_idx_offset()));
  }
  DC_DEVICE int word(int idx, int local) const {
    return arch::ld_weak(rows_.places_in(slot(idx)) + local);
  }
  DC_DEVICE int ordered(int, int, int word, uint32_t) const { return word; }
  DC_DEVICE int expert(int idx, int k) const {
    return arch::ld_weak(reinterpret_cast<const int32_t*>(slot(idx) + placed_.topk_idx_offset()) +
                         k);
  }
  DC_DEVICE float weight(int idx, int k) const {
    return arch::ld_weak(reinterpret_cast<const float*>(slot(idx) + placed_.topk_weights_offset()) +
                         k);
  }
  DC_DEVICE bool is_straight(int local, int target) const {
    return rows_.is_straight(local, target);
  }
  DC_DEVICE const uint8_t* scales(int idx) const { return slot(idx) + placed_.scales_offset(); }

 private:
  DC_DEVICE const uint8_t* slot(int idx) const { return rows_.slot(part_.node, row(idx)); }

  const PlacedRailMessage& placed_;
  RailRows rows_;
  RailRows::Part part_{0, 0, 0};
};

// One warp: writes the metadata of rows to their final rows at this node's ranks, and for combine,
// which ranks these are.
template <class Rows>
class MetaWriter {
 public:
  DC_DEVICE MetaWriter(const InternodeDispatchArgs& args, DirectEntry* entry, const Rows& rows)
      : args_(args), entry_(entry), rows_(rows) {}

  // Every step-th part, from `first` on.
  DC_DEVICE void run(int first, int step) {
    const int part_rows = min_of(kMaxPartRows, kWarpSize / args_.tiers.ranks_per_node());
    const int num_parts = rows_.num_parts(part_rows);
    for (int number = first; number < num_parts; number += step) {
      num_rows_ = rows_.begin(number, part_rows);
      if (num_rows_ < 0) return;
      if (num_rows_ == 0) continue;
      find_targets();
      load_scales(0);
      write_sources();
      write_selections();
      store_scales(0);
      for (int column = kColumns; column < args_.num_scales; column += kColumns) {
        load_scales(column);
        store_scales(column);
      }
    }
  }

 private:
  // With more rows, the first would wait for the last.
  static constexpr int kMaxPartRows = 8;
  static constexpr int kScalesOfLane = 2, kColumns = kScalesOfLane * kWarpSize;

  // All lanes: the final row of a row at a local rank, or -1.
  DC_DEVICE int target_of(int row, int local) const {
    return arch::shfl(kFullMask, target_, (row * args_.tiers.ranks_per_node() + local) % kWarpSize);
  }

  // Finds the final rows, lane row * M + local that of a row at a local rank, and which of them need
  // the scales.
  DC_DEVICE void find_targets() {
    const int num_local = args_.tiers.ranks_per_node();
    const int row = arch::lane_idx() / num_local, local = arch::lane_idx() % num_local;
    word_ = row < num_rows_ ? rows_.word(row, local) : -1;
    target_ = final_row(args_, entry_, rows_.node(), local, word_);
    if constexpr (Rows::kHaveScales) {
      needs_scales_ = arch::ballot(kFullMask, target_ >= 0 && !rows_.is_straight(local, target_));
    }
  }

  // Writes where the rows come from; for combine, also where it returns them.
  DC_DEVICE void write_sources() const {
    const int num_local = args_.tiers.ranks_per_node();
    const int row = arch::lane_idx() / num_local, local = arch::lane_idx() % num_local;
    const bool is_row = row < num_rows_;
    const int word = word_, source = is_row ? rows_.source(row) : -1;
    const int row_of_node = is_row && args_.send_rank_head != nullptr ? rows_.row(row) : -1;
    const uint32_t goes = arch::ballot(kFullMask, word >= 0);
    if (!is_row) return;
    const uint32_t rank_mask = goes >> (row * num_local) & ((1u << num_local) - 1);
    const TierOutput& output = entry_->outputs[local];
    if (target_ >= 0 && output.src_idx != nullptr) {
      arch::st_weak(output.src_idx + target_, source);
      arch::st_weak(output.src_meta + 2 * target_, static_cast<int32_t>(rows_.node()));
      arch::st_weak(output.src_meta + 2 * target_ + 1, static_cast<int32_t>(rank_mask));
    }
    if (row_of_node >= 0) {
      write_rank_head(args_, rows_.node(), row_of_node, local,
                      rows_.ordered(row, local, word, rank_mask));
    }
  }

  // A selection per lane.
  DC_DEVICE void write_selections() const {
    const int num_topk = args_.message.num_topk, num_local = args_.tiers.ranks_per_node();
    const ExpertMap& map = args_.experts;
    for (int base = 0; base < num_rows_ * num_topk; base += kWarpSize) {
      const int idx = base + arch::lane_idx();
      const int row = idx / num_topk, k = idx % num_topk;
      const bool is_active = row < num_rows_;
      const int expert = is_active ? rows_.expert(row, k) : -1;
      const float weight = is_active ? rows_.weight(row, k) : 0.0f;
      for (int local = 0; local < num_local; ++local) {
        const int64_t target = target_of(row, local);
        if (!is_active || target < 0) continue;
        const TierOutput& output = entry_->outputs[local];
        const int rank = args_.tiers.rail.node * num_local + local;
        const int local_expert = expert - map.first_expert(rank);
        const bool is_here = local_expert >= 0 && local_expert < map.num_local_experts(rank);
        store_expert(output.topk_idx, target * num_topk + k, args_.topk_idx_bytes,
                     is_here ? local_expert : -1);
        arch::st_weak(output.topk_weights + target * num_topk + k, is_here ? weight : 0.0f);
      }
    }
  }

  // Of columns [first, first + kColumns) of all rows that need them, all under way together.
  DC_DEVICE void load_scales(int first) {
    if constexpr (Rows::kHaveScales) {
      DC_UNROLL
      for (int row = 0; row < kMaxPartRows; ++row) {
        if (args_.num_scales == 0 || row >= num_rows_ || needing_scales(row) == 0) continue;
        const uint8_t* scales = scales_of(row);
        DC_UNROLL
        for (int idx = 0; idx < kScalesOfLane; ++idx) {
          const int column = first + idx * kWarpSize + arch::lane_idx();
          if (column >= args_.num_scales) continue;
          load_element(&scales_[row][idx], scales + column * args_.scale_bytes, args_.scale_bytes);
        }
      }
    }
  }
  DC_DEVICE void store_scales(int first) const {
    if constexpr (Rows::kHaveScales) {
      DC_UNROLL
      for (int row = 0; row < kMaxPartRows; ++row) {
        if (args_.num_scales == 0 || row >= num_rows_) continue;
        for (uint32_t rest = needing_scales(row); rest != 0; rest &= rest - 1) {
          uint8_t* scales = final_scales(row, arch::ffs(rest) - 1);
          DC_UNROLL
          for (int idx = 0; idx < kScalesOfLane; ++idx) {
            const int column = first + idx * kWarpSize + arch::lane_idx();
            if (column >= args_.num_scales) continue;
            scatter_element(scales + column * args_.scale_bytes,
                            reinterpret_cast<const uint8_t*>(&scales_[row][idx]),
                            args_.scale_bytes);
          }
        }
      }
    }
  }
  // A bit for each local rank that needs the row's scales.
  DC_DEVICE uint32_t needing_scales(int row) const {
    const int num_local = args_.tiers.ranks_per_node();
    return needs_scales_ >> (row * num_local) & ((1u << num_local) - 1);
  }
  // All lanes.
  DC_DEVICE uint8_t* final_scales(int row, int local) const {
    return entry_->outputs[local].scales +
           static_cast<int64_t>(target_of(row, local)) * args_.message.scale_row_bytes;
  }
  // All lanes: where a row's scales have come.
  DC_DEVICE const uint8_t* scales_of(int row) const {
    const int rank = args_.world.rank;
    return rows_.is_straight(rank, target_of(row, rank)) ? final_scales(row, rank)
                                                         : rows_.scales(row);
  }

  const InternodeDispatchArgs& args_;
  DirectEntry* entry_;
  Rows rows_;
  int num_rows_ = 0;           // of the part
  int word_ = -1;              // of this lane's row and rank: where it belongs there
  int target_ = -1;            // and its final row
  uint32_t needs_scales_ = 0;  // a bit for each lane
  uint64_t scales_[kMaxPartRows][kScalesOfLane];
};

// One warp, number `index` of so many of the block: all metadata of direct mode.
DC_DEVICE void write_metadata(const TierContexts& contexts, const InternodeDispatchArgs& args,
                              DirectEntry* entry, int index, int num_warps) {
  const int first = index * arch::num_blocks() + arch::block_idx();
  const int step = num_warps * arch::num_blocks();
  if (args.message.num_topk != 0 || args.recv_src_idx != nullptr)
    MetaWriter(args, entry, OwnRows(args)).run(first, step);
  MetaWriter(args, entry, ArrivedRows(contexts.rail, args, entry)).run(first, step);
}

}  // namespace deep_comm
