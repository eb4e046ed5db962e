// dispatch, ring mode: bounded memory. Every token to every rank that holds one of its experts, through rings.
//
// grid   one block a lane (channel c, strip s of the row); warp w < R sends to rank w, warp R + w receives from
//        rank w, warp 2 R publishes tails and heads; only strip 0 carries and writes metadata
// smem   2 R x (stages + mbarriers)
// words  recv_line.{start,end}_offset · owner: receiver · written by sender · relaxed, flag in data
//        recv_line.tail               · owner: receiver · written by sender · release/acquire sys
//        send_line.head               · owner: sender · written by receiver · release/acquire sys
// waits  offsets, tail: unblocked by the sender; head: by the receiver. Sender and receiver of one rank do not
//        wait for each other, and a sender publishes all it has before it waits, so no cycle can form
#pragma once

#include "device/channel/offsets.cuh"
#include "device/channel/ring.cuh"
#include "device/intranode/args.cuh"
#include "device/intranode/ring_send.cuh"
#include "device/layout/channel_range.cuh"
#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// The tokens of one channel that go to one rank, 32 at a time.
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
  DC_DEVICE void write_meta(uint8_t* meta, int token) const;

 private:
  DC_DEVICE void look_at_batch() {
    const int token = base_ + arch::lane_idx();
    const int64_t position = static_cast<int64_t>(token) * args_.world.num_ranks + dst_;
    pending_ = arch::ballot(kFullMask,
                            token < end_ && arch::ld_nc(args_.is_token_in_rank + position) != 0);
  }

  const DispatchArgs& args_;
  int dst_;
  int base_;
  int end_;
  uint32_t pending_ = 0;
};

DC_DEVICE void TokenSource::write_meta(uint8_t* meta, int token) const {
  const MessageLayout& message = args_.message;
  for (int column = arch::lane_idx(); column < args_.num_scales; column += kWarpSize) {
    const int64_t position = token * args_.scale_token_stride + column * args_.scale_column_stride;
    gather_element(meta + message.scales_offset() + column * args_.scale_bytes,
                   args_.x_scales + position * args_.scale_bytes, args_.scale_bytes);
  }
  const ExpertMap experts{args_.num_experts, args_.world.num_ranks};
  const int first = experts.first_expert(dst_), count = experts.num_local_experts(dst_);
  int32_t* local_experts = reinterpret_cast<int32_t*>(meta + message.topk_idx_offset());
  float* weights = reinterpret_cast<float*>(meta + message.topk_weights_offset());
  for (int k = arch::lane_idx(); k < message.num_topk; k += kWarpSize) {
    const int64_t position = static_cast<int64_t>(token) * message.num_topk + k;
    const int local = load_expert(args_.topk_idx, position, args_.topk_idx_bytes) - first;
    const bool is_here = local >= 0 && local < count;
    local_experts[k] = is_here ? local : -1;
    weights[k] = is_here && args_.topk_weights != nullptr
                     ? arch::ld_nc(args_.topk_weights + position)
                     : 0.0f;
  }
  if (arch::lane_idx() == 0) {
    *reinterpret_cast<int32_t*>(meta + message.src_idx_offset()) = token;
  }
}

DC_DEVICE void dispatch_send(const Context& context, const DispatchArgs& args, Progress& progress,
                             int lane, int dst) {
  const int channel = args.ring.channel_of(lane), num_channels = args.ring.num_channels;
  const Strip strip = Strip::of(args.message, args.ring.strip_of(lane));
  StagePipe pipe = make_pipe(args.stage, args.ring_barriers_offset);
  if (arch::lane_idx() == 0) {
    const int32_t* prefix = args.channel_prefix_matrix + static_cast<int64_t>(dst) * num_channels;
    const int32_t start = channel == 0 ? 0 : arch::ld_nc(prefix + channel - 1);
    publish_offsets(
        context, lane, dst,
        {static_cast<uint32_t>(start), static_cast<uint32_t>(arch::ld_nc(prefix + channel))});
  }
  const ChannelRange range = ChannelRange::of(args.num_tokens, num_channels, channel);
  RingSender ring(context, args.ring, lane, dst);
  send_rows(pipe, ring, SendReport(progress, dst, args.num_send_tokens), strip,
            Pieces::of(strip, args.stage), TokenSource(args, range, dst),
            TokenSource(args, range, dst));
}

// All lanes: the metadata behind a landed row, from shared memory to the outputs.
DC_DEVICE void store_meta(const DispatchArgs& args, const uint8_t* meta, int64_t row) {
  const MessageLayout& message = args.message;
  for (int column = arch::lane_idx(); column < args.num_scales; column += kWarpSize) {
    scatter_element(args.recv_x_scales + (row * args.num_scales + column) * args.scale_bytes,
                    meta + message.scales_offset() + column * args.scale_bytes, args.scale_bytes);
  }
  const int32_t* local_experts = reinterpret_cast<const int32_t*>(meta + message.topk_idx_offset());
  const float* weights = reinterpret_cast<const float*>(meta + message.topk_weights_offset());
  for (int k = arch::lane_idx(); k < message.num_topk; k += kWarpSize) {
    store_expert(args.recv_topk_idx, row * message.num_topk + k, args.topk_idx_bytes,
                 local_experts[k]);
    if (args.recv_topk_weights != nullptr) {
      arch::st_weak(args.recv_topk_weights + row * message.num_topk + k, weights[k]);
    }
  }
  if (arch::lane_idx() == 0 && args.recv_src_idx != nullptr) {
    arch::st_weak(args.recv_src_idx + row,
                  *reinterpret_cast<const int32_t*>(meta + message.src_idx_offset()));
  }
}

// Leader: issues every load whose row has come and whose stage is free; blocks only for the row needed next.
DC_DEVICE bool load_arrived(RingReceiver& ring, StagePipe& pipe, const Strip& strip,
                            const Pieces& pieces, uint32_t num_rows) {
  while (pipe.can_load() && pipe.num_loads() < num_rows * pieces.num_pieces) {
    const uint32_t row_idx = pipe.num_loads() / pieces.num_pieces;
    const int piece = pipe.num_loads() % pieces.num_pieces;
    const uint32_t num_known = ring.num_filled();
    if (!ring.poll_filled(row_idx)) {
      if (pipe.num_loads() > pipe.num_stores()) return true;
      if (!ring.await_filled(row_idx)) return false;
    }
    // A new acquire before the bulk copies that read what it showed.
    if (ring.num_filled() != num_known) arch::fence_proxy_async_global();
    pipe.make_room();
    pipe.load(ring.slot(row_idx) + piece * pieces.piece_bytes,
              pieces.bytes_of(piece) + (pieces.is_last(piece) ? strip.meta_bytes : 0));
    pipe.advance_load();
  }
  return true;
}

// One warp: a strip of the rows that `src` sends through this channel, from the ring to their final places.
// Reports what it has read, and that it has finished.
DC_DEVICE void receive_rows(const DispatchArgs& args, RingReceiver& ring, StagePipe& pipe,
                            Progress& progress, int word, const Strip& strip, uint32_t num_rows,
                            int64_t first_row) {
  const bool is_leader = arch::lane_idx() == 0;
  const Pieces pieces = Pieces::of(strip, args.stage);
  const uint32_t release_step = min_of(args.num_send_tokens, args.ring.num_slots);
  uint32_t num_reported = 0;
  for (uint32_t row_idx = 0; row_idx < num_rows; ++row_idx) {
    const int64_t row = first_row + row_idx;
    const bool fits = row < args.num_recv_rows;
    uint8_t* dst = args.recv_x + row * args.message.row_bytes + strip.offset;
    for (int piece = 0; piece < pieces.num_pieces; ++piece) {
      bool ok = true;
      if (is_leader) {
        ok = load_arrived(ring, pipe, strip, pieces, num_rows);
        if (ok) pipe.await_load();
      }
      arch::sync_warp();  // hands the landed bytes to all lanes
      ok = arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
      if (!ok) {
        if (is_leader) pipe.drain();
        if (is_leader) progress.finish(word, num_reported);
        return;
      }
      const int num_bytes = pieces.bytes_of(piece);
      if (pieces.is_last(piece) && strip.meta_bytes != 0 && fits) {
        store_meta(args, pipe.current() + num_bytes, row);
      }
      if (is_leader) pipe.store(dst + piece * pieces.piece_bytes, fits ? num_bytes : 0);
      pipe.advance_store();
    }
    if (is_leader && row_idx + 1 - num_reported >= release_step) {
      num_reported = row_idx + 1;
      progress.report(word, num_reported);
    }
  }
  if (is_leader) pipe.drain();
  if (is_leader) progress.finish(word, num_rows);
}

DC_DEVICE void dispatch_receive(const Context& context, const DispatchArgs& args,
                                Progress& progress, int lane, int src) {
  const World& world = args.world;
  const int channel = args.ring.channel_of(lane), num_channels = args.ring.num_channels;
  const Strip strip = Strip::of(args.message, args.ring.strip_of(lane));
  StagePipe pipe = make_pipe(args.stage, args.ring_barriers_offset);
  ChannelOffsets offsets{};
  bool ok = true;
  if (arch::lane_idx() == 0) ok = await_offsets(context, lane, channel, src, &offsets);
  ok = arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
  const int word = world.num_ranks + src;
  if (!ok) {
    if (arch::lane_idx() == 0) progress.finish(word, 0);
    return;
  }
  offsets.start = arch::shfl(kFullMask, offsets.start, 0);
  offsets.end = arch::shfl(kFullMask, offsets.end, 0);
  if (arch::lane_idx() == 0 && args.ring.strip_of(lane) == 0 &&
      args.recv_channel_prefix_matrix != nullptr) {
    arch::st_weak(args.recv_channel_prefix_matrix + src * num_channels + channel,
                  static_cast<int32_t>(offsets.start));
  }
  const int32_t source_start =
      src == 0 ? 0
               : arch::ld_nc(args.rank_prefix_matrix + (src - 1) * world.num_ranks + world.rank);
  RingReceiver ring(context, args.ring, lane, src);
  receive_rows(args, ring, pipe, progress, word, strip, offsets.end - offsets.start,
               static_cast<int64_t>(source_start) + offsets.start);
}

// The ring mode of one block. `progress` is reset.
DC_DEVICE void dispatch_by_rings(const Context& context, const DispatchArgs& args,
                                 Progress& progress) {
  const World& world = args.world;
  const int ring_lane = arch::block_idx(), num_ranks = world.num_ranks, warp = arch::warp_idx();
  // A strip that a short row does not reach has nothing to move.
  if (Strip::of(args.message, args.ring.strip_of(ring_lane)).num_bytes == 0) return;
  if (warp < num_ranks) {
    dispatch_send(context, args, progress, ring_lane, warp);
  } else if (warp < 2 * num_ranks) {
    dispatch_receive(context, args, progress, ring_lane, warp - num_ranks);
  } else if (warp == 2 * num_ranks) {
    const int lane = arch::lane_idx();
    uint64_t* target = lane < num_ranks       ? ring_tail(world, ring_lane, lane)
                       : lane < 2 * num_ranks ? ring_head(world, ring_lane, lane - num_ranks)
                                              : nullptr;
    publish_progress(context, progress, 2 * num_ranks, target);
  }
}

}  // namespace deep_comm
