// The warps of a combine that send rows of x as they are, in either tier: by bulk copies, in chunks
// that are dealt while the kernel runs.
#pragma once

#include "device/move/row_weights.cuh"
#include "device/move/stage_pipe.cuh"
#include "device/sync/landed_items.cuh"
#include "device/sync/work_queue.cuh"

namespace deep_comm {

// Rows of x that go to slots that lie one after the other.
struct Chunk {
  int item;      // what the publisher is told
  int peer;      // who gets them: a rank, or a node
  int first;     // row, among those that go to the peer
  int num_rows;  // 0: there is no chunk
  int64_t x_row;
};

// One warp: sends the chunks it takes. Loads begin before the peers have arrived (begin), stores
// after that (run). Entry: what the block's warps share, with `progress` and `landed`. Chunks, for
// an AskedQueue, has besides:
//   Chunk chunk(int item)           item: of `at`, or -1; whole warps call it
//   uint8_t* slots(Chunk)           where the first row goes; once all ranks have entered
//   StoresLeft stores_left(uint32_t num_chunks)
//   bool can_publish()              whether a sender may publish what it has sent itself
//   void publish(int item)          one lane, after a fence: the rows of that item have landed
template <class Chunks, class Args, class Entry>
class RowSender {
 public:
  // warp: among the block's senders.
  DC_DEVICE RowSender(const Context& context, const Args& args, Entry* entry, StagePipe& pipe,
                      int warp, const AskedQueue<Chunks>& chunks)
      : context_(context),
        args_(args),
        entry_(entry),
        pipe_(pipe),
        warp_(warp),
        pieces_(Pieces::of(args.message.row_bytes, args.stage)),
        chunks_(chunks) {}

  DC_DEVICE void begin() {
    take_chunk();
    if (load_.chunk.num_rows > 0) weights_.load(args_, row_of_x(load_.chunk, 0));
    while (load_.chunk.num_rows > 0 && pipe_.can_load()) load_next();
  }

  DC_DEVICE void run() {
    const int lane = arch::lane_idx();
    const size_t slot_bytes = args_.message.slot_bytes();
    uint32_t num_chunks = 0;
    for (Chunk chunk = taken_chunk(0); chunk.num_rows > 0; chunk = taken_chunk(num_chunks)) {
      has_failed_ = !entry_->landed.post(context_, warp_, num_chunks, chunk.item);
      if (has_failed_) break;
      uint8_t* slots = chunks_.items().slots(chunk);
      for (int row = 0; row < chunk.num_rows; ++row) {
        store_row(chunk, num_chunks, row, slots + static_cast<size_t>(row) * slot_bytes);
      }
      if (static_cast<uint32_t>(lane) == num_chunks % kWarpSize) ends_ = pipe_.num_stores();
      ++num_chunks;
      report_landed(num_chunks);
    }
    if (lane == 0) pipe_.drain();
    if (!has_failed_) finish_rest(num_chunks);
    if (lane == 0) entry_->progress.finish(warp_, num_landed_);
  }

  // Instead of run: frees the stages. The leader alone uses the pipeline next.
  DC_DEVICE void give_up() {
    while (pipe_.num_stores() != pipe_.num_loads()) {
      if (arch::lane_idx() == 0) pipe_.await_load();
      pipe_.advance_store();
    }
  }

 private:
  struct LoadCursor {
    Chunk chunk;
    uint32_t index = 0;
    int row = 0;
    int piece = 0;
  };

  // The index-th chunk of this warp, without rows after the last; no later one than is loaded next.
  DC_DEVICE Chunk taken_chunk(uint32_t index) const {
    return chunks_.items().chunk(chunks_.taken(index));
  }
  DC_DEVICE void take_chunk() {
    chunks_.at(load_.index);
    load_.chunk = taken_chunk(load_.index);
  }

  // A worst-case handle may name rows that were dropped, which dispatch has reported. Any row will
  // do.
  DC_DEVICE int64_t row_of_x(const Chunk& chunk, int row) const {
    return min_of<int64_t>(chunk.x_row + row, args_.num_rows - 1);
  }

  DC_DEVICE void load_next() {
    // Not right after the chunk before: the number of the next one may not be known yet
    // (work_queue.cuh).
    if (load_.row == load_.chunk.num_rows && load_.row != 0) {
      load_.row = 0;
      ++load_.index;
      take_chunk();
    }
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
    ++load_.row;
  }

  // Of this warp's index-th chunk.
  DC_DEVICE void store_row(const Chunk& chunk, uint32_t index, int row, uint8_t* slot) {
    const int meta_bytes = args_.message.meta_bytes;
    for (int piece = 0; piece < pieces_.num_pieces; ++piece) {
      int num_bytes = pieces_.bytes_of(piece);
      if (pieces_.is_last(piece) && meta_bytes != 0) {
        // The leader has seen this stage read out before any lane writes into it.
        arch::sync_warp();
        weights_.write(args_, pipe_.current() + num_bytes, row_of_x(chunk, row));
        // Before the bulk copy that reads them.
        arch::fence_proxy_async_shared();
        arch::sync_warp();
        weights_.load(args_, row + 1 < chunk.num_rows ? row_of_x(chunk, row + 1)
                                                      : row_of_x(taken_chunk(index + 1), 0));
        num_bytes += meta_bytes;
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
    const StoresLeft left = chunks_.items().stores_left(num_chunks);
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
      entry_->progress.report(warp_, num_landed);
    }
  }

  // All chunks have landed. If possible the last ones are published from here: the publisher may be
  // in the middle of a fence. The leader alone has stored them.
  DC_DEVICE void finish_rest(uint32_t num_chunks) {
    if (!chunks_.items().can_publish()) {
      num_landed_ = num_chunks;
      return;
    }
    // With the stores of publish a release; these say whom they pair with — the rows
    if (arch::lane_idx() == 0) arch::fence_acq_rel_sys();
    for (uint32_t index = num_landed_; index < num_chunks; ++index) {
      const int item = chunks_.taken(index);
      if (arch::lane_idx() == 0) chunks_.items().publish(item);
    }
  }

  const Context& context_;
  const Args& args_;
  Entry* entry_;
  StagePipe& pipe_;
  int warp_;
  Pieces pieces_;
  AskedQueue<Chunks> chunks_;
  LoadCursor load_;
  // Of the row that is stored next: begin loads the first row's, store_row the next row's. After
  // the last row they are of some row, and nobody writes them.
  RowWeights weights_;
  uint32_t ends_ = 0;  // lane i: stores up to the end of the last chunk whose index is i modulo 32
  uint32_t num_landed_ = 0;
  bool has_failed_ = false;
};

}  // namespace deep_comm
