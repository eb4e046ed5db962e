// The low-latency part of Engine's methods for groups of several nodes;
// included by engine_impl.hpp.
#pragma once

#include "host/engine.hpp"

namespace deep_comm {

// Called by enable_low_latency, which has taken the region from data_bytes_.
template <class Target>
void Engine<Target>::enable_low_latency_rail(size_t num_bytes) {
  using detail::require;
  const int num_ranks = num_group_ranks();
  require(num_rail_peers_ == tiers_.num_nodes() + num_ranks,
          "low-latency mode between nodes needs every rank's segment as a rail peer");
  require(num_ranks < 1 << 15, "num_ranks = ", num_ranks, ", must be less than 32768");
  const size_t num_words = low_latency_rail_workspace_bytes(num_ranks, num_max_experts_);
  require(num_words <= data_bytes_, "the words of low-latency mode between nodes need ", num_words,
          " bytes of the heap");
  data_bytes_ -= num_words;
  const size_t begin = world_.layout.data + data_bytes_;
  RailReach& reach = low_latency_reach_;
  reach.words = LowLatencyRailWords::make(begin, num_ranks, num_max_experts_);
  reach.region = LowLatencyRailRegion::make(begin + num_words, num_bytes, num_ranks, can_shrink_);
  reach.group.rank = tiers_.rank;
  reach.group.num_ranks = num_ranks;
  reach.group.first_near = tiers_.rail.node * world_.num_ranks;
  reach.group.num_near = world_.num_ranks;
  reach.group.first_peer = tiers_.num_nodes();
  reach.group.port = tiers_.rail.port;
  prepare<LowLatencyRailDispatchKernel<PayloadFormat::kBfloat16>,
          LowLatencyRailDispatchKernel<PayloadFormat::kFp8>,
          LowLatencyRailDispatchKernel<PayloadFormat::kNvFp4>>();
  prepare<LowLatencyRailCombineKernel<CombineRows::kSums>,
          LowLatencyRailCombineKernel<CombineRows::kReduced>,
          LowLatencyRailCombineKernel<CombineRows::kSelections>,
          LowLatencyRailCombineKernel<CombineRows::kSums, true>,
          LowLatencyRailCombineKernel<CombineRows::kReduced, true>>();
}

template <class Target>
void Engine<Target>::set_low_latency_rail_sequence(uint32_t sequence) {
  for (const LowLatencyKind kind : {LowLatencyKind::kDispatch, LowLatencyKind::kCombine}) {
    const LowLatencyRailBuffer words = rail_words(kind, 0);
    const int number_of_kind = static_cast<int>(kind);
    target_.store(&words.rail_state()->sequence[number_of_kind], sequence);
    for (const uint32_t number : {sequence - 1, sequence}) {
      const int half = static_cast<int>(number & 1u);
      target_.store(&words.rail_state()->sent[number_of_kind][half], number);
      target_.store(&words.rail_state()->received[number_of_kind][half], number);
      target_.store(&words.rail_state()->credited[number_of_kind][half], number);
      for (int peer = 0; peer < num_group_ranks(); ++peer) {
        target_.store(words.own<uint64_t>(words.consumed(half, peer)), Tagged::pack(number, 0));
      }
    }
  }
}

template <class Target>
void Engine<Target>::low_latency_rail_dispatch(const LowLatencyPlan& plan,
                                               const LowLatencyDispatchCall& call,
                                               const LowLatencyDispatchArgs& base,
                                               uint64_t stream) {
  LowLatencyRailDispatchArgs args{};
  static_cast<LowLatencyDispatchArgs&>(args) = base;
  args.reach = low_latency_reach_;
  args.reach.hand_on_tokens = low_latency_hand_on_tokens;
  args.num_rows = reinterpret_cast<int32_t*>(call.metadata + plan.metadata.num_rows);
  args.return_addresses =
      reinterpret_cast<int32_t*>(call.metadata + plan.metadata.return_addresses);
  switch (plan.options.format) {
    case PayloadFormat::kBfloat16:
      return launch<LowLatencyRailDispatchKernel<PayloadFormat::kBfloat16>>(plan.launch, args,
                                                                            stream);
    case PayloadFormat::kFp8:
      return launch<LowLatencyRailDispatchKernel<PayloadFormat::kFp8>>(plan.launch, args, stream);
    case PayloadFormat::kNvFp4:
      return launch<LowLatencyRailDispatchKernel<PayloadFormat::kNvFp4>>(plan.launch, args, stream);
  }
}

template <class Target>
void Engine<Target>::low_latency_rail_combine(const LowLatencyPlan& plan,
                                              const LowLatencyCombineCall& call,
                                              const LowLatencyCombineArgs& base, uint64_t stream) {
  LowLatencyRailCombineArgs args{};
  static_cast<LowLatencyCombineArgs&>(args) = base;
  args.reach = low_latency_reach_;
  args.num_rows = reinterpret_cast<const int32_t*>(call.metadata + plan.metadata.num_rows);
  args.return_addresses =
      reinterpret_cast<const int32_t*>(call.metadata + plan.metadata.return_addresses);
  const auto run = [&]<CombineRows kRows, bool kLogFmt>() {
    launch<LowLatencyRailCombineKernel<kRows, kLogFmt>>(plan.launch, args, stream);
  };
  switch (call.rows) {
    case CombineRows::kSums:
      return call.use_logfmt ? run.template operator()<CombineRows::kSums, true>()
                             : run.template operator()<CombineRows::kSums, false>();
    case CombineRows::kReduced:
      return call.use_logfmt ? run.template operator()<CombineRows::kReduced, true>()
                             : run.template operator()<CombineRows::kReduced, false>();
    case CombineRows::kSelections:
      return run.template operator()<CombineRows::kSelections, false>();
  }
}

}  // namespace deep_comm
