// The part of Engine's methods for groups of several nodes; included by engine_impl.hpp.
#pragma once

#include "host/engine.hpp"

namespace deep_comm {

namespace detail {

// Rows of one channel on their way between two nodes; a row is a slot.
inline void check_rail(const RailConfig& config) {
  require(config.num_slots >= 1 && config.num_send_tokens >= 1 &&
              config.num_send_tokens <= config.num_slots,
          "num_rail_send_tokens = ", config.num_send_tokens,
          ", must lie in 1..num_rail_slots = ", config.num_slots);
}

}  // namespace detail

template <class Target>
void Engine<Target>::enable_internode(const InternodeOptions& options) {
  using detail::require;
  check_open();
  const int num_local = world_.num_ranks;
  require(!is_internode() && num_launches_ == 0,
          "the tier between nodes is enabled once, before any launch");
  require(options.num_nodes >= 1 && options.node >= 0 && options.node < options.num_nodes,
          "node = ", options.node, ", must lie in 0..num_nodes - 1 = ", options.num_nodes - 1);
  num_rail_peers_ = static_cast<int>(options.rail_bases.size());
  require(num_rail_peers_ == options.num_nodes ||
              num_rail_peers_ == options.num_nodes * (1 + num_local),
          "rail_bases has ", num_rail_peers_, " entries for ", options.num_nodes,
          " nodes, and may have as many more as there are ranks");
  require(options.num_qps >= 1, "num_qps = ", options.num_qps, ", must be at least 1");
  const size_t words = rail_workspace_bytes(options.num_nodes, num_local, num_max_experts_);
  require(options.num_bytes % kLineBytes == 0 && options.num_bytes >= words &&
              options.num_bytes <= data_bytes_,
          "num_bytes = ", options.num_bytes, ", must be a multiple of 128, at least ", words,
          ", within the heap");
  data_bytes_ -= options.num_bytes;
  rail_ring_bytes_ = options.num_bytes - words;
  const size_t num_counters = static_cast<size_t>(num_rail_peers_) * options.num_qps;
  rail_bases_ = allocate_mapped<uint8_t*>(sizeof(uint8_t*) * num_rail_peers_);
  rail_byte_counters_ = allocate_mapped<uint64_t>(sizeof(uint64_t) * num_counters);
  internode_counts_ = allocate_mapped<InternodeCounts>(sizeof(InternodeCounts) +
                                                       sizeof(int32_t) * num_max_experts_);
  for (int peer = 0; peer < num_rail_peers_; ++peer) {
    rail_bases_.get()[peer] = reinterpret_cast<uint8_t*>(options.rail_bases[peer]);
  }
  tiers_.rank = options.node * num_local + world_.rank;
  tiers_.rail.node = options.node;
  tiers_.rail.are_all_near = options.are_all_near;
  RailPort port{};
  port.bases = rail_bases_.get();
  port.num_bytes = rail_byte_counters_.get();
  port.num_qps = options.num_qps;
  tiers_.rail.port = target_.open_rail(port, num_rail_peers_, world_.timeout_ns, options.rail);
  tiers_.rail.layout = RailLayout::make(world_.layout.data + data_bytes_, options.num_nodes,
                                        num_local, num_max_experts_);
  InternodeDispatchArgs of_rings{};  // direct mode only takes what they leave
  require(plan_tier_direct(of_rings) <= static_cast<size_t>(target_.smem_bytes_limit()),
          "num_nodes = ", options.num_nodes,
          ", some words for each must fit in a block's shared memory");
  prepare<InternodeLayoutKernel, InternodeCountKernel, InternodeNotifyKernel,
          InternodeBarrierKernel>();
  prepare<InternodeDispatchKernel<false>, InternodeDispatchKernel<true>>();
  prepare_each_dtype<InternodeCombineKernel>();
}

template <class Target>
std::vector<uint64_t> Engine<Target>::rail_put_bytes() const {
  const size_t count =
      is_internode() ? static_cast<size_t>(num_rail_peers_) * tiers_.rail.port.num_qps : 0;
  return target_.rail_put_bytes(rail_byte_counters_.get(), count);
}

// The rings of a call in both tiers; slots of either have slot_bytes.
template <class Target>
void Engine<Target>::make_rings(const ChannelConfig& config, const RailConfig& rail, int slot_bytes,
                                RingLayout* ring, RailRings* rail_rings) const {
  using detail::require;
  require(is_internode(), "the tier between nodes is not enabled");
  detail::check_channels(config, kMaxRailChannels);
  detail::check_rail(rail);
  *ring = {world_.num_ranks, config.num_channels, config.num_slots,
           static_cast<size_t>(slot_bytes)};
  *rail_rings = {tiers_.num_nodes(), config.num_channels, rail.num_slots, slot_bytes,
                 tiers_.rail.layout.data};
  require(ring->num_bytes() <= data_bytes_, "the rings inside the node need ", ring->num_bytes(),
          " bytes, num_nvl_bytes gives ", data_bytes_);
  require(rail_rings->num_bytes() <= rail_ring_bytes_, "the rings between nodes need ",
          rail_rings->num_bytes(), " bytes, num_rdma_bytes gives ", rail_ring_bytes_);
}

template <class Target>
void Engine<Target>::internode_layout(InternodeLayoutArgs args, uint64_t stream) {
  const int num_experts = args.experts.num_experts;
  check_num_experts(num_experts);
  args.tiers = tiers_;
  const Tuning& tuning = Target::kTuning;
  args.tokens_per_block =
      max_of(tuning.layout_tokens_per_block, ceil_div(args.num_tokens, tuning.max_notify_blocks));
  const size_t smem_bytes =
      sizeof(int32_t) * (tiers_.num_ranks() + tiers_.num_nodes() + num_experts + 1);
  check_counters(num_experts, smem_bytes);
  launch<InternodeLayoutKernel>(
      {.num_blocks = max_of(1, ceil_div(args.num_tokens, args.tokens_per_block)),
       .num_threads = tuning.layout_threads,
       .smem_bytes = smem_bytes},
      args, stream);
}

template <class Target>
void Engine<Target>::internode_notify(InternodeNotifyArgs args, const uint8_t* is_token_in_rank,
                                      int num_tokens, int32_t* send_node_head, int32_t* send_slots,
                                      const ChannelConfig& config, const RailConfig& rail,
                                      uint64_t stream) {
  using detail::require;
  const auto field = [&](RailField name) -> int& {
    return args.header.fields[static_cast<int>(name)];
  };
  const int row_bytes = field(RailField::kRowBytes);
  detail::check_row_bytes(row_bytes);
  check_num_experts(args.experts.num_experts);
  count_bytes(num_tokens, config.num_channels);
  const RailMessage message{row_bytes, field(RailField::kScaleRowBytes),
                            field(RailField::kNumTopk)};
  RingLayout ring{};
  RailRings rail_rings{};
  // Checks the shape of the dispatch that follows, so that nothing is launched if it cannot be.
  make_rings(config, rail, message.slot_bytes(), &ring, &rail_rings);
  field(RailField::kNumExperts) = args.experts.num_experts;
  field(RailField::kNumChannels) = config.num_channels;
  field(RailField::kNumSendTokens) = config.num_send_tokens;
  field(RailField::kNumSlots) = config.num_slots;
  field(RailField::kNumRailSendTokens) = rail.num_send_tokens;
  field(RailField::kNumRailSlots) = rail.num_slots;
  field(RailField::kNumTokens) = num_tokens;
  args.tiers = tiers_;
  args.num_channels = config.num_channels;
  args.sequence = ++sequence_;
  args.counts = internode_counts_.get();
  num_counted_experts_ = args.experts.num_local_experts(tiers_.rank);
  counts_stream_ = stream;
  InternodeCountArgs count{};
  count.is_token_in_rank = is_token_in_rank;
  count.num_tokens = num_tokens;
  count.num_channels = config.num_channels;
  count.node_channel_prefix = const_cast<int32_t*>(args.node_channel_prefix);
  count.rank_channel_prefix = const_cast<int32_t*>(args.rank_channel_prefix);
  count.send_node_head = send_node_head;
  count.send_slots = send_slots;
  launch_count(count, stream);
  launch<InternodeNotifyKernel>(
      {.num_blocks = 1, .num_threads = Target::kTuning.internode_notify_threads, .smem_bytes = 16},
      args, stream);
}

template <class Target>
void Engine<Target>::internode_send_slots(const uint8_t* is_token_in_rank, int num_tokens,
                                          int num_channels, int32_t* send_slots, uint64_t stream) {
  detail::require(is_internode(), "the tier between nodes is not enabled");
  InternodeCountArgs count{};
  count.is_token_in_rank = is_token_in_rank;
  count.num_tokens = num_tokens;
  count.num_channels = num_channels;
  count.send_slots = send_slots;
  launch_count(count, stream);
}

template <class Target>
size_t Engine<Target>::count_bytes(int num_tokens, int num_channels) const {
  const size_t num_bytes = TargetTokens::num_bytes(num_tokens, num_channels);
  detail::require(num_bytes <= static_cast<size_t>(smem_bytes_limit), "num_tokens = ", num_tokens,
                  ", must be fewer: a block counts them in ", num_bytes,
                  " bytes of shared memory, of which it has ", smem_bytes_limit);
  return num_bytes;
}

template <class Target>
void Engine<Target>::launch_count(InternodeCountArgs args, uint64_t stream) {
  args.tiers = tiers_;
  const Tuning& tuning = Target::kTuning;
  launch<InternodeCountKernel>(
      {.num_blocks = min_of(tiers_.num_ranks() + tiers_.num_nodes(), tuning.num_count_blocks),
       .num_threads = tuning.max_notify_threads,
       .smem_bytes = count_bytes(args.num_tokens, args.num_channels)},
      args, stream);
}

template <class Target>
size_t Engine<Target>::plan_tier_direct(InternodeDispatchArgs& args) const {
  const Tuning& tuning = Target::kTuning;
  const RailMessage& message = args.message;
  const int num_nodes = tiers_.num_nodes(), num_local = world_.num_ranks;
  args.placed = {message.row_bytes, message.scale_row_bytes, message.num_topk, num_local};
  args.staging = RailStaging::make(tiers_.rail.layout.data, rail_ring_bytes_, num_nodes,
                                   args.placed.slot_bytes());
  const bool is_quantised = args.source != nullptr;
  // With one rank per node, rows are forwarded only where the rail puts them.
  constexpr int kLoneForwardWarps = 1;
  const bool is_lone = num_local == 1;
  args.num_forward_warps = is_lone ? kLoneForwardWarps : tuning.num_tier_forward_warps;
  if (is_quantised) {
    args.num_send_warps = is_lone ? tuning.num_lone_quantise_warps : tuning.num_tier_quantise_warps;
  } else {
    args.num_send_warps = is_lone ? tuning.num_lone_send_warps : tuning.num_tier_send_warps;
  }
  constexpr int kMaxWarps = InternodeDispatchKernel<true>::kMaxThreads / kWarpSize;
  constexpr int kMostSenders =
      max_of(Target::kTuning.num_tier_send_warps, Target::kTuning.num_tier_quantise_warps);
  constexpr int kMostLone =
      max_of(Target::kTuning.num_lone_send_warps, Target::kTuning.num_lone_quantise_warps);
  static_assert(max_of(kMostSenders, kMostLone) <= DirectEntry::kMaxSenders);
  static_assert(
      max_of(kMostSenders + Target::kTuning.num_tier_forward_warps, kMostLone + kLoneForwardWarps) +
              2 <=
          kMaxWarps,
      "one warp publishes, one writes metadata");
  args.num_meta_warps = min_of(tuning.num_tier_meta_warps,
                               kMaxWarps - 1 - args.num_send_warps - args.num_forward_warps);
  const size_t entry_bytes = DirectEntry::num_bytes(num_nodes, num_local);
  const int num_movers = args.num_send_warps + args.num_forward_warps;
  const int64_t room = static_cast<int64_t>(smem_bytes_limit) - static_cast<int64_t>(entry_bytes) -
                       256 - num_movers * StagePipe::barrier_bytes(StagePipe::kMaxStages);
  const int warp_limit = static_cast<int>(max_of<int64_t>(room, 0)) / num_movers;
  if (is_quantised) args.send_stage = StageLayout::make_cast(message.row_bytes, warp_limit);
  if (warp_limit < StageLayout::min_warp_bytes(0, StagePipe::kMinStages) ||
      (is_quantised && args.send_stage.num_stages == 0)) {
    args.output_line = 0;
  }
  if (args.output_line == 0) {
    args.entry_offset = align_up<size_t>(sizeof(ForwardTeam), 128);
    return args.entry_offset + entry_bytes;
  }
  // Four: a bulk operation costs an SM as much for a small piece as for a large one.
  constexpr int kTierStages = 4;
  const bool has_room = warp_limit >= StageLayout::min_warp_bytes(0, kTierStages);
  args.forward_stage =
      StageLayout::make(message.row_bytes, 0, warp_limit,
                        has_room ? kTierStages : StagePipe::kMinStages, StagePipe::kMaxStages);
  if (!is_quantised) args.send_stage = args.forward_stage;
  args.forward_stages_offset = args.num_send_warps * args.send_stage.warp_bytes();
  args.barriers_offset =
      args.forward_stages_offset + args.num_forward_warps * args.forward_stage.warp_bytes();
  args.entry_offset = align_up<size_t>(
      args.barriers_offset + args.num_send_warps * args.send_stage.warp_barrier_bytes() +
          args.num_forward_warps * args.forward_stage.warp_barrier_bytes(),
      128);
  return args.entry_offset + entry_bytes;
}

template <class Target>
std::optional<TwoTierCounts> Engine<Target>::wait_internode_counts(bool is_early) {
  check_open();
  if (!wait_sequence(&internode_counts_->sequence)) return std::nullopt;
  if (is_early && !wait_sequence(&internode_counts_->dispatch_sequence)) return std::nullopt;
  TwoTierCounts counts;
  counts.is_direct = is_early && internode_counts_->is_direct != 0;
  counts.num_recv_tokens = internode_counts_->num_recv_tokens;
  counts.num_forward_tokens = internode_counts_->num_forward_tokens;
  counts.max_num_tokens = internode_counts_->max_num_tokens;
  counts.num_returning_rows = internode_counts_->num_returning_rows;
  counts.num_recv_tokens_per_expert.assign(
      internode_counts_->num_recv_tokens_per_expert,
      internode_counts_->num_recv_tokens_per_expert + num_counted_experts_);
  return counts;
}

template <class Target>
void Engine<Target>::internode_dispatch(InternodeDispatchArgs args, const ChannelConfig& config,
                                        const RailConfig& rail, int num_topk, int dtypes,
                                        int row_bytes, uint64_t stream) {
  const int scale_row_bytes = args.num_scales * args.scale_bytes;
  args.tiers = tiers_;
  args.message = {row_bytes, scale_row_bytes, num_topk};
  args.order =
      SumOrder::of({args.topk_idx, args.topk_idx_bytes, num_topk, args.experts.num_experts},
                   tiers_.num_ranks(), 1);
  make_rings(config, rail, args.message.slot_bytes(), &args.ring, &args.rail_rings);
  args.num_send_tokens = config.num_send_tokens;
  args.num_rail_send_tokens = rail.num_send_tokens;
  args.num_sender_warps = min_of(Target::kTuning.num_rail_sender_warps, tiers_.num_nodes());
  const int agreed[] = {dtypes,
                        row_bytes,
                        scale_row_bytes,
                        num_topk,
                        config.num_channels,
                        config.num_send_tokens,
                        config.num_slots,
                        rail.num_send_tokens,
                        rail.num_slots,
                        args.topk_idx_bytes,
                        args.source != nullptr,
                        args.scale_format.round_scale,
                        args.scale_format.use_ue8m0,
                        args.is_early};
  args.signature = Operation::signature(Kernel::kInternodeDispatch, agreed, 14);
  args.sequence = sequence_;
  args.counts = internode_counts_.get();
  if (args.output_line != 0) {
    check_block("an output block", args.output_line,
                OutputLayout::make(args.num_recv_rows, row_bytes, scale_row_bytes, num_topk,
                                   args.topk_idx_bytes)
                    .num_bytes);
    if (args.src_line != 0) {
      check_block("an output block", args.src_line,
                  TierSourceLayout::make(args.num_recv_rows).num_bytes);
    }
  }
  const size_t smem_bytes = plan_tier_direct(args);
  const int num_warps =
      max_of(args.num_sender_warps + world_.num_ranks,
             args.num_send_warps + args.num_forward_warps + args.num_meta_warps + 1);
  const LaunchConfig launch_config{.num_blocks = 2 * config.num_channels,
                                   .num_threads = kWarpSize * num_warps,
                                   .smem_bytes = smem_bytes};
  if (args.source != nullptr) {
    launch<InternodeDispatchKernel<true>>(launch_config, args, stream);
  } else {
    launch<InternodeDispatchKernel<false>>(launch_config, args, stream);
  }
}

// Warps and shared memory of combine, for either mode.
template <class Target>
LaunchConfig Engine<Target>::shape_combine(InternodeCombineArgs& args,
                                           const ChannelConfig& config) const {
  const Tuning& tuning = Target::kTuning;
  constexpr int kMaxWarps = InternodeCombineKernel<Dtype::kFloat32>::kMaxThreads / kWarpSize;
  const int num_local = world_.num_ranks;
  args.num_reduce_warps = min_of(tuning.num_reduce_warps, kMaxWarps - num_local - 1);
  args.num_senders = max_of(num_local - 1, tuning.min_senders);
  args.num_adders = min_of(max_of(tuning.num_reduce_warps, 2), kMaxWarps - 1 - args.num_senders);
  // With one rank per node there is nothing to add before the rail.
  args.num_forwarders = num_local == 1 ? 0
                                       : min_of(max_of(args.num_adders / 2, 1),
                                                StagedEntry::kMaxMovers - args.num_senders);
  args.most_single_rows = tuning.most_single_rows;
  const size_t ring_bytes =
      sizeof(ReduceProgress) + max_of(sizeof(SumsRead) * tiers_.num_nodes(),
                                      sizeof(const uint8_t*) * kMaxRanks * args.num_reduce_warps);
  args.stages_offset = align_up<size_t>(ring_bytes, 128);
  const size_t entry_bytes = StagedEntry::num_bytes(args.num_adders);
  const int meta_bytes = args.message.meta_bytes;
  const auto limit = static_cast<int64_t>(smem_bytes_limit) -
                     static_cast<int64_t>(args.stages_offset + entry_bytes) - 1024;
  const int warp_limit =
      static_cast<int>(min_of<int64_t>(tuning.sender_smem_bytes, limit / args.num_senders));
  if (warp_limit < StageLayout::min_warp_bytes(meta_bytes, StagePipe::kMinStages) ||
      tiers_.num_nodes() > kMaxStagedNodes || args.forward_slots == nullptr) {
    args.staging_line = 0;
  }
  if (args.staging_line != 0) {
    const bool has_room =
        warp_limit >= StageLayout::min_warp_bytes(meta_bytes, StagePipe::kGoodStages);
    args.stage = StageLayout::make(args.message.row_bytes, meta_bytes, warp_limit,
                                   has_room ? StagePipe::kGoodStages : StagePipe::kMinStages,
                                   StagePipe::kMaxStages);
    check_block("staging", args.staging_line,
                static_cast<size_t>(args.num_staging_rows) * args.message.slot_bytes());
  }
  args.barriers_offset = args.stages_offset + args.num_senders * args.stage.warp_bytes();
  args.entry_offset =
      align_up<size_t>(args.barriers_offset + args.num_senders * args.stage.warp_barrier_bytes(),
                       alignof(StagedEntry));
  const int num_warps =
      1 + max_of(num_local + args.num_reduce_warps, args.num_senders + args.num_adders);
  return {.num_blocks = 2 * config.num_channels,
          .num_threads = kWarpSize * num_warps,
          .smem_bytes = args.entry_offset + entry_bytes};
}

template <class Target>
void Engine<Target>::internode_combine(InternodeCombineArgs args, Dtype dtype,
                                       const ChannelConfig& config, const RailConfig& rail,
                                       int num_topk, int row_bytes, uint64_t stream) {
  detail::check_row_bytes(row_bytes);
  args.tiers = tiers_;
  args.message = MessageLayout::of_combine(row_bytes, num_topk);
  make_rings(config, rail, static_cast<int>(args.message.slot_bytes()), &args.ring,
             &args.rail_rings);
  args.num_send_tokens = config.num_send_tokens;
  args.num_rail_send_tokens = rail.num_send_tokens;
  // Each rank orders what it adds. Two rows of a node have no order.
  const bool by_selections = world_.num_ranks > 2 && !args.order.is_ascending();
  const int agreed[] = {row_bytes,
                        num_topk,
                        static_cast<int>(dtype),
                        config.num_channels,
                        config.num_send_tokens,
                        config.num_slots,
                        rail.num_send_tokens,
                        rail.num_slots,
                        by_selections};
  args.signature = Operation::signature(Kernel::kInternodeCombine, agreed, 9);
  const LaunchConfig launch_config = shape_combine(args, config);
  detail::require(launch_config.smem_bytes <= static_cast<size_t>(target_.smem_bytes_limit()),
                  "num_nodes = ", tiers_.num_nodes(),
                  ", a word for each must fit in a block's shared memory");
  detail::with_dtype<InternodeCombineKernel>(dtype, [&]<class KernelType>(KernelType) {
    launch<KernelType>(launch_config, args, stream);
  });
}

}  // namespace deep_comm
