// combine, ring mode: bounded memory. Rows return through the rings of their channel.
//
// grid   one block per channel; the senders are dealt to the peers, and those of a peer take its rows
//        in turn; one returns credits, one publishes, the others add: the channel's tokens are dealt
//        to them in turn
// words  recv_line.tail, send_line.head: as in dispatch with exchanged roles
// waits  tail: unblocked by the sender; head: by the receiver's credit warp, which waits for its
//        own block's reducers (num_done), which wait for tails. Tokens are reduced in order, so no
//        cycle can form
#pragma once

#include "device/channel/ring.cuh"
#include "device/intranode/combine_reduce.cuh"
#include "device/intranode/ring_send.cuh"
#include "device/layout/channel_range.cuh"
#include "device/move/row_weights.cuh"

namespace deep_comm {

// The rows of one warp in a contiguous range of x.
class RowSource {
 public:
  DC_DEVICE RowSource(const CombineArgs& args, int begin, int end, Turns turns)
      : args_(args),
        next_(begin + static_cast<int>(turns.first)),
        end_(end),
        step_(static_cast<int>(turns.step)) {}
  DC_DEVICE int next() {
    const int row = next_;
    next_ += step_;
    return row < end_ ? row : -1;
  }
  DC_DEVICE const uint8_t* row(int row) const {
    return args_.x + static_cast<size_t>(row) * args_.message.row_bytes;
  }
  DC_DEVICE void load_meta(int row) { weights_.load(args_, row); }
  DC_DEVICE void write_meta(uint8_t* meta, int row) const { weights_.write(args_, meta, row); }

 private:
  const CombineArgs& args_;
  int next_;
  int end_;
  int step_;
  RowWeights weights_;
};

DC_DEVICE void combine_send(const Context& context, const CombineArgs& args, CombineEntry* entry,
                            StagePipe& pipe, int channel, int dst, Turns turns) {
  const int num_ranks = args.world.num_ranks, num_channels = args.ring.num_channels;
  // The rows that rank dst sent through this channel are contiguous, in its order.
  const int source_begin = static_cast<int>(first_row_of(args, dst));
  const int source_end = arch::ld_nc(args.rank_prefix_matrix + dst * num_ranks + args.world.rank);
  const int32_t* starts = args.recv_channel_prefix_matrix + dst * num_channels;
  const int start = arch::ld_nc(starts + channel);
  const int num_rows = args.num_rows;  // a worst-case handle may name rows that were dropped
  const int begin = min_of(num_rows, source_begin + start);
  const int end = min_of(num_rows, channel + 1 == num_channels
                                       ? source_end
                                       : source_begin + arch::ld_nc(starts + channel + 1));
  const RingSender ring(context, ring_slots(args.world, args.ring, channel, dst, args.world.rank),
                        channel, dst);
  const Pieces pieces = Pieces::of(args.message.row_bytes, args.stage);
  const RowSource rows(args, begin, end, turns);
  send_rows(pipe, RingSink(ring, entry->progress, turns, args.num_send_tokens, pieces), turns,
            pieces, args.message.meta_bytes, rows, rows);
}

// Lane r < R: the ordinal of `token` among the rows that rank r returns to this channel, or -1.
DC_DEVICE int load_head(const CombineArgs& args, int token, int end) {
  const int num_ranks = args.world.num_ranks, lane = arch::lane_idx();
  if (token >= end || lane >= num_ranks) return -1;
  return arch::ld_nc(args.send_head + static_cast<int64_t>(token) * num_ranks + lane);
}

// One reducing warp. Lane r < R handles the rows of rank r: from its ring, or from x for this rank
// itself.
template <Dtype kDtype>
class RingReducer {
 public:
  DC_DEVICE RingReducer(const Context& context, const CombineArgs& args, int channel,
                        const uint8_t** rows)
      : args_(args),
        rows_(rows),
        is_peer_(arch::lane_idx() < args.world.num_ranks && arch::lane_idx() != args.world.rank),
        own_row_(first_row_of(args, args.world.rank) +
                 arch::ld_nc(args.recv_channel_prefix_matrix +
                             args.world.rank * args.ring.num_channels + channel)),
        ring_(context,
              ring_slots(args.world, args.ring, channel, args.world.rank,
                         is_peer_ ? arch::lane_idx() : 0),
              channel, is_peer_ ? arch::lane_idx() : 0) {}

  // Waits for the rows of `token` and adds them. `head`: from load_head.
  DC_DEVICE bool reduce(int token, int head) {
    const int rank = args_.world.rank;
    // A worst-case handle may name rows that were dropped. dispatch has reported that.
    if (arch::lane_idx() == rank && own_row_ + head >= args_.num_rows) head = -1;
    bool ok = true;
    if (is_peer_ && head >= 0) ok = ring_.await_filled(head, Stage::kReduce);
    if (!arch::all(kFullMask, ok)) return false;
    const int64_t own_row = own_row_ + arch::shfl(kFullMask, head, rank);
    const uint8_t* row = nullptr;
    if (head >= 0) {
      row = is_peer_ ? ring_.slot(head) : args_.x + own_row * args_.message.row_bytes;
    }
    add_token<kDtype>(args_, rows_, token, row, own_row);
    return true;
  }

 private:
  const CombineArgs& args_;
  const uint8_t** rows_;
  bool is_peer_;
  int64_t own_row_;  // this rank's first row of the channel, in x
  RingReceiver ring_;
};

// One reducing warp: every num_warps-th token of the channel.
template <Dtype kDtype>
DC_DEVICE void reduce_channel(const Context& context, const CombineArgs& args, CombineEntry* entry,
                              int channel, int warp) {
  const int num_warps = CombineEntry::num_reduce_warps(args);
  const ChannelRange range = ChannelRange::of(args.num_tokens, args.ring.num_channels, channel);
  RingReducer<kDtype> reducer(context, args, channel, entry->rows[warp]);
  uint32_t num_done = 0;
  int next_head = load_head(args, range.begin + warp, range.end);
  for (int token = range.begin + warp; token < range.end; token += num_warps) {
    const int head = next_head;
    next_head = load_head(args, token + num_warps, range.end);  // while this token is added
    if (!reducer.reduce(token, head)) return;
    arch::sync_warp();  // every lane has read its part of the slots
    ++num_done;
    // pairs with: return_credits — the reads of this token's slots
    if (arch::lane_idx() == 0) arch::st_release_cta(&entry->num_done[warp], num_done);
  }
}

// One warp follows the reducers through the channel's tokens, in order. Lane r reports the rows of
// rank r that have been read.
DC_DEVICE void return_credits(const Context& context, const CombineArgs& args, CombineEntry* entry,
                              int channel) {
  constexpr int kAhead = 4;  // tokens whose heads are being loaded
  const int num_ranks = args.world.num_ranks, lane = arch::lane_idx();
  const bool is_peer = lane < num_ranks && lane != args.world.rank;
  const int num_warps = CombineEntry::num_reduce_warps(args);
  const ChannelRange range = ChannelRange::of(args.num_tokens, args.ring.num_channels, channel);
  const uint32_t release_step = min_of(args.num_send_tokens, args.ring.num_slots);
  uint32_t num_read = 0, num_reported = 0;  // rows of this lane's rank
  bool ok = true;
  for (int base = range.begin; base < range.end && ok; base += kAhead) {
    int heads[kAhead];
    DC_UNROLL
    for (int idx = 0; idx < kAhead; ++idx) heads[idx] = load_head(args, base + idx, range.end);
    DC_UNROLL
    for (int idx = 0; idx < kAhead; ++idx) {
      const int token = base + idx;
      if (token >= range.end || !ok) continue;
      const int warp = (token - range.begin) % num_warps;
      const uint32_t wanted = (token - range.begin) / num_warps + 1;
      uint32_t num_done = 0;
      if (lane == 0 && !arch::fault(Fault::kEarlyCredit)) {
        ok = await<Scope::kCta>(
            context, &entry->num_done[warp],
            {Stage::kRetire, Word::kProgress, args.world.rank, channel}, wanted,
            [=](uint32_t value) { return value >= wanted; }, &num_done);
      }
      // Hands the leader's acquire to the lanes that report.
      arch::sync_warp();
      ok = arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
      if (!ok || !is_peer) continue;
      if (heads[idx] >= 0) num_read = heads[idx] + 1;
      if (num_read - num_reported >= release_step) {
        num_reported = num_read;
        entry->progress.report(args.num_senders + lane, num_reported);
      }
    }
  }
  if (is_peer) entry->progress.finish(args.num_senders + lane, num_reported);
}

// The publishing warp: lane i < R - 1 publishes the tail of the ring to the i-th peer, lane R + i the
// head of the ring from it.
DC_DEVICE void combine_publish(const Context& context, const CombineArgs& args, CombineEntry* entry,
                               int channel) {
  const World& world = args.world;
  const int lane = arch::lane_idx(), peer = (world.rank + 1 + lane) % world.num_ranks;
  Published published;
  if (peer != world.rank && lane < 2 * world.num_ranks && !world.is_absent(peer)) {
    published = lane < world.num_ranks
                    ? Published{ring_tail(world, channel, peer), lane * args.num_ring_senders,
                                args.num_ring_senders}
                    : Published{ring_head(world, channel, peer), args.num_senders + peer, 1};
  }
  publish_progress(context, entry->progress, published);
}

// Ring mode, a sending warp.
DC_DEVICE void send_by_rings(const Context& context, const CombineArgs& args, CombineEntry* entry,
                             StagePipe& pipe) {
  const World& world = args.world;
  const int num_warps = args.num_ring_senders, place = arch::warp_idx() / num_warps;
  if (place >= world.num_ranks - 1) return;
  const int dst = (world.rank + 1 + place) % world.num_ranks;
  if (world.is_absent(dst)) return;
  combine_send(context, args, entry, pipe, arch::block_idx(), dst,
               {static_cast<uint32_t>(arch::warp_idx() - place * num_warps),
                static_cast<uint32_t>(num_warps)});
}

// Ring mode, the other warps.
template <Dtype kDtype>
DC_DEVICE void receive_by_rings(const Context& context, const CombineArgs& args,
                                CombineEntry* entry) {
  const int channel = arch::block_idx(), reducer = arch::warp_idx() - args.num_senders - 2;
  if (reducer >= 0) {
    reduce_channel<kDtype>(context, args, entry, channel, reducer);
  } else if (reducer == -1) {
    combine_publish(context, args, entry, channel);
  } else {
    return_credits(context, args, entry, channel);
  }
}

}  // namespace deep_comm
