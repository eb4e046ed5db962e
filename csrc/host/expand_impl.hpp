// Engine's methods for the local kernels around a dispatch: expanded outputs, the order of scales;
// included by engine_impl.hpp.
#pragma once

namespace deep_comm {

template <class Target>
void Engine<Target>::number_rows(NumberRowsArgs args, const ChannelConfig& config,
                                 uint64_t stream) {
  check_num_experts(args.experts.num_experts);
  const size_t smem_bytes = sizeof(uint32_t) * args.experts.num_experts;
  check_counters(args.experts.num_experts, smem_bytes);
  const int num_blocks = config.num_channels;
  args.tokens_per_block = max_of(1, ceil_div(args.num_tokens, num_blocks));
  launch<NumberRowsKernel>(
      {.num_blocks = max_of(1, ceil_div(args.num_tokens, args.tokens_per_block)),
       .num_threads = Target::kTuning.number_threads,
       .smem_bytes = smem_bytes},
      args, stream);
}

template <class Target>
bool Engine<Target>::begins_beside(bool may_run_beside) {
  if (may_run_beside && may_begin_early_) early_launches_.join(target_.device());
  return may_run_beside && early_launches_.are_safe();
}

template <class Target>
void Engine<Target>::dispatch_expanded(const DispatchPlan& plan, const DispatchArgs& args,
                                       const ExpandRowsArgs& expand, int num_blocks,
                                       bool may_run_beside, uint64_t stream) {
  constexpr int kNumThreads = Target::kTuning.expand_rows_threads;
  const DispatchOptions& options = plan.options;
  const bool may_be_direct = args.output_line != 0;
  if (may_be_direct) check_output(args, options);
  // It holds SMs while it waits for the peers. Half of them copy faster than rows arrive; the others
  // are left to whatever the peers' progress may hang on.
  const bool is_beside = begins_beside(may_run_beside);
  const LaunchConfig expand_config{.num_blocks = is_beside ? ceil_div(num_blocks, 2) : num_blocks,
                                   .num_threads = kNumThreads,
                                   .smem_bytes = Arriving::smem_bytes(kNumThreads),
                                   .may_begin_early = is_beside};
  const LaunchConfig& config = plan.variant(may_be_direct).launch;
  if (options.is_quantised) {
    launch_pair<DispatchKernel<true, true>, ExpandKernel>(config, args, expand_config, expand,
                                                          stream);
  } else {
    launch_pair<DispatchKernel<true, false>, ExpandKernel>(config, args, expand_config, expand,
                                                           stream);
  }
}

template <class Target>
World Engine<Target>::world_alone() const {
  World world = world_;
  world.bases[0] = world_.bases[world_.rank];
  world.rank = 0;
  world.num_ranks = 1;
  world.absent = 0;
  return world;
}

template <class Target>
void Engine<Target>::number_received(NumberReceivedArgs args, const ChannelConfig& config,
                                     uint64_t stream) {
  const size_t counters_bytes = sizeof(uint32_t) * max_of(1, args.num_experts);
  const size_t num_counters = static_cast<size_t>(smem_bytes_limit) / counters_bytes;
  if (num_counters < 2) check_counters(args.num_experts, 2 * counters_bytes);
  args.rank = group_rank();
  args.num_numbering_warps = static_cast<int>(
      min_of<size_t>(Target::kTuning.number_threads / kWarpSize, num_counters - 1));
  launch_in<NumberReceivedKernel>(
      world_alone(),
      {.num_blocks = config.num_channels,
       .num_threads = Target::kTuning.number_threads,
       .smem_bytes = counters_bytes * static_cast<size_t>(1 + args.num_numbering_warps)},
      args, stream);
}

template <class Target>
void Engine<Target>::expand_received(const ExpandReceivedArgs& args, const ChannelConfig& config,
                                     uint64_t stream) {
  constexpr int kNumThreads = Target::kTuning.expand_threads;
  launch_in<ExpandReceivedKernel>(world_alone(),
                                  {.num_blocks = config.num_channels,
                                   .num_threads = kNumThreads,
                                   .smem_bytes = kNumThreads / kWarpSize * sizeof(TokenRows)},
                                  args, stream);
}

template <class Target>
void Engine<Target>::reduce_experts(const ReduceExpertsArgs& args, Dtype dtype,
                                    const ChannelConfig& config, uint64_t stream) {
  constexpr int kNumThreads = Target::kTuning.reduce_experts_threads;
  const LaunchConfig launch_config{.num_blocks = config.num_channels,
                                   .num_threads = kNumThreads,
                                   .smem_bytes = kNumThreads / kWarpSize * sizeof(TokenRows)};
  detail::with_dtype<detail::OfDtype>(dtype, [&]<class Of>(Of) {
    launch_in<ReduceExpertsKernel<Of::kDtype>>(world_alone(), launch_config, args, stream);
  });
}

template <class Target>
void Engine<Target>::combine_expanded(const CombinePlan& plan, CombineArgs args,
                                      ReduceExpertsArgs sums, int num_local_blocks,
                                      bool may_run_beside, uint64_t stream) {
  constexpr int kNumThreads = Target::kTuning.reduce_experts_threads;
  static_assert(kNumThreads >= 2 * kWarpSize);  // one publishes
  LaunchConfig launch_config = complete_combine(plan, &args);
  launch_config.may_begin_early = begins_beside(may_run_beside);
  args.world = world_;
  sums.world = world_;
  // The sums are bound by memory, which three quarters of the SMs nearly fill. Where combine cannot
  // run beside them, half are left to whatever the peers' arrival may hang on, as in dispatch_expanded.
  const int num_blocks = launch_config.may_begin_early ? ceil_div(3 * num_local_blocks, 4)
                         : may_run_beside              ? ceil_div(num_local_blocks, 2)
                                                       : num_local_blocks;
  const LaunchConfig sums_config{.num_blocks = num_blocks,
                                 .num_threads = kNumThreads,
                                 .smem_bytes = kNumThreads / kWarpSize * sizeof(TokenRows) +
                                               SumsEntry::num_bytes(world_.num_ranks, num_blocks)};
  detail::with_dtype<detail::OfDtype>(plan.dtype, [&]<class Of>(Of) {
    launch_pair<CombineSumsKernel<Of::kDtype>, CombineKernel<Of::kDtype, true>>(
        sums_config, {world_, args, sums}, launch_config, args, stream);
  });
}

template <class Target>
void Engine<Target>::transpose_scales(const TransposeScalesArgs& args, const ChannelConfig& config,
                                      uint64_t stream) {
  launch<TransposeScalesKernel>({.num_blocks = config.num_channels,
                                 .num_threads = Target::kTuning.expand_threads,
                                 .smem_bytes = 0},
                                args, stream);
}

}  // namespace deep_comm
