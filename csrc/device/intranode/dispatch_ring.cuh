// dispatch, ring mode: bounded memory. Tokens are sent through rings.
//
// grid   one block per channel. It has 2 R - 1 ends: one for each rank that it sends to, this one as
//        well, whose rows go straight to the outputs, and one for each peer that it receives from.
//        Several warps may serve an end, and take its rows in turn (RingWarps); one more publishes
//        tails and heads. Rows pass through bulk copies at every end, since a warp that copies them
//        through registers waits for memory several times per row
// forms  expanded: a row is written to the first of its output rows, which follows all other
//        metadata; the receiver copies it to the others (expand.cuh). Quantised: a block first
//        casts its channel's rows to FP8 in memory, since every destination's warp loads them again
// smem   stages and mbarriers of all warps of ends
// words  recv_line.{start,end}_offset · owner: receiver · written by sender · relaxed, flag in data
//        recv_line.tail               · owner: receiver · written by sender · release/acquire sys
//        send_line.head               · owner: sender · written by receiver · release/acquire sys
// waits  offsets, tail: unblocked by the sender; head: by the receiver. Sender and receiver of one
//        rank do not wait for each other, and a sender publishes all it has before it waits, so no
//        cycle can form
#pragma once

#include "device/channel/offsets.cuh"
#include "device/channel/ring.cuh"
#include "device/intranode/args.cuh"
#include "device/intranode/dispatch_meta.cuh"
#include "device/intranode/ring_receive.cuh"
#include "device/intranode/ring_send.cuh"
#include "device/layout/channel_range.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"
#include "device/move/quantise.cuh"

namespace deep_comm {

// The tokens of one channel that go to one rank, those of one warp. It looks at 32 at a time.
template <class Form>
class TokenSource {
 public:
  DC_DEVICE TokenSource(const DispatchArgs& args, const ChannelRange& range, int dst, Turns turns)
      : args_(args),
        dst_(dst),
        base_(range.begin - kWarpSize),
        end_(range.end),
        num_skipped_(turns.first),
        step_(turns.step) {}

  DC_DEVICE int next() {
    while (true) {
      while (pending_ == 0) {
        base_ += kWarpSize;
        if (base_ >= end_) return -1;
        look_at_batch();
      }
      const int lane = arch::ffs(pending_) - 1;
      pending_ &= pending_ - 1;
      if (num_skipped_-- != 0) continue;
      num_skipped_ = step_ - 1;
      return base_ + lane;
    }
  }
  DC_DEVICE const uint8_t* row(int token) const {
    return args_.x + static_cast<size_t>(token) * args_.message.row_bytes;
  }
  // The scales and the first top-k entries of a token in a warp's registers, as many as fit.
  DC_DEVICE void load_meta(int token);
  // The rest is loaded here.
  DC_DEVICE void write_meta(uint8_t* meta, int token) const;

 private:
  static constexpr ScaleSource kScales =
      Form::kQuantised ? ScaleSource::kWrittenHere : ScaleSource::kInput;

  // A top-k entry.
  struct Entry {
    RawExpert expert;
    float weight = 0.0f;
    int32_t row = 0;  // expanded: of the output
  };
  DC_DEVICE Entry load_entry(int64_t position) const {
    Entry entry;
    entry.expert = RawExpert::load(args_.topk_idx, position, args_.topk_idx_bytes);
    if (args_.topk_weights != nullptr) entry.weight = arch::ld_nc(args_.topk_weights + position);
    if constexpr (Form::kExpanded) entry.row = arch::ld_nc(args_.send_rows + position);
    return entry;
  }
  DC_DEVICE void write_entry(uint8_t* meta, int k, const Entry& entry) const {
    const int local = entry.expert.value(args_.topk_idx_bytes) - args_.experts.first_expert(dst_);
    const bool is_here = local >= 0 && local < args_.experts.num_local_experts(dst_);
    const int number = Form::kExpanded ? entry.row : local;
    reinterpret_cast<int32_t*>(meta + args_.message.topk_idx_offset)[k] = is_here ? number : -1;
    reinterpret_cast<float*>(meta + args_.message.topk_weights_offset)[k] =
        is_here ? entry.weight : 0.0f;
  }
  DC_DEVICE void look_at_batch() {
    const int token = base_ + arch::lane_idx();
    const int64_t position = static_cast<int64_t>(token) * args_.world.num_ranks + dst_;
    pending_ = arch::ballot(kFullMask,
                            token < end_ && arch::ld_weak(args_.is_token_in_rank + position) != 0);
  }

  const DispatchArgs& args_;
  int dst_;
  int base_;
  int end_;
  uint32_t num_skipped_;  // tokens of other warps before the next one of this warp
  uint32_t step_;
  uint32_t pending_ = 0;
  TokenScales<kScales> scales_;
  Entry entry_;          // of this lane
  int32_t dst_row_ = 0;  // expanded
};

template <class Form>
DC_DEVICE void TokenSource<Form>::load_meta(int token) {
  const int lane = arch::lane_idx(), num_topk = args_.message.num_topk;
  if (lane < num_topk) entry_ = load_entry(static_cast<int64_t>(token) * num_topk + lane);
  if (TokenScales<kScales>::fits(args_)) scales_.load(args_, token);
  if constexpr (Form::kExpanded) {
    dst_row_ =
        arch::ld_nc(args_.send_row + static_cast<int64_t>(token) * args_.world.num_ranks + dst_);
  }
}

template <class Form>
DC_DEVICE void TokenSource<Form>::write_meta(uint8_t* meta, int token) const {
  const MessageLayout& message = args_.message;
  const int lane = arch::lane_idx(), num_topk = message.num_topk;
  if (TokenScales<kScales>::fits(args_)) {
    scales_.write(args_, meta + message.scales_offset);
  } else {
    for (int column = lane; column < args_.num_scales; column += kWarpSize) {
      const int64_t position =
          token * args_.scale_token_stride + column * args_.scale_column_stride;
      uint8_t* dst = meta + message.scales_offset + column * args_.scale_bytes;
      if constexpr (Form::kQuantised) {  // written by this kernel
        *reinterpret_cast<uint32_t*>(dst) =
            arch::ld_weak(reinterpret_cast<const uint32_t*>(args_.x_scales) + position);
      } else {
        gather_element(dst, args_.x_scales + position * args_.scale_bytes, args_.scale_bytes);
      }
    }
  }
  if (lane < num_topk) write_entry(meta, lane, entry_);
  DC_NO_UNROLL
  for (int k = lane + kWarpSize; k < num_topk; k += kWarpSize) {
    write_entry(meta, k, load_entry(static_cast<int64_t>(token) * num_topk + k));
  }
  if (lane == 0 && args_.recv_src_idx != nullptr) {
    *reinterpret_cast<int32_t*>(meta + message.src_idx_offset) = token;
  }
  if (Form::kExpanded && lane == 0) {
    *reinterpret_cast<int32_t*>(meta + message.dst_row_offset) = dst_row_;
  }
}

// All lanes: writes the metadata of a token, which lie in a stage, to this rank's outputs. `ordinal`
// counts the received tokens. Returns the row of the outputs, or -1 if there is none.
template <class Form>
DC_DEVICE int64_t store_meta(const DispatchArgs& args, const uint8_t* meta, int64_t ordinal) {
  const MessageLayout& message = args.message;
  const int lane = arch::lane_idx();
  int64_t row = ordinal;
  if constexpr (Form::kExpanded) {
    row = *reinterpret_cast<const int32_t*>(meta + message.dst_row_offset);
  }
  const bool fits = row >= 0 && row < args.num_recv_rows;
  for (int column = lane; column < args.num_scales && fits; column += kWarpSize) {
    scatter_element(args.recv_x_scales + (row * args.num_scales + column) * args.scale_bytes,
                    meta + message.scales_offset + column * args.scale_bytes, args.scale_bytes);
  }
  const int32_t* numbers = reinterpret_cast<const int32_t*>(meta + message.topk_idx_offset);
  const float* weights = reinterpret_cast<const float*>(meta + message.topk_weights_offset);
  const bool is_received = ordinal < args.num_recv_rows;
  for (int k = lane; k < message.num_topk && is_received; k += kWarpSize) {
    const int64_t position = ordinal * message.num_topk + k;
    const int number = numbers[k];
    if constexpr (Form::kExpanded) {
      arch::st_weak(args.recv_rows + position, number);
      if (args.recv_topk_weights != nullptr && number >= 0 && number < args.num_recv_rows) {
        arch::st_weak(args.recv_topk_weights + number, weights[k]);
      }
    } else {
      store_expert(args.recv_topk_idx, position, args.topk_idx_bytes, number);
      if (args.recv_topk_weights != nullptr) {
        arch::st_weak(args.recv_topk_weights + position, weights[k]);
      }
    }
  }
  if (lane == 0 && args.recv_src_idx != nullptr && is_received) {
    arch::st_weak(args.recv_src_idx + ordinal,
                  *reinterpret_cast<const int32_t*>(meta + message.src_idx_offset));
  }
  // What the lanes have read, before the leader loads the stage anew.
  arch::fence_proxy_async_shared();
  arch::sync_warp();
  return fits ? row : -1;
}

// The sink of this rank's own rows, from the first_row-th received token on.
template <class Form>
class OutputSink {
 public:
  static constexpr bool kSendsMeta = false;

  DC_DEVICE OutputSink(const DispatchArgs& args, int64_t first_row)
      : args_(args), first_row_(first_row) {}

  DC_DEVICE bool acquire(uint32_t) const { return true; }
  DC_DEVICE uint8_t* place(uint32_t row_idx, const uint8_t* meta) const {
    const int64_t row = store_meta<Form>(args_, meta, first_row_ + row_idx);
    return row < 0 ? nullptr : args_.recv_x + row * args_.message.row_bytes;
  }
  DC_DEVICE void sent(uint32_t) const {}
  DC_DEVICE void finish(bool, uint32_t) const {}

 private:
  const DispatchArgs& args_;
  int64_t first_row_;
};

// Where this rank's rows for rank `dst` begin and end in a channel, among all that it sends there.
DC_DEVICE ChannelOffsets sent_offsets(const DispatchArgs& args, int channel, int dst) {
  const int32_t* prefix =
      args.channel_prefix_matrix + static_cast<int64_t>(dst) * args.ring.num_channels;
  const int32_t start = channel == 0 ? 0 : arch::ld_weak(prefix + channel - 1);
  return {static_cast<uint32_t>(start), static_cast<uint32_t>(arch::ld_weak(prefix + channel))};
}

// The row of the outputs where the rows from rank `src` begin.
DC_DEVICE int64_t source_start(const DispatchArgs& args, int src) {
  const World& world = args.world;
  return src == 0
             ? 0
             : arch::ld_weak(args.rank_prefix_matrix + (src - 1) * world.num_ranks + world.rank);
}

// Notes where a source's rows of one channel begin among all that this rank receives from it.
DC_DEVICE void note_channel_start(const DispatchArgs& args, int channel, int src, uint32_t start) {
  if (arch::lane_idx() != 0 || args.recv_channel_prefix_matrix == nullptr) return;
  arch::st_weak(args.recv_channel_prefix_matrix + src * args.ring.num_channels + channel,
                static_cast<int32_t>(start));
}

// One of the warps that send to `dst`. Progress words: each warp of an end has the word of its own
// index. It says before which row all of its own have landed, or have been read. A word may be larger
// than the number of rows. The least of an end is not: the warp whose turn it is next has moved no
// later row.
template <class Form>
DC_DEVICE void dispatch_send(const Context& context, const DispatchArgs& args, Progress& progress,
                             int channel, int dst, Turns turns) {
  const World& world = args.world;
  if (world.is_absent(dst)) return;
  StagePipe pipe = make_pipe(args.stage, args.ring_barriers_offset);
  const ChannelRange range = ChannelRange::of(args.num_tokens, args.ring.num_channels, channel);
  const Pieces pieces = Pieces::of(args.message.row_bytes, args.stage);
  const TokenSource<Form> tokens(args, range, dst, turns);
  const ChannelOffsets offsets = sent_offsets(args, channel, dst);
  if (dst == world.rank) {
    if (turns.first == 0) note_channel_start(args, channel, dst, offsets.start);
    return send_rows(pipe, OutputSink<Form>(args, source_start(args, dst) + offsets.start), turns,
                     pieces, args.message.meta_bytes, tokens, tokens);
  }
  if (arch::lane_idx() == 0 && turns.first == 0) publish_offsets(context, channel, dst, offsets);
  const RingSender ring(context, ring_slots(world, args.ring, channel, dst, world.rank), channel,
                        dst);
  send_rows(pipe, RingSink(ring, progress, turns, args.num_send_tokens, pieces), turns, pieces,
            args.message.meta_bytes, tokens, tokens);
}

// One of the warps that receive from a ring: moves its rows to the outputs, where they begin at
// first_row.
template <class Form>
DC_DEVICE void receive_rows(const DispatchArgs& args, RingLoader loader, StagePipe& pipe,
                            const Pieces& pieces, Turns turns, uint32_t num_rows,
                            int64_t first_row) {
  const bool is_leader = arch::lane_idx() == 0;
  bool ok = true;
  if (is_leader) loader.begin();
  for (uint32_t row_idx = turns.first; row_idx < num_rows; row_idx += turns.step) {
    int64_t row = -1;
    for (int piece = pieces.num_pieces - 1; piece >= 0; --piece) {
      if (is_leader) ok = loader.await_load();
      if (pieces.is_last(piece)) {
        ok = arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
        if (!ok) break;
        arch::sync_warp();  // what the leader has seen land, for all lanes
        row = store_meta<Form>(args, pipe.current() + pieces.last_bytes, first_row + row_idx);
      }
      if (is_leader) {
        if (piece == 0) loader.free_before(row_idx + turns.step);
        pipe.store(args.recv_x + row * args.message.row_bytes + piece * pieces.piece_bytes,
                   row < 0 ? 0 : pieces.bytes_of(piece));
      }
      pipe.advance_store();
    }
    if (!ok) break;
  }
  if (is_leader) loader.finish(ok);
}

// One of the warps that receive from `src`.
template <class Form>
DC_DEVICE void dispatch_receive(const Context& context, const DispatchArgs& args,
                                Progress& progress, int channel, int src, Turns turns) {
  const World& world = args.world;
  if (world.is_absent(src)) {
    if (turns.first == 0) note_channel_start(args, channel, src, 0);
    return;
  }
  StagePipe pipe = make_pipe(args.stage, args.ring_barriers_offset);
  const Pieces pieces = Pieces::of(args.message.row_bytes, args.stage);
  ChannelOffsets offsets{};
  bool ok = true;
  if (arch::lane_idx() == 0) ok = await_offsets(context, channel, src, &offsets);
  if (arch::shfl(kFullMask, static_cast<int>(ok), 0) == 0) {
    if (arch::lane_idx() == 0) progress.finish(arch::warp_idx(), 0);
    return;
  }
  offsets.start = arch::shfl(kFullMask, offsets.start, 0);
  offsets.end = arch::shfl(kFullMask, offsets.end, 0);
  if (turns.first == 0) note_channel_start(args, channel, src, offsets.start);
  const uint32_t num_rows = offsets.end - offsets.start;
  const RingReceiver ring(context, ring_slots(world, args.ring, channel, world.rank, src), channel,
                          src);
  receive_rows<Form>(args, RingLoader(args, ring, pipe, progress, turns, num_rows, pieces), pipe,
                     pieces, turns, num_rows, source_start(args, src) + offsets.start);
}

// The rank at the other side of an end of the block.
DC_DEVICE int rank_of_end(const World& world, int end) {
  return (world.rank + 1 + end) % world.num_ranks;
}

// The publishing warp: a lane for every end publishes the tail of the ring that its warps fill, or the
// head of the ring that they empty.
DC_DEVICE void dispatch_publish(const Context& context, const DispatchArgs& args,
                                Progress& progress, int channel) {
  const World& world = args.world;
  const int end = arch::lane_idx(), peer = rank_of_end(world, end);
  Published published;
  if (end < 2 * world.num_ranks - 1 && peer != world.rank && !world.is_absent(peer)) {
    published = {
        end < world.num_ranks ? ring_tail(world, channel, peer) : ring_head(world, channel, peer),
        args.ring_warps.first_of(world.num_ranks, end),
        args.ring_warps.of_end(world.num_ranks, end)};
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
  arch::fence_proxy_async_global();  // before the bulk copies of the warps that send
  arch::sync_block();
}

// Ring mode, one block. `progress` has been reset.
template <class Form>
DC_DEVICE void dispatch_by_rings(const Context& context, const DispatchArgs& args,
                                 Progress& progress) {
  const int channel = arch::block_idx(), num_ranks = args.world.num_ranks;
  const RingWarps warps = args.ring_warps;
  const int warp = arch::warp_idx(), end = warps.end_of(num_ranks, warp);
  const auto first = static_cast<uint32_t>(warp - warps.first_of(num_ranks, end));
  if constexpr (Form::kQuantised) quantise_channel(args, channel);
  if (end < num_ranks) {
    dispatch_send<Form>(context, args, progress, channel, rank_of_end(args.world, end),
                        {first, static_cast<uint32_t>(args.ring_warps.of_send_end)});
  } else if (warp < warps.count(num_ranks)) {
    dispatch_receive<Form>(context, args, progress, channel, rank_of_end(args.world, end),
                           {first, static_cast<uint32_t>(args.ring_warps.of_receive_end)});
  } else if (warp == warps.count(num_ranks)) {
    dispatch_publish(context, args, progress, channel);
    // All rows of rings have been moved; this rank's own may not.
    note_in_warp(context, TraceStep::kLeft);
  }
}

}  // namespace deep_comm
