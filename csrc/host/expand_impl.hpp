// Engine's methods for the local kernels around a dispatch: expanded outputs, the order of scales;
// included by engine_impl.hpp.
#pragma once

namespace deep_comm {

template <class Target>
void Engine<Target>::number_rows(NumberRowsArgs args, const ChannelConfig& config,
                                 uint64_t stream) {
  detail::require(args.num_experts >= 1 && args.num_experts <= num_max_experts_,
                  "num_experts = " + std::to_string(args.num_experts) +
                      ", must lie in 1..num_max_experts = " + std::to_string(num_max_experts_));
  const size_t smem_bytes = sizeof(uint32_t) * args.num_experts;
  detail::require(smem_bytes <= static_cast<size_t>(smem_bytes_limit),
                  "num_experts = " + std::to_string(args.num_experts) +
                      ", their counters must fit in a block's shared memory");
  const int num_blocks = config.num_channels;
  args.tokens_per_block = max_of(1, ceil_div(args.num_tokens, num_blocks));
  launch<NumberRowsKernel>(
      {.num_blocks = max_of(1, ceil_div(args.num_tokens, args.tokens_per_block)),
       .num_threads = Target::kTuning.number_threads,
       .smem_bytes = smem_bytes},
      args, stream);
}

template <class Target>
void Engine<Target>::expand_rows(const ExpandArgs& args, const ChannelConfig& config,
                                 uint64_t stream) {
  constexpr int kNumThreads = Target::kTuning.expand_threads;
  launch<ExpandKernel>({.num_blocks = config.num_channels,
                        .num_threads = kNumThreads,
                        .smem_bytes = kNumThreads / kWarpSize * sizeof(Places)},
                       args, stream);
}

template <class Target>
void Engine<Target>::reduce_experts(const ReduceExpertsArgs& args, Dtype dtype,
                                    const ChannelConfig& config, uint64_t stream) {
  constexpr int kNumThreads = Target::kTuning.reduce_experts_threads;
  const LaunchConfig launch_config{.num_blocks = config.num_channels,
                                   .num_threads = kNumThreads,
                                   .smem_bytes = kNumThreads / kWarpSize * sizeof(Places)};
  switch (dtype) {
    case Dtype::kBfloat16:
      return launch<ReduceExpertsKernel<Dtype::kBfloat16>>(launch_config, args, stream);
    case Dtype::kFloat16:
      return launch<ReduceExpertsKernel<Dtype::kFloat16>>(launch_config, args, stream);
    case Dtype::kFloat32:
      return launch<ReduceExpertsKernel<Dtype::kFloat32>>(launch_config, args, stream);
  }
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
