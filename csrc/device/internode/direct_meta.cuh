// dispatch, direct mode: the metadata of rows, from their source for its own node's ranks (whose
// scales the sender stores), and from their slots for rows that have come over the rail.
#pragma once

#include "device/internode/direct_forward.cuh"

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

// One warp: writes the metadata of the rows for this node's own ranks, except the scales.
DC_DEVICE void store_own_meta(const InternodeDispatchArgs& args, DirectEntry* entry, int token) {
  const TwoTier& tiers = args.tiers;
  const int lane = arch::lane_idx(), num_topk = args.message.num_topk, own = tiers.rail.node;
  const int num_local = tiers.ranks_per_node(), num_nodes = tiers.num_nodes();
  const int32_t* places = slots_of(args, token);
  const int row_of_node = arch::ld_nc(places + own);
  if (row_of_node < 0) return;
  const int my_place =
      lane < num_local ? arch::ld_nc(places + num_nodes + own * num_local + lane) : -1;
  const uint32_t rank_mask = arch::ballot(kFullMask, my_place >= 0);
  const ExpertMap map{args.num_experts, tiers.num_ranks()};
  for (int local = 0; local < num_local; ++local) {
    const int place = arch::shfl(kFullMask, my_place, local);
    const TierOutput& output = entry->outputs[local];
    const int64_t row = static_cast<int64_t>(entry->starts(tiers)[local * num_nodes + own]) + place;
    if (place < 0 || row >= output.num_rows) continue;
    const int rank = own * num_local + local;
    const int first = map.first_expert(rank), count = map.num_local_experts(rank);
    for (int k = lane; k < num_topk; k += kWarpSize) {
      const int64_t position = static_cast<int64_t>(token) * num_topk + k;
      const int expert = load_expert(args.topk_idx, position, args.topk_idx_bytes) - first;
      const bool is_here = expert >= 0 && expert < count;
      store_expert(output.topk_idx, row * num_topk + k, args.topk_idx_bytes, is_here ? expert : -1);
      arch::st_weak(output.topk_weights + row * num_topk + k,
                    is_here && args.topk_weights != nullptr
                        ? arch::ld_nc(args.topk_weights + position)
                        : 0.0f);
    }
    if (lane == 0 && output.src_idx != nullptr) {
      arch::st_weak(output.src_idx + row, static_cast<int32_t>(token));
      arch::st_weak(output.src_meta + 2 * row, static_cast<int32_t>(own));
      arch::st_weak(output.src_meta + 2 * row + 1, static_cast<int32_t>(rank_mask));
    }
  }
  if (args.send_rank_head == nullptr) return;
  const int position = args.order.position_of_lane(token, rank_mask, own * num_local);
  if (lane < num_local) {
    write_rank_head(args, own, row_of_node, lane, OrderedPlace::pack(my_place, position));
  }
}

// One warp: writes the metadata of rows that have arrived over the rail to their final rows, and for
// combine, which ranks these are. A few rows at a time share the trips to memory. Every row is waited
// for, also one without metadata: the kernel ends when all have arrived.
class MetaForwarder {
 public:
  DC_DEVICE MetaForwarder(const Context& rail, const InternodeDispatchArgs& args,
                          DirectEntry* entry)
      : args_(args), entry_(entry), rows_(rail, args, entry) {}

  // Every step-th part, from `first` on.
  DC_DEVICE void run(int first, int step) {
    const int part_rows = min_of(kMaxPartRows, kWarpSize / args_.tiers.ranks_per_node());
    const int num_parts = rows_.num_parts(part_rows);
    for (int number = first; number < num_parts; number += step) {
      part_ = rows_.part(number, part_rows);
      if (part_.num_rows <= 0) continue;
      const int lane = arch::lane_idx();
      const bool ok =
          lane >= part_.num_rows || rows_.has_come(part_.node, part_.first + lane, true);
      if (!arch::all(kFullMask, ok)) return;
      arch::sync_warp();  // hands each lane's acquire to all lanes
      load_scales(0);
      find_targets();
      forward_selections();
      store_scales(0);
      for (int first = kColumns; first < args_.num_scales; first += kColumns) {
        load_scales(first);
        store_scales(first);
      }
    }
  }

 private:
  // More would come late to the last rows.
  static constexpr int kMaxPartRows = 8;
  static constexpr int kScalesOfLane = 2, kColumns = kScalesOfLane * kWarpSize;

  DC_DEVICE const uint8_t* slot(int row) const { return rows_.slot(part_.node, part_.first + row); }
  // All lanes: the final row of a row at a local rank, or -1.
  DC_DEVICE int target_of(int row, int local) const {
    return arch::shfl(kFullMask, target_, (row * args_.tiers.ranks_per_node() + local) % kWarpSize);
  }

  // Lane row * M + local: a row at a local rank.
  DC_DEVICE void find_targets() {
    const int num_local = args_.tiers.ranks_per_node();
    const int row = arch::lane_idx() / num_local, local = arch::lane_idx() % num_local;
    const bool is_row = row < part_.num_rows;
    const int word = is_row ? arch::ld_weak(rows_.places_in(slot(row)) + local) : -1;
    const int source = is_row ? arch::ld_weak(at<int32_t>(row, args_.placed.src_idx_offset())) : -1;
    target_ = rows_.final_row(part_.node, local, word);
    const uint32_t goes = arch::ballot(kFullMask, word >= 0);
    if (!is_row) return;
    const TierOutput& output = entry_->outputs[local];
    if (target_ >= 0 && output.src_idx != nullptr) {
      const uint32_t rank_mask = goes >> (row * num_local) & ((1u << num_local) - 1);
      arch::st_weak(output.src_idx + target_, source);
      arch::st_weak(output.src_meta + 2 * target_, static_cast<int32_t>(part_.node));
      arch::st_weak(output.src_meta + 2 * target_ + 1, static_cast<int32_t>(rank_mask));
    }
    if (args_.send_rank_head != nullptr) {
      write_rank_head(args_, part_.node, part_.first + row, local, word);
    }
  }

  // A selection per lane.
  DC_DEVICE void forward_selections() const {
    const int num_topk = args_.placed.num_topk, num_local = args_.tiers.ranks_per_node();
    const ExpertMap map{args_.num_experts, args_.tiers.num_ranks()};
    for (int base = 0; base < part_.num_rows * num_topk; base += kWarpSize) {
      const int idx = base + arch::lane_idx();
      const int row = idx / num_topk, k = idx % num_topk;
      const bool is_active = row < part_.num_rows;
      int expert = -1;
      float weight = 0.0f;
      if (is_active) {
        expert = arch::ld_weak(at<int32_t>(row, args_.placed.topk_idx_offset()) + k);
        weight = arch::ld_weak(at<float>(row, args_.placed.topk_weights_offset()) + k);
      }
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

  // Of columns [first, first + kColumns) of all rows, all under way together.
  DC_DEVICE void load_scales(int first) {
    DC_UNROLL
    for (int row = 0; row < kMaxPartRows; ++row) {
      const uint8_t* scales = slot(row) + args_.placed.scales_offset();
      DC_UNROLL
      for (int idx = 0; idx < kScalesOfLane; ++idx) {
        const int column = first + idx * kWarpSize + arch::lane_idx();
        if (row >= part_.num_rows || column >= args_.num_scales) continue;
        load_element(&scales_[row][idx], scales + column * args_.scale_bytes, args_.scale_bytes);
      }
    }
  }
  DC_DEVICE void store_scales(int first) const {
    if (args_.num_scales == 0) return;
    DC_UNROLL
    for (int row = 0; row < kMaxPartRows; ++row) {
      for (int local = 0; local < args_.tiers.ranks_per_node(); ++local) {
        const int64_t target = target_of(row, local);
        if (row >= part_.num_rows || target < 0) continue;
        uint8_t* scales =
            entry_->outputs[local].scales + target * args_.num_scales * args_.scale_bytes;
        DC_UNROLL
        for (int idx = 0; idx < kScalesOfLane; ++idx) {
          const int column = first + idx * kWarpSize + arch::lane_idx();
          if (column >= args_.num_scales) continue;
          scatter_element(scales + column * args_.scale_bytes,
                          reinterpret_cast<const uint8_t*>(&scales_[row][idx]), args_.scale_bytes);
        }
      }
    }
  }
  // Of a row's slot.
  template <class T>
  DC_DEVICE const T* at(int row, int offset) const {
    return reinterpret_cast<const T*>(slot(row) + offset);
  }

  const InternodeDispatchArgs& args_;
  DirectEntry* entry_;
  RailRows rows_;
  RailRows::Part part_{0, 0, 0};
  int target_ = -1;  // of this lane's row and rank
  uint64_t scales_[kMaxPartRows][kScalesOfLane];
};

}  // namespace deep_comm
