// The low-latency part of Engine's methods; included by engine_impl.hpp.
#pragma once

#include "host/engine.hpp"

namespace deep_comm {

template <class Target>
void Engine<Target>::enable_low_latency(size_t num_bytes, bool can_shrink) {
  using detail::require;
  check_open();
  require(low_latency_bytes_ == 0 && num_launches_ == 0,
          "low-latency mode is enabled once, before any launch");
  require(num_bytes % kLineBytes == 0 && num_bytes <= data_bytes_, "num_bytes = ", num_bytes,
          ", must be a multiple of 128 within the heap");
  data_bytes_ -= num_bytes;
  low_latency_bytes_ = num_bytes;
  can_shrink_ = can_shrink;
  low_latency_report_ = allocate_mapped<uint64_t>();
  if (is_internode()) return enable_low_latency_rail(num_bytes);
  low_latency_region_ = LowLatencyRegion::make(world_.layout.data + data_bytes_, num_bytes);
  if (may_begin_early_) early_launches_.join(target_.device());
  // The common kernels are there without what masks need, too.
  if (can_shrink_) {
    prepare<LowLatencyDispatchKernel<PayloadFormat::kBfloat16>,
            LowLatencyDispatchKernel<PayloadFormat::kFp8>,
            LowLatencyCombineKernel<CombineRows::kSums>,
            LowLatencyCombineKernel<CombineRows::kReduced>>();
  } else {
    const auto prepare_form = [this]<DispatchRows kRows, bool kTakesTurns>() {
      prepare<LowLatencyDispatchKernel<PayloadFormat::kBfloat16, false, kRows>,
              LowLatencyDispatchKernel<PayloadFormat::kFp8, false, kRows>,
              LowLatencyCombineKernel<CombineRows::kSums, false, false, kTakesTurns>,
              LowLatencyCombineKernel<CombineRows::kReduced, false, false, kTakesTurns>>();
    };
    prepare_form.template operator()<DispatchRows::kStrips, false>();
    prepare_form.template operator()<DispatchRows::kHalves, false>();
    prepare_form.template operator()<DispatchRows::kWhole, true>();
    prepare_form.template operator()<DispatchRows::kMany, true>();
  }
  prepare<LowLatencyDispatchKernel<PayloadFormat::kNvFp4>,
          LowLatencyCombineKernel<CombineRows::kSelections>,
          LowLatencyCombineKernel<CombineRows::kSums, true>,
          LowLatencyCombineKernel<CombineRows::kReduced, true>>();
}

template <class Target>
LaunchConfig Engine<Target>::low_latency_launch(const LowLatencyShape& shape) const {
  using detail::require;
  require(shape.num_blocks >= 1 && shape.num_blocks <= kMaxLowLatencyBlocks,
          "num_blocks = ", shape.num_blocks, ", must lie in 1..", kMaxLowLatencyBlocks);
  require(shape.num_max_tokens >= 1 && shape.num_max_tokens <= kMaxLowLatencyTokens,
          "num_max_tokens = ", shape.num_max_tokens, ", must lie in 1..", kMaxLowLatencyTokens);
  check_num_experts(shape.num_experts);
  require(shape.num_topk >= 1 && shape.num_topk <= kMaxTopk, "num_topk = ", shape.num_topk,
          ", must lie in 1..", kMaxTopk);
  const int multiple = shape.num_scales == 0             ? 8
                       : shape.row_bytes >= shape.hidden ? kScaleBlock
                                                         : kFp4ScaleWord;
  require(shape.hidden >= 8 && shape.hidden % multiple == 0, "hidden = ", shape.hidden,
          ", must be a positive multiple of 8, of 128 for FP8, of 64 for NVFP4");
  const size_t needed = low_latency_bytes_for(shape, false);
  require(needed <= low_latency_bytes_, "this shape needs a low-latency region of ", needed,
          " bytes, there are ", low_latency_bytes_);
  const size_t smem_bytes = low_latency_smem_bytes(shape);
  check_counters(shape.num_experts, smem_bytes);
  return {.num_blocks = shape.num_blocks,
          .num_threads = Target::kTuning.low_latency_threads,
          .smem_bytes = smem_bytes};
}

template <class Target>
size_t Engine<Target>::low_latency_smem_bytes(const LowLatencyShape& shape) const {
  const int num_warps = Target::kTuning.low_latency_threads / kWarpSize;
  return is_internode() ? RailBlockMemory::num_bytes(shape, num_group_ranks(), num_warps)
                        : BlockMemory::num_bytes(shape, world_.num_ranks, num_warps);
}

template <class Target>
int Engine<Target>::low_latency_max_experts(int num_topk) const {
  LowLatencyShape shape{};
  shape.num_topk = num_topk;
  int most = 0, too_many = num_max_experts_ + 1;
  while (too_many - most > 1) {  // bytes grow with experts
    shape.num_experts = most + (too_many - most) / 2;
    const bool fits = low_latency_smem_bytes(shape) <= static_cast<size_t>(smem_bytes_limit);
    (fits ? most : too_many) = shape.num_experts;
  }
  return most;
}

namespace detail {

// 16 bits of what all ranks must have alike; travels with every flag.
inline uint32_t low_latency_signature(Kernel kernel, const LowLatencyShape& shape, int options) {
  const int agreed[] = {shape.num_max_tokens, shape.hidden,    shape.num_topk, shape.num_experts,
                        shape.num_blocks,     shape.row_bytes, options};
  const uint32_t hash = Operation::signature(kernel, agreed, 7);
  return (hash ^ hash >> 16) & 0xffffu;
}

// In every call: no text is made unless it is needed.
inline void check_call(const Phases& phases, int num_tokens, const LowLatencyPlan& plan) {
  require(phases.send || phases.receive, "an operation without a phase");
  require(phases.send || phases.ticket != nullptr,
          "the receive phase alone needs the ticket of its send phase");
  require(num_tokens >= 0 && num_tokens <= plan.options.num_max_tokens, "num_tokens = ", num_tokens,
          ", must lie in 0..num_max_tokens");
}

}  // namespace detail

template <class Target>
size_t Engine<Target>::low_latency_bytes_for(const LowLatencyShape& shape,
                                             bool one_rounding) const {
  return is_internode()
             ? LowLatencyRailRegion::bytes_for(shape, num_group_ranks(), one_rounding, can_shrink_)
             : LowLatencyRegion::bytes_for(shape, world_.num_ranks, one_rounding, can_shrink_);
}

// The region, and the words of a group of several nodes before it.
template <class Target>
void Engine<Target>::zero_low_latency() {
  const size_t num_words = low_latency_reach_.words.num_bytes;
  target_.fill_zero(world_.bases[world_.rank] + world_.layout.data + data_bytes_,
                    num_words + low_latency_bytes_);
}

template <class Target>
void Engine<Target>::reset_low_latency() {
  check_open();
  uint8_t* base = world_.bases[world_.rank];
  target_.fill_zero(base + world_.layout.low_latency.state, world_.layout.low_latency.num_bytes);
  zero_low_latency();
}

template <class Target>
void Engine<Target>::set_low_latency_sequence(uint32_t sequence) {
  check_open();
  detail::require(sequence >= 4, "sequence must be at least 4");
  if (is_internode()) return set_low_latency_rail_sequence(sequence);
  const LowLatencyShape none{};
  for (const LowLatencyKind kind : {LowLatencyKind::kDispatch, LowLatencyKind::kCombine}) {
    const LowLatencyBuffer words{world_, low_latency_region_, none, kind, 0};
    LowLatencyState* state = words.state();
    for (LowLatencyRecord& record : state->records[static_cast<int>(kind)]) {
      target_.store(&record.sequence, sequence);
      target_.store(&record.sent[sequence & 1u], sequence);
      target_.store(&record.sent[(sequence - 1) & 1u], sequence - 1);
    }
    for (const uint32_t number : {sequence - 1, sequence}) {
      const int half = static_cast<int>(number & 1u);
      target_.store(&state->received[static_cast<int>(kind)][half], number);
      for (int peer = 0; peer < world_.num_ranks; ++peer) {
        target_.store(words.consumed(world_.rank, half, peer), Tagged::pack(number, 0));
      }
    }
  }
}

template <class Target>
LowLatencyPlan Engine<Target>::plan_low_latency(const LowLatencyOptions& options) const {
  check_open();
  LowLatencyPlan plan{};
  plan.options = options;
  plan.experts = ExpertMap::make(options.num_experts, num_group_ranks());
  const int num_local = plan.experts.num_local_experts(group_rank());
  plan.metadata = LowLatencyMetadata::make(num_group_ranks(), num_local, options.num_max_tokens,
                                           options.num_topk, options.is_compact,
                                           options.has_weights, is_internode());
  const auto shape_of = [&](PayloadFormat format) {
    return low_latency_shape(options.num_max_tokens, options.hidden, options.num_topk,
                             options.num_experts, options.num_blocks, format);
  };
  plan.dispatch_shape = shape_of(options.format);
  plan.combine_shape = shape_of(PayloadFormat::kBfloat16);
  plan.launch = low_latency_launch(plan.dispatch_shape);
  // Scales of a block's columns are whole pieces of 16 bytes then, as bulk copies need them.
  const bool has_whole_pieces = plan.dispatch_shape.num_scales % 4 == 0;
  const size_t staged_bytes = BlockMemory::num_bytes_with_stage(
      plan.dispatch_shape, world_.num_ranks, plan.launch.num_threads / kWarpSize);
  plan.stages_strips = !is_internode() && !can_shrink_ && has_whole_pieces &&
                       options.format != PayloadFormat::kNvFp4 &&
                       staged_bytes <= static_cast<size_t>(smem_bytes_limit);
  // Of all kernels alike: an SM whose share of L1 changes has to be empty.
  if (plan.stages_strips) plan.launch.smem_bytes = staged_bytes;
  plan.stages_rows =
      plan.stages_strips &&
      plan.dispatch_shape.row_bytes <= plan.launch.num_threads * static_cast<int>(sizeof(Vec16));
  // Senders round scales, receivers take the exponents of rounded ones; rows do not say which.
  const int forms = (options.is_compact ? 1 : 0) | (options.has_weights ? 2 : 0) |
                    (options.round_scale ? 4 : 0) | (options.use_ue8m0 ? 8 : 0);
  plan.dispatch_signature =
      detail::low_latency_signature(Kernel::kLowLatencyDispatch, plan.dispatch_shape, forms);
  for (int rows = 0; rows < 2 * kNumCombineRows; ++rows) {
    plan.combine_signatures[rows] =
        detail::low_latency_signature(Kernel::kLowLatencyCombine, plan.combine_shape, rows);
  }
  plan.has_room_for_selections =
      low_latency_bytes_for(plan.combine_shape, true) <= low_latency_bytes_;
  plan.has_whole_log_pieces = options.hidden % LogPiece::kElements == 0;
  for (LowLatencyShape* shape : {&plan.dispatch_shape, &plan.combine_shape}) {
    if (is_internode()) {
      low_latency_reach_.region.spread(shape, num_group_ranks(), can_shrink_);
    } else if (can_shrink_) {
      low_latency_region_.spread(shape, world_.num_ranks);
    }
  }
  return plan;
}

template <class Target>
void Engine<Target>::low_latency_dispatch(const LowLatencyPlan& plan,
                                          const LowLatencyDispatchCall& call, uint64_t stream) {
  const LowLatencyMetadata& metadata = plan.metadata;
  const auto part = [&](size_t offset) {
    return offset == LowLatencyMetadata::kNone ? nullptr
                                               : reinterpret_cast<uint8_t*>(call.metadata + offset);
  };
  LowLatencyDispatchArgs args{};
  args.region = low_latency_region_;
  args.shape = plan.dispatch_shape;
  args.experts = plan.experts;
  args.signature = plan.dispatch_signature;
  args.phases = {call.send, call.receive,
                 call.has_ticket ? reinterpret_cast<uint32_t*>(part(metadata.ticket)) : nullptr};
  detail::check_call(args.phases, call.num_tokens, plan);
  args.can_shrink = can_shrink_;
  args.split = LowLatencySplit::make(args.shape, call.num_tokens);
  args.x = reinterpret_cast<const uint8_t*>(call.x);
  args.topk_idx = reinterpret_cast<const void*>(call.topk_idx);
  args.topk_idx_bytes = call.topk_idx_bytes;
  args.topk_weights = reinterpret_cast<const float*>(call.topk_weights);
  args.round_scale = plan.options.round_scale;
  args.global_scale = reinterpret_cast<const float*>(call.global_scale);
  if (call.is_reporting) {
    args.report = low_latency_report_.get();
    args.report_sequence = ++report_sequence_;
    report_stream_ = stream;
  }
  const int first_expert = plan.experts.first_expert(group_rank());
  int other_expert = -1;
  if (call.has_global_idx) other_expert = first_expert > 0 ? 0 : plan.options.num_experts - 1;
  args.out = {.is_compact = plan.options.is_compact,
              .recv_x = reinterpret_cast<uint8_t*>(call.recv_x),
              .recv_scales = reinterpret_cast<void*>(call.recv_scales),
              .use_ue8m0 = plan.options.use_ue8m0,
              .recv_count = reinterpret_cast<int32_t*>(part(metadata.recv_count)),
              .src_info = reinterpret_cast<int32_t*>(part(metadata.src_info)),
              .layout_range = reinterpret_cast<int64_t*>(part(metadata.layout_range)),
              .num_recv = reinterpret_cast<int32_t*>(part(metadata.num_recv)),
              .compact_idx = reinterpret_cast<int32_t*>(part(metadata.compact_idx)),
              .first_idx = call.has_global_idx ? first_expert : 0,
              .other_idx = other_expert,
              .compact_weights = reinterpret_cast<float*>(part(metadata.compact_weights)),
              .recv_tokens = reinterpret_cast<int32_t*>(part(metadata.recv_tokens)),
              .recv_rows = reinterpret_cast<int32_t*>(part(metadata.recv_rows)),
              .recv_weights = reinterpret_cast<float*>(part(metadata.recv_weights)),
              .cumulative_stats = reinterpret_cast<int32_t*>(call.cumulative_stats),
              .wait_stats = reinterpret_cast<int64_t*>(call.wait_stats)};
  if (is_internode()) return low_latency_rail_dispatch(plan, call, args, stream);
  LaunchConfig config = plan.launch;
  config.may_begin_early = begins_early();
  const auto run_rows = [&]<PayloadFormat kFormat, DispatchRows kRows>() {
    launch<LowLatencyDispatchKernel<kFormat, false, kRows>>(config, args, stream);
  };
  const auto run = [&]<PayloadFormat kFormat>() {
    if (can_shrink_) return launch<LowLatencyDispatchKernel<kFormat>>(config, args, stream);
    // Of both phases alike: profiles then show one kernel per operation.
    switch (
        dispatch_rows(call.num_tokens, config.num_blocks, plan.stages_strips, plan.stages_rows)) {
      case DispatchRows::kStrips:
        return run_rows.template operator()<kFormat, DispatchRows::kStrips>();
      case DispatchRows::kHalves:
        return run_rows.template operator()<kFormat, DispatchRows::kHalves>();
      case DispatchRows::kWhole:
        return run_rows.template operator()<kFormat, DispatchRows::kWhole>();
      case DispatchRows::kMany:
        return run_rows.template operator()<kFormat, DispatchRows::kMany>();
    }
  };
  switch (plan.options.format) {
    case PayloadFormat::kBfloat16:
      return run.template operator()<PayloadFormat::kBfloat16>();
    case PayloadFormat::kFp8:
      return run.template operator()<PayloadFormat::kFp8>();
    case PayloadFormat::kNvFp4:
      return launch<LowLatencyDispatchKernel<PayloadFormat::kNvFp4>>(config, args, stream);
  }
}

template <class Target>
std::optional<int> Engine<Target>::wait_low_latency_num_tokens() {
  check_open();
  uint64_t word = 0;
  const auto has_come = [&] {
    word = __atomic_load_n(low_latency_report_.get(), __ATOMIC_ACQUIRE);
    return Tagged::unpack(word).generation == report_sequence_;
  };
  if (!wait_for_kernel(has_come, report_stream_,
                       "low_latency_dispatch ended without a report: its receive phase has not "
                       "run")) {
    return std::nullopt;
  }
  return static_cast<int>(Tagged::unpack(word).value);
}

template <class Target>
void Engine<Target>::low_latency_combine(const LowLatencyPlan& plan,
                                         const LowLatencyCombineCall& call, uint64_t stream) {
  const LowLatencyMetadata& metadata = plan.metadata;
  LowLatencyCombineArgs args{};
  args.region = low_latency_region_;
  args.shape = plan.combine_shape;
  args.experts = plan.experts;
  args.signature =
      plan.combine_signatures[static_cast<int>(call.rows) + (call.use_logfmt ? kLogFmtRows : 0)];
  args.phases = {call.send, call.receive, reinterpret_cast<uint32_t*>(call.ticket)};
  detail::check_call(args.phases, call.num_tokens, plan);
  args.can_shrink = can_shrink_;
  args.x = reinterpret_cast<const uint8_t*>(call.x);
  args.recv_tokens = reinterpret_cast<const int32_t*>(call.metadata + metadata.recv_tokens);
  args.recv_rows = reinterpret_cast<const int32_t*>(call.metadata + metadata.recv_rows);
  if (metadata.recv_weights != LowLatencyMetadata::kNone) {
    args.recv_weights = reinterpret_cast<const float*>(call.metadata + metadata.recv_weights);
  }
  args.split = LowLatencySplit::make(args.shape, call.num_tokens);
  args.topk_idx = reinterpret_cast<const void*>(call.topk_idx);
  args.topk_idx_bytes = call.topk_idx_bytes;
  args.topk_weights = reinterpret_cast<const float*>(call.topk_weights);
  args.combined_x = reinterpret_cast<uint8_t*>(call.combined_x);
  args.wait_stats = reinterpret_cast<int64_t*>(call.wait_stats);
  LaunchConfig config = plan.launch;
  config.may_begin_early = begins_early();
  if (call.use_logfmt) {
    if (!plan.has_whole_log_pieces || call.rows == CombineRows::kSelections) {
      throw std::invalid_argument("LogFMT takes sums or reduced rows of a multiple of 16 columns");
    }
    if (is_internode()) return low_latency_rail_combine(plan, call, args, stream);
    if (call.rows == CombineRows::kSums) {
      return launch<LowLatencyCombineKernel<CombineRows::kSums, true>>(config, args, stream);
    }
    return launch<LowLatencyCombineKernel<CombineRows::kReduced, true>>(config, args, stream);
  }
  if (call.rows == CombineRows::kSelections && !plan.has_room_for_selections) {
    throw std::invalid_argument("no room for a row a selection");
  }
  if (is_internode()) return low_latency_rail_combine(plan, call, args, stream);
  // What it brings is more than what it costs where a block has a row and more.
  const bool takes_turns = 2 * call.num_tokens > config.num_blocks;
  const auto run = [&]<CombineRows kRows>() {
    if (can_shrink_) return launch<LowLatencyCombineKernel<kRows>>(config, args, stream);
    return takes_turns
               ? launch<LowLatencyCombineKernel<kRows, false, false, true>>(config, args, stream)
               : launch<LowLatencyCombineKernel<kRows, false, false>>(config, args, stream);
  };
  switch (call.rows) {
    case CombineRows::kSums:
      return run.template operator()<CombineRows::kSums>();
    case CombineRows::kReduced:
      return run.template operator()<CombineRows::kReduced>();
    case CombineRows::kSelections:
      return launch<LowLatencyCombineKernel<CombineRows::kSelections>>(config, args, stream);
  }
}

}  // namespace deep_comm
