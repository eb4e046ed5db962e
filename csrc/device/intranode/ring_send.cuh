// How a warp sends the rows of a source, in order, for dispatch and combine. Several warps may take
// them in turn. A Source tells one of these warps which rows it sends and what follows each of them:
//
//   int            next()                              its next row, or -1; the whole warp calls it
//   const uint8_t* row(int row)                        its first byte
//   void           load_meta(int row)                  begins to load the metadata
//   void           write_meta(uint8_t* meta, int row)  fills those loaded last in shared memory
//
// A Sink is where the rows go, a ring or this rank's own outputs. row_idx counts the rows of the source:
//
//   bool     acquire(uint32_t row_idx)                 leader: waits until there is room
//   uint8_t* place(uint32_t row_idx, const uint8_t* meta)
//                                                      the whole warp, when the metadata are in
//                                                      shared memory. Null: the row is dropped
//   bool     kSendsMeta                                they are stored after the row
//   void     sent(uint32_t row_idx)                    leader: the stores of the row have been issued
//   void     finish(bool ok, uint32_t row_idx)         leader: the warp's rows before row_idx have
//                                                      landed; without ok it has failed there
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

// Which rows a warp has of those that several take in turn.
struct Turns {
  uint32_t first;
  uint32_t step;
};

// The sink of a warp that fills a ring. It reports a row in the word of Progress that has the warp's
// index: all of its own rows before that one have landed.
class RingSink {
 public:
  static constexpr bool kSendsMeta = true;

  // The whole warp. chunk: rows that it reports at a time.
  DC_DEVICE RingSink(const RingSender& ring, Progress& progress, Turns turns, uint32_t chunk,
                     const Pieces& pieces)
      : ring_(ring),
        progress_(progress),
        step_(turns.step),
        num_pieces_(pieces.num_pieces),
        chunk_(chunk) {
    // The receiver may need earlier rows before this warp can send its first one.
    if (arch::lane_idx() == 0) report(turns.first);
  }

  DC_DEVICE bool acquire(uint32_t row_idx) {
    if (ring_.poll_slot(row_idx)) return true;
    // Reports all rows. Otherwise the receiver could not free a slot.
    arch::bulk_wait<0>();
    report(row_idx);
    return ring_.await_slot(row_idx);
  }
  DC_DEVICE uint8_t* place(uint32_t row_idx, const uint8_t*) const { return ring_.slot(row_idx); }
  // Reports when a chunk of rows has landed. A store needs the time of several rows to land, and
  // waiting for it would empty the pipeline. So the newest rows are reported later.
  DC_DEVICE void sent(uint32_t row_idx) {
    constexpr int kInFlight = 6;  // stores
    const uint32_t next_row = row_idx + step_;
    const uint32_t num_late = ceil_div(kInFlight, num_pieces_) * step_;
    // acquire may have reported more already
    if (next_row < num_reported_ + chunk_ + num_late) return;
    arch::bulk_wait<kInFlight>();
    report(next_row - num_late);
  }
  // A failed sender adds nothing to its last report.
  DC_DEVICE void finish(bool ok, uint32_t row_idx) {
    progress_.finish(arch::warp_idx(), ok ? row_idx : num_reported_);
  }

 private:
  DC_DEVICE void report(uint32_t num_rows) {
    if (num_rows == num_reported_) return;
    num_reported_ = num_rows;
    progress_.report(arch::warp_idx(), num_rows);
  }

  RingSender ring_;
  Progress& progress_;
  uint32_t step_;
  int num_pieces_;
  uint32_t chunk_;
  uint32_t num_reported_ = 0;
};

// One warp. On failure the pipeline is drained and nothing more is written. meta_bytes: of what the
// source writes behind the last piece of each row. That piece is sent first, since the metadata may say
// where the row belongs.
template <class Source, class Sink>
DC_DEVICE void send_rows(StagePipe& pipe, Sink sink, Turns turns, const Pieces& pieces,
                         int meta_bytes, Source ahead, Source current) {
  const bool is_leader = arch::lane_idx() == 0;
  int load_row = ahead.next();
  int load_piece = pieces.num_pieces - 1;
  auto load_next = [&] {
    if (is_leader) {
      pipe.make_room();
      pipe.load(ahead.row(load_row) + load_piece * pieces.piece_bytes, pieces.bytes_of(load_piece));
    }
    pipe.advance_load();
    if (load_piece-- == 0) {
      load_piece = pieces.num_pieces - 1;
      load_row = ahead.next();
    }
  };

  // The metadata of a row are loaded while the row before it is stored. Otherwise each row would wait
  // for memory.
  uint32_t row_idx = turns.first;
  bool ok = true;
  int next_row = current.next();
  if (next_row >= 0 && meta_bytes != 0) current.load_meta(next_row);
  for (; next_row >= 0; row_idx += turns.step) {
    const int row = next_row;
    next_row = current.next();
    if (is_leader) ok = sink.acquire(row_idx);
    ok = arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
    if (!ok) break;
    uint8_t* place = nullptr;
    for (int piece = pieces.num_pieces - 1; piece >= 0; --piece) {
      while (load_row >= 0 && pipe.can_load()) load_next();
      int num_bytes = pieces.bytes_of(piece);
      if (pieces.is_last(piece)) {
        uint8_t* meta = pipe.current() + num_bytes;
        if (meta_bytes != 0) {
          // the leader has seen this stage read out before any lane writes into it
          arch::sync_warp();
          current.write_meta(meta, row);
          // The metadata before the bulk copy that reads it.
          arch::fence_proxy_async_shared();
          arch::sync_warp();
          if (next_row >= 0) current.load_meta(next_row);
        }
        place = sink.place(row_idx, meta);
        if (Sink::kSendsMeta) num_bytes += meta_bytes;
      }
      if (is_leader) {
        pipe.await_load();
        pipe.store(place + piece * pieces.piece_bytes, place != nullptr ? num_bytes : 0);
      }
      pipe.advance_store();
    }
    if (is_leader) sink.sent(row_idx);
  }
  if (is_leader) {
    pipe.drain();
    sink.finish(ok, row_idx);
  }
}

}  // namespace deep_comm
