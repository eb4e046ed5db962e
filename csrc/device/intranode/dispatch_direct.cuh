// dispatch, direct mode: after notify every row's final index is known, so the sender writes it
// there at once. A row is loaded once and stored once per destination, by one lane per destination.
// No receiver copies it.
//
// grid   any number of blocks; warps [0, num_move_warps) move rows of the tokens they take; the
//        next num_meta_warps write metadata of tokens dealt in turn
// forms  expanded: a row is sent to the first of its output rows, and the receiver copies it to the
//        others (expand.cuh), so each row crosses the link once. Tokens are taken in chunks, whose
//        landing is published (dispatch_chunks.cuh). Quantised: dispatch_cast.cuh
// smem   num_move_warps x (stages + mbarriers)
// words  recv_line[c].{start,end}_offset · owner: receiver · written by block 0 of the sender,
//                            before `done`
//        recv_line[b].done · owner: receiver · written by block b of the sender
//                            · release/acquire sys
// waits  done: block b by the same block of every peer, which waits for nobody in between
#pragma once

#include <type_traits>

#include "device/channel/offsets.cuh"
#include "device/intranode/args.cuh"
#include "device/intranode/dispatch_chunks.cuh"
#include "device/intranode/dispatch_meta.cuh"
#include "device/intranode/dispatch_output.cuh"
#include "device/intranode/final_rows.cuh"
#include "device/intranode/ring_send.cuh"
#include "device/layout/channel_range.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"
#include "device/sync/generation.cuh"
#include "device/sync/work_queue.cuh"

namespace deep_comm {

// One warp: moves the tokens it takes. Lane i stores to rank (rank + 1 + i) % R, so ranks do not
// all begin with the same receiver. Loads begin before the peers have arrived (begin), stores after
// that (run).
template <class Form>
class TokenMover {
 public:
  DC_DEVICE TokenMover(const Context& context, const DispatchArgs& args,
                       typename Moved<Form>::Entry* entry)
      : args_(args),
        tokens_(Moved<Form>::tokens(
            args, deal_items(&taken_work(context)->num_tokens, Moved<Form>::num_items(args),
                             arch::warp_idx(), args.num_move_warps))),
        peer_((args.world.rank + 1 + arch::lane_idx()) % args.world.num_ranks),
        is_storing_(arch::lane_idx() < args.world.num_ranks),
        pieces_(Pieces::of(args.message.row_bytes, args.direct_stage)),
        pipe_(make_pipe(args.direct_stage, args.direct_barriers_offset)),
        rows_(args, is_storing_ ? peer_ : 0),
        report_(context, args, entry) {}

  DC_DEVICE void begin() {
    while (load_token() >= 0 && pipe_.can_load()) load_next();
    look_up(0);
  }

  DC_DEVICE void run(const PeerOutput* outputs) {
    const PeerOutput output = outputs[is_storing_ ? peer_ : 0];
    report_.take(tokens_, 0);
    for (uint32_t index = 0; tokens_.at(index) >= 0; ++index) {
      const int64_t row = rows_.row();
      look_up(index + 1);
      report_.take(tokens_, index + 1);
      const bool goes = row >= 0 && row < output.num_rows;
      uint8_t* dst = output.x + row * args_.message.row_bytes;
      for (int piece = 0; piece < pieces_.num_pieces; ++piece) {
        pipe_.await_load();
        if (is_storing_)
          pipe_.store(dst + piece * pieces_.piece_bytes, goes ? pieces_.bytes_of(piece) : 0);
        pipe_.advance_store();
        if (is_storing_) pipe_.make_room();
        // All storing lanes have read the stage that the leader loads next.
        arch::sync_warp();
        load_next();
      }
      report_.template stored<kStoresInFlight>(tokens_, index, pipe_.num_stores());
    }
    pipe_.drain();
    report_.finish();
  }

  // Instead of run, if the mode is not direct.
  DC_DEVICE void give_up() { pipe_.drain(); }

 private:
  DC_DEVICE int load_token() { return tokens_.at(load_index_); }
  // Looks up the rows of the index-th token.
  DC_DEVICE void look_up(uint32_t index) {
    const int token = tokens_.at(index);
    rows_.look_up(is_storing_ && token >= 0 ? token : args_.num_tokens);
  }
  DC_DEVICE void load_next() {
    const int token = load_token();
    if (token < 0) return;
    if (arch::lane_idx() == 0) {
      pipe_.load(args_.x + static_cast<size_t>(token) * args_.message.row_bytes +
                     load_piece_ * pieces_.piece_bytes,
                 pieces_.bytes_of(load_piece_));
    }
    pipe_.advance_load();
    if (++load_piece_ < pieces_.num_pieces) return;
    load_piece_ = 0;
    ++load_index_;
  }

  static constexpr uint32_t kStoresInFlight = 3;  // when older ones are reported
  using Rows = std::conditional_t<Form::kExpanded, FirstRows, FinalRows>;

  const DispatchArgs& args_;
  typename Moved<Form>::template Tokens<WorkQueue<TakeNext>> tokens_;
  uint32_t load_index_ = 0;  // among them
  int load_piece_ = 0;
  int peer_;
  bool is_storing_;
  Pieces pieces_;
  StagePipe pipe_;
  Rows rows_;
  typename Moved<Form>::Report report_;
};

// One warp: scales, expert ids, weights and source of every num_warps-th token, straight to the
// outputs.
template <class Form>
DC_DEVICE void write_metadata(const DispatchArgs& args, const PeerOutput* outputs, int warp,
                              int num_warps) {
  const World& world = args.world;
  constexpr ScaleSource kScales = Form::kQuantised ? ScaleSource::kNone : ScaleSource::kInput;
  const int lane = arch::lane_idx();
  FinalRows rows(args, min_of(lane, world.num_ranks - 1));
  const bool is_in_registers = TokenMeta<kScales>::fits(args);
  TokenMeta<kScales> next;
  rows.look_up(warp);
  if (is_in_registers) next.load(args, warp);
  for (int token = warp; token < args.num_tokens; token += num_warps) {
    const int64_t my_row = lane < world.num_ranks ? rows.row() : -1;
    const TokenMeta<kScales> meta = next;
    rows.look_up(token + num_warps);
    if (is_in_registers) next.load(args, token + num_warps);
    for (int peer = 0; peer < world.num_ranks; ++peer) {
      const int64_t row = arch::shfl(kFullMask, my_row, peer);
      const PeerOutput& output = outputs[peer];
      if (row < 0 || row >= output.num_rows) continue;
      if (is_in_registers) {
        meta.store(args, token, peer, output, row);
      } else {
        store_token_meta<kScales>(args, token, peer, output, row);
      }
    }
  }
}

// Block 0: tells the receivers where each channel's rows begin, for their handles.
DC_DEVICE void send_channel_starts(const Context& context, const DispatchArgs& args) {
  const int num_words = args.world.num_ranks * args.ring.num_channels;
  for (int idx = arch::thread_idx(); idx < num_words; idx += arch::num_threads()) {
    const int peer = idx / args.ring.num_channels, channel = idx % args.ring.num_channels;
    if (args.world.is_absent(peer)) continue;
    const int32_t* prefix =
        args.channel_prefix_matrix + static_cast<int64_t>(peer) * args.ring.num_channels;
    const int32_t start = channel == 0 ? 0 : arch::ld_weak(prefix + channel - 1);
    publish_offsets(
        context, channel, peer,
        {static_cast<uint32_t>(start), static_cast<uint32_t>(arch::ld_weak(prefix + channel))});
  }
}

// Block 0, after block 0 of every peer is done.
DC_DEVICE void read_channel_starts(const DispatchArgs& args) {
  const World& world = args.world;
  const int num_words = world.num_ranks * args.ring.num_channels;
  for (int idx = arch::thread_idx(); idx < num_words; idx += arch::num_threads()) {
    const int channel = idx % args.ring.num_channels, source = idx / args.ring.num_channels;
    const RecvLine* line = world.recv_line(world.rank, channel, source);
    const uint64_t start = world.is_absent(source) ? 0 : arch::ld_relaxed_sys(&line->start_offset);
    arch::st_weak(args.recv_channel_prefix_matrix + idx,
                  static_cast<int32_t>(Tagged::unpack(start).value));
  }
}

// Every thread of every block, last. Tells the peers that everything this block sends has landed,
// and waits for the same block of every peer. Then all blocks together have all rows.
DC_DEVICE void finish_direct(const Context& context, const DispatchArgs& args) {
  const World& world = args.world;
  const int peer = arch::thread_idx(), block = arch::block_idx();
  // Once it hears that this block is done, a peer may go on to write the next counts, over those that
  // this rank's notify may still be reading.
  arch::await_earlier_launch();
  arch::sync_block();
  note_in_block(context, TraceStep::kSent);
  bool ok = true;
  if (world.takes_part(peer)) {
    // pairs with: the await below at the peer — every row and word that this block wrote into its
    // segment
    arch::st_release_sys(&world.recv_line(peer, block, world.rank)->done,
                         Tagged::pack(context.generation, 1));
    uint32_t done = 0;
    ok = arch::fault(Fault::kSkipExitBarrier) ||
         await_tagged(context, &world.recv_line(world.rank, block, peer)->done,
                      {Stage::kDone, Word::kDone, peer, block}, 1, &done);
    if (ok) note(context, TraceStep::kReceived);  // of the last peer that arrives
  }
  if (block != 0 || args.recv_channel_prefix_matrix == nullptr) return;
  if (!arch::sync_block_any(!ok)) read_channel_starts(args);
}

// The warps after the movers: metadata, if the call has any.
template <class Form>
DC_DEVICE void write_block_metadata(const Context& context, const DispatchArgs& args,
                                    typename Moved<Form>::Entry* entry) {
  const int warp = arch::warp_idx() - args.num_move_warps;
  if (warp < 0 || warp >= args.num_meta_warps) return;
  if constexpr (Form::kExpanded) {
    ChunkPublisher<Form>(context, args, entry->outputs, &entry->sent, warp).run();
  } else {
    const int first = warp * arch::num_blocks() + arch::block_idx();
    const int num_warps = args.num_meta_warps * arch::num_blocks();
    write_metadata<Form>(args, entry->outputs, first, num_warps);
  }
}

}  // namespace deep_comm
