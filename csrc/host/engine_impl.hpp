// Engine's methods, compiled once a target (engine_host.cpp, engine_cuda.cu).
#pragma once

#include <sstream>
#include <stdexcept>

#include "device/internode/kernels.cuh"
#include "device/intranode/kernels.cuh"
#include "device/low_latency/kernels.cuh"
#include "device/low_latency/rail_kernels.cuh"
#include "device/tp/kernels.cuh"
#include "host/engine.hpp"

namespace deep_comm {

namespace detail {

// The text is made of these parts, if it is needed.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

inline void check_channels(const ChannelConfig& config, int most) {
  require(config.num_channels >= 1 && config.num_channels <= most,
          "num_channels = ", config.num_channels, ", must lie in 1..", most);
  require(config.num_slots >= 1 && config.num_send_tokens >= 1 &&
              config.num_send_tokens <= config.num_slots,
          "num_send_tokens = ", config.num_send_tokens,
          ", must lie in 1..num_slots = ", config.num_slots);
}

inline void check_row_bytes(int row_bytes) {
  require(row_bytes > 0 && row_bytes % 16 == 0, "row_bytes = ", row_bytes,
          ", must be a positive multiple of 16");
}

// Calls visit with the kernel type for rows of that dtype.
template <template <Dtype> class KernelOf, class Visit>
void with_dtype(Dtype dtype, const Visit& visit) {
  switch (dtype) {
    case Dtype::kBfloat16:
      return visit(KernelOf<Dtype::kBfloat16>{});
    case Dtype::kFloat16:
      return visit(KernelOf<Dtype::kFloat16>{});
    case Dtype::kFloat32:
      return visit(KernelOf<Dtype::kFloat32>{});
  }
}

// For kernels that differ in more than the dtype.
template <Dtype kOfDtype>
struct OfDtype {
  static constexpr Dtype kDtype = kOfDtype;
};

// Words that a kernel of this rank releases and the host polls.
inline uint32_t load_acquire(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

// Between two polls: leaves the core to its other thread, where there is a way to say so.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace detail

template <class Target>
Engine<Target>::Engine(const EngineOptions& options, Target target)
    : smem_bytes_limit(target.smem_bytes_limit()), target_(target) {
  using detail::require;
  require(options.num_ranks >= 1 && options.num_ranks <= kMaxRanks,
          "num_ranks = ", options.num_ranks, ", must lie in 1..", kMaxRanks);
  require(options.rank >= 0 && options.rank < options.num_ranks, "rank = ", options.rank,
          ", must lie in 0..num_ranks - 1");
  require(static_cast<int>(options.peer_bases.size()) == options.num_ranks, "peer_bases has ",
          options.peer_bases.size(), " entries for ", options.num_ranks, " ranks");
  world_.rank = options.rank;
  world_.num_ranks = options.num_ranks;
  world_.layout = WorkspaceLayout::make(options.num_ranks, options.num_max_experts);
  world_.timeout_ns = options.timeout_ns;
  may_begin_early_ = options.begins_early && target_.can_begin_early();
  require(options.heap_bytes >= world_.layout.data, "heap_bytes = ", options.heap_bytes,
          ", must be at least ", world_.layout.data);
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    world_.bases[rank] = reinterpret_cast<uint8_t*>(options.peer_bases[rank]);
  }
  data_bytes_ = options.heap_bytes - world_.layout.data;
  num_max_experts_ = options.num_max_experts;
  error_ = allocate_mapped<ErrorBlock>();
  world_.error = error_.get();
  counts_ =
      allocate_mapped<CountsBlock>(sizeof(CountsBlock) + sizeof(int32_t) * options.num_max_experts);
  shrink_barrier_result_ = allocate_mapped<ShrinkBarrierResult>();
  prepare<LayoutKernel, NotifyKernel, BarrierKernel, ShrinkBarrierKernel>();
  prepare<DispatchKernel<false, false>, DispatchKernel<false, true>, DispatchKernel<true, false>,
          DispatchKernel<true, true>>();
  prepare<NumberRowsKernel, ExpandKernel, NumberReceivedKernel, ExpandReceivedKernel,
          TransposeScalesKernel>();
  prepare_each_dtype<CombineKernel>();
  prepare_each_dtype<ReduceExpertsKernel, CombineSumsKernel, AddSlotsKernel>();
  prepare_collective<Collective::kAllGather>();
  prepare_collective<Collective::kReduceScatter>();
  prepare_collective<Collective::kAllReduceOnce>();
  prepare_collective<Collective::kAllReduceTwice>();
  prepare_collective<Collective::kAllReduceNorm>();
  prepare<SignalWordKernel, AwaitWordKernel, BeginMatmulKernel, AwaitPushKernel, EndMatmulKernel>();
}

template <class Target>
Engine<Target>::~Engine() {
  close();
}

template <class Target>
void Engine<Target>::close() {
  if (error_ == nullptr) return;
  early_launches_.leave();
  if (is_internode()) target_.close_rail();
  error_.reset();
  world_.error = nullptr;
  counts_.reset();
  shrink_barrier_result_.reset();
  low_latency_report_.reset();
  rail_bases_.reset();
  rail_byte_counters_.reset();
  internode_counts_.reset();
}

template <class Target>
void Engine<Target>::check_open() const {
  if (error_ == nullptr) throw std::runtime_error("the engine is closed");
}

template <class Target>
template <class Launch>
void Engine<Target>::count_launches(int count, const Launch& launch) {
  check_open();
  num_launches_ += count;
  if (skips_launches) return;
  try {
    launch();
  } catch (const Interrupted&) {
    note_interrupt();
    throw;
  }
}

template <class Target>
template <class KernelType>
void Engine<Target>::launch_in(const World& world, const LaunchConfig& config,
                               typename KernelType::Args args, uint64_t stream) {
  args.world = world;
  count_launches(1, [&] { target_.template launch<KernelType>(config, args, stream); });
}

template <class Target>
template <class First, class Second>
void Engine<Target>::launch_pair(const LaunchConfig& first_config, typename First::Args first,
                                 const LaunchConfig& second_config, typename Second::Args second,
                                 uint64_t stream) {
  static_assert(kBeginsBeside<Second>);
  first.world = world_;
  second.world = world_;
  count_launches(2, [&] {
    target_.template launch_pair<First, Second>(first_config, first, second_config, second, stream);
  });
}

template <class Target>
void Engine<Target>::note_interrupt() {
  if (!is_open()) return;
  target_.store_beside_kernels(&world_.state()->abort, 1);  // what still waits need not go on
  ErrorBlock& block = *world_.error;
  if (detail::load_acquire(&block.is_written) != 0) return;  // it had failed before
  block.kind = static_cast<uint32_t>(ErrorKind::kInterrupted);
  block.rank = group_rank();
  __atomic_store_n(&block.is_written, 1u, __ATOMIC_RELEASE);
}

template <class Target>
void Engine<Target>::check_num_experts(int num_experts) const {
  detail::require(num_experts >= 1 && num_experts <= num_max_experts_,
                  "num_experts = ", num_experts,
                  ", must lie in 1..num_max_experts = ", num_max_experts_);
}

template <class Target>
void Engine<Target>::check_counters(int num_experts, size_t smem_bytes) const {
  detail::require(smem_bytes <= static_cast<size_t>(smem_bytes_limit),
                  "num_experts = ", num_experts, ", must be fewer: a block counts them in ",
                  smem_bytes, " bytes of shared memory, of which it has ", smem_bytes_limit);
}

template <class Target>
std::optional<ErrorRecord> Engine<Target>::poll_error() const {
  check_open();
  const ErrorBlock& block = *world_.error;
  if (detail::load_acquire(&block.is_written) == 0) return std::nullopt;
  ErrorRecord record;
  record.kind = kErrorKindNames[block.kind];
  record.kernel = kKernelNames[block.kernel];
  record.stage = kStageNames[block.stage];
  const bool is_header = block.word == static_cast<uint32_t>(Word::kHeader);
  const bool is_rail_header = block.word == static_cast<uint32_t>(Word::kRailHeader);
  record.word = is_header        ? kHeaderFieldNames[block.channel]
                : is_rail_header ? kRailFieldNames[block.channel]
                                 : kWordNames[block.word];
  record.rank = block.rank;
  record.peer = block.peer;
  record.channel = is_header || is_rail_header ? -1 : block.channel;
  record.seen = static_cast<int64_t>(block.seen);
  record.expected = static_cast<int64_t>(block.expected);
  record.waited_ns = block.waited_ns;
  record.index = block.index;
  // Low-latency calls announce less than a signature.
  if (block.word == static_cast<uint32_t>(Word::kOperation) &&
      block.stage != static_cast<uint32_t>(Stage::kAnnounced) &&
      block.seen != Operation::kDisputed) {
    record.peer_kernel = kKernelNames[static_cast<int>(Operation::kernel_of(block.seen))];
  }
  return record;
}

template <class Target>
const uint64_t* Engine<Target>::arrival_of(int peer) const {
  if (!is_internode()) return world_.arrived(world_.rank, peer);
  const int local = peer % world_.num_ranks, node = peer / world_.num_ranks;
  if (node == tiers_.rail.node) return world_.arrived(world_.rank, local);
  return reinterpret_cast<const uint64_t*>(world_.bases[local] +
                                           tiers_.rail.layout.arrived_of(node));
}

template <class Target>
Tagged Engine<Target>::announcement_of(int peer, LowLatencyKind kind, int buffer_idx) {
  if (!is_internode()) {
    return Tagged::unpack(
        target_.load_beside_kernels(world_.announced(world_.rank, kind, buffer_idx, peer)));
  }
  const LowLatencyRailBuffer buffer = rail_words(kind, buffer_idx);
  return Tagged::unpack(
      target_.load_beside_kernels(buffer.template own<uint64_t>(buffer.announced(peer))));
}

template <class Target>
Kernel Engine<Target>::begun_instead(int peer) {
  const ErrorBlock& block = *world_.error;
  const auto kernel = static_cast<Kernel>(block.kernel);
  const auto word = static_cast<Word>(block.word);
  bool is_low_latency = false;
  Kernel other = Kernel::kCount;
  for (int kind = 0; kind < 2 && low_latency_bytes_ > 0; ++kind) {
    const auto of_kind = static_cast<LowLatencyKind>(kind);
    const Kernel its_kernel = kind == 0 ? Kernel::kLowLatencyDispatch : Kernel::kLowLatencyCombine;
    const uint32_t begun = target_.load_beside_kernels(
        is_internode() ? &rail_words(of_kind, 0).rail_state()->sequence[kind]
                       : &world_.low_latency_state()->records[kind][0].sequence);
    is_low_latency = is_low_latency || kernel == its_kernel;
    for (int buffer_idx = 0; buffer_idx < 2; ++buffer_idx) {
      const Tagged seen = announcement_of(peer, of_kind, buffer_idx);
      if (kernel == its_kernel) {
        if (seen.has_reached(begun)) return Kernel::kCount;  // it has begun this rank's operation
      } else if (seen.generation != begun && seen.has_reached(begun)) {
        other = its_kernel;
      }
    }
  }
  const Tagged seen = Tagged::unpack(target_.load_beside_kernels(arrival_of(peer)));
  if (is_low_latency) {
    const uint32_t ended = target_.load_beside_kernels(&world_.state()->generation);
    if (seen.generation != ended && seen.has_reached(ended))
      other = Operation::kernel_of(seen.value);
  } else if (word != Word::kRailArrived && word != Word::kBlamed &&
             (word != Word::kArrived ||
              seen.has_reached(Tagged::unpack(block.expected).generation))) {
    return Kernel::kCount;  // likewise
  }
  return other;
}

template <class Target>
std::pair<int, std::string> Engine<Target>::begun_by_peer() {
  check_open();
  const ErrorBlock& block = *world_.error;
  const int num_ranks = num_group_ranks();
  if (detail::load_acquire(&block.is_written) == 0 || block.peer < 0 || block.peer >= num_ranks ||
      block.kind != static_cast<uint32_t>(ErrorKind::kPeerTimeout)) {
    return {};
  }
  const auto kernel = static_cast<Kernel>(block.kernel);
  const bool sees_all =
      kernel == Kernel::kLowLatencyDispatch || kernel == Kernel::kLowLatencyCombine;
  for (int idx = 0; idx < (sees_all ? num_ranks : 1); ++idx) {
    const int peer = (block.peer + idx) % num_ranks;
    const Kernel other = peer == block.rank ? Kernel::kCount : begun_instead(peer);
    if (other != Kernel::kCount) return {peer, kKernelNames[static_cast<int>(other)]};
  }
  return {};
}

template <class Target>
void Engine<Target>::clear_error() {
  check_open();
  LocalState* state = world_.state();
  target_.fill_zero(&state->abort, sizeof(state->abort));
  target_.fill_zero(&state->bad_expert_index, sizeof(state->bad_expert_index));
  // No dispatch has followed a notify that failed: the next one could take its result for that of the
  // notify before it.
  const uint64_t notified = target_.load_beside_kernels(&state->notified);
  if (Tagged::unpack(notified).value == static_cast<uint32_t>(NotifyResult::kFailed)) {
    target_.fill_zero(&state->notified, sizeof(state->notified));
  }
  *world_.error = ErrorBlock{};
  target_.fill_zero(&state->error_claimed, sizeof(state->error_claimed));
}

template <class Target>
void Engine<Target>::reset() {
  check_open();
  target_.fill_zero(world_.bases[world_.rank], world_.layout.data);
  if (low_latency_bytes_ > 0)
    zero_low_latency();  // numbers start anew, and rows are told from zeros
  if (is_internode()) {
    const size_t begin = tiers_.rail.layout.arrived;
    target_.fill_zero(world_.bases[world_.rank] + begin, tiers_.rail.layout.data - begin);
  }
  *world_.error = ErrorBlock{};
  world_.absent = 0;
}

template <class Target>
void Engine<Target>::barrier(int digest, uint64_t stream) {
  const uint32_t signature = Operation::signature(Kernel::kBarrier, &digest, 1);
  const LaunchConfig config{.num_blocks = 1, .num_threads = kWarpSize, .smem_bytes = 16};
  if (!is_internode()) return launch<BarrierKernel>(config, {world_, signature}, stream);
  InternodeBarrierArgs args{};
  args.tiers = tiers_;
  args.signature = signature;
  launch<InternodeBarrierKernel>(config, args, stream);
}

template <class Target>
void Engine<Target>::shrink_barrier(uint32_t absent, uint32_t number, uint64_t stream) {
  check_open();
  detail::require(!is_internode(), "ranks can be done without inside a node alone");
  detail::require((absent >> world_.rank & 1u) == 0 && absent >> world_.num_ranks == 0,
                  "absent = ", absent, ", must name other ranks of the group");
  World world = world_;
  world.absent = absent;
  *shrink_barrier_result_ = ShrinkBarrierResult{number, 0};
  ShrinkBarrierArgs args{};
  args.number = number;
  args.tells_low_latency = can_shrink_;
  args.result = shrink_barrier_result_.get();
  launch_in<ShrinkBarrierKernel>(
      world, {.num_blocks = 1, .num_threads = kWarpSize, .smem_bytes = 0}, args, stream);
}

template <class Target>
void Engine<Target>::do_without(uint32_t absent) {
  check_open();
  // Not the words of the shrink barrier: peers may be writing there.
  target_.fill_zero(world_.bases[world_.rank], world_.layout.proposals(world_.num_ranks));
  if (low_latency_bytes_ > 0) zero_low_latency();
  *world_.error = ErrorBlock{};
  world_.absent = absent;
  for (int rank = 0; rank < world_.num_ranks && can_shrink_; ++rank) {
    if (world_.is_absent(rank)) target_.store(world_.masked(rank), 1);
  }
}

template <class Target>
void Engine<Target>::quiet_rail() {
  check_open();
  if (is_internode()) target_.quiet_rail();
}

template <class Target>
void Engine<Target>::set_trace(uintptr_t slots, uint32_t num_calls) {
  check_open();
  detail::require(num_calls > 0 && (num_calls & (num_calls - 1)) == 0, "num_calls = ", num_calls,
                  ", must be a power of two");
  world_.trace_slots = reinterpret_cast<TraceSlot*>(slots);
  world_.last_traced_call = num_calls - 1;
}

template <class Target>
void Engine<Target>::set_generation(uint32_t generation) {
  check_open();
  target_.store(&world_.state()->generation, generation);
  target_.fill_zero(world_.state()->taken, sizeof(LocalState::taken));  // whichever half is next
  for (int peer = 0; peer < world_.num_ranks; ++peer)
    target_.store(world_.arrived(world_.rank, peer), Tagged::pack(generation, 0));
}

}  // namespace deep_comm

#include "host/expand_impl.hpp"
#include "host/internode_impl.hpp"
#include "host/low_latency_impl.hpp"
#include "host/low_latency_rail_impl.hpp"
#include "host/normal_impl.hpp"
#include "host/tp_impl.hpp"
