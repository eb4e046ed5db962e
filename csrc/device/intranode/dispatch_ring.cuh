// dispatch, ring mode: bounded memory. Tokens are sent through rings.
//
// grid   one block per channel; R - 1 warps send, each to one peer; R x num_receive_warps warps
//        receive, those of a source its rows in turn (this rank's own rows come straight from x);
//        one publishes tails and heads
// forms  expanded: a row is written to the first of its output rows, which follows all other
//        metadata; the receiver copies it to the others (expand.cuh). Quantised: a block first
//        casts its channel's rows to FP8 in memory, since every destination's warp loads them again
// smem   (R - 1) x (stages + mbarriers)
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
#include "device/intranode/ring_send.cuh"
#include "device/layout/channel_range.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"
#include "device/move/quantise.cuh"
#include "device/move/vecs.cuh"

namespace deep_comm {

// The tokens of one channel that go to one rank, 32 at a time.
template <class Form>
class TokenSource {
 public:
  DC_DEVICE TokenSource(const DispatchArgs& args, const ChannelRange& range, int dst)
      : args_(args), dst_(dst), base_(range.begin - kWarpSize), end_(range.end) {}

  DC_DEVICE int next() {
    while (pending_ == 0) {
      base_ += kWarpSize;
      if (base_ >= end_) return -1;
      look_at_batch();
    }
    const int lane = arch::ffs(pending_) - 1;
    pending_ &= pending_ - 1;
    return base_ + lane;
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

// Progress words: [peer] rows sent to it; then num_receive_warps words per source: before which row
// each of these warps has read all of its own. A word may be larger than the number of rows. The
// least of a source is not: the warp whose turn it is next has read no later row.
DC_DEVICE int receive_word(const DispatchArgs& args, int src) {
  return args.world.num_ranks + src * args.num_receive_warps;
}

template <class Form>
DC_DEVICE void dispatch_send(const Context& context, const DispatchArgs& args, Progress& progress,
                             int channel, int dst) {
  if (args.world.is_absent(dst)) return;
  const int num_channels = args.ring.num_channels;
  StagePipe pipe = make_pipe(args.stage, args.ring_barriers_offset);
  if (arch::lane_idx() == 0) {
    const int32_t* prefix = args.channel_prefix_matrix + static_cast<int64_t>(dst) * num_channels;
    const int32_t start = channel == 0 ? 0 : arch::ld_weak(prefix + channel - 1);
    publish_offsets(
        context, channel, dst,
        {static_cast<uint32_t>(start), static_cast<uint32_t>(arch::ld_weak(prefix + channel))});
  }
  const ChannelRange range = ChannelRange::of(args.num_tokens, num_channels, channel);
  RingSender ring(context, ring_slots(args.world, args.ring, channel, dst, args.world.rank),
                  channel, dst);
  send_rows(pipe, ring, SendReport(progress, dst, args.num_send_tokens, pipe),
            Pieces::of(args.message.row_bytes, args.stage), args.message.meta_bytes,
            TokenSource<Form>(args, range, dst), TokenSource<Form>(args, range, dst));
}

// All lanes: copies the metadata of one received row to the outputs.
DC_DEVICE void store_meta(const DispatchArgs& args, const uint8_t* meta, int64_t row) {
  const MessageLayout& message = args.message;
  for (int column = arch::lane_idx(); column < args.num_scales; column += kWarpSize) {
    move_element(args.recv_x_scales + (row * args.num_scales + column) * args.scale_bytes,
                 meta + message.scales_offset + column * args.scale_bytes, args.scale_bytes);
  }
  const int32_t* local_experts = reinterpret_cast<const int32_t*>(meta + message.topk_idx_offset);
  const float* weights = reinterpret_cast<const float*>(meta + message.topk_weights_offset);
  for (int k = arch::lane_idx(); k < message.num_topk; k += kWarpSize) {
    store_expert(args.recv_topk_idx, row * message.num_topk + k, args.topk_idx_bytes,
                 arch::ld_weak(local_experts + k));
    if (args.recv_topk_weights != nullptr) {
      arch::st_weak(args.recv_topk_weights + row * message.num_topk + k,
                    arch::ld_weak(weights + k));
    }
  }
  if (arch::lane_idx() == 0 && args.recv_src_idx != nullptr) {
    arch::st_weak(args.recv_src_idx + row,
                  arch::ld_weak(reinterpret_cast<const int32_t*>(meta + message.src_idx_offset)));
  }
}

// The same for expanded outputs: `ordinal` among the received tokens, whose first output row is
// `row`.
DC_DEVICE void store_expanded_meta(const DispatchArgs& args, const uint8_t* meta, int64_t ordinal,
                                   int64_t row) {
  const MessageLayout& message = args.message;
  const bool fits = row >= 0 && row < args.num_recv_rows;
  for (int column = arch::lane_idx(); column < args.num_scales && fits; column += kWarpSize) {
    move_element(args.recv_x_scales + (row * args.num_scales + column) * args.scale_bytes,
                 meta + message.scales_offset + column * args.scale_bytes, args.scale_bytes);
  }
  const int32_t* places = reinterpret_cast<const int32_t*>(meta + message.topk_idx_offset);
  const float* weights = reinterpret_cast<const float*>(meta + message.topk_weights_offset);
  for (int k = arch::lane_idx(); k < message.num_topk; k += kWarpSize) {
    const int32_t place = arch::ld_weak(places + k);
    arch::st_weak(args.recv_rows + ordinal * message.num_topk + k, place);
    if (args.recv_topk_weights != nullptr && place >= 0 && place < args.num_recv_rows) {
      arch::st_weak(args.recv_topk_weights + place, arch::ld_weak(weights + k));
    }
  }
  if (arch::lane_idx() == 0 && args.recv_src_idx != nullptr) {
    arch::st_weak(args.recv_src_idx + ordinal,
                  arch::ld_weak(reinterpret_cast<const int32_t*>(meta + message.src_idx_offset)));
  }
}

// One of the warps that receive from `src` through this channel: copies the part-th of its rows from
// the ring to their final rows, and then every num_receive_warps-th. Returns what it reports last: the
// number of rows, or, if a wait has failed, what it has reported before.
template <class Form>
DC_DEVICE uint32_t receive_rows(const DispatchArgs& args, RingReceiver& ring, Progress& progress,
                                int word, int part, uint32_t num_rows, int64_t first_row) {
  const uint32_t num_warps = args.num_receive_warps;
  const uint32_t release_step = min_of(args.num_send_tokens, args.ring.num_slots);
  uint32_t num_reported = part;
  // The sender may need the slots of earlier rows before it fills the first one of this warp.
  if (arch::lane_idx() == 0) progress.report(word, num_reported);
  for (uint32_t row_idx = part; row_idx < num_rows; row_idx += num_warps) {
    bool ok = true;
    if (arch::lane_idx() == 0) ok = ring.await_filled(row_idx);
    arch::sync_warp();  // hands the leader's acquire to all lanes
    if (arch::shfl(kFullMask, static_cast<int>(ok), 0) == 0) return num_reported;
    if (arch::fault(Fault::kEarlyCredit) && arch::lane_idx() == 0)
      progress.report(word, row_idx + num_warps);
    const int64_t ordinal = first_row + row_idx;
    int64_t row = ordinal;
    const uint8_t* slot = ring.slot(row_idx);
    const uint8_t* meta = slot + args.message.row_bytes;
    if constexpr (Form::kExpanded) {
      row = arch::ld_weak(reinterpret_cast<const int32_t*>(meta + args.message.dst_row_offset));
      if (ordinal < args.num_recv_rows) store_expanded_meta(args, meta, ordinal, row);
    }
    if (row >= 0 && row < args.num_recv_rows) {
      copy_vecs<VecSource::kPeerWritten>(args.recv_x + row * args.message.row_bytes, slot,
                                         args.message.row_bytes / 16);
      if (!Form::kExpanded) store_meta(args, meta, row);
    }
    if (row_idx + num_warps - num_reported >= release_step) {
      arch::sync_warp();  // every lane has read its part of the slots
      num_reported = row_idx + num_warps;
      if (arch::lane_idx() == 0) progress.report(word, num_reported);
    }
  }
  // No sender waits for the credit of the last rows: what a warp has read but not reported is less than
  // release_step, and so than a ring of slots.
  return num_rows;
}

// One of the warps that handle this rank's own tokens: copies the part-th one straight from x, and
// then every num_receive_warps-th.
template <class Form>
DC_DEVICE void copy_own_rows(const DispatchArgs& args, int channel, int part, int64_t first_row) {
  const World& world = args.world;
  const PeerOutput output{args.recv_x,
                          args.recv_x_scales,
                          static_cast<uint8_t*>(args.recv_topk_idx),
                          args.recv_topk_weights,
                          args.recv_src_idx,
                          args.recv_rows,
                          args.num_recv_rows};
  constexpr VecSource kRows = Form::kQuantised ? VecSource::kPeerWritten : VecSource::kInput;
  constexpr ScaleSource kScales =
      Form::kQuantised ? ScaleSource::kWrittenHere : ScaleSource::kInput;
  TokenSource<Form> tokens(args, ChannelRange::of(args.num_tokens, args.ring.num_channels, channel),
                           world.rank);
  int turn = part;  // tokens until this warp's next one
  int64_t ordinal = first_row;
  for (int token = tokens.next(); token >= 0; token = tokens.next(), ++ordinal) {
    if (turn-- != 0) continue;
    turn = args.num_receive_warps - 1;
    if (ordinal < 0 || ordinal >= args.num_recv_rows) return;
    int64_t row = ordinal;
    if constexpr (Form::kExpanded) {
      row = arch::ld_nc(args.send_row + static_cast<int64_t>(token) * world.num_ranks + world.rank);
      ExpandedMeta<kScales> meta;
      meta.load(args, token);
      meta.store(args, token, world.rank, output, ordinal, row);
      if (row < 0 || row >= args.num_recv_rows) continue;
    }
    copy_vecs<kRows>(args.recv_x + row * args.message.row_bytes, tokens.row(token),
                     args.message.row_bytes / 16);
    if (!Form::kExpanded) store_token_meta<kScales>(args, token, world.rank, output, row);
  }
}

// Notes where a source's rows of one channel begin among all that this rank receives from it.
DC_DEVICE void note_channel_start(const DispatchArgs& args, int channel, int src, uint32_t start) {
  if (arch::lane_idx() != 0 || args.recv_channel_prefix_matrix == nullptr) return;
  arch::st_weak(args.recv_channel_prefix_matrix + src * args.ring.num_channels + channel,
                static_cast<int32_t>(start));
}

// One of the warps that receive from `src`.
template <class Form>
DC_DEVICE void dispatch_receive(const Context& context, const DispatchArgs& args,
                                Progress& progress, int channel, int src, int part) {
  const World& world = args.world;
  if (world.is_absent(src)) {
    if (part == 0) note_channel_start(args, channel, src, 0);
    return;
  }
  const int64_t source_start =
      src == 0 ? 0
               : arch::ld_weak(args.rank_prefix_matrix + (src - 1) * world.num_ranks + world.rank);
  if (src == world.rank) {
    const int32_t* prefix =
        args.channel_prefix_matrix + static_cast<int64_t>(src) * args.ring.num_channels;
    const int32_t start = channel == 0 ? 0 : arch::ld_weak(prefix + channel - 1);
    if (part == 0) note_channel_start(args, channel, src, start);
    copy_own_rows<Form>(args, channel, part, source_start + start);
    return;
  }
  const int word = receive_word(args, src) + part;
  ChannelOffsets offsets{};
  bool ok = true;
  if (arch::lane_idx() == 0) ok = await_offsets(context, channel, src, &offsets);
  ok = arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
  uint32_t num_read = 0;
  if (ok) {
    offsets.start = arch::shfl(kFullMask, offsets.start, 0);
    offsets.end = arch::shfl(kFullMask, offsets.end, 0);
    if (part == 0) note_channel_start(args, channel, src, offsets.start);
    RingReceiver ring(context, ring_slots(world, args.ring, channel, world.rank, src), channel,
                      src);
    num_read = receive_rows<Form>(args, ring, progress, word, part, offsets.end - offsets.start,
                                  source_start + offsets.start);
  }
  if (arch::lane_idx() == 0) progress.finish(word, num_read);
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
    published = {ring_tail(world, channel, peer), peer, 1};
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

// Ring mode, one block. `progress` has been reset.
template <class Form>
DC_DEVICE void dispatch_by_rings(const Context& context, const DispatchArgs& args,
                                 Progress& progress) {
  const int channel = arch::block_idx(), num_ranks = args.world.num_ranks;
  const int num_senders = num_ranks - 1, num_receivers = num_ranks * args.num_receive_warps;
  const int warp = arch::warp_idx(), receiver = warp - num_senders;
  if constexpr (Form::kQuantised) quantise_channel(args, channel);
  if (warp < num_senders) {
    dispatch_send<Form>(context, args, progress, channel, (args.world.rank + 1 + warp) % num_ranks);
  } else if (receiver < num_receivers) {
    dispatch_receive<Form>(context, args, progress, channel, receiver / args.num_receive_warps,
                           receiver % args.num_receive_warps);
  } else if (receiver == num_receivers) {
    dispatch_publish(context, args, progress, channel);
    note_in_warp(context, TraceStep::kLeft);  // the other warps have finished
  }
}

}  // namespace deep_comm
