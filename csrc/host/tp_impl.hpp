// Engine's methods for tensor parallelism; included by engine_impl.hpp.
#pragma once

#include <array>

namespace deep_comm {

namespace detail {

inline constexpr LaunchConfig kOneWarp{.num_blocks = 1, .num_threads = kWarpSize, .smem_bytes = 16};

template <Collective kOp, bool kMulticast>
struct OfCollective {
  template <Dtype kDtype>
  using Kernel = CollectiveKernel<kOp, kDtype, kMulticast>;
};

// Calls visit with the kernel type of an operation. An all-gather copies bytes, of whatever type, and
// adds nothing that a switch could add.
template <Collective kOp, class Visit>
void with_collective(Dtype dtype, bool has_multicast, const Visit& visit) {
  if constexpr (!CollectiveForm<kOp>::kReduces) {
    visit(CollectiveKernel<kOp, Dtype::kBfloat16>{});
  } else if (has_multicast) {
    with_dtype<OfCollective<kOp, true>::template Kernel>(dtype, visit);
  } else {
    with_dtype<OfCollective<kOp, false>::template Kernel>(dtype, visit);
  }
}

// A rank alone stages nothing.
inline CollectiveRoles collective_roles(Collective op, int num_ranks, int num_warps) {
  const bool has_sums = op == Collective::kAllReduceTwice || op == Collective::kAllReduceNorm;
  const int num_stage_warps = num_ranks == 1 ? 0 : has_sums ? (num_warps + 2) / 4 : num_warps / 2;
  const int num_others = num_warps - num_stage_warps;
  if (op == Collective::kAllGather) return {num_stage_warps, 0, num_others};
  if (!has_sums) return {num_stage_warps, num_others, 0};
  return {num_stage_warps, num_others / 2, num_others - num_others / 2};
}

}  // namespace detail

template <class Target>
template <Collective kOp>
void Engine<Target>::prepare_collective() {
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16, Dtype::kFloat32}) {
    for (const bool has_multicast : {false, true}) {
      detail::with_collective<kOp>(dtype, has_multicast,
                                   [this]<class KernelType>(KernelType) { prepare<KernelType>(); });
    }
  }
}

template <class Target>
void Engine<Target>::collective(CollectiveArgs args, Dtype dtype, int digest, int max_blocks,
                                uint64_t stream) {
  constexpr Tuning kTuning = Target::kTuning;
  detail::require(!is_internode(), "collectives serve ranks inside a node");
  args.roles = detail::collective_roles(args.op, world_.num_ranks, kTuning.num_collective_warps);
  // Parts of whole rows, where rows count.
  const int64_t unit = max_of<int64_t>(args.norm.row_vecs, 1);
  const int num_blocks = static_cast<int>(min_of<int64_t>(
      max_blocks,
      ceil_div<int64_t>(args.shard_vecs, max_of<int64_t>(unit, kTuning.least_part_vecs))));
  args.part_vecs = align_up(
      min_of<int64_t>(kTuning.most_part_vecs, ceil_div<int64_t>(args.shard_vecs, num_blocks)),
      unit);
  args.num_parts = static_cast<int>(ceil_div(args.shard_vecs, args.part_vecs * num_blocks));
  const auto half = [](int64_t value, int idx) { return static_cast<int>(value >> (32 * idx)); };
  const std::array<int, 11> agreed = {static_cast<int>(args.op),
                                      digest,
                                      num_blocks,
                                      half(args.num_bytes, 0),
                                      half(args.num_bytes, 1),
                                      half(args.shard_bytes, 0),
                                      half(args.shard_bytes, 1),
                                      half(static_cast<int64_t>(args.staging_bytes), 0),
                                      half(static_cast<int64_t>(args.staging_bytes), 1),
                                      static_cast<int>(args.norm.row_vecs),
                                      bit_cast<int>(args.norm.eps)};
  const LaunchConfig config{.num_blocks = num_blocks,
                            .num_threads = args.roles.num_warps() * kWarpSize,
                            .smem_bytes = 16};
  const auto launch_op = [&]<Collective kOp>() {
    detail::with_collective<kOp>(
        dtype, args.multicast != nullptr, [&]<class KernelType>(KernelType) {
          args.signature = Operation::signature(KernelType::kName, agreed.data(),
                                                static_cast<int>(agreed.size()));
          launch<KernelType>(config, args, stream);
        });
  };
  switch (args.op) {
    case Collective::kAllGather:
      return launch_op.template operator()<Collective::kAllGather>();
    case Collective::kReduceScatter:
      return launch_op.template operator()<Collective::kReduceScatter>();
    case Collective::kAllReduceOnce:
      return launch_op.template operator()<Collective::kAllReduceOnce>();
    case Collective::kAllReduceNorm:
      return launch_op.template operator()<Collective::kAllReduceNorm>();
    default:
      return launch_op.template operator()<Collective::kAllReduceTwice>();
  }
}

template <class Target>
void Engine<Target>::begin_matmul(MatmulArgs args, int digest, uint64_t stream) {
  detail::require(!is_internode(), "products serve ranks inside a node");
  args.signature = Operation::signature(Kernel::kMatmul, &digest, 1);
  launch<BeginMatmulKernel>(detail::kOneWarp, args, stream);
}

template <class Target>
void Engine<Target>::push(const PushArgs& args, uint64_t stream) {
  if constexpr (Target::kHasCopyEngines) {
    target_.copy(args.dst, args.src, static_cast<size_t>(args.num_bytes), stream);
    target_.copy(args.word, args.sequence, sizeof(*args.word), stream);
  } else {
    launch<PushKernel>({.num_blocks = 1, .num_threads = PushKernel::kMaxThreads, .smem_bytes = 0},
                       args, stream);
  }
}

template <class Target>
void Engine<Target>::await_push(const MatmulArgs& args, uint64_t stream) {
  launch<AwaitPushKernel>(detail::kOneWarp, args, stream);
}

template <class Target>
void Engine<Target>::add_slots(const AddSlotsArgs& args, Dtype dtype, uint64_t stream) {
  constexpr int64_t kVecsOfBlock = 4096;
  const int num_blocks = static_cast<int>(min_of<int64_t>(
      Target::kTuning.most_local_blocks, ceil_div<int64_t>(args.slot_vecs, kVecsOfBlock)));
  const LaunchConfig config{
      .num_blocks = num_blocks, .num_threads = Target::kTuning.add_slots_threads, .smem_bytes = 0};
  detail::with_dtype<AddSlotsKernel>(
      dtype, [&]<class KernelType>(KernelType) { launch<KernelType>(config, args, stream); });
}

template <class Target>
void Engine<Target>::end_matmul(const MatmulArgs& args, uint64_t stream) {
  launch<EndMatmulKernel>(detail::kOneWarp, args, stream);
}

template <class Target>
void Engine<Target>::signal_word(const WordArgs& args, uint64_t stream) {
  launch<SignalWordKernel>(detail::kOneWarp, args, stream);
}

template <class Target>
void Engine<Target>::await_word(const WordArgs& args, uint64_t stream) {
  launch<AwaitWordKernel>(detail::kOneWarp, args, stream);
}

}  // namespace deep_comm
