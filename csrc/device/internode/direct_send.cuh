// dispatch, direct mode, the sending side: a row is loaded once. It is stored to its final rows in
// this node, and once for each of its other nodes: into its slot, there or here, or straight to its
// final row at the rank of this local index there. Straight where all rows between nodes are stored
// and that rank is among the destinations. A lane serves a destination. Quantised: the warp casts a
// row to FP8 once, so all destinations get the same bytes. Scales go where their row goes; all other
// metadata is written by other warps: direct_meta.cuh, direct_publish.cuh.
#pragma once

#include <type_traits>

#include "device/internode/direct_entry.cuh"
#include "device/internode/scales.cuh"
#include "device/move/cast_stages.cuh"
#include "device/move/stage_pipe.cuh"
#include "device/sync/work_queue.cuh"

namespace deep_comm {

// The pipeline of the index-th warp of a role, whose first mbarrier is `first_barrier`.
DC_DEVICE StagePipe make_tier_pipe(const InternodeDispatchArgs& args, const StageLayout& stage,
                                   size_t stages_offset, int first_barrier, int index) {
  uint8_t* smem = arch::dynamic_smem();
  arch::Mbarrier* barriers = reinterpret_cast<arch::Mbarrier*>(smem + args.barriers_offset);
  return {smem + stages_offset + index * stage.warp_bytes(),
          barriers + first_barrier + index * stage.num_stages, stage};
}

DC_DEVICE const int32_t* slots_of(const InternodeDispatchArgs& args, int64_t token) {
  return args.send_slots + token * (args.tiers.num_nodes() + args.tiers.num_ranks());
}

// The slot of the row-th row for another node: there if stores reach it, else here.
DC_DEVICE uint8_t* slot_for(const InternodeDispatchArgs& args, int node, int64_t row) {
  const RailTier& tier = args.tiers.rail;
  uint8_t* near = near_segment(args.world, tier, node);
  return near != nullptr
             ? near + args.staging.recv_slot(!tier.are_all_near, node, tier.node, row)
             : args.world.bases[args.world.rank] + args.staging.send_slot(tier.node, node, row);
}

using Tokens = AskedQueue<Numbered>;  // of one sending warp

// The rows of a warp's tokens, piece by piece: loaded in bulk, ahead of the stores. Whole warps call
// the methods.
class LoadedPieces {
 public:
  DC_DEVICE LoadedPieces(const InternodeDispatchArgs& args, int sender)
      : x_(args.x),
        row_bytes_(args.message.row_bytes),
        pieces_(Pieces::of(row_bytes_, args.send_stage)),
        pipe_(make_tier_pipe(args, args.send_stage, 0, 0, sender)) {}

  DC_DEVICE void begin(Tokens& tokens) {
    while (tokens.at(load_index_) >= 0 && pipe_.can_load()) load_next(tokens);
  }
  // The next piece, in its stage.
  DC_DEVICE const uint8_t* await(int /*token*/, int /*piece*/, bool /*is_storing*/) {
    pipe_.await_load();
    return pipe_.current();
  }
  // After the storing lanes have stored it: loads the next piece.
  DC_DEVICE void advance(Tokens& tokens, bool is_storing) {
    pipe_.advance_store();
    if (is_storing) pipe_.make_room();
    // All storing lanes have read the stage that the leader loads next.
    arch::sync_warp();
    load_next(tokens);
  }
  DC_DEVICE uint32_t num_stores() const { return pipe_.num_stores(); }
  DC_DEVICE void drain() { pipe_.drain(); }
  // After begin, if nothing is sent: frees the stages. A block barrier follows.
  DC_DEVICE void give_up() {
    while (pipe_.num_stores() != pipe_.num_loads()) {
      if (arch::lane_idx() == 0) pipe_.await_load();
      pipe_.advance_store();
    }
  }

 private:
  DC_DEVICE void load_next(Tokens& tokens) {
    const int token = tokens.at(load_index_);
    if (token < 0) return;
    if (arch::lane_idx() == 0) {
      pipe_.load(x_ + static_cast<size_t>(token) * row_bytes_ + load_piece_ * pieces_.piece_bytes,
                 pieces_.bytes_of(load_piece_));
    }
    pipe_.advance_load();
    if (++load_piece_ < pieces_.num_pieces) return;
    load_piece_ = 0;
    ++load_index_;
  }

  const uint8_t* x_;
  int row_bytes_;
  Pieces pieces_;
  StagePipe pipe_;
  uint32_t load_index_ = 0;  // among the tokens
  int load_piece_ = 0;
};

// The rows of a warp's tokens, piece by piece, cast to FP8. Has the methods of LoadedPieces. Nothing is
// loaded ahead.
class CastPieces {
 public:
  DC_DEVICE CastPieces(const InternodeDispatchArgs& args, int sender)
      : source_(args.source),
        row_bytes_(args.message.row_bytes),
        stages_(arch::dynamic_smem() + sender * args.send_stage.warp_bytes(), args.send_stage,
                Pieces::of(row_bytes_, args.send_stage), args.scale_format) {}

  DC_DEVICE void begin(Tokens& tokens) {
    if (tokens.at(0) >= 0) cast(tokens.at(0), 0, false);
  }
  DC_DEVICE const uint8_t* await(int token, int piece, bool is_storing) {
    if (stages_.num_stores() > 0) cast(token, piece, is_storing);
    return stages_.current();
  }
  DC_DEVICE StageScales scales(int piece) const { return stages_.scales(piece); }
  DC_DEVICE void advance(Tokens& /*tokens*/, bool /*is_storing*/) { stages_.advance_store(); }
  DC_DEVICE uint32_t num_stores() const { return stages_.num_stores(); }
  DC_DEVICE void drain() { arch::bulk_wait<0>(); }
  DC_DEVICE void give_up() {}

 private:
  DC_DEVICE void cast(int token, int piece, bool is_storing) {
    const size_t element = static_cast<size_t>(token) * row_bytes_;
    stages_.cast(source_ + element * sizeof(Bf16), piece, is_storing);
  }

  const uint8_t* source_;
  int row_bytes_;
  CastStages stages_;
};

// One warp: sends the tokens it takes. The first rows are read before the peers have arrived
// (begin). Nothing is stored before that (run).
template <bool kIsQuantised>
class TokenSender {
 public:
  DC_DEVICE TokenSender(const Context& node, const InternodeDispatchArgs& args, DirectEntry* entry,
                        int sender)
      : context_(node),
        args_(args),
        entry_(entry),
        sender_(sender),
        tokens_(ask_for_items(&taken_work(node)->num_tokens, args.num_tokens, sender,
                              args.num_send_warps)),
        pieces_(Pieces::of(args.message.row_bytes, args.send_stage)),
        rows_(args, sender),
        num_targets_(args.tiers.ranks_per_node() + args.tiers.num_nodes() - 1),
        is_storing_(arch::lane_idx() < num_targets_) {}

  DC_DEVICE void begin() { rows_.begin(tokens_); }

  DC_DEVICE void run() {
    const int lane = arch::lane_idx();
    uint32_t index = 0;
    const Target target = target_at(lane);
    Place place = place_at(target, tokens_.at(0));
    for (int token = tokens_.at(0); token >= 0;) {
      has_failed_ = !entry_->landed.post(context_, sender_, index, token);
      if (has_failed_) break;
      const int next = tokens_.at(index + 1);
      const Place next_place = place_at(target, next);  // ahead: it costs a trip to memory
      uint8_t* dst = dst_of(target, place);
      uint8_t* scales_dst = scales_of(target, place);
      InputScales scales;
      if constexpr (!kIsQuantised) scales.load(args_, token);
      for (int piece = 0; piece < pieces_.num_pieces; ++piece) {
        store_piece(token, piece, dst, rows_.await(token, piece, is_storing_));
        if constexpr (kIsQuantised) {
          const StageScales of_piece = rows_.scales(piece);
          for_each_target(token, scales_dst, [&](uint8_t* row) { of_piece.store(row); });
        }
        rows_.advance(tokens_, is_storing_);
      }
      if (!kIsQuantised && args_.num_scales != 0) {
        for_each_target(token, scales_dst, [&](uint8_t* row) { scales.store(args_, row, token); });
      }
      if (static_cast<uint32_t>(lane) == index % kWarpSize) ends_ = rows_.num_stores();
      report_landed(++index);
      token = next;
      place = next_place;
    }
    rows_.drain();
    arch::sync_warp();  // all lanes' stores have landed
    if (lane == 0) entry_->progress.finish(sender_, has_failed_ ? num_landed_ : index);
  }

  // Instead of run. A block barrier follows.
  DC_DEVICE void give_up() { rows_.give_up(); }

 private:
  // One destination: its rows by place, and the column of send_slots that holds a token's place.
  struct Target {
    uint8_t* rows = nullptr;
    uint32_t stride = 0;
    int num_rows = 0;
    int column = 0;  // of send_slots
    uint8_t* scales = nullptr;
    uint32_t scale_stride = 0;

    DC_DEVICE uint8_t* row_of(int place) const {
      return place < 0 || place >= num_rows ? nullptr : rows + static_cast<size_t>(place) * stride;
    }
    DC_DEVICE uint8_t* scales_of(int place) const {
      return place < 0 || place >= num_rows ? nullptr
                                            : scales + static_cast<size_t>(place) * scale_stride;
    }
  };
  // Of a token at a destination, or -1. straight: at a node's rank of this local index.
  struct Place {
    int row = -1;
    int straight = -1;
  };

  // First the node's ranks, this one last, then the other nodes. So ranks do not all begin with the
  // same one.
  DC_DEVICE Target target_at(int idx) const {
    const TwoTier& tiers = args_.tiers;
    const int num_local = tiers.ranks_per_node(), num_nodes = tiers.num_nodes();
    if (idx >= num_targets_) return {};
    if (idx < num_local) {
      const int local = (args_.world.rank + 1 + idx) % num_local;
      const TierOutput& output = entry_->outputs[local];
      const int64_t start = entry_->starts(tiers)[local * num_nodes + tiers.rail.node];
      const uint32_t row_bytes = args_.message.row_bytes;
      const uint32_t scale_row_bytes = args_.message.scale_row_bytes;
      return {output.x + start * row_bytes,
              row_bytes,
              static_cast<int>(output.num_rows - start),
              num_nodes + tiers.rail.node * num_local + local,
              output.scales + start * scale_row_bytes,
              scale_row_bytes};
    }
    const int node = (tiers.rail.node + 1 + idx - num_local) % num_nodes;
    uint8_t* slots = slot_for(args_, node, 0);
    const uint32_t slot_bytes = args_.staging.slot_bytes;
    return {slots + args_.placed.meta_bytes(),
            slot_bytes,
            args_.staging.rows_per_node(!args_.tiers.rail.are_all_near),
            node,
            slots + args_.placed.scales_offset(),
            slot_bytes};
  }
  DC_DEVICE Place place_at(const Target& target, int token) const {
    if (token < 0 || target.rows == nullptr) return {};
    const int32_t* places = slots_of(args_, token);
    Place place{arch::ld_nc(places + target.column)};
    const int node = target.column, num_nodes = args_.tiers.num_nodes();  // or a rank of this one
    if (args_.tiers.rail.are_all_near && node < num_nodes) {
      const int first = num_nodes + node * args_.tiers.ranks_per_node();
      place.straight = arch::ld_nc(places + first + args_.world.rank);
    }
    return place;
  }
  // A node's rank of this local index gets a row and its scales in its final row, from where it hands
  // them on; RailRows::is_straight decides in the same way. Otherwise, like the metadata of every row
  // for a node, they go to its slot.
  DC_DEVICE bool is_straight(const Target& target, const Place& place) const {
    return place.straight >= 0 && place.straight < entry_->straight_rows()[target.column].num_rows;
  }
  DC_DEVICE uint8_t* dst_of(const Target& target, const Place& place) const {
    if (!is_straight(target, place)) return target.row_of(place.row);
    return entry_->straight_rows()[target.column].x +
           static_cast<size_t>(place.straight) * args_.message.row_bytes;
  }
  DC_DEVICE uint8_t* scales_of(const Target& target, const Place& place) const {
    if (!is_straight(target, place)) return target.scales_of(place.row);
    return entry_->straight_rows()[target.column].scales +
           static_cast<size_t>(place.straight) * args_.message.scale_row_bytes;
  }

  // Stores a piece from its stage to all destinations: one bulk group per lane, even without a
  // destination.
  DC_DEVICE void store_piece(int token, int piece, uint8_t* dst, const uint8_t* stage) const {
    if (!is_storing_) return;
    const int offset = piece * pieces_.piece_bytes, num_bytes = pieces_.bytes_of(piece);
    if (dst != nullptr) arch::bulk_store(dst + offset, stage, num_bytes);
    for (int idx = arch::lane_idx() + kWarpSize; idx < num_targets_; idx += kWarpSize) {
      uint8_t* other = far_dst(idx, token);
      if (other != nullptr) arch::bulk_store(other + offset, stage, num_bytes);
    }
    arch::bulk_commit();
  }
  // Of a destination beyond the lanes.
  DC_DEVICE uint8_t* far_dst(int idx, int token) const {
    const Target target = target_at(idx);
    return dst_of(target, place_at(target, token));
  }
  DC_DEVICE uint8_t* far_scales(int idx, int token) const {
    const Target target = target_at(idx);
    return scales_of(target, place_at(target, token));
  }
  // All lanes: the idx-th destination's pointer; each lane passes its own.
  DC_DEVICE static uint8_t* of_lane(uint8_t* own, int idx) {
    return reinterpret_cast<uint8_t*>(arch::shfl(kFullMask, reinterpret_cast<uint64_t>(own), idx));
  }

  // Calls visit(scales of the row) for all destinations. dst: at this lane's.
  template <class Visit>
  DC_DEVICE void for_each_target(int token, uint8_t* dst, Visit visit) const {
    for (int idx = 0; idx < num_targets_; ++idx) {
      uint8_t* row = idx < kWarpSize ? of_lane(dst, idx) : far_scales(idx, token);
      if (row != nullptr) visit(row);
    }
  }

  // Reports the tokens whose stores have landed. Waiting for the newest stores would empty the
  // pipeline, so they are reported later.
  DC_DEVICE void report_landed(uint32_t num_tokens) {
    const StoresLeft left = args_.tiers.rail.are_all_near ? StoresLeft::of_stored(kIsQuantised)
                                                          : StoresLeft::behind(num_tokens);
    uint32_t num_landed = num_landed_;
    while (num_landed < num_tokens &&
           arch::shfl(kFullMask, ends_, num_landed % kWarpSize) + left.count <=
               rows_.num_stores()) {
      ++num_landed;
    }
    if (num_landed == num_landed_) return;
    num_landed_ = num_landed;
    if (is_storing_) left.wait();
    arch::sync_warp();  // every lane's rows have landed, and its scales are stored
    if (arch::lane_idx() == 0) entry_->progress.report(sender_, num_landed);
  }

  const Context& context_;
  const InternodeDispatchArgs& args_;
  DirectEntry* entry_;
  int sender_;
  Tokens tokens_;
  Pieces pieces_;
  std::conditional_t<kIsQuantised, CastPieces, LoadedPieces> rows_;
  int num_targets_;
  bool is_storing_;
  uint32_t ends_ = 0;  // lane i: stores up to the end of the last token whose index is i modulo 32
  uint32_t num_landed_ = 0;
  bool has_failed_ = false;
};

}  // namespace deep_comm
