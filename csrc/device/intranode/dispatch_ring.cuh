// dispatch, ring mode: bounded memory. Tokens are sent through rings.
//
// grid   one block per channel. num_ring_movers warps take its tokens in turn: a row is loaded once
//        and stored to the ring of each rank that it goes to, and to its final row if it stays, by
//        one lane per rank. num_receive_warps warps per source copy its rows in turn from the ring
//        to their final rows. One publishes tails and heads
// forms  expanded: a row is written to the first of its output rows; the receiver copies it to the
//        others (expand.cuh). Quantised: a block first casts its channel's rows to FP8 in memory
// smem   num_ring_movers x (stages + mbarriers)
// words  recv_line.{start,end}_offset · owner: receiver · written by sender · relaxed, flag in data
//        recv_line.tail               · owner: receiver · written by sender · release/acquire sys
//        send_line.head               · owner: sender · written by receiver · release/acquire sys
// waits  offsets, tail: unblocked by the sender; head: by the receiver. Movers and receivers of one
//        rank do not wait for each other. A mover reports all it has, towards every rank, before it
//        waits; so of the movers that wait, the one with the earliest token always gets its credit
#pragma once

#include "device/channel/offsets.cuh"
#include "device/channel/ring.cuh"
#include "device/intranode/args.cuh"
#include "device/intranode/ring_meta.cuh"
#include "device/intranode/ring_send.cuh"
#include "device/layout/channel_range.cuh"
#include "device/move/copy_row.cuh"
#include "device/move/quantise.cuh"

namespace deep_comm {

// Where the tokens of a channel go; a whole warp, tokens ascending. Each lane asks about one rank.
class RingPlaces {
 public:
  DC_DEVICE RingPlaces(const DispatchArgs& args, const ChannelRange& range, int peer)
      : args_(args), peer_(peer), base_(range.begin - kWarpSize), end_(range.end) {}

  DC_DEVICE void look_up(int token) {
    while (token >= base_ + kWarpSize) look_at_batch();
    const int bit = token - base_;
    goes_ = (present_ >> bit & 1u) != 0;
    place_ = num_before_ + arch::popc(present_ & ((1u << bit) - 1));
  }
  DC_DEVICE bool goes() const { return goes_; }
  // Rows of the channel's earlier tokens to that rank, whether the token goes there or not.
  DC_DEVICE uint32_t place() const { return place_; }

 private:
  // Lane i loads what the i-th of 32 tokens says of all ranks, in one trip to memory.
  DC_DEVICE void look_at_batch() {
    const int num_ranks = args_.world.num_ranks;
    num_before_ += arch::popc(present_);
    base_ += kWarpSize;
    const int token = base_ + arch::lane_idx();
    const uint8_t* flags = args_.is_token_in_rank + static_cast<int64_t>(token) * num_ranks;
    bool is_sent[kMaxRanks];
    DC_UNROLL
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      is_sent[rank] = rank < num_ranks && token < end_ && arch::ld_nc(flags + rank) != 0;
    }
    DC_UNROLL
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      const uint32_t present = arch::ballot(kFullMask, is_sent[rank]);
      if (rank == peer_) present_ = present;
    }
  }

  const DispatchArgs& args_;
  int peer_;
  int base_;
  int end_;
  uint32_t present_ = 0;
  uint32_t num_before_ = 0;  // rows before base_
  bool goes_ = false;
  uint32_t place_ = 0;
};

// Progress words: num_ring_movers per peer, then num_receive_warps per source. Each says of a warp:
// of the ring's rows before this number, all that are its own have landed, or have been read. So
// the least of them is what the publisher tells the peer.
DC_DEVICE int send_word(const DispatchArgs& args, int peer) { return peer * args.num_ring_movers; }
DC_DEVICE int receive_word(const DispatchArgs& args, int src) {
  return send_word(args, args.world.num_ranks) + src * args.num_receive_warps;
}

// Notes where a source's rows of one channel begin among all that this rank receives from it. One
// lane.
DC_DEVICE void note_channel_start(const DispatchArgs& args, int channel, int src, uint32_t start) {
  if (args.recv_channel_prefix_matrix == nullptr) return;
  arch::st_weak(args.recv_channel_prefix_matrix + src * args.ring.num_channels + channel,
                static_cast<int32_t>(start));
}

// The first row that this rank receives from `src`.
DC_DEVICE int first_row_from(const DispatchArgs& args, int src) {
  const World& world = args.world;
  return src == 0 ? 0
                  : arch::ld_nc(args.rank_prefix_matrix + (src - 1) * world.num_ranks + world.rank);
}

// One warp: every num_ring_movers-th token of a channel. Lane i stores to rank (rank + 1 + i) % R,
// the last of them to this rank's outputs.
template <class Form>
class RingMover {
 public:
  DC_DEVICE RingMover(const Context& context, const DispatchArgs& args, Progress& progress,
                      int channel)
      : args_(args),
        progress_(progress),
        peer_((args.world.rank + 1 + arch::lane_idx()) % args.world.num_ranks),
        is_storing_(arch::lane_idx() < args.world.num_ranks && !args.world.is_absent(peer_)),
        is_own_(is_storing_ && peer_ == args.world.rank),
        is_sending_(is_storing_ && !is_own_),
        word_(send_word(args, peer_) + arch::warp_idx()),
        range_(ChannelRange::of(args.num_tokens, args.ring.num_channels, channel)),
        pieces_(Pieces::of(args.message.row_bytes, args.stage)),
        pipe_(make_pipe(args.stage, args.ring_barriers_offset)),
        places_(args, range_, peer_),
        ring_(context, ring_slots(args.world, args.ring, channel, peer_, args.world.rank), channel,
              peer_),
        load_token_(range_.begin + arch::warp_idx()) {
    if (!is_storing_) return;
    const int32_t* prefix =
        args.channel_prefix_matrix + static_cast<int64_t>(peer_) * args.ring.num_channels;
    const int32_t start = channel == 0 ? 0 : arch::ld_nc(prefix + channel - 1);
    const int32_t end = arch::ld_nc(prefix + channel);
    num_rows_ = end - start;
    if (is_own_) first_row_ = first_row_from(args, peer_) + start;
    if (arch::warp_idx() != 0) return;
    if (is_own_) {
      note_channel_start(args, channel, peer_, start);
    } else {
      publish_offsets(context, channel, peer_,
                      {static_cast<uint32_t>(start), static_cast<uint32_t>(end)});
    }
  }

  // On failure the pipeline is drained and nothing more is written.
  DC_DEVICE void run() {
    const int first = load_token_;
    while (load_token_ < range_.end && pipe_.can_load()) load_next();
    SentMeta<Form> next;
    next.load(args_, first, range_.end);
    bool ok = true;
    for (int token = first; token < range_.end; token += args_.num_ring_movers) {
      const SentMeta<Form> meta = next;
      next.load(args_, token + args_.num_ring_movers, range_.end);
      places_.look_up(token);
      ok = acquire_slots();
      if (!ok) break;
      send(meta, token);
      report_landed();
    }
    pipe_.drain();
    if (is_sending_) progress_.finish(word_, ok ? num_rows_ : num_reported_);
  }

 private:
  DC_DEVICE void load_next() {
    if (load_token_ >= range_.end) return;
    if (arch::lane_idx() == 0) {
      pipe_.load(args_.x + static_cast<size_t>(load_token_) * args_.message.row_bytes +
                     load_piece_ * pieces_.piece_bytes,
                 pieces_.bytes_of(load_piece_));
    }
    pipe_.advance_load();
    if (++load_piece_ < pieces_.num_pieces) return;
    load_piece_ = 0;
    load_token_ += args_.num_ring_movers;
  }

  // Free slots in all rings that the token goes to.
  DC_DEVICE bool acquire_slots() {
    const uint32_t place = places_.place();
    bool ok = !is_sending_ || !places_.goes() || ring_.poll_slot(place);
    if (arch::all(kFullMask, ok)) return true;
    // To all ranks, not only where there is no credit: otherwise movers that wait for credits of
    // different ranks could keep from each other's receivers what these need to free a slot.
    if (is_sending_) {
      arch::bulk_wait<0>();
      report(place);
    }
    if (!ok) ok = ring_.await_slot(place);
    return arch::all(kFullMask, ok);
  }

  DC_DEVICE void send(const SentMeta<Form>& meta, int token) {
    const int meta_bytes = args_.message.meta_bytes;
    const int ordinal = first_row_ + static_cast<int>(places_.place());  // of the lane of this rank
    int row = ordinal;
    if constexpr (Form::kExpanded) row = meta.first_row_at(args_.world.rank);
    bool goes = is_storing_ && places_.goes();
    const bool stays = is_own_ && goes && ordinal < args_.num_recv_rows;
    if (is_own_) goes = stays && row >= 0 && row < args_.num_recv_rows;
    uint8_t* dst = is_own_ ? args_.recv_x + static_cast<int64_t>(row) * args_.message.row_bytes
                           : ring_.slot(places_.place());
    for (int piece = 0; piece < pieces_.num_pieces; ++piece) {
      int num_bytes = pieces_.bytes_of(piece);
      if (pieces_.is_last(piece) && meta_bytes != 0) {
        uint8_t* staged = pipe_.current() + num_bytes;
        meta.write(args_, staged, token);
        // Before the bulk copies that read it.
        arch::fence_proxy_async_shared();
        arch::sync_warp();
        store_own_meta(staged, stays, ordinal, row);
        if (!is_own_) num_bytes += meta_bytes;
      }
      pipe_.await_load();
      if (is_storing_) pipe_.store(dst + piece * pieces_.piece_bytes, goes ? num_bytes : 0);
      pipe_.advance_store();
      if (is_storing_) pipe_.make_room();
      // All storing lanes have read the stage that the leader loads next.
      arch::sync_warp();
      load_next();
    }
  }

  // The metadata of a token that stays on this rank, from the stage. The arguments are those of
  // this rank's lane.
  DC_DEVICE void store_own_meta(const uint8_t* staged, bool stays, int ordinal, int row) {
    const int own_lane = args_.world.num_ranks - 1;
    if (arch::shfl(kFullMask, static_cast<int>(stays), own_lane) == 0) return;
    ordinal = arch::shfl(kFullMask, ordinal, own_lane);
    row = arch::shfl(kFullMask, row, own_lane);
    ReceivedMeta<Form, MetaPlace::kStage> meta;
    meta.load(args_, staged);
    meta.store(args_, staged, ordinal, row);
  }

  DC_DEVICE void report(uint32_t num_landed) {
    if (num_landed == num_reported_) return;
    num_reported_ = num_landed;
    progress_.report(word_, num_landed);
  }
  // Reports when a chunk of rows has landed. A store needs the time of several rows to land, and
  // waiting for it would empty the pipeline. So the newest tokens are reported later.
  DC_DEVICE void report_landed() {
    DC_UNROLL
    for (int idx = kInFlight - 1; idx > 0; --idx) places_before_[idx] = places_before_[idx - 1];
    places_before_[0] = places_.place();
    const uint32_t num_landed = places_before_[kInFlight - 1];
    if (!is_sending_ || num_landed < num_reported_ + args_.num_send_tokens) return;
    arch::bulk_wait<kInFlight>();
    report(num_landed);
  }

  static constexpr int kInFlight = 4;

  const DispatchArgs& args_;
  Progress& progress_;
  int peer_;
  bool is_storing_;
  bool is_own_;
  bool is_sending_;
  int word_;
  ChannelRange range_;
  Pieces pieces_;
  StagePipe pipe_;
  RingPlaces places_;
  RingSender ring_;
  int load_token_;
  int load_piece_ = 0;
  int num_rows_ = 0;   // of the channel, to this lane's rank
  int first_row_ = 0;  // of the channel, of this rank's own
  uint32_t num_reported_ = 0;
  uint32_t places_before_[kInFlight] = {};  // of the newest tokens
};

// One warp: copies its rows, every num_receive_warps-th that `src` sends through this channel, from
// the ring to their final rows. Returns before which row it has read all of its own.
template <class Form>
DC_DEVICE uint32_t receive_rows(const DispatchArgs& args, RingReceiver& ring, Progress& progress,
                                int word, int part, uint32_t num_rows, int first_row) {
  const uint32_t num_warps = args.num_receive_warps;
  const uint32_t release_step = min_of(args.num_send_tokens, args.ring.num_slots);
  // The rows before the first are other warps'.
  uint32_t num_reported = min_of<uint32_t>(part, num_rows);
  if (arch::lane_idx() == 0 && num_reported != 0) progress.report(word, num_reported);
  for (uint32_t row_idx = part; row_idx < num_rows; row_idx += num_warps) {
    bool ok = true;
    if (arch::lane_idx() == 0) ok = ring.await_filled(row_idx);
    arch::sync_warp();  // hands the leader's acquire to all lanes
    if (arch::shfl(kFullMask, static_cast<int>(ok), 0) == 0) return num_reported;
    const uint32_t num_read = min_of(row_idx + num_warps, num_rows);
    if (arch::fault(Fault::kEarlyCredit) && arch::lane_idx() == 0) progress.report(word, num_read);
    const int ordinal = first_row + static_cast<int>(row_idx);
    const uint8_t* slot = ring.slot(row_idx);
    const uint8_t* staged = slot + args.message.row_bytes;
    // Loaded with the row: otherwise each kind of metadata would cost a trip to memory.
    ReceivedMeta<Form, MetaPlace::kSlot> meta;
    meta.load(args, staged);
    const int row = meta.row(ordinal);
    if (row >= 0 && row < args.num_recv_rows) {
      copy_row(args.recv_x + static_cast<int64_t>(row) * args.message.row_bytes, slot,
               args.message.row_bytes);
    }
    if (ordinal < args.num_recv_rows) meta.store(args, staged, ordinal, row);
    if (num_read - num_reported >= release_step) {
      arch::sync_warp();  // every lane has read its part of the slots
      num_reported = num_read;
      if (arch::lane_idx() == 0) progress.report(word, num_reported);
    }
  }
  // No sender waits for the credit of the last rows: a warp reports at least every ring of slots.
  return num_rows;
}

// One of the warps that receive from `src`, a peer.
template <class Form>
DC_DEVICE void dispatch_receive(const Context& context, const DispatchArgs& args,
                                Progress& progress, int channel, int src, int part) {
  const World& world = args.world;
  const bool is_leader = arch::lane_idx() == 0;
  if (world.is_absent(src)) {
    if (part == 0 && is_leader) note_channel_start(args, channel, src, 0);
    return;
  }
  const int source_start = first_row_from(args, src);
  const int word = receive_word(args, src) + part;
  ChannelOffsets offsets{};
  bool ok = true;
  if (is_leader) ok = await_offsets(context, channel, src, &offsets);
  ok = arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
  uint32_t num_read = 0;
  if (ok) {
    offsets.start = arch::shfl(kFullMask, offsets.start, 0);
    offsets.end = arch::shfl(kFullMask, offsets.end, 0);
    if (part == 0 && is_leader) note_channel_start(args, channel, src, offsets.start);
    RingReceiver ring(context, ring_slots(world, args.ring, channel, world.rank, src), channel,
                      src);
    num_read = receive_rows<Form>(args, ring, progress, word, part, offsets.end - offsets.start,
                                  source_start + static_cast<int>(offsets.start));
  }
  if (is_leader) progress.finish(word, num_read);
}

// The publishing warp: lane r publishes the tail of the ring to rank r, lane R + r the head of the
// ring from it.
DC_DEVICE void dispatch_publish(const Context& context, const DispatchArgs& args,
                                Progress& progress, int channel) {
  const World& world = args.world;
  const int lane = arch::lane_idx(), peer = lane % world.num_ranks;
  Published published;
  if (world.is_absent(peer)) {
    // nothing to publish
  } else if (peer != world.rank && lane < world.num_ranks) {
    published = {ring_tail(world, channel, peer), send_word(args, peer), args.num_ring_movers};
  } else if (peer != world.rank && lane < 2 * world.num_ranks) {
    published = {ring_head(world, channel, peer), receive_word(args, peer), args.num_receive_warps};
  }
  publish_progress(context, progress, published);
}

// The block: casts its channel's rows to FP8, where the senders load them.
DC_DEVICE void quantise_channel(const DispatchArgs& args, int channel) {
  const ChannelRange range = ChannelRange::of(args.num_tokens, args.ring.num_channels, channel);
  QuantisedRows{
      const_cast<uint8_t*>(args.x), const_cast<uint8_t*>(args.x_scales), args.source,
      args.message.row_bytes,       args.num_scales * args.scale_bytes,  args.scale_format}
      .cast(range.begin, range.end);
  arch::fence_proxy_async_global();  // before the bulk copies of the block's senders
  arch::sync_block();
}

// Ring mode, one block. `progress` has been reset. Not in line: its registers would be spilled around
// direct mode's, too.
template <class Form>
DC_DEVICE_COLD void dispatch_by_rings(const Context& context, const DispatchArgs& args,
                                 Progress& progress) {
  const World& world = args.world;
  const int channel = arch::block_idx(), warp = arch::warp_idx();
  const int receiver = warp - args.num_ring_movers;
  const int num_receivers = (world.num_ranks - 1) * args.num_receive_warps;
  if constexpr (Form::kQuantised) quantise_channel(args, channel);
  if (receiver < 0) {
    RingMover<Form>(context, args, progress, channel).run();
  } else if (receiver < num_receivers) {
    const int src = (world.rank + 1 + receiver / args.num_receive_warps) % world.num_ranks;
    dispatch_receive<Form>(context, args, progress, channel, src,
                           receiver % args.num_receive_warps);
  } else if (receiver == num_receivers) {
    dispatch_publish(context, args, progress, channel);
    note_in_warp(context, TraceStep::kLeft);  // the other warps have finished
  }
}

}  // namespace deep_comm
