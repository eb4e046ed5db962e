// notify_dispatch: every rank learns how many rows it will receive from whom, before any row moves.
//
// in     num_tokens_per_rank [R], num_tokens_per_expert [E], is_token_in_rank [T, R]
// out    rank_prefix_matrix [R, R]     [i][j] = rows that ranks 0..i send to rank j
//        channel_prefix_matrix [R, C]  [j][c] = rows that this rank sends to j in channels 0..c
//        send_head [T, R]              ordinal of a token among those its channel sends to a rank, or -1
//        counts (host memory): total and per-expert rows, aligned, and the most tokens a rank has; num_recv_tokens_per_expert (device)
// grid   1 + R blocks; block 0 talks to the peers, block 1 + j counts the channels of destination j
// words  arrived  · owner: receiver · written by each peer · read by block 0 · release/acquire sys · generation
//        counts   · owner: receiver · row of each peer    · before its `arrived` · overwritten by the next notify,
//                   which a peer can reach only after this rank has finished this kernel (its dispatch needs ours)
// after  all ranks have entered this kernel, hence finished their earlier ones: rings are free
// waits  await_arrivals, unblocked by every peer's announce_arrival
#pragma once

#include "device/intranode/args.cuh"
#include "device/layout/channel_range.cuh"
#include "device/layout/expert_map.cuh"
#include "device/sync/barrier.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

// Writes this rank's header and counts into every peer's segment.
DC_DEVICE void send_counts(const NotifyArgs& args) {
  const World& world = args.world;
  const ExpertMap experts{args.num_experts, world.num_ranks};
  for (int peer = 0; peer < world.num_ranks; ++peer) {
    int32_t* row = world.counts(peer, world.rank);
    const int num_experts = experts.num_local_experts(peer);
    const int num_words = kNumHeaderFields + world.num_ranks + num_experts;
    for (int idx = arch::thread_idx(); idx < num_words; idx += arch::num_threads()) {
      int32_t value;
      if (idx < kNumHeaderFields) {
        value = idx == static_cast<int>(HeaderField::kBadExpertIndex)
                    ? static_cast<int32_t>(arch::ld_relaxed_gpu(&world.state()->bad_expert_index))
                    : args.header.fields[idx];
      } else if (idx < kNumHeaderFields + world.num_ranks) {
        value = arch::ld_weak(args.num_tokens_per_rank + idx - kNumHeaderFields);
      } else {
        value = arch::ld_weak(args.num_tokens_per_expert + experts.first_expert(peer) + idx -
                              kNumHeaderFields - world.num_ranks);
      }
      arch::st_weak(row + idx, value);
    }
  }
}

// Compares every peer's header with this rank's. Threads [0, R) of a block.
DC_DEVICE void check_headers(const Context& context, const NotifyArgs& args) {
  const int peer = arch::thread_idx();
  if (peer >= args.world.num_ranks) return;
  const int32_t* header = args.world.counts(args.world.rank, peer);
  for (int field = 0; field < static_cast<int>(HeaderField::kCount); ++field) {
    const int32_t theirs = arch::ld_weak(header + field);
    if (field == static_cast<int>(HeaderField::kBadExpertIndex)) {
      if (theirs == 0) continue;
      report_error(context, {ErrorKind::kExpertIndex,
                             {Stage::kCheckArguments, Word::kTopkIdx, peer, -1},
                             0,
                             static_cast<uint64_t>(args.num_experts),
                             0,
                             -1});
      abort_rank(context);
    } else if (field == static_cast<int>(HeaderField::kNumTokens)) {
      continue;
    } else if (theirs != args.header.fields[field]) {
      report_error(context, {ErrorKind::kConfigMismatch,
                             {Stage::kCounts, Word::kHeader, peer, field},
                             static_cast<uint64_t>(static_cast<int64_t>(theirs)),
                             static_cast<uint64_t>(static_cast<int64_t>(args.header.fields[field])),
                             0,
                             -1});
      abort_rank(context);
    }
  }
}

// Thread j < R: column j of the rank prefix matrix, and the total if j is this rank.
DC_DEVICE void write_rank_prefix(const NotifyArgs& args) {
  const World& world = args.world;
  const int dst = arch::thread_idx();
  if (dst >= world.num_ranks) return;
  int32_t sum = 0;
  for (int src = 0; src < world.num_ranks; ++src) {
    sum += arch::ld_weak(world.counts(world.rank, src) + kNumHeaderFields + dst);
    arch::st_weak(args.rank_prefix_matrix + src * world.num_ranks + dst, sum);
  }
  if (dst == world.rank) {
    arch::st_relaxed_sys(&args.counts->num_recv_tokens, sum);
    int32_t most = 0;
    for (int src = 0; src < world.num_ranks; ++src) {
      most = max_of(most, arch::ld_weak(world.counts(world.rank, src) +
                                        static_cast<int>(HeaderField::kNumTokens)));
    }
    arch::st_relaxed_sys(&args.counts->max_num_tokens, most);
  }
}

DC_DEVICE void write_expert_counts(const NotifyArgs& args) {
  const World& world = args.world;
  const ExpertMap experts{args.num_experts, world.num_ranks};
  for (int expert = arch::thread_idx(); expert < experts.num_local_experts(world.rank);
       expert += arch::num_threads()) {
    int32_t sum = 0;
    for (int src = 0; src < world.num_ranks; ++src) {
      sum += arch::ld_weak(world.counts(world.rank, src) + kNumHeaderFields + world.num_ranks +
                           expert);
    }
    sum = align_up(sum, args.expert_alignment);
    arch::st_relaxed_sys(&args.counts->num_recv_tokens_per_expert[0] + expert, sum);
    if (args.num_recv_tokens_per_expert != nullptr) {
      arch::st_weak(args.num_recv_tokens_per_expert + expert, sum);
    }
  }
}

DC_DEVICE void exchange_counts(const Context& context, const NotifyArgs& args) {
  const uint32_t signature = Operation::signature(Kernel::kNotifyDispatch, nullptr, 0);
  uint32_t* arrived = reinterpret_cast<uint32_t*>(arch::dynamic_smem());
  send_counts(args);
  arch::sync_block();  // the block's counts before the arrivals that release them
  announce_arrival(context, signature);
  if (arch::warp_idx() == 0) {
    const bool ok = await_arrivals(context, Stage::kCounts, signature);
    if (arch::lane_idx() == 0) *arrived = ok;
  }
  arch::sync_block();
  if (*arrived == 0) return;
  check_headers(context, args);
  write_rank_prefix(args);
  write_expert_counts(args);
  arch::sync_block();
  if (arch::thread_idx() == 0 && !is_aborted(args.world)) {
    // pairs with: Engine::wait_counts on the host — every field of CountsBlock.
    arch::st_release_sys(&args.counts->sequence, args.sequence);
  }
}

// One warp numbers the tokens that one channel sends to `dst`; returns how many they are.
DC_DEVICE int number_channel(const NotifyArgs& args, int channel, int dst) {
  constexpr int kBatches = 4;  // loads in flight: each would otherwise cost a trip to L2
  const ChannelRange range = ChannelRange::of(args.num_tokens, args.num_channels, channel);
  const uint32_t lower_lanes = (1u << arch::lane_idx()) - 1;
  int num_rows = 0;
  for (int base = range.begin; base < range.end; base += kBatches * kWarpSize) {
    bool goes[kBatches];
    DC_UNROLL
    for (int batch = 0; batch < kBatches; ++batch) {
      const int token = base + batch * kWarpSize + arch::lane_idx();
      const int64_t position = static_cast<int64_t>(token) * args.world.num_ranks + dst;
      goes[batch] = token < range.end && arch::ld_nc(args.is_token_in_rank + position) != 0;
    }
    DC_UNROLL
    for (int batch = 0; batch < kBatches; ++batch) {
      const int token = base + batch * kWarpSize + arch::lane_idx();
      const uint32_t going = arch::ballot(kFullMask, goes[batch]);
      if (token < range.end) {
        arch::st_weak(args.send_head + static_cast<int64_t>(token) * args.world.num_ranks + dst,
                      goes[batch] ? num_rows + arch::popc(going & lower_lanes) : -1);
      }
      num_rows += arch::popc(going);
    }
  }
  return num_rows;
}

// A warp a channel; then one thread turns counts into prefix sums.
DC_DEVICE void count_channels(const NotifyArgs& args, int dst) {
  int32_t* row = args.channel_prefix_matrix + static_cast<int64_t>(dst) * args.num_channels;
  int32_t* num_rows = reinterpret_cast<int32_t*>(arch::dynamic_smem());
  for (int channel = arch::warp_idx(); channel < args.num_channels; channel += arch::num_warps()) {
    const int count = number_channel(args, channel, dst);
    if (arch::lane_idx() == 0) num_rows[channel] = count;
  }
  arch::sync_block();
  if (arch::thread_idx() != 0) return;
  int32_t sum = 0;  // C is small, and the peers' counts take longer to come
  for (int channel = 0; channel < args.num_channels; ++channel) {
    sum += num_rows[channel];
    arch::st_weak(row + channel, sum);
  }
}

DC_DEVICE void notify_dispatch(const NotifyArgs& args) {
  const Context context{args.world, Kernel::kNotifyDispatch, current_generation(args.world)};
  if (arch::block_idx() == 0) {
    exchange_counts(context, args);
  } else {
    count_channels(args, arch::block_idx() - 1);
  }
  retire_block(context);
}

}  // namespace deep_comm
