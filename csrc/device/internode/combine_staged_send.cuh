// combine, staged mode, inside the node: every row of x is sent to its slot at the local rank that
// forwarded it. Chunks are dealt while the kernel runs. Those that cross to other nodes come first,
// the nodes in rotation, so that all of them get sums from the start. Those of this node's own
// tokens follow.
#pragma once

#include "device/internode/combine_staging.cuh"
#include "device/layout/message.cuh"
#include "device/move/stage_pipe.cuh"
#include "device/sync/work_queue.cuh"

namespace deep_comm {

// The rows of x that return to one local rank, in chunks, in the order in which they are sent.
class ReturnOrder {
 public:
  DC_DEVICE ReturnOrder(const InternodeCombineArgs& args, const StagedTables& tables, int peer)
      : returned_(tables.returned[peer]),
        num_nodes_(args.tiers.num_nodes()),
        own_(args.tiers.rail.node),
        chunks_(tables.returned_chunks[peer]),
        num_crossing_(tables.num_rounds[peer] * (num_nodes_ - 1)) {}

  DC_DEVICE int num_items() const {
    return num_crossing_ + chunks_.count(returned_[own_], returned_[own_ + 1]);
  }

  struct Chunk {
    int node;
    int first;  // row, among all that return to the peer
    int num_rows;
    int number;
  };
  // A chunk without rows: that node has no more.
  DC_DEVICE Chunk at(int item) const {
    int node = own_, index = item - num_crossing_;
    if (index < 0) {
      const int step = item % (num_nodes_ - 1) + 1;
      index = item / (num_nodes_ - 1);
      node = (own_ + step) % num_nodes_;
    }
    const int begin = returned_[node], end = returned_[node + 1];
    const int slice = begin / chunks_.rows + index;
    const int first = max_of(begin, slice * chunks_.rows);
    return {node, first, min_of(end, (slice + 1) * chunks_.rows) - first, slice + node};
  }

 private:
  const int32_t* returned_;
  int num_nodes_;
  int own_;
  PairChunks chunks_;
  int num_crossing_;
};

// Lane 0 of a sending warp takes chunks for one local rank until none is left, then for the next.
class TakeReturn {
 public:
  static constexpr int kPeerShift = 24;

  DC_DEVICE TakeReturn(const Context& node, const InternodeCombineArgs& args,
                       const StagedTables& tables, int first_peer)
      : counters_(taken_work(node)->num_chunks),
        args_(&args),
        tables_(&tables),
        num_left_(args.world.num_ranks - 1),
        peer_((args.world.rank + 1 + first_peer % num_left_) % args.world.num_ranks),
        order_(args, tables, peer_) {}

  DC_DEVICE int operator()() {
    while (num_left_ > 0) {
      const uint32_t item = arch::atomic_add_relaxed_gpu(&counters_[peer_], 1u);
      if (item < static_cast<uint32_t>(order_.num_items())) {
        if (order_.at(static_cast<int>(item)).num_rows > 0)
          return peer_ << kPeerShift | static_cast<int>(item);
        continue;
      }
      --num_left_;
      peer_ = (peer_ + 1) % args_->world.num_ranks;
      if (peer_ == args_->world.rank) peer_ = (peer_ + 1) % args_->world.num_ranks;
      order_ = ReturnOrder(*args_, *tables_, peer_);
    }
    return -1;
  }

 private:
  uint32_t* counters_;
  const InternodeCombineArgs* args_;
  const StagedTables* tables_;
  int num_left_;  // peers
  int peer_;
  ReturnOrder order_;
};

// One warp: sends the chunks it takes. Loads begin before the peers have arrived (begin), stores
// after that (run).
class ReturnSender {
 public:
  DC_DEVICE ReturnSender(const Context& node, const InternodeCombineArgs& args, StagedEntry* entry,
                         StagePipe& pipe, int sender)
      : context_(node),
        args_(args),
        entry_(entry),
        pipe_(pipe),
        sender_(sender),
        meta_bytes_(align_up(4 * args.message.num_topk, 16)),
        pieces_(Pieces::of(args.message.row_bytes, args.stage)),
        items_(TakeReturn(node, args, entry->tables, sender + arch::block_idx())) {}

  DC_DEVICE void begin() {
    load_.chunk = chunk_at(0);
    while (load_.chunk.num_rows > 0 && pipe_.can_load()) load_next();
  }

  DC_DEVICE void run() {
    const int lane = arch::lane_idx();
    const bool is_peer = lane < args_.world.num_ranks && lane != args_.world.rank;
    const uint64_t my_base =
        is_peer ? reinterpret_cast<uint64_t>(staging_at_local(context_, lane)) : 0;
    const size_t slot_bytes = args_.message.slot_bytes();
    uint32_t num_chunks = 0;
    for (Chunk chunk = chunk_at(0); chunk.num_rows > 0; chunk = chunk_at(num_chunks)) {
      has_failed_ = !entry_->landed.post(context_, sender_, num_chunks,
                                         chunk.peer * kMaxPairChunks + chunk.number);
      if (has_failed_) break;
      uint8_t* base = reinterpret_cast<uint8_t*>(arch::shfl(kFullMask, my_base, chunk.peer));
      base += static_cast<size_t>(chunk.first) * slot_bytes;
      for (int row = 0; row < chunk.num_rows; ++row)
        store_row(chunk.x_row + row, base + row * slot_bytes);
      if (static_cast<uint32_t>(lane) == num_chunks % kWarpSize) ends_ = pipe_.num_stores();
      ++num_chunks;
      report_landed(num_chunks);
    }
    if (lane == 0) {
      pipe_.drain();
      entry_->progress.finish(sender_, has_failed_ ? num_landed_ : num_chunks);
    }
  }

  // Instead of run: frees the stages. A block barrier follows.
  DC_DEVICE void give_up() {
    while (pipe_.num_stores() != pipe_.num_loads()) {
      if (arch::lane_idx() == 0) pipe_.await_load();
      pipe_.advance_store();
    }
  }

 private:
  struct Chunk {
    int peer;
    int number;
    int first;  // row, among those that return to the peer
    int num_rows;
    int64_t x_row;
  };
  struct LoadCursor {
    Chunk chunk;
    uint32_t index = 0;
    int row = 0;
    int piece = 0;
  };

  // The index-th chunk of this warp; without rows after the last.
  DC_DEVICE Chunk chunk_at(uint32_t index) {
    const int item = items_.at(index);
    if (item < 0) return {-1, 0, 0, 0, 0};
    const int peer = item >> TakeReturn::kPeerShift;
    const ReturnOrder::Chunk chunk =
        ReturnOrder(args_, entry_->tables, peer).at(item & ((1 << TakeReturn::kPeerShift) - 1));
    const StagedTables& tables = entry_->tables;
    return {peer, chunk.number, chunk.first, chunk.num_rows,
            static_cast<int64_t>(tables.x_starts[peer][chunk.node]) + chunk.first -
                tables.returned[peer][chunk.node]};
  }

  DC_DEVICE void load_next() {
    if (load_.chunk.num_rows == 0) return;
    // A worst-case handle may name rows that were dropped, which dispatch has reported. Any row
    // will do.
    const int64_t row = min_of<int64_t>(load_.chunk.x_row + load_.row, args_.num_rows - 1);
    if (arch::lane_idx() == 0) {
      pipe_.make_room();
      pipe_.load(args_.x + row * args_.message.row_bytes + load_.piece * pieces_.piece_bytes,
                 pieces_.bytes_of(load_.piece));
    }
    pipe_.advance_load();
    if (++load_.piece < pieces_.num_pieces) return;
    load_.piece = 0;
    if (++load_.row < load_.chunk.num_rows) return;
    load_.row = 0;
    load_.chunk = chunk_at(++load_.index);
  }

  DC_DEVICE void store_row(int64_t x_row, uint8_t* slot) {
    for (int piece = 0; piece < pieces_.num_pieces; ++piece) {
      int num_bytes = pieces_.bytes_of(piece);
      if (pieces_.is_last(piece) && meta_bytes_ != 0) {
        // The leader has seen this stage read out before any lane writes into it.
        arch::sync_warp();
        const int num_topk = args_.message.num_topk;
        const int64_t row = min_of<int64_t>(x_row, args_.num_rows - 1);
        float* weights = reinterpret_cast<float*>(pipe_.current() + num_bytes);
        for (int k = arch::lane_idx(); k < num_topk; k += kWarpSize) {
          weights[k] = arch::ld_nc(args_.topk_weights + row * num_topk + k);
        }
        // Before the bulk copy that reads them.
        arch::fence_proxy_async_shared();
        arch::sync_warp();
        num_bytes += meta_bytes_;
      }
      if (arch::lane_idx() == 0) {
        pipe_.await_load();
        pipe_.store(slot + piece * pieces_.piece_bytes, num_bytes);
      }
      pipe_.advance_store();
      load_next();
    }
  }

  // Reports the chunks whose stores have landed. Waiting for the newest stores would empty the
  // pipeline, so they are reported later.
  DC_DEVICE void report_landed(uint32_t num_chunks) {
    const StoresLeft left = StoresLeft::behind(num_chunks);
    uint32_t num_landed = num_landed_;
    while (num_landed < num_chunks &&
           arch::shfl(kFullMask, ends_, num_landed % kWarpSize) + left.count <=
               pipe_.num_stores()) {
      ++num_landed;
    }
    if (num_landed == num_landed_) return;
    num_landed_ = num_landed;
    if (arch::lane_idx() == 0) {
      left.wait();
      entry_->progress.report(sender_, num_landed);
    }
  }

  const Context& context_;
  const InternodeCombineArgs& args_;
  StagedEntry* entry_;
  StagePipe& pipe_;
  int sender_;
  int meta_bytes_;
  Pieces pieces_;
  WorkQueue<TakeReturn> items_;
  LoadCursor load_;
  uint32_t ends_ = 0;  // lane i: stores up to the end of the last chunk whose index is i modulo 32
  uint32_t num_landed_ = 0;
  bool has_failed_ = false;
};

}  // namespace deep_comm
