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

// Fills in who takes which parts. Returns the number of blocks, at most max_blocks.
template <class Target>
int Engine<Target>::deal_parts(CollectiveArgs& args, int max_blocks) const {
  constexpr Tuning kTuning = Target::kTuning;
  const bool is_alone = world_.num_ranks == 1, is_lone_block = max_blocks == 1;
  const int num_warps = kTuning.num_collective_warps;
  CollectiveRoles& roles = args.roles;
  roles.num_push_warps = is_alone        ? 0
                         : is_lone_block ? (num_warps + 2) / 4
                                         : min_of(num_warps, kTuning.most_push_warps);
  const int num_takers = num_warps - (is_lone_block ? roles.num_push_warps : 0);
  roles.num_reduce_warps = args.op == Collective::kAllGather ? 0
                           : spreads_sums(args.op)           ? num_takers / 2
                                                             : num_takers;
  roles.num_gather_warps = num_takers - roles.num_reduce_warps;

  const int most_push_blocks =
      is_alone ? 0 : max_of(1, min_of(kTuning.most_push_blocks, max_blocks / 4));
  const int num_pushers = max_of(1, most_push_blocks * roles.num_push_warps);
  const int64_t part_vecs =
      min_of<int64_t>(kTuning.most_part_vecs, ceil_div<int64_t>(args.shard_vecs, num_pushers));
  // Parts that begin at lines, where they are so long, and have whole rows, where rows count.
  args.part_vecs = align_up(align_up<int64_t>(part_vecs, part_vecs < kWarpSize ? 1 : kWarpSize),
                            max_of<int64_t>(args.norm.row_vecs, 1));
  args.num_parts = static_cast<int>(ceil_div(args.shard_vecs, args.part_vecs));
  const auto blocks_for = [&](int most, int warps) {
    return static_cast<int>(min_of<int64_t>(most, ceil_div(args.num_parts, warps)));
  };
  args.num_push_blocks = is_alone ? 0 : blocks_for(most_push_blocks, roles.num_push_warps);
  args.first_take_block = is_lone_block ? 0 : args.num_push_blocks;
  const int num_take_blocks =
      blocks_for(max_blocks - args.first_take_block,
                 roles.num_reduce_warps == 0 ? roles.num_gather_warps : roles.num_reduce_warps);

  const bool pushes_sums = spreads_sums(args.op) && args.multicast == nullptr;
  const int num_sum_pushers = pushes_sums ? roles.num_reduce_warps : 0;
  const int num_in_block = is_lone_block ? roles.num_push_warps + num_sum_pushers
                                         : max_of(roles.num_push_warps, num_sum_pushers);
  // Of vectors that are as many pieces as there are rooms.
  const int64_t vec_bytes =
      static_cast<int64_t>(PiecePusher::kNumRooms * sizeof(Vec16)) * max_of(num_in_block, 1);
  const int64_t free_bytes = smem_bytes_limit - static_cast<int64_t>(sizeof(CollectiveEntry));
  args.piece_vecs = max_of<int64_t>(
      1, min_of(args.part_vecs, min_of<int64_t>(kTuning.most_piece_vecs, free_bytes / vec_bytes)));
  args.entry_offset = num_in_block == 0 ? 0 : static_cast<uint64_t>(args.piece_vecs * vec_bytes);
  return args.first_take_block + num_take_blocks;
}

template <class Target>
void Engine<Target>::collective(CollectiveArgs args, Dtype dtype, int digest, int max_blocks,
                                uint64_t stream) {
  constexpr Tuning kTuning = Target::kTuning;
  detail::require(!is_internode(), "collectives serve ranks inside a node");
  const int num_blocks = deal_parts(args, max_blocks);
  const auto half = [](int64_t value, int idx) { return static_cast<int>(value >> (32 * idx)); };
  const std::array<int, 11> agreed = {static_cast<int>(args.op),
                                      digest,
                                      num_blocks,
                                      args.num_push_blocks,
                                      static_cast<int>(args.part_vecs),
                                      half(args.num_bytes, 0),
                                      half(args.num_bytes, 1),
                                      half(args.shard_bytes, 0),
                                      half(args.shard_bytes, 1),
                                      static_cast<int>(args.norm.row_vecs),
                                      bit_cast<int>(args.norm.eps)};
  const LaunchConfig config{.num_blocks = num_blocks,
                            .num_threads = (1 + kTuning.num_collective_warps) * kWarpSize,
                            .smem_bytes = args.entry_offset + sizeof(CollectiveEntry)};
  detail::require(config.smem_bytes <= static_cast<size_t>(smem_bytes_limit), "collectives need ",
                  config.smem_bytes, " bytes of shared memory, of which a block has ",
                  smem_bytes_limit);
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
