// dispatch, direct mode, inside the node: rows that have arrived over the rail are forwarded to
// their final rows. Chunks are dealt while the kernel runs. A warp that waits for a chunk has
// nothing else to do.
#pragma once

#include "device/internode/direct_publish.cuh"

namespace deep_comm {

// Lane 0 of a forwarding warp takes parts, a few consecutive rows each, the nodes in rotation. An
// item is part * (N - 1) + other node. A part may lie in two chunks.
class TakeRailRows {
 public:
  // Two. A chunk that was put arrives at once, and the last chunk ends the kernel, so many warps
  // should share it. With one row per part each row would cost a trip to the counter.
  static constexpr int kPartRows = 2;

  DC_DEVICE TakeRailRows(const Context& rail, const InternodeDispatchArgs& args)
      : args_(&args),
        counter_(&taken_work(rail)->num_chunks[0]),
        num_others_(args.tiers.num_nodes() - 1) {
    for (int other = 0; other < num_others_; ++other) {
      num_rounds_ = max_of(num_rounds_, ceil_div(num_rows_from(*args_, node_of(other)), kPartRows));
    }
  }
  DC_DEVICE int operator()() const {
    while (true) {
      const uint32_t item = arch::atomic_add_relaxed_gpu(counter_, 1u);
      if (item >= static_cast<uint32_t>(num_rounds_) * num_others_) return -1;
      if (rows_of(static_cast<int>(item)).num_rows > 0) return static_cast<int>(item);
    }
  }

  struct Rows {
    int node;
    int first;  // among those of the node
    int num_rows;
  };
  DC_DEVICE Rows rows_of(int item) const {
    const int node = node_of(item % num_others_), begin = item / num_others_ * kPartRows;
    return {node, begin, min_of(num_rows_from(*args_, node) - begin, kPartRows)};
  }

 private:
  DC_DEVICE int node_of(int other) const {
    return (args_->tiers.rail.node + 1 + other) % (num_others_ + 1);
  }

  const InternodeDispatchArgs* args_;
  uint32_t* counter_;
  int num_others_;
  int num_rounds_ = 0;
};

// What combine needs for a forwarded row: its ordinal in combine's ring of each local rank. Lane m
// handles local rank m. place: OrderedPlace at that rank. row: among `node`'s rows.
DC_DEVICE void write_rank_heads(const InternodeDispatchArgs& args, int node, int row, int place) {
  const int num_channels = args.rail_rings.num_channels, num_local = args.tiers.ranks_per_node();
  const int32_t* prefix = args.recv_node_channel_prefix + node * num_channels;
  int channel = 0;  // of the row: as many channels end before it
  for (int base = 0; base < num_channels; base += kWarpSize) {
    const int own = base + arch::lane_idx();
    channel +=
        arch::popc(arch::ballot(kFullMask, own < num_channels && arch::ld_nc(prefix + own) <= row));
  }
  const int start = node == 0 ? 0 : arch::ld_nc(args.recv_node_prefix_sum + node - 1);
  const int64_t forwarded = static_cast<int64_t>(start) + row;
  const int local = arch::lane_idx();
  if (local >= num_local || forwarded >= args.num_forward_rows) return;
  const int num_nodes = args.tiers.num_nodes();
  // Converts the place among all rows of the rank to an ordinal in combine's ring.
  const int32_t* places = args.forward_slots;
  const int before = arch::ld_nc(places + node * num_local + local);
  const int shift =
      arch::ld_nc(places + ((1 + channel) * num_nodes + 1 + node) * num_local + local);
  arch::st_weak(args.send_rank_head + forwarded * num_local + local,
                place < 0 ? -1 : before + place - shift);
}

// One warp: forwards the rows it takes.
class RowForwarder {
 public:
  DC_DEVICE RowForwarder(const Context& rail, const InternodeDispatchArgs& args, DirectEntry* entry,
                         int warp)
      : context_(rail),
        args_(args),
        entry_(entry),
        is_near_(entry->is_near),
        take_(rail, args),
        parts_(take_),
        pieces_(Pieces::of(args.message.row_bytes, args.forward_stage)),
        pipe_(make_tier_pipe(args, args.forward_stage, args.forward_stages_offset,
                             args.num_send_warps * args.send_stage.num_stages, warp)) {}

  DC_DEVICE void run() {
    load_.part = store_.part = part_at(0);
    while (true) {
      // Loads only what has arrived, unless there is nothing else to do.
      while (pipe_.can_load() && load_next(pipe_.num_loads() == pipe_.num_stores())) {
      }
      if (pipe_.num_loads() == pipe_.num_stores()) break;  // all are done, or a wait has failed
      store_next();
    }
    pipe_.drain();
  }

 private:
  using Part = TakeRailRows::Rows;
  struct Cursor {
    Part part;
    uint32_t index = 0;
    int row = 0;
    int piece = 0;
  };

  // The index-th part of this warp; without rows after the last.
  DC_DEVICE Part part_at(uint32_t index) {
    const int item = parts_.at(index);
    if (item < 0) return {0, 0, 0};
    return take_.rows_of(item);
  }
  DC_DEVICE void advance(Cursor& cursor) {
    if (++cursor.piece < pieces_.num_pieces) return;
    cursor.piece = 0;
    if (++cursor.row < cursor.part.num_rows) return;
    cursor.row = 0;
    cursor.part = part_at(++cursor.index);
  }

  // The whole warp: counts the rows of `part`, from `first` on, that have arrived. The first one
  // matters; the others save later looks. With `waits`, none means that the wait has failed.
  DC_DEVICE int num_come(const Part& part, int first, bool waits) {
    const RailTier& tier = args_.tiers.rail;
    const RailChunks chunks = rail_chunks(args_, is_near_, num_rows_from(args_, part.node));
    const int row = first + arch::lane_idx();
    bool ok = false;
    if (row < part.num_rows) {
      const uint64_t* word = own_word(
          args_.world, tier.layout.landed_of(part.node, (part.first + row) / chunks.chunk_rows));
      // pairs with: RowPublisher at the node — the chunk's rows and their metadata
      ok = Tagged::unpack(arch::ld_acquire_sys(word)).generation == context_.generation;
      if (!ok && waits && arch::lane_idx() == 0) {
        uint32_t seen = 0;
        ok = await_tagged(context_, word, {Stage::kRailTail, Word::kLanded, part.node, -1}, 1,
                          &seen);
      }
    }
    const uint32_t missing = ~arch::ballot(kFullMask, ok);
    arch::sync_warp();  // hands each lane's acquire to lane 0, which loads
    // Before the bulk loads of the rows.
    // order-proof: the simulation asks for it after stores of the same thread; these are a peer's
    if (arch::lane_idx() == 0) arch::fence_proxy_async_global();
    return missing == 0 ? kWarpSize : arch::ffs(missing) - 1;
  }

  // Begins the next load if there is one and its row has arrived.
  DC_DEVICE bool load_next(bool waits) {
    const Part& part = load_.part;
    if (part.num_rows == 0) return false;
    if (load_.row == 0 && load_.piece == 0) num_come_ = 0;
    if (load_.row == num_come_) {
      num_come_ += num_come(part, load_.row, waits);
      if (load_.row == num_come_) return false;
    }
    const int meta_bytes = args_.placed.meta_bytes();
    if (arch::lane_idx() == 0) {
      const RailTier& tier = args_.tiers.rail;
      const uint8_t* slot =
          args_.world.bases[args_.world.rank] +
          args_.staging.recv_slot(!is_near_, tier.node, part.node, part.first + load_.row);
      const int num_bytes = pieces_.bytes_of(load_.piece);
      if (load_.piece == 0) {
        pipe_.load(slot, meta_bytes + num_bytes);
      } else {
        pipe_.load(slot + meta_bytes + load_.piece * pieces_.piece_bytes, num_bytes);
      }
    }
    pipe_.advance_load();
    advance(load_);
    return true;
  }

  DC_DEVICE void store_next() {
    const int lane = arch::lane_idx(), num_local = args_.tiers.ranks_per_node();
    const int piece = store_.piece;
    const uint8_t* stage = pipe_.current();
    pipe_.await_load();
    if (piece == 0) look_up(stage);
    if (lane < num_local) {
      const uint8_t* src = stage + (piece == 0 ? args_.placed.meta_bytes() : 0);
      if (dst_ != nullptr) {
        arch::bulk_store(dst_ + piece * pieces_.piece_bytes, src, pieces_.bytes_of(piece));
      }
      arch::bulk_commit();
    }
    if (piece == 0) forward_meta(stage);
    pipe_.advance_store();
    if (lane < num_local) pipe_.make_room();
    // All lanes have read the stage that the leader loads next.
    if (piece == 0) arch::fence_proxy_async_shared();
    arch::sync_warp();
    advance(store_);
  }

  DC_DEVICE const int32_t* slots_in(const uint8_t* meta) const {
    return reinterpret_cast<const int32_t*>(meta + args_.placed.slots_offset());
  }
  // Lane i serves local rank (own + 1 + i) % M, so ranks do not all write to the same one.
  DC_DEVICE int64_t row_at(const uint8_t* meta, int local) const {
    const int place = OrderedPlace::place(slots_in(meta)[local]);
    if (place < 0) return -1;
    const int num_nodes = args_.tiers.num_nodes();
    const int64_t row =
        static_cast<int64_t>(entry_->starts()[local * num_nodes + store_.part.node]) + place;
    return row < entry_->outputs[local].num_rows ? row : -1;
  }
  DC_DEVICE void look_up(const uint8_t* meta) {
    const int num_local = args_.tiers.ranks_per_node();
    dst_ = nullptr;
    if (arch::lane_idx() >= num_local) return;
    const int local = (args_.world.rank + 1 + arch::lane_idx()) % num_local;
    const int64_t row = row_at(meta, local);
    if (row >= 0) dst_ = entry_->outputs[local].x + row * args_.message.row_bytes;
  }

  // Writes a row's metadata to the ranks that get it, and for combine, which ranks these are.
  DC_DEVICE void forward_meta(const uint8_t* meta) {
    const int lane = arch::lane_idx(), num_local = args_.tiers.ranks_per_node();
    const int my_place = lane < num_local ? slots_in(meta)[lane] : -1;
    const uint32_t rank_mask = arch::ballot(kFullMask, my_place >= 0);
    for (int local = 0; local < num_local; ++local) {
      const int64_t row = row_at(meta, local);
      if (row >= 0) store_meta(meta, local, row, rank_mask);
    }
    if (args_.send_rank_head != nullptr) {
      write_rank_heads(args_, store_.part.node, store_.part.first + store_.row, my_place);
    }
  }
  DC_DEVICE void store_meta(const uint8_t* meta, int local, int64_t row, uint32_t rank_mask) const {
    const PlacedRailMessage& parts = args_.placed;
    const TierOutput& output = entry_->outputs[local];
    const int lane = arch::lane_idx(), num_topk = parts.num_topk;
    for (int column = lane; column < args_.num_scales; column += kWarpSize) {
      scatter_element(output.scales + (row * args_.num_scales + column) * args_.scale_bytes,
                      meta + parts.scales_offset() + column * args_.scale_bytes, args_.scale_bytes);
    }
    const ExpertMap map{args_.num_experts, args_.tiers.num_ranks()};
    const int rank = args_.tiers.rail.node * args_.tiers.ranks_per_node() + local;
    const int first = map.first_expert(rank), count = map.num_local_experts(rank);
    const int32_t* experts = reinterpret_cast<const int32_t*>(meta + parts.topk_idx_offset());
    const float* weights = reinterpret_cast<const float*>(meta + parts.topk_weights_offset());
    for (int k = lane; k < num_topk; k += kWarpSize) {
      const int expert = experts[k] - first;
      const bool is_here = expert >= 0 && expert < count;
      store_expert(output.topk_idx, row * num_topk + k, args_.topk_idx_bytes,
                   is_here ? expert : -1);
      arch::st_weak(output.topk_weights + row * num_topk + k, is_here ? weights[k] : 0.0f);
    }
    if (lane == 0 && output.src_idx != nullptr) {
      arch::st_weak(output.src_idx + row,
                    *reinterpret_cast<const int32_t*>(meta + parts.src_idx_offset()));
      arch::st_weak(output.src_meta + 2 * row, static_cast<int32_t>(store_.part.node));
      arch::st_weak(output.src_meta + 2 * row + 1, static_cast<int32_t>(rank_mask));
    }
  }

  const Context& context_;
  const InternodeDispatchArgs& args_;
  DirectEntry* entry_;
  bool is_near_;
  TakeRailRows take_;
  WorkQueue<TakeRailRows> parts_;
  Pieces pieces_;
  StagePipe pipe_;
  Cursor load_;
  Cursor store_;
  int num_come_ = 0;        // rows of the part that is being loaded
  uint8_t* dst_ = nullptr;  // this lane's destination of the row that is being stored
};

}  // namespace deep_comm
