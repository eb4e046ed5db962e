// combine, staged mode, the warps that move rows of x as they are, in chunks that are dealt while
// the kernel runs.
//
// Several ranks per node: every row goes to its slot at the local rank that forwarded it. Those that
// cross to other nodes come first, the nodes in rotation, so that all of them get sums from the
// start. Those of this node's own tokens follow.
//
// One rank per node: a row is its node's whole sum. It goes to its slot at the owner's node, and
// there is nothing to add before that. The bits are those of a sum of one row: rounding it would
// only make 0 of -0, and the owner's sum, which begins with 0, does so too.
#pragma once

#include "device/internode/combine_forward_order.cuh"
#include "device/internode/combine_staging.cuh"
#include "device/layout/message.cuh"
#include "device/move/row_weights.cuh"
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
        by_others_(Divisor::make(max_of(num_nodes_ - 1, 1))),
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
      index = by_others_.quotient(item);
      node = own_ + 1 + item - index * (num_nodes_ - 1);
      if (node >= num_nodes_) node -= num_nodes_;
    }
    const int begin = returned_[node], end = returned_[node + 1];
    const int slice = (begin >> chunks_.shift) + index;
    const int first = max_of(begin, slice << chunks_.shift);
    return {node, first, min_of(end, (slice + 1) << chunks_.shift) - first, slice + node};
  }

 private:
  const int32_t* returned_;
  int num_nodes_;
  int own_;
  Divisor by_others_;
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

// Rows that a sending warp moves to one place.
struct SentChunk {
  int peer;      // local rank, or node
  int item;      // for the publisher
  int first;     // row, among those that go to the peer
  int num_rows;  // 0: there is no more
  int64_t x_row;
};

// For a RowSender, with several ranks per node.
class RowsToRanks {
 public:
  static constexpr bool kCrosses = false;

  DC_DEVICE RowsToRanks(const TierContexts& contexts, const InternodeCombineArgs& args,
                        const StagedTables& tables, int sender)
      : contexts_(contexts),
        args_(args),
        tables_(tables),
        items_(TakeReturn(contexts.node, args, tables, sender + arch::block_idx())) {}

  // The index-th chunk of this warp.
  DC_DEVICE SentChunk take(uint32_t index) { return chunk_of(items_.at(index)); }
  DC_DEVICE SentChunk taken(uint32_t index) const { return chunk_of(items_.taken(index)); }
  // Lane j: where the rows for peer j begin. After enter_combine.
  DC_DEVICE uint8_t* target() const {
    const int lane = arch::lane_idx();
    const bool is_peer = lane < args_.world.num_ranks && lane != args_.world.rank;
    return is_peer ? staging_at_local(contexts_.node, lane) : nullptr;
  }

 private:
  DC_DEVICE SentChunk chunk_of(int item) const {
    if (item < 0) return {-1, 0, 0, 0, 0};
    const int peer = item >> TakeReturn::kPeerShift;
    const ReturnOrder::Chunk chunk =
        ReturnOrder(args_, tables_, peer).at(item & ((1 << TakeReturn::kPeerShift) - 1));
    return {peer, peer * kMaxPairChunks + chunk.number, chunk.first, chunk.num_rows,
            static_cast<int64_t>(tables_.x_starts[peer][chunk.node]) + chunk.first -
                tables_.returned[peer][chunk.node]};
  }

  const TierContexts& contexts_;
  const InternodeCombineArgs& args_;
  const StagedTables& tables_;
  WorkQueue<TakeReturn> items_;
};

// The same with one rank per node: the rows of x that came from a node lie in the order of their
// slots there.
class RowsToNodes {
 public:
  static constexpr bool kCrosses = true;

  DC_DEVICE RowsToNodes(const TierContexts& contexts, const InternodeCombineArgs& args,
                        const StagedTables& tables, int)
      : contexts_(contexts),
        args_(args),
        tables_(tables),
        items_(ForwardedRows::ask(contexts.node, args, tables)) {}

  DC_DEVICE SentChunk take(uint32_t index) { return chunk_of(items_.at(index)); }
  DC_DEVICE SentChunk taken(uint32_t index) const { return chunk_of(items_.taken(index)); }
  DC_DEVICE uint8_t* target() const { return sums_target(contexts_.rail, args_, tables_); }

 private:
  DC_DEVICE SentChunk chunk_of(int item) const {
    if (item < 0) return {-1, 0, 0, 0, 0};
    const int node = ForwardedRows::node_of(item), row = ForwardedRows::row_of(item);
    return {node, ForwardedRows::sum_item(args_, tables_, node, row), row, 1,
            static_cast<int64_t>(tables_.x_starts[0][node]) + row};
  }

  const TierContexts& contexts_;
  const InternodeCombineArgs& args_;
  const StagedTables& tables_;
  AskedQueue<ForwardedRows> items_;
};

// One warp: sends the chunks it takes. Loads begin before the peers have arrived (begin), stores
// after that (run). Chunks: RowsToRanks or RowsToNodes.
template <class Chunks>
class RowSender {
 public:
  DC_DEVICE RowSender(const TierContexts& contexts, const InternodeCombineArgs& args,
                      StagedEntry* entry, StagePipe& pipe, int sender)
      : context_(contexts.node),
        args_(args),
        entry_(entry),
        pipe_(pipe),
        sender_(sender),
        meta_bytes_(align_up(4 * args.message.num_topk, 16)),
        pieces_(Pieces::of(args.message.row_bytes, args.stage)),
        chunks_(contexts, args, entry->tables, sender) {}

  DC_DEVICE void begin() {
    load_.chunk = chunks_.take(0);
    if (load_.chunk.num_rows > 0) weights_.load(args_, row_of_x(load_.chunk, 0));
    while (load_.chunk.num_rows > 0 && pipe_.can_load()) load_next();
  }

  DC_DEVICE void run() {
    const int lane = arch::lane_idx();
    const auto target = reinterpret_cast<uint64_t>(chunks_.target());
    const size_t slot_bytes = args_.message.slot_bytes();
    uint32_t num_chunks = 0;
    for (SentChunk chunk = chunks_.taken(0); chunk.num_rows > 0;
         chunk = chunks_.taken(num_chunks)) {
      has_failed_ = !entry_->landed.post(context_, sender_, num_chunks, chunk.item);
      if (has_failed_) break;
      uint8_t* base = reinterpret_cast<uint8_t*>(arch::shfl(kFullMask, target, chunk.peer));
      base += static_cast<size_t>(chunk.first) * slot_bytes;
      for (int row = 0; row < chunk.num_rows; ++row) {
        store_row(chunk, num_chunks, row, base + row * slot_bytes);
      }
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
  struct LoadCursor {
    SentChunk chunk;
    uint32_t index = 0;
    int row = 0;
    int piece = 0;
  };

  DC_DEVICE void load_next() {
    if (load_.chunk.num_rows == 0) return;
    const int64_t row = row_of_x(load_.chunk, load_.row);
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
    load_.chunk = chunks_.take(++load_.index);
  }

  // A worst-case handle may name rows that were dropped, which dispatch has reported. Any row will
  // do.
  DC_DEVICE int64_t row_of_x(const SentChunk& chunk, int row) const {
    return min_of<int64_t>(chunk.x_row + row, args_.num_rows - 1);
  }

  // Of this warp's index-th chunk.
  DC_DEVICE void store_row(const SentChunk& chunk, uint32_t index, int row, uint8_t* slot) {
    for (int piece = 0; piece < pieces_.num_pieces; ++piece) {
      int num_bytes = pieces_.bytes_of(piece);
      if (pieces_.is_last(piece) && meta_bytes_ != 0) {
        // The leader has seen this stage read out before any lane writes into it.
        arch::sync_warp();
        weights_.write(args_, pipe_.current() + num_bytes, row_of_x(chunk, row));
        // Before the bulk copy that reads them.
        arch::fence_proxy_async_shared();
        arch::sync_warp();
        weights_.load(args_, row + 1 < chunk.num_rows ? row_of_x(chunk, row + 1)
                                                      : row_of_x(chunks_.taken(index + 1), 0));
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
  Chunks chunks_;
  LoadCursor load_;
  // Of the row that is stored next. After the last row they are of some row, and nobody writes them.
  RowWeights weights_;
  uint32_t ends_ = 0;  // lane i: stores up to the end of the last chunk whose index is i modulo 32
  uint32_t num_landed_ = 0;
  bool has_failed_ = false;
};

}  // namespace deep_comm
