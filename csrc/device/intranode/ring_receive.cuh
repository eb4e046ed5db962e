// How a warp receives the rows of a ring: they pass through its stages. Several warps may take them in
// turn. The tail of the ring says which rows have arrived. The warp loads ahead of its stores only what
// the tail has told already, so it never waits for the sender while it holds a row that the sender
// needs back.
#pragma once

#include "device/intranode/ring_send.cuh"

namespace deep_comm {

// The loads of such a warp, and its reports in the word of Progress that has the warp's index: all of
// its own rows before the reported one have been read. Leader only.
class RingLoader {
 public:
  DC_DEVICE RingLoader(const DispatchArgs& args, const RingReceiver& ring, StagePipe& pipe,
                       Progress& progress, Turns turns, uint32_t num_rows, const Pieces& pieces)
      : ring_(ring),
        pipe_(pipe),
        progress_(progress),
        turns_(turns),
        pieces_(pieces),
        meta_bytes_(args.message.meta_bytes),
        release_step_(min_of(args.num_send_tokens, args.ring.num_slots)),
        num_rows_(num_rows),
        row_(turns.first),
        piece_(pieces.num_pieces - 1),
        num_reported_(turns.first) {}

  // The sender may need the slots of earlier rows before it fills the first one of this warp.
  DC_DEVICE void begin() { progress_.report(arch::warp_idx(), num_reported_); }

  // Waits until the bytes of the current stage have landed, and loads what has arrived after them.
  // False: the wait for the row has failed.
  DC_DEVICE bool await_load() {
    while (row_ < num_rows_ && pipe_.can_load()) {
      const bool is_needed = pipe_.num_loads() == pipe_.num_stores();
      if (!ring_.knows(row_)) {
        if (is_needed ? !ring_.await_filled(row_) : !ring_.poll_filled(row_)) {
          if (is_needed) return false;
          break;
        }
        // The rows that the acquire has made visible, before the bulk loads that read them.
        // order-proof: the simulation asks for it after stores of the same thread; these are a peer's
        arch::fence_proxy_async_global();
      }
      load();
    }
    pipe_.await_load();
    return true;
  }
  // The rows of this warp before num_read have been read.
  DC_DEVICE void free_before(uint32_t num_read) {
    if (num_read < num_reported_ + release_step_) return;
    num_reported_ = num_read;
    progress_.report(arch::warp_idx(), num_reported_);
  }
  // No sender waits for the credit of the last rows: what a warp has read but not reported is less
  // than release_step, and so than a ring of slots.
  DC_DEVICE void finish(bool ok) {
    pipe_.drain();
    progress_.finish(arch::warp_idx(), ok ? num_rows_ : num_reported_);
  }

 private:
  // The last piece of a row comes first: its metadata may say where the row belongs.
  DC_DEVICE void load() {
    if (arch::fault(Fault::kEarlyCredit)) free_before(row_ + turns_.step);
    pipe_.make_room();
    pipe_.load(ring_.slot(row_) + piece_ * pieces_.piece_bytes,
               pieces_.bytes_of(piece_) + (pieces_.is_last(piece_) ? meta_bytes_ : 0));
    pipe_.advance_load();
    if (piece_-- != 0) return;
    piece_ = pieces_.num_pieces - 1;
    row_ += turns_.step;
  }

  RingReceiver ring_;
  StagePipe& pipe_;
  Progress& progress_;
  Turns turns_;
  Pieces pieces_;
  int meta_bytes_;
  uint32_t release_step_;
  uint32_t num_rows_;
  uint32_t row_;  // to be loaded next; then its piece
  int piece_;
  uint32_t num_reported_;
};

}  // namespace deep_comm
