// internode_notify: every rank learns how many rows it will receive and forward, before any row
// moves.
//
// in     num_tokens_per_expert [E], node_channel_prefix [N, C], rank_channel_prefix [R, C]
//        (internode_count)
// out    recv_node_channel_prefix [N, C], recv_node_prefix_sum [N]      rows to forward
//        recv_rank_channel_start [R, C], recv_rank_prefix_sum [R]       rows to receive
//        combine_start [C, N, M]; forward_slots [(N + 1) M + C N M]; counts (host memory);
//        num_recv_tokens_per_expert, num_recv_tokens_per_rank
// grid   one block
// rounds two, which are also the barrier over all ranks: the counts for a node are sent over the
//        rail to the rank of this local index, which forwards every rank of its node its part
// words  arrived (rail)  · owner: receiver · written by each node's rank · after its counts, on the
//                          same queue
//        counts_received · owner: receiver · overwritten by the notify after the next one:
//                          its parity returns only when this rank has entered a kernel after this
//        arrived (node), rank_counts · the same inside the node · release/acquire sys
//        notified (LocalState): whether a dispatch launched after this may send
// after  all ranks have entered this kernel
// waits  await_rail_arrivals, unblocked by announce_on_rail of every node; await_all_entered,
//        unblocked by every local rank
#pragma once

#include "device/internode/tiers.cuh"
#include "device/layout/expert_map.cuh"
#include "device/layout/prefix_sum.cuh"

namespace deep_comm {

// Offsets in the counts for a node and in those for a rank, in int32.
struct CountsOffsets {
  int num_channels;
  int ranks_per_node;

  DC_DEVICE int node_prefix() const { return kNumRailHeaderFields; }
  DC_DEVICE int rank_prefix(int local) const { return node_prefix() + num_channels * (1 + local); }
  DC_DEVICE int node_experts() const { return rank_prefix(ranks_per_node); }
  DC_DEVICE int own_prefix() const { return kNumRailHeaderFields; }
  DC_DEVICE int own_experts() const { return own_prefix() + num_channels; }
};

DC_DEVICE int32_t* counts_at(const World& world, int owner, size_t offset) {
  return reinterpret_cast<int32_t*>(world.bases[owner] + offset);
}

// The size of the counts that this rank sends to `node`, in int32.
DC_DEVICE int num_counts(const InternodeNotifyArgs& args, int node) {
  const int num_local = args.tiers.ranks_per_node();
  const CountsOffsets offsets{args.num_channels, num_local};
  const ExpertMap& experts = args.experts;
  return offsets.node_experts() + experts.first_expert((node + 1) * num_local) -
         experts.first_expert(node * num_local);
}

// Writes these counts into `out`.
DC_DEVICE void fill_counts(const InternodeNotifyArgs& args, int node, int32_t* out) {
  const World& world = args.world;
  const int num_local = args.tiers.ranks_per_node(), num_channels = args.num_channels;
  const CountsOffsets offsets{num_channels, num_local};
  const int first_rank = node * num_local;
  const int first_expert = args.experts.first_expert(first_rank);
  const int num_words = num_counts(args, node);
  for (int idx = arch::thread_idx(); idx < num_words; idx += arch::num_threads()) {
    int32_t value;
    if (idx < offsets.node_prefix()) {
      value = idx == static_cast<int>(RailField::kBadExpertIndex)
                  ? static_cast<int32_t>(arch::ld_relaxed_gpu(&world.state()->bad_expert_index))
                  : args.header.fields[idx];
    } else if (idx < offsets.rank_prefix(0)) {
      value = arch::ld_weak(args.node_channel_prefix + node * num_channels + idx -
                            offsets.node_prefix());
    } else if (idx < offsets.node_experts()) {
      value = arch::ld_weak(args.rank_channel_prefix + first_rank * num_channels + idx -
                            offsets.rank_prefix(0));
    } else {
      value =
          arch::ld_weak(args.num_tokens_per_expert + first_expert + idx - offsets.node_experts());
    }
    arch::st_weak(out + idx, value);
  }
}

// Round one. The counts for the own node, and for near nodes, are stored instead of put.
DC_DEVICE void send_counts_to_nodes(const InternodeNotifyArgs& args, int parity) {
  const World& world = args.world;
  const RailTier& tier = args.tiers.rail;
  for (int node = 0; node < tier.num_nodes(); ++node) {
    uint8_t* near = near_segment(world, tier, node);
    uint8_t* out = near != nullptr
                       ? near + tier.layout.received_counts_of(parity, tier.node)
                       : world.bases[world.rank] + tier.layout.sent_counts_of(parity, node);
    fill_counts(args, node, reinterpret_cast<int32_t*>(out));
  }
  arch::sync_block();
  if (arch::warp_idx() != 0) return;
  if (!arch::fault(Fault::kSkipRailFence)) arch::fence_acq_rel_sys();  // before the NIC reads them
  for (int node = arch::lane_idx(); node < tier.num_nodes(); node += kWarpSize) {
    if (near_segment(world, tier, node) != nullptr) continue;
    arch::rail_put(tier.port, node, 0, tier.layout.received_counts_of(parity, tier.node),
                   counts_at(world, world.rank, tier.layout.sent_counts_of(parity, node)),
                   static_cast<uint32_t>(align_up(4 * num_counts(args, node), 16)));
  }
}

// Round two: gives every local rank its part of what arrived from every node.
DC_DEVICE void forward_counts(const InternodeNotifyArgs& args, int parity) {
  const World& world = args.world;
  const RailLayout& layout = args.tiers.rail.layout;
  const int num_local = args.tiers.ranks_per_node(), num_channels = args.num_channels;
  const CountsOffsets offsets{num_channels, num_local};
  const ExpertMap& experts = args.experts;
  const int first_rank = args.tiers.rail.node * num_local;
  // One loop over all words: a loop over parts would cost a trip to memory for each.
  const int most_words = offsets.own_experts() + experts.base + 1;
  for (int word = arch::thread_idx(); word < args.tiers.num_ranks() * most_words;
       word += arch::num_threads()) {
    const int part = word / most_words, idx = word - part * most_words;
    const int node = part / num_local, local = part - node * num_local;
    if (idx >= offsets.own_experts() + experts.num_local_experts(first_rank + local)) continue;
    const int32_t* in = counts_at(world, world.rank, layout.received_counts_of(parity, node));
    int32_t* out =
        counts_at(world, local, layout.rank_counts_of(parity, node * num_local + world.rank));
    const int skipped = experts.first_expert(first_rank + local) - experts.first_expert(first_rank);
    const int from = idx < offsets.own_prefix() ? idx
                     : idx < offsets.own_experts()
                         ? offsets.rank_prefix(local) + idx - offsets.own_prefix()
                         : offsets.node_experts() + skipped + idx - offsets.own_experts();
    arch::st_weak(out + idx, arch::ld_weak(in + from));
  }
}

// One lane: source's header differs from this rank's.
DC_DEVICE_COLD void report_rail_header(const Context& node, const InternodeNotifyArgs& args,
                                       int source, int field, int32_t theirs) {
  Context context = node;
  context.names.first = 0;  // sources have their names in the group
  ErrorReport error{ErrorKind::kConfigMismatch,
                    {Stage::kCounts, Word::kRailHeader, source, field},
                    static_cast<uint64_t>(static_cast<int64_t>(theirs)),
                    static_cast<uint64_t>(static_cast<int64_t>(args.header.fields[field])),
                    0,
                    -1};
  if (field == static_cast<int>(RailField::kBadExpertIndex)) {
    error = {ErrorKind::kExpertIndex,
             {Stage::kCheckArguments, Word::kTopkIdx, source, -1},
             0,
             static_cast<uint64_t>(args.experts.num_experts),
             0,
             -1};
  }
  report_error(context, error);
  abort_rank(context);
}

// Compares every rank's header with this rank's: a source per warp, a field per lane.
DC_DEVICE void check_rail_headers(const Context& node, const InternodeNotifyArgs& args,
                                  int parity) {
  constexpr int kNumFields = static_cast<int>(RailField::kNumTokens);  // that are compared
  static_assert(kNumFields <= kWarpSize);
  const int field = arch::lane_idx();
  // A rank that has found an index out of range says so with 1.
  const int32_t own = field >= kNumFields || field == static_cast<int>(RailField::kBadExpertIndex)
                          ? 0
                          : args.header.fields[field];
  for (int source = arch::warp_idx(); source < args.tiers.num_ranks();
       source += arch::num_warps()) {
    const int32_t* header = counts_at(args.world, args.world.rank,
                                      args.tiers.rail.layout.rank_counts_of(parity, source));
    const int32_t theirs = field < kNumFields ? arch::ld_weak(header + field) : 0;
    const uint32_t differing = arch::ballot(kFullMask, theirs != own);
    if (field == arch::ffs(differing) - 1) report_rail_header(node, args, source, field, theirs);
  }
}

// Rows to forward, and where they begin in the rings of combine.
DC_DEVICE void write_forward_prefixes(const InternodeNotifyArgs& args, int parity) {
  const World& world = args.world;
  const RailLayout& layout = args.tiers.rail.layout;
  const int num_nodes = args.tiers.num_nodes(), num_local = args.tiers.ranks_per_node();
  const int num_channels = args.num_channels;
  const CountsOffsets offsets{num_channels, num_local};
  const auto counts_of = [&](int node) {
    return counts_at(world, world.rank, layout.received_counts_of(parity, node));
  };
  for (int idx = arch::thread_idx(); idx < num_nodes * num_channels; idx += arch::num_threads()) {
    const int node = idx / num_channels, channel = idx % num_channels;
    arch::st_weak(args.recv_node_channel_prefix + idx,
                  arch::ld_weak(counts_of(node) + offsets.node_prefix() + channel));
  }
  if (arch::thread_idx() == 0) {
    int32_t sum = 0;
    for (int node = 0; node < num_nodes; ++node) {
      sum += arch::ld_weak(counts_of(node) + offsets.node_prefix() + num_channels - 1);
      arch::st_weak(args.recv_node_prefix_sum + node, sum);
    }
    arch::st_relaxed_sys(&args.counts->num_forward_tokens, sum);
  }
  for (int idx = arch::thread_idx(); idx < num_channels * num_local; idx += arch::num_threads()) {
    const int channel = idx / num_local, local = idx % num_local;
    int32_t sum = 0;
    for (int step = 0; step < num_nodes; ++step) {
      const int node = NodeOrder::combine_to(channel, step, num_nodes);
      arch::st_weak(args.combine_start + (channel * num_nodes + node) * num_local + local, sum);
      const int32_t* prefix = counts_of(node) + offsets.rank_prefix(local);
      sum += arch::ld_weak(prefix + channel) -
             (channel == 0 ? 0 : arch::ld_weak(prefix + channel - 1));
    }
  }
}

// What the node's ranks return in combine: how many rows that this rank forwards come before those of
// a node, for each local rank.
DC_DEVICE void write_forward_sums(const InternodeNotifyArgs& args, int parity) {
  const World& world = args.world;
  const RailLayout& layout = args.tiers.rail.layout;
  const int num_nodes = args.tiers.num_nodes(), num_local = args.tiers.ranks_per_node();
  const CountsOffsets offsets{args.num_channels, num_local};
  for (int local = arch::thread_idx(); local < num_local; local += arch::num_threads()) {
    int32_t sum = 0;
    for (int node = 0; node < num_nodes; ++node) {
      arch::st_weak(args.forward_slots + node * num_local + local, sum);
      sum += arch::ld_weak(counts_at(world, world.rank, layout.received_counts_of(parity, node)) +
                           offsets.rank_prefix(local) + args.num_channels - 1);
    }
    arch::st_weak(args.forward_slots + num_nodes * num_local + local, sum);
  }
}

// The same by channel. The whole block, after a barrier behind write_forward_prefixes and
// write_forward_sums.
DC_DEVICE void write_forward_slots(const InternodeNotifyArgs& args, int parity) {
  const World& world = args.world;
  const RailLayout& layout = args.tiers.rail.layout;
  const int num_nodes = args.tiers.num_nodes(), num_local = args.tiers.ranks_per_node();
  const int num_channels = args.num_channels;
  const CountsOffsets offsets{num_channels, num_local};
  for (int idx = arch::thread_idx(); idx < num_channels * num_nodes * num_local;
       idx += arch::num_threads()) {
    const int local = idx % num_local, node = idx / num_local % num_nodes;
    const int channel = idx / num_local / num_nodes;
    const int32_t* prefix = counts_at(world, world.rank, layout.received_counts_of(parity, node)) +
                            offsets.rank_prefix(local);
    const int32_t before = channel == 0 ? 0 : arch::ld_weak(prefix + channel - 1);
    arch::st_weak(args.forward_slots + (num_nodes + 1) * num_local + idx,
                  arch::ld_weak(args.forward_slots + node * num_local + local) + before -
                      arch::ld_weak(args.combine_start + idx));
  }
  if (arch::thread_idx() == 0) {
    int32_t num_rows = 0;
    for (int local = 0; local < num_local; ++local) {
      if (local == world.rank) continue;
      num_rows += arch::ld_weak(args.forward_slots + num_nodes * num_local + local);
    }
    arch::st_relaxed_sys(&args.counts->num_returning_rows, num_rows);
  }
}

// Rows to receive. One warp: a prefix sum over the sources, 32 at a time.
DC_DEVICE void write_receive_prefixes(const InternodeNotifyArgs& args, int parity) {
  const World& world = args.world;
  const RailLayout& layout = args.tiers.rail.layout;
  const int num_ranks = args.tiers.num_ranks();
  const CountsOffsets offsets{args.num_channels, args.tiers.ranks_per_node()};
  int32_t before = 0, max_num_tokens = 0;
  for (int base = 0; base < num_ranks; base += kWarpSize) {
    const int source = base + arch::lane_idx();
    int32_t count = 0, num_tokens = 0;
    if (source < num_ranks) {
      const int32_t* counts = counts_at(world, world.rank, layout.rank_counts_of(parity, source));
      count = arch::ld_weak(counts + offsets.own_prefix() + args.num_channels - 1);
      num_tokens = arch::ld_weak(counts + static_cast<int>(RailField::kNumTokens));
    }
    const int32_t inclusive = prefix_sum(count);
    max_num_tokens = max_of(max_num_tokens, arch::reduce_max(kFullMask, num_tokens));
    if (source < num_ranks) {
      arch::st_weak(args.recv_rank_prefix_sum + source, before + inclusive);
      arch::st_weak(args.num_recv_tokens_per_rank + source, count);
    }
    before += arch::shfl(kFullMask, inclusive, kWarpSize - 1);
  }
  if (arch::lane_idx() == 0) {
    arch::st_relaxed_sys(&args.counts->num_recv_tokens, before);
    arch::st_relaxed_sys(&args.counts->max_num_tokens, max_num_tokens);
  }
}

// Where each source's rows of each channel begin. A warp per source, after a barrier behind
// write_receive_prefixes.
DC_DEVICE void write_channel_starts(const InternodeNotifyArgs& args, int parity) {
  const World& world = args.world;
  const CountsOffsets offsets{args.num_channels, args.tiers.ranks_per_node()};
  for (int source = arch::warp_idx(); source < args.tiers.num_ranks();
       source += arch::num_warps()) {
    const int32_t first = source == 0 ? 0 : arch::ld_weak(args.recv_rank_prefix_sum + source - 1);
    const int32_t* prefix =
        counts_at(world, world.rank, args.tiers.rail.layout.rank_counts_of(parity, source)) +
        offsets.own_prefix();
    for (int channel = arch::lane_idx(); channel < args.num_channels; channel += kWarpSize) {
      const int32_t before = channel == 0 ? 0 : arch::ld_weak(prefix + channel - 1);
      arch::st_weak(args.recv_rank_channel_start + source * args.num_channels + channel,
                    first + before);
    }
  }
}

DC_DEVICE void write_expert_totals(const InternodeNotifyArgs& args, int parity) {
  const World& world = args.world;
  const RailLayout& layout = args.tiers.rail.layout;
  const CountsOffsets offsets{args.num_channels, args.tiers.ranks_per_node()};
  const ExpertMap& experts = args.experts;
  for (int expert = arch::thread_idx(); expert < experts.num_local_experts(args.tiers.rank);
       expert += arch::num_threads()) {
    int32_t sum = 0;
    for (int source = 0; source < args.tiers.num_ranks(); ++source) {
      sum += arch::ld_weak(counts_at(world, world.rank, layout.rank_counts_of(parity, source)) +
                           offsets.own_experts() + expert);
    }
    sum = align_up(sum, args.expert_alignment);
    arch::st_relaxed_sys(&args.counts->num_recv_tokens_per_expert[0] + expert, sum);
    arch::st_weak(args.num_recv_tokens_per_expert + expert, sum);
  }
}

// The block; false: a wait failed.
DC_DEVICE bool exchange_tier_counts(const TierContexts& contexts, const InternodeNotifyArgs& args) {
  const uint32_t signature = Operation::signature(Kernel::kInternodeNotify, nullptr, 0);
  const int parity = contexts.node.generation & 1;
  uint32_t* flag = reinterpret_cast<uint32_t*>(arch::dynamic_smem());
  send_counts_to_nodes(args, parity);
  if (arch::warp_idx() == 0) {
    // Each lane has put the counts for the nodes that it tells now, after a fence of its own.
    announce_on_rail(contexts.rail, args.tiers.rail, signature);
    const bool ok = await_rail_arrivals(contexts.rail, args.tiers.rail, signature);
    if (!ok) announce_dispute(contexts);
    if (arch::lane_idx() == 0) *flag = ok;
  }
  arch::sync_block();
  if (*flag == 0) return false;
  forward_counts(args, parity);
  arch::sync_block();  // the block's counts before the arrivals that release them
  announce_arrival(contexts.node, signature);
  if (arch::warp_idx() == 0) {
    const bool ok = await_all_entered(contexts.node, Stage::kCounts, signature);
    if (ok) note_in_warp(contexts.node, TraceStep::kEntered);
    if (arch::lane_idx() == 0) *flag = ok;
  }
  arch::sync_block();
  if (*flag == 0) return false;
  check_rail_headers(contexts.node, args, parity);
  if (arch::warp_idx() == arch::num_warps() - 1) write_receive_prefixes(args, parity);
  write_forward_sums(args, parity);
  write_forward_prefixes(args, parity);
  write_expert_totals(args, parity);
  arch::sync_block();  // the sums, and combine_start
  write_channel_starts(args, parity);
  write_forward_slots(args, parity);
  // order-proof: before a release for the host, see there; is_aborted is for headers that differ
  arch::sync_block();
  return true;
}

DC_DEVICE void internode_notify(const InternodeNotifyArgs& args) {
  const TierContexts contexts =
      TierContexts::make(args.world, args.tiers, Kernel::kInternodeNotify);
  note_in_block(contexts.node, TraceStep::kBegun);
  const bool arrived = exchange_tier_counts(contexts, args);
  if (arch::thread_idx() == 0) {
    const bool is_sound = arrived && !is_aborted(args.world);
    const NotifyResult result = is_sound ? NotifyResult::kNotDirect : NotifyResult::kFailed;
    // pairs with: the end of this kernel — read by the kernels after it
    arch::st_relaxed_gpu(&args.world.state()->notified,
                         Tagged::pack(contexts.node.generation, static_cast<uint32_t>(result)));
    // pairs with: Engine::wait_internode_counts on the host — every field of InternodeCounts
    // order-proof: in a simulation the host reads it after the end of the kernel
    if (is_sound) arch::st_release_sys(&args.counts->sequence, args.sequence);
  }
  leave_tiers(contexts);
}

}  // namespace deep_comm
