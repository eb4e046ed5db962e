// combine: every expert rank's rows back to the ranks that own the tokens, where they are added.
//
// in     x [N, H] in dispatch's order, optional topk_weights [N, K]; optional bias_0, bias_1 [T, H];
//        rank_prefix_matrix, recv_channel_prefix_matrix, send_head of the dispatch
// out    combined_x [T, H] = round(((0 + x of rank a) + x of rank b + …) + bias_0 + bias_1), ranks ascending,
//        in float32, rounded once; combined_topk_weights [T, K] likewise in float32
// grid   one block a lane (channel c, strip s of the row): warp w < R sends to rank w, warp R returns credits,
//        warp R + 1 publishes, the warps behind it add, taking tokens in turn; strip 0 carries the weights
// smem   R x (stages + mbarriers), then a ReduceTeam
// words  recv_line.tail, send_line.head: as in dispatch, roles exchanged
// before entry_barrier: every rank's rings are free and this rank's handle is complete
// waits  tail: unblocked by the sender; head: by the receiver's warp R, which waits for its own block's
//        reducers (progress), which wait for tails. Tokens are taken in order, so no cycle can form
// not promised: nothing; the result does not depend on C, slots, chunks or the number of warps
#pragma once

#include "device/channel/ring.cuh"
#include "device/intranode/args.cuh"
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
    float* weights = reinterpret_cast<float*>(meta + args_.message.topk_weights_offset());
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

DC_DEVICE void combine_send(const Context& context, const CombineArgs& args, Progress& progress,
                            int lane, int dst) {
  const int num_ranks = args.world.num_ranks, num_channels = args.ring.num_channels;
  const int channel = args.ring.channel_of(lane);
  const Strip strip = Strip::of(args.message, args.ring.strip_of(lane));
  StagePipe pipe = make_pipe(args.stage, args.barriers_offset);
  // The rows that rank dst sent through this channel lie together, in its order.
  const int32_t* prefix = args.rank_prefix_matrix;
  const int source_begin =
      dst == 0 ? 0 : arch::ld_nc(prefix + (dst - 1) * num_ranks + args.world.rank);
  const int source_end = arch::ld_nc(prefix + dst * num_ranks + args.world.rank);
  const int32_t* starts = args.recv_channel_prefix_matrix + dst * num_channels;
  const int num_rows = args.num_rows;  // a worst-case handle may name rows that were dropped
  const int begin = min_of(num_rows, source_begin + arch::ld_nc(starts + channel));
  const int end = min_of(num_rows, channel + 1 == num_channels
                                       ? source_end
                                       : source_begin + arch::ld_nc(starts + channel + 1));
  RingSender ring(context, args.ring, lane, dst);
  send_rows(pipe, ring, SendReport(progress, dst, args.num_send_tokens), strip,
            Pieces::of(strip, args.stage), RowSource(args, begin, end),
            RowSource(args, begin, end));
}

// The reducing warps of a block and how far each has come; in shared memory, behind the senders' stages.
struct ReduceTeam {
  Progress progress;     // of the senders, and of the rows read
  uint32_t num_done[1];  // [num_warps]: tokens each warp has finished

  DC_DEVICE static ReduceTeam* of_block(const CombineArgs& args) {
    return reinterpret_cast<ReduceTeam*>(arch::dynamic_smem() + args.team_offset);
  }
  DC_HOST_DEVICE static constexpr size_t num_bytes(int num_warps) {
    return sizeof(Progress) + sizeof(uint32_t) * num_warps;
  }
  // Warps that neither send nor return credits nor publish.
  DC_DEVICE static int num_warps(const CombineArgs& args) {
    return arch::num_warps() - args.world.num_ranks - 2;
  }
  DC_DEVICE void reset(const CombineArgs& args) {
    progress.reset();
    for (int warp = arch::thread_idx(); warp < num_warps(args); warp += arch::num_threads())
      num_done[warp] = 0;
  }
};

// The rows of one token, in the order in which they are added: ranks ascending, then the biases.
struct Summands {
  static constexpr int kMax = kMaxRanks + 2;
  const uint8_t* rows[kMax];
  int num_rows = 0;

  // Indexed by constants only, so that the pointers stay in registers.
  DC_DEVICE void add(const uint8_t* row) {
    DC_UNROLL
    for (int idx = 0; idx < kMax; ++idx) {
      if (idx == num_rows) rows[idx] = row;
    }
    ++num_rows;
  }
};

// Lane r < R: the ordinal of `token` in rank r's ring, or -1.
DC_DEVICE int load_head(const CombineArgs& args, int token, int end) {
  const int num_ranks = args.world.num_ranks, lane = arch::lane_idx();
  if (token >= end || lane >= num_ranks) return -1;
  return arch::ld_nc(args.send_head + static_cast<int64_t>(token) * num_ranks + lane);
}

// One warp, one token, `head` by load_head: waits for its rows, adds them, writes the result.
template <Dtype kDtype>
DC_DEVICE bool reduce_token(const Context& context, const CombineArgs& args, int ring_lane,
                            const Strip& strip, int token, int head) {
  const int lane = arch::lane_idx();
  bool ok = true;
  if (head >= 0) {
    RingReceiver ring(context, args.ring, ring_lane, lane);
    ok = ring.await_filled(head, Stage::kReduce);
  }
  arch::sync_warp();  // hands each lane's acquire to the whole warp
  if (!arch::all(kFullMask, ok)) return false;
  Summands summands;
  for (uint32_t present = arch::ballot(kFullMask, head >= 0); present != 0;
       present &= present - 1) {
    const int rank = arch::ffs(present) - 1;
    const int row_idx = arch::shfl(kFullMask, head, rank);
    summands.add(RingReceiver(context, args.ring, ring_lane, rank).slot(row_idx));
  }
  const int num_received = summands.num_rows;
  const int64_t offset = static_cast<int64_t>(token) * args.message.row_bytes + strip.offset;
  DC_UNROLL
  for (int bias = 0; bias < 2; ++bias) {
    if (args.bias[bias] != nullptr) summands.add(args.bias[bias] + offset);
  }
  reduce_rows<kDtype>(args.combined_x + offset, summands.rows, summands.num_rows,
                      strip.num_bytes / 16);
  if (strip.meta_bytes == 0) return true;
  for (int k = lane; k < args.message.num_topk; k += kWarpSize) {
    float sum = 0.0f;
    DC_UNROLL
    for (int idx = 0; idx < kMaxRanks; ++idx) {
      if (idx >= num_received) continue;
      const uint8_t* weights =
          summands.rows[idx] + strip.num_bytes + args.message.topk_weights_offset();
      sum += arch::ld_weak(reinterpret_cast<const float*>(weights) + k);
    }
    arch::st_weak(
        args.combined_topk_weights + static_cast<int64_t>(token) * args.message.num_topk + k, sum);
  }
  return true;
}

// One reducing warp: every num_warps-th token of the channel.
template <Dtype kDtype>
DC_DEVICE void reduce_channel(const Context& context, const CombineArgs& args, int ring_lane,
                              ReduceTeam* team, int warp) {
  const int num_warps = ReduceTeam::num_warps(args);
  const ChannelRange range =
      ChannelRange::of(args.num_tokens, args.ring.num_channels, args.ring.channel_of(ring_lane));
  const Strip strip = Strip::of(args.message, args.ring.strip_of(ring_lane));
  uint32_t num_done = 0;
  int next_head = load_head(args, range.begin + warp, range.end);
  for (int token = range.begin + warp; token < range.end; token += num_warps) {
    const int head = next_head;
    next_head = load_head(args, token + num_warps, range.end);  // while this token is added
    if (!reduce_token<kDtype>(context, args, ring_lane, strip, token, head)) return;
    arch::sync_warp();  // every lane has read its part of the slots
    ++num_done;
    // pairs with: return_credits — the reads of this token's slots.
    if (arch::lane_idx() == 0) arch::st_release_cta(&team->num_done[warp], num_done);
  }
}

// One warp: walks the channel's tokens in order behind the reducers; lane r reports the rows of rank r that have
// been read.
DC_DEVICE void return_credits(const Context& context, const CombineArgs& args, int ring_lane,
                              ReduceTeam* team) {
  constexpr int kAhead = 4;  // tokens whose heads are on their way
  const int num_ranks = args.world.num_ranks, lane = arch::lane_idx();
  const int num_warps = ReduceTeam::num_warps(args);
  const int channel = args.ring.channel_of(ring_lane);
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
      if (lane == 0) {
        ok = await<Scope::kCta>(
            context, &team->num_done[warp],
            {Stage::kRetire, Word::kProgress, args.world.rank, channel}, wanted,
            [=](uint32_t value) { return value >= wanted; }, &num_done);
      }
      arch::sync_warp();  // hands the leader's acquire to the lanes that report
      ok = arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
      if (ok && heads[idx] >= 0) num_read = heads[idx] + 1;
      if (num_read - num_reported >= release_step) {
        num_reported = num_read;
        team->progress.report(num_ranks + lane, num_reported);
      }
    }
  }
  if (lane < num_ranks) team->progress.finish(num_ranks + lane, num_reported);
}

template <Dtype kDtype>
DC_DEVICE void combine(const CombineArgs& args) {
  const World& world = args.world;
  const Context context{world, Kernel::kCombine, current_generation(world)};
  const int ring_lane = arch::block_idx(), num_ranks = world.num_ranks, warp = arch::warp_idx();
  const int lane = arch::lane_idx();
  ReduceTeam* team = ReduceTeam::of_block(args);
  team->reset(args);
  bool* has_entered = reinterpret_cast<bool*>(arch::dynamic_smem());  // no stage is in use yet
  if (warp == 0) {
    const bool ok = entry_barrier(context, args.signature);
    if (lane == 0) *has_entered = ok;
  }
  arch::sync_block();
  const bool ok = *has_entered;
  arch::sync_block();  // all have read it before the stages are filled
  if (!ok || Strip::of(args.message, args.ring.strip_of(ring_lane)).num_bytes == 0) {
    // A peer did not come, or the row is too short for this strip: nothing to move.
  } else if (warp < num_ranks) {
    combine_send(context, args, team->progress, ring_lane, warp);
  } else if (warp == num_ranks) {
    return_credits(context, args, ring_lane, team);
  } else if (warp == num_ranks + 1) {
    uint64_t* target = lane < num_ranks       ? ring_tail(world, ring_lane, lane)
                       : lane < 2 * num_ranks ? ring_head(world, ring_lane, lane - num_ranks)
                                              : nullptr;
    publish_progress(context, team->progress, 2 * num_ranks, target);
  } else {
    reduce_channel<kDtype>(context, args, ring_lane, team, warp - num_ranks - 2);
  }
  retire_block(context);
}

}  // namespace deep_comm
