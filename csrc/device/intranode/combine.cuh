// combine: every expert rank's rows back to the ranks that own the tokens, where they are added.
//
// in     x [N, H] in dispatch's order, optional topk_weights [N, K]; optional bias_0, bias_1 [T, H];
//        rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, send_head of the
//        dispatch
// out    combined_x [T, H] = round(((0 + x of rank a) + x of rank b + …) + bias_0 + bias_1), ranks
//        ascending, in float32, rounded once; combined_topk_weights [T, K] likewise in float32
// modes  staged, when every rank has room for all rows that come to it (announced at entry, as in
//        dispatch): a "ring" as long as the message, so nobody waits for credit. Otherwise rings
// grid   one block a channel: R - 1 warps send to a peer each, one returns credits, one publishes,
//        the warps behind them add, taking tokens in turn; rows of this rank's own are read where
//        they are
// smem   (R - 1) x (stages + mbarriers), then a CombineEntry
// words  recv_line.tail, send_line.head: as in dispatch, roles exchanged
//        arrived, staging_line, staging_rows · owner: reader · written by each peer's block 0 · entry
// before entry: every rank's rings and staging are free and this rank's handle is complete
// waits  tail: unblocked by the sender; head: by the receiver's credit warp, which waits for its own
//        block's reducers (progress), which wait for tails. Tokens are taken in order, so no cycle
//        can form
// not promised: nothing; the result does not depend on mode, C, slots, chunks or number of warps
#pragma once

#include "device/channel/ring.cuh"
#include "device/intranode/args.cuh"
#include "device/intranode/combine_staging.cuh"
#include "device/intranode/ring_send.cuh"
#include "device/layout/channel_range.cuh"
#include "device/move/reduce.cuh"
#include "device/sync/barrier.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

// A contiguous range of x.
class RowSource {
 public:
  DC_DEVICE RowSource(const CombineArgs& args, int begin, int end)
      : args_(args), next_(begin), end_(end) {}
  DC_DEVICE int next() { return next_ < end_ ? next_++ : -1; }
  DC_DEVICE const uint8_t* row(int row) const {
    return args_.x + static_cast<size_t>(row) * args_.message.row_bytes;
  }
  DC_DEVICE void write_meta(uint8_t* meta, int row) const {
    float* weights = reinterpret_cast<float*>(meta);
    for (int k = arch::lane_idx(); k < args_.message.num_topk; k += kWarpSize) {
      weights[k] =
          arch::ld_nc(args_.topk_weights + static_cast<int64_t>(row) * args_.message.num_topk + k);
    }
  }

 private:
  const CombineArgs& args_;
  int next_;
  int end_;
};

// What a block's warps share: how rows travel, how far its senders, readers and reducers have come.
// In shared memory, behind the senders' stages.
struct CombineEntry {
  CombineMode mode;
  Progress progress;  // [peer] rows sent to it, [R + peer] rows of its ring that have been read
  static constexpr int kMaxReduceWarps = 32;
  static constexpr int kMaxRows = kMaxRanks + 2;   // of one token: one a rank, then the biases
  uint32_t num_done[kMaxReduceWarps];              // tokens each reducing warp has finished
  const uint8_t* rows[kMaxReduceWarps][kMaxRows];  // what each of them adds

  DC_DEVICE static CombineEntry* of_block(const CombineArgs& args) {
    return reinterpret_cast<CombineEntry*>(arch::dynamic_smem() + args.entry_offset);
  }
  // Warps that neither send nor return credits nor publish.
  DC_DEVICE static int num_reduce_warps(const CombineArgs& args) {
    return arch::num_warps() - args.world.num_ranks - 1;
  }
  DC_DEVICE void reset(const CombineArgs& args) {
    progress.reset();
    for (int warp = arch::thread_idx(); warp < num_reduce_warps(args); warp += arch::num_threads())
      num_done[warp] = 0;
  }
};

DC_DEVICE void combine_send(const Context& context, const CombineArgs& args, CombineEntry* entry,
                            int channel, int dst) {
  const int num_ranks = args.world.num_ranks, num_channels = args.ring.num_channels;
  StagePipe pipe = make_pipe(args.stage, args.barriers_offset);
  // The rows that rank dst sent through this channel lie together, in its order.
  const int32_t* prefix = args.rank_prefix_matrix;
  const int source_begin =
      dst == 0 ? 0 : arch::ld_nc(prefix + (dst - 1) * num_ranks + args.world.rank);
  const int source_end = arch::ld_nc(prefix + dst * num_ranks + args.world.rank);
  const int32_t* starts = args.recv_channel_prefix_matrix + dst * num_channels;
  const int start = arch::ld_nc(starts + channel);
  const int num_rows = args.num_rows;  // a worst-case handle may name rows that were dropped
  const int begin = min_of(num_rows, source_begin + start);
  const int end = min_of(num_rows, channel + 1 == num_channels
                                       ? source_end
                                       : source_begin + arch::ld_nc(starts + channel + 1));
  const RingSlots slots = entry->mode == CombineMode::kStaged
                              ? staging_slots(context, args, dst, args.world.rank, start)
                              : ring_slots(args.world, args.ring, channel, dst, args.world.rank);
  RingSender ring(context, slots, channel, dst);
  send_rows(pipe, ring, SendReport(entry->progress, dst, args.num_send_tokens),
            Pieces::of(args.message.row_bytes, args.stage), args.message.meta_bytes,
            RowSource(args, begin, end), RowSource(args, begin, end));
}

// Lane r < R: the ordinal of `token` among the rows that rank r returns to this channel, or -1.
DC_DEVICE int load_head(const CombineArgs& args, int token, int end) {
  const int num_ranks = args.world.num_ranks, lane = arch::lane_idx();
  if (token >= end || lane >= num_ranks) return -1;
  return arch::ld_nc(args.send_head + static_cast<int64_t>(token) * num_ranks + lane);
}

// One reducing warp; lane r < R looks after the rows of rank r: from its ring, or from x for this
// rank's own.
template <Dtype kDtype>
class Reducer {
 public:
  // rows: in shared memory, this warp's own.
  DC_DEVICE Reducer(const Context& context, const CombineArgs& args, CombineMode mode, int channel,
                    const uint8_t** rows)
      : args_(args),
        rows_(rows),
        is_peer_(arch::lane_idx() < args.world.num_ranks && arch::lane_idx() != args.world.rank),
        slots_(slots_of_lane(context, args, mode, channel)),
        ring_(context, slots_, channel, is_peer_ ? arch::lane_idx() : 0) {}

  // Waits for the rows of `token`, adds them, writes the result. `head` by load_head.
  DC_DEVICE bool reduce(int token, int head) {
    bool ok = true;
    // A worst-case handle may name rows that were dropped; dispatch has said so.
    if (arch::lane_idx() == args_.world.rank && own_row_ + head >= args_.num_rows) head = -1;
    if (is_peer_ && head >= 0) ok = ring_.await_filled(head, Stage::kReduce);
    arch::sync_warp();  // hands each lane's acquire to the whole warp
    if (!arch::all(kFullMask, ok)) return false;
    const int lane = arch::lane_idx(), rank = args_.world.rank;
    const uint32_t present = arch::ballot(kFullMask, head >= 0);
    const int position = arch::popc(present & ((1u << lane) - 1));
    if (head >= 0) rows_[position] = slots_.slot(head);
    const int num_received = arch::popc(present);
    const int64_t offset = static_cast<int64_t>(token) * args_.message.row_bytes;
    int num_rows = num_received;
    DC_UNROLL
    for (int bias = 0; bias < 2; ++bias) {
      if (args_.bias[bias] == nullptr) continue;
      if (lane == 0) rows_[num_rows] = args_.bias[bias] + offset;
      ++num_rows;
    }
    arch::sync_warp();  // the rows' addresses before any lane follows them
    reduce_rows<kDtype>(args_.combined_x + offset, rows_, num_rows, args_.message.row_bytes / 16);
    if (args_.message.num_topk == 0) return true;
    const int own_position =
        (present >> rank & 1u) != 0 ? arch::shfl(kFullMask, position, rank) : -1;
    const int own_head = arch::shfl(kFullMask, head, rank);
    for (int k = lane; k < args_.message.num_topk; k += kWarpSize) {
      float sum = 0.0f;
      for (int idx = 0; idx < num_received; ++idx) {
        const float* weights =
            idx == own_position
                ? args_.topk_weights + (own_row_ + own_head) * args_.message.num_topk
                : reinterpret_cast<const float*>(rows_[idx] + args_.message.row_bytes);
        sum += arch::ld_weak(weights + k);
      }
      arch::st_weak(
          args_.combined_topk_weights + static_cast<int64_t>(token) * args_.message.num_topk + k,
          sum);
    }
    return true;
  }

 private:
  DC_DEVICE RingSlots slots_of_lane(const Context& context, const CombineArgs& args,
                                    CombineMode mode, int channel) {
    const World& world = args.world;
    const int lane = arch::lane_idx(), num_channels = args.ring.num_channels;
    own_row_ = (world.rank == 0 ? 0
                                : arch::ld_nc(args.rank_prefix_matrix +
                                              (world.rank - 1) * world.num_ranks + world.rank)) +
               arch::ld_nc(args.recv_channel_prefix_matrix + world.rank * num_channels + channel);
    if (lane == world.rank) {
      uint8_t* rows = const_cast<uint8_t*>(args.x);  // as slots, which nobody writes here
      const size_t row_bytes = args.message.row_bytes;
      return {rows + own_row_ * row_bytes, kUnlimitedSlots, row_bytes};
    }
    if (!is_peer_) return {};
    if (mode != CombineMode::kStaged) {
      return ring_slots(world, args.ring, channel, world.rank, lane);
    }
    const int32_t* prefix = args.channel_prefix_matrix + lane * num_channels;
    return staging_slots(context, args, world.rank, lane,
                         channel == 0 ? 0 : arch::ld_nc(prefix + channel - 1));
  }

  const CombineArgs& args_;
  const uint8_t** rows_;
  bool is_peer_;
  int64_t own_row_ = 0;  // this rank's first row of the channel, in x
  RingSlots slots_;
  RingReceiver ring_;
};

// One reducing warp: every num_warps-th token of the channel.
template <Dtype kDtype>
DC_DEVICE void reduce_channel(const Context& context, const CombineArgs& args, CombineEntry* entry,
                              int channel, int warp) {
  const int num_warps = CombineEntry::num_reduce_warps(args);
  const ChannelRange range = ChannelRange::of(args.num_tokens, args.ring.num_channels, channel);
  Reducer<kDtype> reducer(context, args, entry->mode, channel, entry->rows[warp]);
  uint32_t num_done = 0;
  int next_head = load_head(args, range.begin + warp, range.end);
  for (int token = range.begin + warp; token < range.end; token += num_warps) {
    const int head = next_head;
    next_head = load_head(args, token + num_warps, range.end);  // while this token is added
    if (!reducer.reduce(token, head)) return;
    arch::sync_warp();  // every lane has read its part of the slots
    ++num_done;
    // pairs with: return_credits — the reads of this token's slots.
    if (arch::lane_idx() == 0) arch::st_release_cta(&entry->num_done[warp], num_done);
  }
}

// One warp, ring mode: walks the channel's tokens in order behind the reducers; lane r reports the
// rows of rank r that have been read.
DC_DEVICE void return_credits(const Context& context, const CombineArgs& args, CombineEntry* entry,
                              int channel) {
  constexpr int kAhead = 4;  // tokens whose heads are on their way
  const int num_ranks = args.world.num_ranks, lane = arch::lane_idx();
  const bool is_peer = lane < num_ranks && lane != args.world.rank;
  const int num_warps = CombineEntry::num_reduce_warps(args);
  const ChannelRange range = ChannelRange::of(args.num_tokens, args.ring.num_channels, channel);
  const uint32_t release_step = min_of(args.num_send_tokens, args.ring.num_slots);
  uint32_t num_read = 0, num_reported = 0;  // rows of this lane's rank
  bool ok = entry->mode == CombineMode::kRings;
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
      if (lane == 0) {
        ok = await<Scope::kCta>(
            context, &entry->num_done[warp],
            {Stage::kRetire, Word::kProgress, args.world.rank, channel}, wanted,
            [=](uint32_t value) { return value >= wanted; }, &num_done);
      }
      arch::sync_warp();  // hands the leader's acquire to the lanes that report
      ok = arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
      if (!ok || !is_peer) continue;
      if (heads[idx] >= 0) num_read = heads[idx] + 1;
      if (num_read - num_reported >= release_step) {
        num_reported = num_read;
        entry->progress.report(num_ranks + lane, num_reported);
      }
    }
  }
  if (is_peer) entry->progress.finish(num_ranks + lane, num_reported);
}

// The warp that publishes: lane r the tail of the ring to rank r, lane R + r the head of the ring
// from it.
DC_DEVICE void combine_publish(const Context& context, const CombineArgs& args, CombineEntry* entry,
                               int channel) {
  const World& world = args.world;
  const int lane = arch::lane_idx(), peer = lane % world.num_ranks;
  Published published;
  if (peer != world.rank && lane < 2 * world.num_ranks) {
    published = {
        lane < world.num_ranks ? ring_tail(world, channel, peer) : ring_head(world, channel, peer),
        lane, 1};
  }
  publish_progress(context, entry->progress, published);
}

template <Dtype kDtype>
DC_DEVICE void combine(const CombineArgs& args) {
  const World& world = args.world;
  const Context context{world, Kernel::kCombine, current_generation(world)};
  const int channel = arch::block_idx(), num_ranks = world.num_ranks, warp = arch::warp_idx();
  const int num_senders = num_ranks - 1;
  CombineEntry* entry = CombineEntry::of_block(args);
  entry->reset(args);
  if (channel == 0) announce_staging(context, args);
  if (warp == 0) {
    const CombineMode mode = enter_combine(context, args);
    if (arch::lane_idx() == 0) entry->mode = mode;
  }
  arch::sync_block();
  if (entry->mode == CombineMode::kFailed) {
    // A peer did not come: nothing to move.
  } else if (warp < num_senders) {
    combine_send(context, args, entry, channel, (world.rank + 1 + warp) % num_ranks);
  } else if (warp == num_senders) {
    return_credits(context, args, entry, channel);
  } else if (warp == num_senders + 1) {
    combine_publish(context, args, entry, channel);
  } else {
    reduce_channel<kDtype>(context, args, entry, channel, warp - num_senders - 2);
  }
  retire_block(context);
}

}  // namespace deep_comm
