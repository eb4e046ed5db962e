// notify_dispatch: every rank learns how many rows it will receive from whom, before any row moves.
//
// in     topk_idx [T, K], -1 selects nothing; or, after get_dispatch_layout, its result:
//        num_tokens_per_expert [E], is_token_in_rank [T, R]. Tokens per rank are counted here in
//        either case: rows move by the mask, whatever a caller has counted
//        place: where the rows of the next dispatch belong
// out    is_token_in_rank [T, R]       from topk_idx
//        rank_prefix_matrix [R, R]     [i][j] = rows that ranks 0..i send to rank j
//        channel_prefix_matrix [R, C]  [j][c] = rows that this rank sends to j in channels 0..c
//        send_head [T, R]              ordinal of a token among those its channel sends to a rank,
//                                      or -1
//        counts (host memory): total and per-expert rows, aligned; the most tokens of a rank;
//        is_direct
//        num_recv_tokens_per_expert [L], recv_counts [1 + R] (device): the same, aligned; all rows,
//        and by source
//        notified (LocalState): whether every rank has announced room for its rows
//        expansion, if asked for: first_rows [E], expert_offsets [L + 1], expert_counts [L],
//        num_rows [R]
// grid   any; a block numbers the tokens of every num_blocks-th channel, one thread per token. The
//        last block to finish talks to the peers; no block waits for another
// smem   NotifySmem, then E counters if topk_idx is given
// words  layout_counts, layout_ticket · this rank only · zero at rest
//        notified · this rank only · read by the dispatch, which may begin before this kernel ends:
//                   all that it reads is complete · release/acquire · generation
//        arrived  · owner: receiver · written by each peer · read by the last block
//                 · release/acquire sys · generation
//        counts   · owner: receiver · row of each peer, before its `arrived` · read by the last
//                   block, and by the next dispatch if is_direct · overwritten by the next notify
//                   but one, or by the next notify after another kernel: both need this rank to
//                   have left this one
//        expert_counts · as counts, with expansion only; read by the last block alone
// after  all ranks have entered this kernel, hence finished their earlier ones: rings and announced
//        outputs are free
// waits  await_all_entered, unblocked by every peer's announce_arrival
// errors an index outside [-1, E) counts as -1, never indexes memory, and is reported on all ranks
#pragma once

#include "device/intranode/count_tokens.cuh"
#include "device/intranode/dispatch_output.cuh"
#include "device/layout/channel_range.cuh"
#include "device/layout/prefix_sum.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

// What a rank's header and counts say about it.
struct PeerSummary {
  int32_t num_tokens;
  bool is_sound;  // its header equals this rank's
  bool has_room;  // for the rows that it will receive, where it has announced its output
};

struct NotifySmem {
  static constexpr int kMaxWarps = 32;

  uint32_t ticket;
  int32_t has_arrived;
  PeerSummary of_peer[kMaxRanks];
  int32_t num_per_rank[kMaxRanks];
  int32_t num_per_warp[kMaxWarps][kMaxRanks];  // tokens of a warp's 32 that go to a rank

  // Tokens per expert follow this struct.
  DC_DEVICE int32_t* num_per_expert() { return reinterpret_cast<int32_t*>(this + 1); }
};

// One thread: the ranks of its token, from topk_idx or from the result of get_dispatch_layout.
DC_DEVICE uint32_t ranks_of_token(const NotifyArgs& args, NotifySmem* smem, int token) {
  const int num_ranks = args.world.num_ranks;
  uint8_t* row = args.is_token_in_rank + static_cast<int64_t>(token) * num_ranks;
  uint32_t rank_mask = 0;
  if (args.topk.data != nullptr) {
    rank_mask = count_token(args.world, Kernel::kNotifyDispatch, args.topk, args.experts, token,
                            smem->num_per_expert());
    DC_NO_UNROLL
    for (int rank = 0; rank < num_ranks; ++rank)
      arch::st_weak(row + rank, static_cast<uint8_t>(rank_mask >> rank & 1));
    return rank_mask;
  }
  DC_UNROLL
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if (args.world.takes_part(rank) && arch::ld_nc(row + rank) != 0) rank_mask |= 1u << rank;
  }
  return rank_mask;
}

// The whole block numbers the tokens of one channel, by rank. The channel's counts are stored where
// its prefix sums will be.
DC_DEVICE void number_channel(const NotifyArgs& args, NotifySmem* smem, int channel) {
  const int num_ranks = args.world.num_ranks, lane = arch::lane_idx(), warp = arch::warp_idx();
  const ChannelRange range = ChannelRange::of(args.num_tokens, args.num_channels, channel);
  const uint32_t lower_lanes = (1u << lane) - 1;
  int num_rows = 0;  // lane r: to rank r so far; the same in all warps
  // Whole blocks step together, so that ballots and barriers are complete.
  for (int base = range.begin; base < range.end; base += arch::num_threads()) {
    const int token = base + arch::thread_idx();
    const bool is_token = token < range.end;
    const uint32_t rank_mask = is_token ? ranks_of_token(args, smem, token) : 0;
    int num_in_warp = 0;  // lane r: of this warp to rank r
    DC_NO_UNROLL
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int num = arch::popc(arch::ballot(kFullMask, (rank_mask >> rank & 1) != 0));
      if (rank == lane) num_in_warp = num;
    }
    if (lane < num_ranks) smem->num_per_warp[warp][lane] = num_in_warp;
    arch::sync_block();
    int before_warp = num_rows;
    if (lane < num_ranks) {
      for (int other = 0; other < arch::num_warps(); ++other) {
        const int num = smem->num_per_warp[other][lane];
        if (other < warp) before_warp += num;
        num_rows += num;
      }
    }
    DC_NO_UNROLL
    for (int rank = 0; rank < num_ranks; ++rank) {
      const bool goes = (rank_mask >> rank & 1) != 0;
      const int below = arch::popc(arch::ballot(kFullMask, goes) & lower_lanes);
      const int before = arch::shfl(kFullMask, before_warp, rank);
      if (is_token) {
        arch::st_weak(args.send_head + static_cast<int64_t>(token) * num_ranks + rank,
                      goes ? before + below : -1);
      }
    }
    arch::sync_block();  // num_per_warp has been read
  }
  if (warp == 0 && lane < num_ranks) {
    smem->num_per_rank[lane] += num_rows;
    arch::st_relaxed_gpu(args.channel_prefix_matrix + lane * args.num_channels + channel, num_rows);
  }
}

// Every block: counts its channels and adds their tokens to the rank's accumulators.
DC_DEVICE void count_channels(const NotifyArgs& args, NotifySmem* smem) {
  const int num_ranks = args.world.num_ranks;
  const int num_experts = args.topk.data != nullptr ? args.experts.num_experts : 0;
  int32_t* totals = args.world.layout_counts();
  for (int idx = arch::thread_idx(); idx < num_experts; idx += arch::num_threads())
    smem->num_per_expert()[idx] = 0;
  if (arch::thread_idx() < num_ranks) smem->num_per_rank[arch::thread_idx()] = 0;
  arch::sync_block();
  for (int channel = arch::block_idx(); channel < args.num_channels; channel += arch::num_blocks())
    number_channel(args, smem, channel);
  // Each channel ends in a block barrier, and num_per_rank[r] is thread r's own.
  add_counters(totals, smem->num_per_rank, num_ranks);
  add_counters(totals + num_ranks, smem->num_per_expert(), num_experts);
}

// The last block: this rank's tokens per rank and per expert, from the accumulators, which it
// zeroes. Tokens per expert come from the caller's layout if there is one.
DC_DEVICE int32_t take_total(const NotifyArgs& args, int idx) {
  const int num_ranks = args.world.num_ranks;
  if (args.topk.data == nullptr && idx >= num_ranks) {
    return arch::ld_weak(args.num_tokens_per_expert + (idx - num_ranks));
  }
  int32_t* total = args.world.layout_counts() + idx;
  const int32_t value = arch::ld_relaxed_gpu(total);
  arch::st_relaxed_gpu(total, 0);
  return value;
}

// Writes this rank's header and counts into every peer's segment. Each count is read once and
// stored where it is needed.
DC_DEVICE void send_counts(const Context& context, const NotifyArgs& args) {
  const World& world = args.world;
  const ExpertMap& experts = args.experts;
  const int num_ranks = world.num_ranks;
  const int num_words = kNumHeaderFields + num_ranks + experts.num_experts;
  for (int idx = arch::thread_idx(); idx < num_words; idx += arch::num_threads()) {
    if (idx >= kNumHeaderFields + num_ranks) {  // to the expert's rank
      const int expert = idx - kNumHeaderFields - num_ranks;
      const int owner = experts.rank_of(expert);
      const int32_t total = take_total(args, num_ranks + expert);
      if (world.is_absent(owner)) continue;
      arch::st_weak(world.counts(owner, world.rank, context.generation) + kNumHeaderFields +
                        num_ranks + expert - experts.first_expert(owner),
                    total);
      // Expanded outputs: every rank computes where its rows belong, on every rank.
      DC_NO_UNROLL
      for (int peer = 0; peer < num_ranks && args.expansion.first_rows != nullptr; ++peer) {
        if (world.is_absent(peer)) continue;
        arch::st_weak(world.expert_counts(peer, world.rank, context.generation) + expert, total);
      }
      continue;
    }
    int32_t value;
    if (idx >= kNumHeaderFields) {
      value = take_total(args, idx - kNumHeaderFields);
    } else if (idx == static_cast<int>(HeaderField::kBadExpertIndex)) {
      value = static_cast<int32_t>(arch::ld_relaxed_gpu(&world.state()->bad_expert_index));
    } else {
      value = args.header.fields[idx];
    }
    DC_NO_UNROLL
    for (int step = 1; step <= num_ranks; ++step) {
      const int peer =
          world.rank + step < num_ranks ? world.rank + step : world.rank + step - num_ranks;
      if (world.is_absent(peer)) continue;
      arch::st_weak(world.counts(peer, world.rank, context.generation) + idx, value);
    }
  }
}

// One lane: rank `peer` has another value of a header's field, or routing with a bad index.
DC_DEVICE_COLD void report_header(Context context, int peer, int field, int32_t theirs, int32_t own,
                                  int num_experts) {
  if (field == static_cast<int>(HeaderField::kBadExpertIndex)) {
    report_error(context, {ErrorKind::kExpertIndex,
                           {Stage::kCheckArguments, Word::kTopkIdx, peer, -1},
                           0,
                           static_cast<uint64_t>(num_experts),
                           0,
                           -1});
  } else {
    report_error(context, {ErrorKind::kConfigMismatch,
                           {Stage::kCounts, Word::kHeader, peer, field},
                           static_cast<uint64_t>(static_cast<int64_t>(theirs)),
                           static_cast<uint64_t>(static_cast<int64_t>(own)),
                           0,
                           -1});
  }
  abort_rank(context);
}

// A warp: compares rank `peer`'s header with this rank's, and writes column `peer` of the rank prefix
// matrix: the rows that `peer` receives. Lanes hold the fields of the header, the lanes after them
// what each rank sends to `peer`.
DC_DEVICE PeerSummary summarise_peer(const Context& context, const NotifyArgs& args, int peer) {
  static_assert(kNumHeaderFields + kMaxRanks <= kWarpSize);
  const World& world = args.world;
  const int lane = arch::lane_idx(), src = lane - kNumHeaderFields;
  const bool is_count = src >= 0 && world.takes_part(src);
  const bool is_field = src < 0 && !world.is_absent(peer);
  const int32_t* word = world.counts(world.rank, is_count ? src : peer, context.generation) +
                        (is_count ? kNumHeaderFields + peer : lane);
  const int32_t value = is_count || is_field ? arch::ld_weak(word) : 0;
  const int32_t own = lane < static_cast<int>(HeaderField::kNumCompared) ? args.header.fields[lane]
                      : lane == static_cast<int>(HeaderField::kBadExpertIndex) ? 0
                                                                               : value;
  const uint32_t differing = arch::ballot(kFullMask, is_field && value != own);
  if (differing != 0) {  // the bad index, or else the first field
    constexpr int kBadIndex = static_cast<int>(HeaderField::kBadExpertIndex);
    const int field = (differing >> kBadIndex & 1) != 0 ? kBadIndex : arch::ffs(differing) - 1;
    if (lane == field) report_header(context, peer, field, value, own, args.experts.num_experts);
  }
  int32_t sum = src >= 0 ? value : 0;
  for (int delta = 1; delta < kMaxRanks; delta *= 2) {
    const int32_t lower = arch::shfl_up(kFullMask, sum, delta);
    if (src >= delta) sum += lower;
  }
  if (src >= 0 && src < world.num_ranks) {
    arch::st_weak(args.rank_prefix_matrix + src * world.num_ranks + peer, sum);
    if (peer == world.rank) arch::st_weak(args.recv_counts + 1 + src, value);
  }
  const int32_t num_rows = arch::shfl(kFullMask, sum, kNumHeaderFields + kMaxRanks - 1);
  if (peer == world.rank && lane == 0) {
    arch::st_weak(args.recv_counts, num_rows);
    arch::st_relaxed_sys(&args.counts->num_recv_tokens, num_rows);
  }
  const auto field = [&](HeaderField name) {
    return arch::shfl(kFullMask, value, static_cast<int>(name));
  };
  const OutputWords words{static_cast<uint32_t>(field(HeaderField::kOutputLine)),
                          static_cast<uint32_t>(field(HeaderField::kSrcLine)),
                          static_cast<uint32_t>(field(HeaderField::kOutputRows))};
  const bool is_expanded = args.expansion.first_rows != nullptr;
  const int32_t wanted = is_expanded ? arch::ld_weak(args.expansion.num_rows + peer) : num_rows;
  return {field(HeaderField::kNumTokens), differing == 0,
          world.is_absent(peer) || words.has_room(wanted)};
}

// One thread, once: what the dispatch after this kernel may do. It may have begun already, so all
// that it reads is complete.
DC_DEVICE void announce_result(const Context& context, NotifyResult result) {
  // pairs with: await_notify in this rank's dispatch — the routing, peers' counts, and the
  // generation that this kernel has closed
  arch::st_release_gpu(&context.world.state()->notified,
                       Tagged::pack(context.generation, static_cast<uint32_t>(result)));
}

// Warp 0: what the ranks have in common: the most tokens of a rank, and whether the announced
// outputs suffice. All ranks read the same words, so they decide the same. False if the rank has
// failed.
DC_DEVICE bool write_totals(const Context& context, const NotifyArgs& args,
                            const NotifySmem& smem) {
  const int peer = arch::lane_idx();
  PeerSummary summary{0, true, true};
  if (peer < args.world.num_ranks) summary = smem.of_peer[peer];
  const bool is_direct = arch::all(kFullMask, summary.has_room);
  const bool is_sound = arch::all(kFullMask, summary.is_sound) && !is_aborted(args.world);
  int32_t max_tokens = summary.num_tokens;
  for (int mask = kMaxRanks / 2; mask > 0; mask /= 2)
    max_tokens = max_of(max_tokens, arch::shfl_xor(kFullMask, max_tokens, mask));
  if (peer == 0) {
    announce_result(context, !is_sound   ? NotifyResult::kFailed
                             : is_direct ? NotifyResult::kDirect
                                         : NotifyResult::kNotDirect);
    arch::st_relaxed_sys(&args.counts->max_num_tokens, max_tokens);
    arch::st_relaxed_sys(&args.counts->is_direct, is_direct ? 1 : 0);
  }
  return is_sound;
}

DC_DEVICE void write_expert_counts(const Context& context, const NotifyArgs& args) {
  const World& world = args.world;
  const ExpertMap& experts = args.experts;
  for (int expert = arch::thread_idx(); expert < experts.num_local_experts(world.rank);
       expert += arch::num_threads()) {
    const int position = kNumHeaderFields + world.num_ranks + expert;
    int32_t counts[kMaxRanks];
    DC_UNROLL
    for (int src = 0; src < kMaxRanks; ++src) {
      counts[src] =
          world.takes_part(src)
              ? arch::ld_weak(world.counts(world.rank, src, context.generation) + position)
              : 0;
    }
    int32_t sum = 0;
    DC_UNROLL
    for (int src = 0; src < kMaxRanks; ++src) sum += counts[src];
    sum = align_up(sum, args.expert_alignment);
    arch::st_relaxed_sys(&args.counts->num_recv_tokens_per_expert[0] + expert, sum);
    if (args.num_recv_tokens_per_expert != nullptr) {
      arch::st_weak(args.num_recv_tokens_per_expert + expert, sum);
    }
  }
}

// Turns the channels' counts, which all blocks have stored, into prefix sums. A destination per
// warp.
DC_DEVICE void write_channel_prefix(const NotifyArgs& args) {
  // The last warp first: warp 0 is waiting for the peers.
  for (int dst = arch::num_warps() - 1 - arch::warp_idx(); dst < args.world.num_ranks;
       dst += arch::num_warps()) {
    int32_t* row = args.channel_prefix_matrix + static_cast<int64_t>(dst) * args.num_channels;
    int32_t before = 0;
    for (int base = 0; base < args.num_channels; base += kWarpSize) {
      const int channel = base + arch::lane_idx();
      const int32_t sum =
          prefix_sum(channel < args.num_channels ? arch::ld_relaxed_gpu(row + channel) : 0);
      if (channel < args.num_channels) arch::st_weak(row + channel, before + sum);
      before += arch::shfl(kFullMask, sum, kWarpSize - 1);
    }
  }
}

// The block: where the groups of every rank's expanded output begin, and this rank's rows in them.
// A rank per warp.
DC_DEVICE void write_expansion(const Context& context, const NotifyArgs& args) {
  const World& world = args.world;
  const ExpansionArgs& out = args.expansion;
  const ExpertMap& experts = args.experts;
  const int lane = arch::lane_idx();
  for (int dst = arch::warp_idx(); dst < world.num_ranks; dst += arch::num_warps()) {
    const int first = experts.first_expert(dst), count = experts.num_local_experts(dst);
    int32_t num_rows = 0;
    for (int base = 0; base < count; base += kWarpSize) {
      const int local = base + lane;
      int32_t total = 0, before = 0;  // rows of all ranks, of lower ranks
      for (int src = 0; src < world.num_ranks && local < count; ++src) {
        if (src == world.rank) before = total;
        if (world.is_absent(src)) continue;
        total +=
            arch::ld_weak(world.expert_counts(world.rank, src, context.generation) + first + local);
      }
      const int32_t aligned = align_up(total, args.expert_alignment);
      const int32_t end = prefix_sum(aligned);
      const int32_t begin = num_rows + end - aligned;
      if (local < count) {
        arch::st_weak(out.first_rows + first + local, begin + before);
        if (dst == world.rank) {
          arch::st_weak(out.expert_offsets + local, begin);
          arch::st_weak(out.expert_counts + local, total);
        }
      }
      num_rows += arch::shfl(kFullMask, end, kWarpSize - 1);
    }
    if (lane != 0) continue;
    arch::st_weak(out.num_rows + dst, num_rows);
    if (dst == world.rank) arch::st_weak(out.expert_offsets + count, num_rows);
  }
}

DC_DEVICE void exchange_counts(const Context& context, const NotifyArgs& args, NotifySmem* smem) {
  const uint32_t signature = Operation::signature(Kernel::kNotifyDispatch, nullptr, 0);
  send_counts(context, args);
  arch::sync_block();  // the block's counts before the arrivals that release them
  announce_arrival(context, signature);
  if (arch::warp_idx() == 0) {
    const bool ok = await_all_entered(context, Stage::kCounts, signature);
    if (arch::lane_idx() == 0) smem->has_arrived = ok;
    if (ok) note_in_warp(context, TraceStep::kEntered);
  }
  write_channel_prefix(args);
  arch::sync_block();
  if (smem->has_arrived == 0) {
    if (arch::thread_idx() == 0) announce_result(context, NotifyResult::kFailed);
    return;
  }
  if (args.expansion.first_rows != nullptr) {
    write_expansion(context, args);
    arch::sync_block();  // the rows of each rank's output, before they are compared with its room
  }
  for (int peer = arch::warp_idx(); peer < args.world.num_ranks; peer += arch::num_warps()) {
    const PeerSummary summary = summarise_peer(context, args, peer);
    if (arch::lane_idx() == 0) smem->of_peer[peer] = summary;
  }
  arch::sync_block();
  bool is_sound = true;
  if (arch::warp_idx() == 0) is_sound = write_totals(context, args, *smem);
  write_expert_counts(context, args);
  // order-proof: before a release for the host, see there
  arch::sync_block();
  if (arch::thread_idx() == 0 && is_sound) {
    // pairs with: Engine::wait_counts on the host — every field of CountsBlock
    // order-proof: in a simulation the host reads it after the end of the kernel
    arch::st_release_sys(&args.counts->sequence, args.sequence);
    note(context, TraceStep::kLeft);
  }
}

DC_DEVICE void notify_dispatch(const NotifyArgs& args) {
  const Context context{args.world, Kernel::kNotifyDispatch, current_generation(args.world)};
  NotifySmem* smem = reinterpret_cast<NotifySmem*>(arch::dynamic_smem());
  note_in_block(context, TraceStep::kBegun);
  count_channels(args, smem);
  note_in_block(context, TraceStep::kCounted);
  // The counts' ticket is the kernel's exit as well: the other blocks have nothing left to do.
  if (!is_last_to_count(args.world, &smem->ticket)) return;
  close_generation(context);  // before the dispatch takes work: see announce_result
  arch::sync_block();
  // The dispatch behind this kernel begins beside it, on the SMs that the other blocks have left.
  arch::allow_later_launch();
  exchange_counts(context, args, smem);
}

}  // namespace deep_comm
