// dispatch, direct mode, inside the node: rows that have arrived over the rail are forwarded to
// their final rows, from their slots or, if straight, from this rank's own final row. Other warps
// write their metadata: direct_meta.cuh.
#pragma once

#include "device/internode/direct_publish.cuh"

namespace deep_comm {

// Returns the final row at a local rank of a row from `node`, which may be this one; or -1. word:
// OrderedPlace.
DC_DEVICE int final_row(const InternodeDispatchArgs& args, DirectEntry* entry, int node, int local,
                        int word) {
  const int place = OrderedPlace::place(word);
  if (place < 0) return -1;
  const int row = entry->starts(args.tiers)[local * args.tiers.num_nodes() + node] + place;
  return row < entry->outputs[local].num_rows ? row : -1;
}

// Rows from other nodes, as the rank of this local index there has sent them: where their slots lie,
// and where they belong.
class RailRows {
 public:
  DC_DEVICE RailRows(const Context& rail, const InternodeDispatchArgs& args, DirectEntry* entry)
      : context_(rail), args_(args), entry_(entry) {}

  // A few consecutive rows of one node.
  struct Part {
    int node;
    int first;  // among those of the node
    int num_rows;
  };
  // Parts are numbered with the nodes in rotation. Returns how many numbers there are; some have no
  // rows. A part may lie in two chunks.
  DC_DEVICE int num_parts(int part_rows) const {
    int num_rounds = 0;
    for (int other = 0; other < num_others(); ++other) {
      num_rounds = max_of(num_rounds, ceil_div(num_rows_from(args_, node_of(other)), part_rows));
    }
    return num_rounds * num_others();
  }
  DC_DEVICE Part part(int number, int part_rows) const {
    // Each round begins with another node, so that every n-th part is not always one node's.
    const int round = number / num_others();
    const int node = node_of((number + round) % num_others()), first = round * part_rows;
    return {node, first, min_of(num_rows_from(args_, node) - first, part_rows)};
  }

  DC_DEVICE const uint8_t* slot(int node, int row) const {
    return args_.world.bases[args_.world.rank] +
           args_.staging.recv_slot(!args_.tiers.rail.are_all_near, args_.tiers.rail.node, node,
                                   row);
  }
  // By local rank, in a slot: OrderedPlace of the row there.
  DC_DEVICE const int32_t* places_in(const uint8_t* slot) const {
    return reinterpret_cast<const int32_t*>(slot + args_.placed.slots_offset());
  }
  // Whether a row whose final row at local rank `local` is `target` (-1: none) lies there already:
  // TokenSender at the node decides in the same way.
  DC_DEVICE bool is_straight(int local, int target) const {
    return args_.tiers.rail.are_all_near && local == args_.world.rank && target >= 0;
  }
  // One lane: returns whether a row has arrived, with its metadata. With `waits`, waits for it first.
  DC_DEVICE bool has_arrived(int node, int row, bool waits) const {
    const RailChunks chunks = rail_chunks(args_, num_rows_from(args_, node));
    const uint64_t* word =
        own_word(args_.world, args_.tiers.rail.layout.landed_of(node, chunks.chunk_of(row)));
    // pairs with: RowPublisher at the node — the chunk's rows and their metadata
    if (Tagged::unpack(arch::ld_acquire_sys(word)).generation == context_.generation) return true;
    uint32_t seen = 0;
    return waits &&
           await_tagged(context_, word, {Stage::kRailTail, Word::kLanded, node, -1}, 1, &seen);
  }

 private:
  DC_DEVICE int num_others() const { return args_.tiers.num_nodes() - 1; }
  DC_DEVICE int node_of(int other) const {
    return (args_.tiers.rail.node + 1 + other) % args_.tiers.num_nodes();
  }

  const Context& context_;
  const InternodeDispatchArgs& args_;
  DirectEntry* entry_;
};

// Parts for an AskedQueue of forwarding warps.
class RailParts {
 public:
  static constexpr int kEnd = -1, kNone = -2;
  // Two. A chunk that was put arrives at once, and the last chunk ends the kernel, so many warps
  // should share it. With one row per part each row would need its own request to the counter.
  static constexpr int kPartRows = 2;

  DC_DEVICE explicit RailParts(const RailRows& rows)
      : rows_(rows), num_parts_(rows.num_parts(kPartRows)) {}
  DC_DEVICE int at(uint32_t number) const {
    if (number >= static_cast<uint32_t>(num_parts_)) return kEnd;
    return part(static_cast<int>(number)).num_rows > 0 ? static_cast<int>(number) : kNone;
  }

 private:
  DC_DEVICE RailRows::Part part(int number) const { return rows_.part(number, kPartRows); }

  RailRows rows_;
  int num_parts_;
};

// One warp: forwards the rows it takes.
class RowForwarder {
 public:
  DC_DEVICE RowForwarder(const Context& rail, const InternodeDispatchArgs& args, DirectEntry* entry,
                         int warp)
      : args_(args),
        entry_(entry),
        rows_(rail, args, entry),
        taken_(RailParts(rows_), &taken_work(rail)->num_chunks[0]),
        pieces_(Pieces::of(args.message.row_bytes, args.forward_stage)),
        pipe_(make_tier_pipe(args, args.forward_stage, args.forward_stages_offset,
                             args.num_send_warps * args.send_stage.num_stages, warp)) {}

  DC_DEVICE void run() {
    load_.part = part_at(0);
    while (true) {
      // Loads only what has arrived, unless there is nothing else to do.
      while (pipe_.can_load() && load_next()) {
      }
      if (!has_loaded()) break;  // all are done, or a wait has failed
      store_next();
    }
    pipe_.drain();
  }

 private:
  using Part = RailRows::Part;
  struct Cursor {
    Part part{0, 0, 0};
    uint32_t index = 0;
    int row = 0;
    int piece = 0;
  };

  DC_DEVICE bool has_loaded() const { return pipe_.num_loads() != pipe_.num_stores(); }
  // The index-th part of this warp; without rows after the last.
  DC_DEVICE Part part_at(uint32_t index) {
    const int number = taken_.at(index);
    return number < 0 ? Part{0, 0, 0} : rows_.part(number, RailParts::kPartRows);
  }
  DC_DEVICE void advance(Cursor& cursor) {
    if (++cursor.piece == pieces_.num_pieces) skip_row(cursor);
  }
  DC_DEVICE void skip_row(Cursor& cursor) {
    cursor.piece = 0;
    if (++cursor.row < cursor.part.num_rows) return;
    cursor.row = 0;
    cursor.part = part_at(++cursor.index);
  }

  DC_DEVICE int num_local() const { return args_.tiers.ranks_per_node(); }
  // The i-th destination is local rank (own + 1 + i) % M, so ranks do not all write to the same one.
  // This rank is the last one.
  DC_DEVICE int local_at(int idx) const { return (args_.world.rank + 1 + idx) % num_local(); }

  // Each row on its way has a group of lanes, which keep its final rows: lane group * M + i that of
  // destination i.
  DC_DEVICE int num_groups() const { return kWarpSize / num_local(); }
  DC_DEVICE int group_of(uint32_t part_index, int row) const {
    return static_cast<int>((part_index * RailParts::kPartRows + row) % num_groups());
  }
  DC_DEVICE int first_lane(const Cursor& cursor) const {
    return group_of(cursor.index, cursor.row) * num_local();
  }
  // Whether there are groups for the part that is loaded, beside those of rows on their way.
  DC_DEVICE bool has_free_groups() const {
    static_assert(2 * RailParts::kPartRows * kMaxRanks <= kWarpSize);
    return (load_.index + 1 - store_.index) * RailParts::kPartRows <=
           static_cast<uint32_t>(num_groups());
  }
  // Finds where rows [begin, end) of that part belong. They have arrived.
  DC_DEVICE void find_targets(int begin, int end) {
    const int lane = arch::lane_idx(), group = lane / num_local();
    const int distance = group + num_groups() - group_of(load_.index, begin);
    const int row = begin + distance % num_groups();
    if (group >= num_groups() || row >= end) return;
    const Part& part = load_.part;
    const int local = local_at(lane % num_local());
    const int32_t* places = rows_.places_in(rows_.slot(part.node, part.first + row));
    target_ = final_row(args_, entry_, part.node, local, arch::ld_weak(places + local));
    if (rows_.is_straight(local, target_)) target_ = kStraight - target_;
  }
  DC_DEVICE bool has_targets(const Cursor& cursor) const {
    const uint32_t lanes = arch::ballot(kFullMask, target_ >= 0) >> first_lane(cursor);
    return (lanes & ((1u << num_local()) - 1)) != 0;
  }

  // Counts the rows of the part that is loaded, from the next one on, that have arrived. The next
  // one matters; the others save later looks. If nothing is on its way, waits for the next one: 0
  // means that the wait has failed.
  DC_DEVICE int num_arrived() {
    const Part& part = load_.part;
    const int row = load_.row + arch::lane_idx();
    const bool waits = arch::lane_idx() == 0 && !has_loaded();
    const bool ok = row < part.num_rows && rows_.has_arrived(part.node, part.first + row, waits);
    const uint32_t missing = ~arch::ballot(kFullMask, ok);
    arch::sync_warp();  // hands each lane's acquire to all lanes
    // Before the bulk loads of the rows.
    // order-proof: the simulation asks for it after stores of the same thread; these are a peer's
    if (arch::lane_idx() == 0) arch::fence_proxy_async_global();
    return arch::ffs(missing) - 1;  // a part has fewer rows than a warp has lanes
  }

  // Begins the next load if there is one and its row has arrived.
  DC_DEVICE bool load_next() {
    while (true) {
      if (!has_loaded()) store_ = load_;  // no row between them has a target
      if (load_.part.num_rows == 0) return false;
      if (load_.row == num_found_) {
        if (!has_free_groups()) return false;
        const int num_rows = num_arrived();
        if (num_rows == 0) return false;
        find_targets(load_.row, load_.row + num_rows);
        num_found_ += num_rows;
      }
      if (has_targets(load_)) break;
      skip_row(load_);
      if (load_.row == 0) num_found_ = 0;
    }
    const int own_row = arch::shfl(kFullMask, target_, first_lane(load_) + num_local() - 1);
    if (arch::lane_idx() == 0) {
      const Part& part = load_.part;
      const uint8_t* row = own_row <= kStraight ? row_at(args_.world.rank, kStraight - own_row)
                                                : rows_.slot(part.node, part.first + load_.row) +
                                                      args_.placed.meta_bytes();
      pipe_.load(row + load_.piece * pieces_.piece_bytes, pieces_.bytes_of(load_.piece));
    }
    pipe_.advance_load();
    advance(load_);
    if (load_.row == 0 && load_.piece == 0) num_found_ = 0;
    return true;
  }

  DC_DEVICE void store_next() {
    while (!has_targets(store_)) skip_row(store_);
    const int idx = arch::lane_idx();
    const int row = arch::shfl(kFullMask, target_, (first_lane(store_) + idx) % kWarpSize);
    pipe_.await_load();
    if (idx < num_local()) {
      if (row >= 0) {
        arch::bulk_store(row_at(local_at(idx), row) + store_.piece * pieces_.piece_bytes,
                         pipe_.current(), pieces_.bytes_of(store_.piece));
      }
      arch::bulk_commit();
    }
    pipe_.advance_store();
    if (idx < num_local()) pipe_.make_room();
    // All storing lanes have read the stage that the leader loads next.
    arch::sync_warp();
    advance(store_);
  }

  DC_DEVICE uint8_t* row_at(int local, int row) const {
    return entry_->outputs[local].x + static_cast<int64_t>(row) * args_.message.row_bytes;
  }

  static constexpr int kStraight = -2;  // kStraight - r: the row lies in its final row r already

  const InternodeDispatchArgs& args_;
  DirectEntry* entry_;
  RailRows rows_;
  AskedQueue<RailParts> taken_;
  Pieces pieces_;
  StagePipe pipe_;
  Cursor load_;
  Cursor store_;       // at or before the oldest loaded row
  int num_found_ = 0;  // rows of the part that is loaded whose targets are known
  int target_ = -1;    // see group_of; a final row, -1 for none
};

}  // namespace deep_comm
