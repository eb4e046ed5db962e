// The sending half of a ring, for dispatch and combine: a source's rows, in order. A Source tells
// one warp which rows to send and what follows each of them:
//
//   int            next()                              the next row, or -1; the whole warp calls it
//   const uint8_t* row(int row)                        its first byte
//   void           load_meta(int row)                  begins to load the metadata
//   void           write_meta(uint8_t* meta, int row)  fills those loaded last in shared memory
#pragma once

#include "device/channel/ring.cuh"
#include "device/intranode/args.cuh"
#include "device/move/stage_pipe.cuh"
#include "device/sync/publisher.cuh"

namespace deep_comm {

// The pipeline of this warp. Shared memory of the block: [stages of warp 0 | stages of warp 1 | …],
// and the mbarriers from barriers_offset on.
DC_DEVICE StagePipe make_pipe(const StageLayout& stage, size_t barriers_offset) {
  uint8_t* smem = arch::dynamic_smem();
  const int warp = arch::warp_idx();
  arch::Mbarrier* barriers = reinterpret_cast<arch::Mbarrier*>(smem + barriers_offset);
  return {smem + warp * stage.warp_bytes(), barriers + warp * stage.num_stages, stage};
}

// What a sending warp has reported to its block's publisher. Leader only.
class SendReport {
 public:
  // pipe: may have been used before.
  DC_DEVICE SendReport(Progress& progress, int word, uint32_t chunk, const StagePipe& pipe)
      : progress_(progress), word_(word), chunk_(chunk), num_stores_before_(pipe.num_stores()) {}

  // Reports when a chunk of rows has landed. A store needs the time of several rows to land, and
  // waiting for it would empty the pipeline. So the newest stores are reported later.
  DC_DEVICE void after_row(const StagePipe& pipe, int num_pieces) {
    constexpr uint32_t kInFlight = 6;
    const uint32_t num_stores = pipe.num_stores() - num_stores_before_;
    if (num_stores < kInFlight) return;
    const uint32_t num_landed = (num_stores - kInFlight) / num_pieces;
    if (num_landed < num_reported_ + chunk_) return;  // before_wait may have reported more already
    arch::bulk_wait<kInFlight>();
    report(num_landed);
  }
  // Before a wait for credit: reports all of `num_rows`. Otherwise the receiver could not free a
  // slot.
  DC_DEVICE void before_wait(uint32_t num_rows) {
    arch::bulk_wait<0>();
    report(num_rows);
  }
  // After the pipeline has been drained. A failed sender adds nothing to its last report.
  DC_DEVICE void finish(bool ok, uint32_t num_rows) {
    progress_.finish(word_, ok ? num_rows : num_reported_);
  }

 private:
  DC_DEVICE void report(uint32_t num_rows) {
    if (num_rows == num_reported_) return;
    num_reported_ = num_rows;
    progress_.report(word_, num_rows);
  }

  Progress& progress_;
  int word_;
  uint32_t chunk_;
  uint32_t num_stores_before_;
  uint32_t num_reported_ = 0;
};

// Leader: a free slot for `row_idx`.
DC_DEVICE bool acquire_slot(RingSender& ring, SendReport& sent, uint32_t row_idx) {
  if (ring.poll_slot(row_idx)) return true;
  sent.before_wait(row_idx);
  return ring.await_slot(row_idx);
}

// One warp. On failure the pipeline is drained and nothing more is written.
template <class Source>
DC_DEVICE void send_rows(StagePipe& pipe, RingSender& ring, SendReport sent, const Pieces& pieces,
                         int meta_bytes, Source ahead, Source current) {
  const bool is_leader = arch::lane_idx() == 0;
  int load_row = ahead.next();
  int load_piece = 0;
  auto load_next = [&] {
    if (load_row < 0) return;
    if (is_leader) {
      pipe.make_room();
      pipe.load(ahead.row(load_row) + load_piece * pieces.piece_bytes, pieces.bytes_of(load_piece));
    }
    pipe.advance_load();
    if (++load_piece == pieces.num_pieces) {
      load_piece = 0;
      load_row = ahead.next();
    }
  };
  while (load_row >= 0 && pipe.can_load()) load_next();

  // The metadata of a row are loaded while the row before it is stored. Otherwise each row would wait
  // for memory.
  uint32_t row_idx = 0;
  bool ok = true;
  int next_row = current.next();
  if (next_row >= 0 && meta_bytes != 0) current.load_meta(next_row);
  for (; next_row >= 0; ++row_idx) {
    const int row = next_row;
    next_row = current.next();
    if (is_leader) ok = acquire_slot(ring, sent, row_idx);
    ok = arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
    if (!ok) break;
    for (int piece = 0; piece < pieces.num_pieces; ++piece) {
      int num_bytes = pieces.bytes_of(piece);
      if (pieces.is_last(piece) && meta_bytes != 0) {
        // the leader has seen this stage read out before any lane writes into it
        arch::sync_warp();
        current.write_meta(pipe.current() + num_bytes, row);
        // The metadata before the bulk copy that reads it.
        arch::fence_proxy_async_shared();
        arch::sync_warp();
        if (next_row >= 0) current.load_meta(next_row);
        num_bytes += meta_bytes;
      }
      if (is_leader) {
        pipe.await_load();
        pipe.store(ring.slot(row_idx) + piece * pieces.piece_bytes, num_bytes);
      }
      pipe.advance_store();
      load_next();
    }
    if (is_leader) sent.after_row(pipe, pieces.num_pieces);
  }
  if (is_leader) {
    pipe.drain();
    sent.finish(ok, row_idx);
  }
}

}  // namespace deep_comm
