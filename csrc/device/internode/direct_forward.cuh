// dispatch, direct mode, inside the node: rows that have arrived over the rail are forwarded to
// their final rows, from their slots or from the final row that this rank has got itself. Chunks are
// dealt while the kernel runs. A warp that waits for a chunk has nothing else to do.
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

// One warp: forwards the rows it takes. In a slot the metadata and the first piece of the row are one
// load. A straight row lies in a final row of this rank already: its metadata is a load of its own,
// and the row is loaded only if other ranks of the node get it.
class RowForwarder {
 public:
  DC_DEVICE RowForwarder(const Context& rail, const InternodeDispatchArgs& args, DirectEntry* entry,
                         int warp)
      : context_(rail),
        args_(args),
        entry_(entry),
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
    int load = 0;  // of the row
  };
  // Where a row lies. The loads that it takes, each with a stage, follow from that.
  struct Origin {
    int word = -1;  // in its slot; otherwise the final row here * 2 + (other ranks get it, too)

    DC_DEVICE bool is_straight() const { return word >= 0; }
    DC_DEVICE int final_row() const { return word >> 1; }
    DC_DEVICE int num_loads(int num_pieces) const {
      return !is_straight() ? num_pieces : (word & 1) != 0 ? 1 + num_pieces : 1;
    }
    // Of the row; negative: metadata only.
    DC_DEVICE int piece_of(int load) const { return load - static_cast<int>(is_straight()); }
  };

  // The index-th part of this warp; without rows after the last.
  DC_DEVICE Part part_at(uint32_t index) {
    const int item = parts_.at(index);
    if (item < 0) return {0, 0, 0};
    return take_.rows_of(item);
  }
  DC_DEVICE void advance(Cursor& cursor, const Origin& origin) {
    if (++cursor.load < origin.num_loads(pieces_.num_pieces)) return;
    cursor.load = 0;
    if (++cursor.row < cursor.part.num_rows) return;
    cursor.row = 0;
    cursor.part = part_at(++cursor.index);
  }

  // The i-th destination is local rank (own + 1 + i) % M, so ranks do not all write to the same one.
  // This rank is the last one.
  DC_DEVICE int local_at(int idx) const {
    return (args_.world.rank + 1 + idx) % args_.tiers.ranks_per_node();
  }
  // The lane that keeps the origin of a part's row, from before its load to its store.
  DC_DEVICE static int keeper_of(uint32_t part_index, int row) {
    return (part_index * TakeRailRows::kPartRows + row) % kWarpSize;
  }
  DC_DEVICE Origin origin_of(const Cursor& cursor) const {
    return {arch::shfl(kFullMask, origin_.word, keeper_of(cursor.index, cursor.row))};
  }
  DC_DEVICE const uint8_t* slot_of(const Part& part, int row) const {
    return args_.world.bases[args_.world.rank] +
           args_.staging.recv_slot(!entry_->is_near, args_.tiers.rail.node, part.node,
                                   part.first + row);
  }

  // The whole warp: counts the rows of `part`, from `first` on, that have arrived. The first one
  // matters; the others save later looks. With `waits`, none means that the wait has failed.
  DC_DEVICE int num_come(const Part& part, int first, bool waits) {
    const RailTier& tier = args_.tiers.rail;
    const RailChunks chunks = rail_chunks(args_, entry_->is_near, num_rows_from(args_, part.node));
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
    arch::sync_warp();  // hands each lane's acquire to all lanes
    // Before the bulk loads of the rows.
    // order-proof: the simulation asks for it after stores of the same thread; these are a peer's
    if (arch::lane_idx() == 0) arch::fence_proxy_async_global();
    return arch::ffs(missing) - 1;  // a part has fewer rows than a warp has lanes
  }

  // The whole warp: finds where rows [begin, end) of the part that is loaded lie. They have arrived.
  // A load of the metadata would tell too late. TokenSender at the node decides in the same way.
  DC_DEVICE void find_origins(int begin, int end) {
    static_assert(TakeRailRows::kPartRows * kMaxRanks <= kWarpSize);
    if (!entry_->is_near) return;
    const int num_local = args_.tiers.ranks_per_node(), row = arch::lane_idx() / num_local;
    int final_row = -1;  // lane row * M + i: of that row at the i-th destination
    if (row >= begin && row < end) {
      const int local = local_at(arch::lane_idx() % num_local);
      const int32_t* places = slots_in(slot_of(load_.part, row));
      final_row = row_at(load_.part, local, arch::ld_weak(places + local));
    }
    const uint32_t goes = arch::ballot(kFullMask, final_row >= 0);
    for (int other = begin; other < end; ++other) {
      const int own = (other + 1) * num_local - 1;
      const int here = arch::shfl(kFullMask, final_row, own);
      const bool is_shared = (goes >> (own + 1 - num_local) & ((1u << (num_local - 1)) - 1)) != 0;
      if (arch::lane_idx() == keeper_of(load_.index, other))
        origin_.word = here < 0 ? -1 : 2 * here + static_cast<int>(is_shared);
    }
  }

  // Begins the next load if there is one and its row has arrived.
  DC_DEVICE bool load_next(bool waits) {
    const Part& part = load_.part;
    if (part.num_rows == 0) return false;
    if (load_.row == 0 && load_.load == 0) num_come_ = 0;
    if (load_.row == num_come_) {
      num_come_ += num_come(part, load_.row, waits);
      if (load_.row == num_come_) return false;
      find_origins(load_.row, num_come_);
    }
    const Origin origin = origin_of(load_);
    if (arch::lane_idx() == 0) {
      const uint8_t* slot = slot_of(part, load_.row);
      const int meta_bytes = args_.placed.meta_bytes(), piece = origin.piece_of(load_.load);
      const int num_bytes = piece < 0 ? 0 : pieces_.bytes_of(piece);
      if (load_.load == 0) {
        pipe_.load(slot, meta_bytes + num_bytes);
      } else {
        const uint8_t* row = origin.is_straight() ? final_row(args_.world.rank, origin.final_row())
                                                  : slot + meta_bytes;
        pipe_.load(row + piece * pieces_.piece_bytes, num_bytes);
      }
    }
    pipe_.advance_load();
    advance(load_, origin);
    return true;
  }

  DC_DEVICE void store_next() {
    const int lane = arch::lane_idx(), num_local = args_.tiers.ranks_per_node();
    const bool has_meta = store_.load == 0;
    const uint8_t* stage = pipe_.current();
    pipe_.await_load();
    const Origin origin = origin_of(store_);
    const int piece = origin.piece_of(store_.load);
    if (has_meta) look_up(stage, origin);
    if (lane < num_local) {
      const uint8_t* src = stage + (has_meta ? args_.placed.meta_bytes() : 0);
      if (dst_ != nullptr && piece >= 0) {
        arch::bulk_store(dst_ + piece * pieces_.piece_bytes, src, pieces_.bytes_of(piece));
      }
      arch::bulk_commit();
    }
    if (has_meta) forward_meta(stage);
    pipe_.advance_store();
    if (lane < num_local) pipe_.make_room();
    // All lanes have read the stage that the leader loads next.
    if (has_meta) arch::fence_proxy_async_shared();
    arch::sync_warp();
    advance(store_, origin);
  }

  DC_DEVICE const int32_t* slots_in(const uint8_t* meta) const {
    return reinterpret_cast<const int32_t*>(meta + args_.placed.slots_offset());
  }
  // The final row of one of the part's rows at a local rank, or -1. word: OrderedPlace.
  DC_DEVICE int row_at(const Part& part, int local, int word) const {
    const int place = OrderedPlace::place(word);
    if (place < 0) return -1;
    const int row =
        entry_->starts(args_.tiers)[local * args_.tiers.num_nodes() + part.node] + place;
    return row < entry_->outputs[local].num_rows ? row : -1;
  }
  DC_DEVICE uint8_t* final_row(int local, int row) const {
    return entry_->outputs[local].x + static_cast<int64_t>(row) * args_.message.row_bytes;
  }
  // Finds where this lane's destination gets the row that is stored next.
  DC_DEVICE void look_up(const uint8_t* meta, const Origin& origin) {
    dst_ = nullptr;
    if (arch::lane_idx() >= args_.tiers.ranks_per_node()) return;
    const int local = local_at(arch::lane_idx());
    if (origin.is_straight() && local == args_.world.rank) return;
    const int row = row_at(store_.part, local, slots_in(meta)[local]);
    if (row >= 0) dst_ = final_row(local, row);
  }

  // Writes a row's metadata to the ranks that get it, and for combine, which ranks these are.
  DC_DEVICE void forward_meta(const uint8_t* meta) {
    const int lane = arch::lane_idx(), num_local = args_.tiers.ranks_per_node();
    const int my_place = lane < num_local ? slots_in(meta)[lane] : -1;
    const uint32_t rank_mask = arch::ballot(kFullMask, my_place >= 0);
    for (int local = 0; local < num_local; ++local) {
      const int row = row_at(store_.part, local, slots_in(meta)[local]);
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
  TakeRailRows take_;
  WorkQueue<TakeRailRows> parts_;
  Pieces pieces_;
  StagePipe pipe_;
  Cursor load_;
  Cursor store_;
  int num_come_ = 0;        // rows of the part that is being loaded
  Origin origin_;           // see keeper_of
  uint8_t* dst_ = nullptr;  // this lane's destination of the row that is being stored
};

}  // namespace deep_comm
