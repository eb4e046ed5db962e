// Engine's methods for dispatch and combine inside a node; included by engine_impl.hpp.
#pragma once

#include <bit>

#include "device/intranode/kernels.cuh"
#include "host/engine.hpp"

namespace deep_comm {

// Shared memory of a block that is not stages: the entries of dispatch and combine.
inline constexpr int kReservedSmemBytes = 4736;
inline constexpr int kMaxDispatchWarps = DispatchKernel<false, false>::kMaxThreads / kWarpSize;
// The mbarriers of both modes of dispatch.
inline constexpr int kMaxBarrierBytes = 256 * sizeof(uint64_t);
static_assert(sizeof(ExpandedEntry) <= kReservedSmemBytes - 16);
static_assert(sizeof(CombineEntry) <= kReservedSmemBytes - 16);

template <class Target>
int Engine<Target>::stages_limit() const {
  return smem_bytes_limit - kReservedSmemBytes - kMaxBarrierBytes;
}

template <class Target>
typename Engine<Target>::Shape Engine<Target>::shape_of(const ChannelConfig& config,
                                                        const MessageLayout& message,
                                                        int warp_bytes, int good_stages) const {
  using detail::require;
  detail::check_channels(config, kMaxChannels);
  detail::check_row_bytes(message.row_bytes);
  const int most_meta_bytes = StageLayout::most_meta_bytes(warp_bytes, StagePipe::kMinStages);
  require(message.meta_bytes <= most_meta_bytes, "scales and top-k of one token take ",
          message.meta_bytes, " bytes, of which rings of ", world_.num_ranks,
          " ranks have room for ", most_meta_bytes);
  const bool has_room = warp_bytes >= StageLayout::min_warp_bytes(message.meta_bytes, good_stages);
  Shape shape{};
  shape.stage =
      StageLayout::make(message.row_bytes, message.meta_bytes, warp_bytes,
                        has_room ? good_stages : StagePipe::kMinStages, StagePipe::kMaxStages);
  shape.ring = {world_.num_ranks, config.num_channels, config.num_slots, message.slot_bytes()};
  require(shape.ring.num_bytes() <= data_bytes_, "the rings need ", shape.ring.num_bytes(),
          " bytes, num_nvl_bytes gives ", data_bytes_);
  return shape;
}

template <class Target>
typename Engine<Target>::Shape Engine<Target>::shape_of_dispatch(const ChannelConfig& config,
                                                                 const MessageLayout& message,
                                                                 bool may_be_direct) const {
  static_assert(kMaxDispatchWarps <= Progress::kMaxWords);  // each has one at most
  static_assert(max_of(Target::kTuning.most_ring_warps, 2 * kMaxRanks - 1) < kMaxDispatchWarps);
  static_assert(StagePipe::barrier_bytes(StagePipe::kMaxStages) *
                    (kMaxDispatchWarps + Target::kTuning.num_direct_move_warps) <=
                kMaxBarrierBytes);
  const Tuning& tuning = Target::kTuning;
  const int num_ranks = world_.num_ranks;
  detail::check_row_bytes(message.row_bytes);
  const int num_senders =
      max_of(1, min_of(tuning.num_ring_send_warps, tuning.ring_send_bytes / message.row_bytes));
  const auto warps_of = [&](int num_send_warps) {
    return RingWarps{num_send_warps, min_of(2 * num_send_warps, tuning.num_ring_receive_warps)};
  };
  // Direct mode, where it is possible, is the usual one. It keeps its L1.
  const int needed = RingWarps{1, 1}.count(num_ranks) *
                     StageLayout::min_warp_bytes(message.meta_bytes, StagePipe::kMinStages);
  const int with_direct =
      max_of(needed, tuning.sender_smem_bytes * max_of(num_ranks - 1, tuning.min_senders));
  const int most_bytes = may_be_direct ? min_of(stages_limit(), with_direct) : stages_limit();
  const int good_bytes =
      StageLayout::bytes_of_stages(min_of(message.row_bytes, tuning.good_piece_bytes),
                                   message.meta_bytes, StagePipe::kMinStages);
  const auto fits = [&](const RingWarps& warps) {
    const int count = warps.count(num_ranks);
    return count <= tuning.most_ring_warps && count * good_bytes <= most_bytes;
  };
  RingWarps warps = warps_of(num_senders);
  while (!fits(warps) && warps.of_send_end > 1) warps = warps_of(warps.of_send_end - 1);
  while (!fits(warps) && warps.of_receive_end > 1) --warps.of_receive_end;
  Shape shape =
      shape_of(config, message, most_bytes / warps.count(num_ranks), StagePipe::kMinStages);
  shape.ring_warps = warps;
  return shape;
}

template <class Target>
void Engine<Target>::get_dispatch_layout(LayoutArgs args, uint64_t stream) {
  const int num_experts = args.topk.num_experts;
  check_num_experts(num_experts);
  const Tuning& tuning = Target::kTuning;
  args.experts = ExpertMap::make(num_experts, world_.num_ranks);
  args.tokens_per_block =
      max_of(tuning.layout_tokens_per_block, ceil_div(args.num_tokens, tuning.max_notify_blocks));
  const size_t smem_bytes = sizeof(int32_t) * (world_.num_ranks + num_experts + 1);
  check_counters(num_experts, smem_bytes);
  launch<LayoutKernel>({.num_blocks = max_of(1, ceil_div(args.num_tokens, args.tokens_per_block)),
                        .num_threads = tuning.layout_threads,
                        .smem_bytes = smem_bytes},
                       args, stream);
}

template <class Target>
NotifyPlan Engine<Target>::plan_notify(const NotifyOptions& options) const {
  // Checks the shape of the dispatch that follows, so that nothing is launched if it cannot be.
  shape_of_dispatch(options.channels,
                    MessageLayout::of_dispatch(options.row_bytes, options.scale_row_bytes,
                                               options.num_topk, true, options.is_expanded),
                    true);
  check_num_experts(options.num_experts);
  const size_t counter_bytes =
      options.counts_choices ? sizeof(int32_t) * static_cast<size_t>(options.num_experts) : 0;
  NotifyPlan plan{};
  plan.smem_bytes = sizeof(NotifySmem) + counter_bytes;
  check_counters(options.num_experts, plan.smem_bytes);
  NotifyArgs& args = plan.args;
  const auto field = [&](HeaderField name) -> int& {
    return args.header.fields[static_cast<int>(name)];
  };
  field(HeaderField::kNumTopk) = options.num_topk;
  field(HeaderField::kDtypes) = options.dtypes;
  field(HeaderField::kRowBytes) = options.row_bytes;
  field(HeaderField::kScaleRowBytes) = options.scale_row_bytes;
  field(HeaderField::kCast) = options.cast;
  field(HeaderField::kNumExperts) = options.num_experts;
  field(HeaderField::kNumChannels) = options.channels.num_channels;
  field(HeaderField::kNumSendTokens) = options.channels.num_send_tokens;
  field(HeaderField::kNumSlots) = options.channels.num_slots;
  field(HeaderField::kExpertAlignment) = options.is_expanded ? options.expert_alignment : 0;
  if (options.counts_choices) {
    args.topk = {nullptr, options.topk_idx_bytes, options.num_topk, options.num_experts};
  }
  args.experts = ExpertMap::make(options.num_experts, world_.num_ranks);
  args.num_channels = options.channels.num_channels;
  args.expert_alignment = options.expert_alignment;
  args.counts = counts_.get();
  return plan;
}

template <class Target>
LaunchConfig Engine<Target>::complete_notify(const NotifyPlan& plan, NotifyArgs* made,
                                             uint64_t stream) {
  NotifyArgs& args = *made;
  const auto field = [&](HeaderField name) -> int& {
    return args.header.fields[static_cast<int>(name)];
  };
  field(HeaderField::kNumTokens) = args.num_tokens;
  const OutputWords words = OutputWords::of(args.place);
  field(HeaderField::kOutputLine) = static_cast<int>(words.line);
  field(HeaderField::kSrcLine) = static_cast<int>(words.src_line);
  field(HeaderField::kOutputRows) = static_cast<int>(words.rows);
  args.sequence = ++sequence_;
  num_counted_experts_ = args.experts.num_local_experts(world_.rank);
  counts_stream_ = stream;
  const Tuning& tuning = Target::kTuning;
  const int tokens_per_channel = ceil_div(args.num_tokens, args.num_channels);
  const int num_threads =
      min_of(max_of(tuning.min_notify_threads, align_up(tokens_per_channel, kWarpSize)),
             tuning.max_notify_threads);
  return {.num_blocks = min_of(args.num_channels, tuning.max_notify_blocks),
          .num_threads = num_threads,
          .smem_bytes = plan.smem_bytes};
}

template <class Target>
void Engine<Target>::notify_dispatch(const NotifyPlan& plan, NotifyArgs args, uint64_t stream) {
  const LaunchConfig launch_config = complete_notify(plan, &args, stream);
  launch<NotifyKernel>(launch_config, args, stream);
}

template <class Target>
template <class HasCome>
bool Engine<Target>::wait_for_kernel(const HasCome& has_come, uint64_t stream, const char* what) {
  // Kernels bound their own waits; here only the end of the stream needs watching. Asking for it
  // takes longer than kernels are expected to, so not before many polls, some milliseconds.
  constexpr uint32_t kPollsBetweenQueries = 1 << 16;
  InterruptWatch interrupts;
  for (uint32_t num_polls = 1; !has_come(); ++num_polls) {
    if (detail::load_acquire(&world_.error->is_written) != 0) return false;
    detail::pause();
    if (num_polls % kPollsBetweenQueries != 0) continue;
    try {
      interrupts.look();
    } catch (const Interrupted&) {
      note_interrupt();
      throw;
    }
    if (target_.is_idle(stream) && !has_come() &&
        detail::load_acquire(&world_.error->is_written) == 0) {
      throw std::runtime_error(what);
    }
  }
  return true;
}

template <class Target>
bool Engine<Target>::wait_sequence(const uint32_t* sequence) {
  return wait_for_kernel(
      [&] { return detail::load_acquire(sequence) == sequence_; }, counts_stream_,
      "notify_dispatch ended without totals: an earlier failure was not cleared");
}

template <class Target>
std::optional<Counts> Engine<Target>::wait_counts() {
  check_open();
  if (!wait_sequence(&counts_->sequence)) return std::nullopt;
  Counts counts;
  counts.num_recv_tokens = counts_->num_recv_tokens;
  counts.max_num_tokens = counts_->max_num_tokens;
  counts.is_direct = counts_->is_direct != 0;
  counts.num_recv_tokens_per_expert.assign(
      counts_->num_recv_tokens_per_expert,
      counts_->num_recv_tokens_per_expert + num_counted_experts_);
  return counts;
}

// Casting warps write the scales that they make.
inline bool brings_scales(const DispatchOptions& options) {
  return options.num_scales != 0 && !options.is_quantised;
}

template <class Target>
void Engine<Target>::plan_direct(DispatchArgs& args, const DispatchOptions& options) const {
  // As many moving warps as have room for whole rows, within reason; longer rows travel in pieces.
  constexpr int kMinDirectStages = 4;
  // Of plain rows, a block holds no more than this (docs/design/0028).
  constexpr int kDirectRows = 16, kDirectRowBytes = kDirectRows * 7168;
  const Tuning& tuning = Target::kTuning;
  const int room = stages_limit();
  const bool has_metadata = options.num_topk != 0 || brings_scales(options) || options.makes_handle;
  const int meta_factor = brings_scales(options) && options.num_topk != 0 ? 2 : 1;
  args.num_meta_warps = has_metadata ? meta_factor * tuning.num_direct_meta_warps : 0;
  if (options.is_quantised) {
    const int fewest_bytes = StageLayout::make_cast(kScaleBlock, room).warp_bytes();
    args.num_move_warps = max_of(1, min_of(tuning.num_direct_cast_warps, room / fewest_bytes));
    args.direct_stage = StageLayout::make_cast(options.row_bytes, room / args.num_move_warps);
    detail::require(args.direct_stage.num_stages > 0, "smem_bytes_limit = ", smem_bytes_limit,
                    ", quantising needs stages of 512 elements");
    return;
  }
  const int most_rows = max_of(kDirectRows, kDirectRowBytes / options.row_bytes);
  // SMs that the links keep up with send as fast as they can, and that is faster in pieces, by more
  // warps; where links are what is waited for, it is slower.
  const int cut_bytes = room / tuning.num_direct_move_warps;
  const int num_ranks = world_.num_ranks;
  if (options.channels.num_channels * (num_ranks - 1) <= tuning.num_link_sms * num_ranks &&
      cut_bytes < kMinDirectStages * options.row_bytes &&
      cut_bytes >= StageLayout::min_warp_bytes(0, StagePipe::kGoodStages)) {
    args.num_move_warps = tuning.num_direct_move_warps;
    args.direct_stage = StageLayout::make(options.row_bytes, 0, cut_bytes, StagePipe::kGoodStages,
                                          StagePipe::kMaxStages);
    return;
  }
  const int most_warps = min_of(tuning.num_direct_move_warps,
                                min_of(room / (kMinDirectStages * align_up(options.row_bytes, 128)),
                                       most_rows / kMinDirectStages));
  args.num_move_warps = max_of(2, most_warps);
  args.direct_stage =
      StageLayout::make(options.row_bytes, 0, room / args.num_move_warps, kMinDirectStages,
                        min_of(StagePipe::kMaxStages, most_rows / args.num_move_warps));
}

template <class Target>
DispatchPlan Engine<Target>::plan_dispatch(const DispatchOptions& options) const {
  const MessageLayout message =
      MessageLayout::of_dispatch(options.row_bytes, options.num_scales * options.scale_bytes,
                                 options.num_topk, options.makes_handle, options.is_expanded);
  DispatchPlan plan{};
  plan.options = options;
  for (const bool may_be_direct : {false, true}) {
    DispatchPlan::Variant& variant = plan.variants[may_be_direct ? 1 : 0];
    variant = plan_dispatch(options, shape_of_dispatch(options.channels, message, may_be_direct),
                            may_be_direct);
    variant.args.message = message;
  }
  return plan;
}

template <class Target>
DispatchPlan::Variant Engine<Target>::plan_dispatch(const DispatchOptions& options,
                                                    const Shape& shape, bool may_be_direct) const {
  const Tuning& tuning = Target::kTuning;
  const ChannelConfig& config = options.channels;
  DispatchPlan::Variant variant{};
  DispatchArgs& args = variant.args;
  args.scale_bytes = options.scale_bytes;
  args.num_scales = options.num_scales;
  args.topk_idx_bytes = options.topk_idx_bytes;
  args.scale_format = options.scale_format;
  args.ring_warps = shape.ring_warps;
  const int num_pipes = shape.ring_warps.count(world_.num_ranks);
  args.stage = shape.stage;
  args.ring = shape.ring;
  args.num_send_tokens = config.num_send_tokens;
  static_assert(max_of(tuning.num_direct_move_warps, tuning.num_direct_cast_warps) <=
                SentChunks::kMaxMovers);
  plan_direct(args, options);
  if (options.is_expanded) {
    // Scales make metadata slow. Otherwise more warps would only make more fences.
    args.num_meta_warps = brings_scales(options)
                              ? SentChunks::num_meta_warps(args.num_move_warps, kMaxDispatchWarps)
                              : max_of(1, min_of(args.num_meta_warps, args.num_move_warps));
  }
  const size_t stages_bytes =
      align_up<size_t>(max_of(num_pipes * args.stage.warp_bytes(),
                              may_be_direct * args.num_move_warps * args.direct_stage.warp_bytes()),
                       16);
  args.ring_barriers_offset = stages_bytes;
  args.direct_barriers_offset =
      args.ring_barriers_offset + num_pipes * args.stage.warp_barrier_bytes();
  args.entry_offset = align_up<size_t>(
      args.direct_barriers_offset + args.num_move_warps * args.direct_stage.warp_barrier_bytes(),
      16);
  const int agreed[] = {options.dtypes,
                        options.row_bytes,
                        options.num_scales * options.scale_bytes,
                        options.num_topk,
                        config.num_channels,
                        config.num_send_tokens,
                        config.num_slots,
                        options.topk_idx_bytes,
                        options.makes_handle,
                        options.is_expanded,
                        options.is_quantised,
                        options.scale_format.round_scale,
                        options.scale_format.use_ue8m0};
  args.signature = Operation::signature(Kernel::kDispatch, agreed, 13);
  variant.launch = {
      .num_blocks = config.num_channels,
      // The last warp never moves rows: it retires the block early.
      .num_threads = kWarpSize * max_of(num_pipes + 1,  // of rings, and the publisher
                                        args.num_move_warps + max_of(args.num_meta_warps, 1)),
      .smem_bytes = args.entry_offset +
                    (options.is_expanded ? sizeof(ExpandedEntry) : sizeof(DispatchEntry))};
  return variant;
}

template <class Target>
void Engine<Target>::dispatch(const DispatchPlan& plan, const DispatchArgs& args, uint64_t stream) {
  const DispatchOptions& options = plan.options;
  const bool may_be_direct = args.output_line != 0;  // otherwise no stages for it
  if (may_be_direct) check_output(args, options);
  const LaunchConfig& launch_config = plan.variant(may_be_direct).launch;
  if (options.is_quantised) {
    launch<DispatchKernel<false, true>>(launch_config, args, stream);
  } else {
    launch<DispatchKernel<false, false>>(launch_config, args, stream);
  }
}

template <class Target>
void Engine<Target>::notify_and_dispatch(const NotifyPlan& notify_plan, NotifyArgs notify,
                                         const DispatchPlan& plan, const DispatchArgs& args,
                                         uint64_t stream) {
  const DispatchOptions& options = plan.options;
  const bool may_be_direct = args.output_line != 0;
  if (may_be_direct) check_output(args, options);
  const LaunchConfig notify_config = complete_notify(notify_plan, &notify, stream);
  LaunchConfig launch_config = plan.variant(may_be_direct).launch;
  launch_config.may_begin_early = may_begin_early_;
  if (options.is_quantised) {
    launch_pair<NotifyKernel, DispatchKernel<false, true>>(notify_config, notify, launch_config,
                                                           args, stream);
  } else {
    launch_pair<NotifyKernel, DispatchKernel<false, false>>(notify_config, notify, launch_config,
                                                            args, stream);
  }
}

template <class Target>
void Engine<Target>::check_block(const char* what, uint32_t line, size_t num_bytes) const {
  const size_t begin = static_cast<size_t>(line) * kLineBytes;
  detail::require(
      begin >= world_.layout.data && begin + num_bytes <= world_.layout.data + data_bytes_, what,
      " of ", num_bytes, " bytes at ", begin, " must lie in the data region");
}

template <class Target>
void Engine<Target>::check_output(const DispatchArgs& args, const DispatchOptions& options) const {
  const int num_topk = options.is_expanded ? min_of(options.num_topk, 1) : options.num_topk;
  const OutputLayout output = OutputLayout::make(args.num_recv_rows, options.row_bytes,
                                                 options.num_scales * options.scale_bytes, num_topk,
                                                 options.topk_idx_bytes);
  check_block("an output block", args.output_line, output.num_bytes);
  if (args.src_line != 0) {
    const size_t num_bytes =
        options.is_expanded ? SourceLayout::make(args.num_recv_rows, options.num_topk).num_bytes
                            : sizeof(int32_t) * static_cast<size_t>(args.num_recv_rows);
    check_block("an output block", args.src_line, num_bytes);
  }
}

template <class Target>
CombinePlan Engine<Target>::plan_combine(const ChannelConfig& config, Dtype dtype, int num_topk,
                                         int row_bytes, const CombineSms& sms) const {
  constexpr int kMaxWarps = CombineKernel<Dtype::kFloat32, false>::kMaxThreads / kWarpSize;
  const int num_senders = max_of(world_.num_ranks - 1, Target::kTuning.min_senders);
  // Beside the reducing warps: the senders, the credits', the publisher.
  const int num_reduce_warps =
      min_of(Target::kTuning.num_reduce_warps, kMaxWarps - num_senders - 2);
  static_assert(Target::kTuning.num_reduce_warps <= CombineEntry::kMaxReduceWarps);
  detail::require(max_of(sms.of_few_rows, sms.of_more_sums) <= kMaxChannels,
                  "SMs of a combine = ", sms.of_few_rows, ", ", sms.of_more_sums,
                  ", must not be above ", kMaxChannels);
  CombinePlan plan{};
  plan.dtype = dtype;
  plan.sms = sms;
  CombineArgs& args = plan.args;
  args.message = MessageLayout::of_combine(row_bytes, num_topk);
  Shape shape = shape_of(config, args.message,
                         min_of(stages_limit() / num_senders, Target::kTuning.sender_smem_bytes),
                         StagePipe::kGoodStages);
  const int num_peers = max_of(1, world_.num_ranks - 1);
  const int num_rings = config.num_channels * num_peers;
  const bool has_two =
      num_senders >= 2 * num_peers && Target::kTuning.most_ring_senders >= 2 * num_rings;
  args.num_ring_senders = has_two ? 2 : 1;
  if (has_two) {
    const int64_t window = Target::kTuning.ring_window_bytes / (num_rings * shape.ring.slot_bytes);
    shape.ring.num_slots = static_cast<int>(
        min_of<int64_t>(shape.ring.num_slots, max_of<int64_t>(window, 2 * config.num_send_tokens)));
  }
  args.num_senders = num_senders;
  args.barriers_offset = num_senders * shape.stage.warp_bytes();
  args.entry_offset = align_up<size_t>(
      args.barriers_offset + num_senders * shape.stage.warp_barrier_bytes(), alignof(CombineEntry));
  args.stage = shape.stage;
  args.ring = shape.ring;
  args.num_send_tokens = config.num_send_tokens;
  args.most_single_rows = Target::kTuning.most_single_rows;
  const int agreed[] = {row_bytes,
                        num_topk,
                        static_cast<int>(dtype),
                        config.num_channels,
                        config.num_send_tokens,
                        config.num_slots};
  args.signature = Operation::signature(Kernel::kCombine, agreed, 6);
  plan.launch = {.num_blocks = config.num_channels,
                 .num_threads = kWarpSize * (num_senders + 2 + num_reduce_warps),
                 .smem_bytes = args.entry_offset + sizeof(CombineEntry)};
  return plan;
}

template <class Target>
LaunchConfig Engine<Target>::complete_combine(const CombinePlan& plan, CombineArgs* made) const {
  CombineArgs& args = *made;
  constexpr Tuning kTuning = Target::kTuning;
  constexpr int kMinWindowSlots = 4;
  LaunchConfig launch_config = plan.launch;
  // Rings have a block a channel: those beyond leave them alone.
  if (max_of(args.num_rows, args.num_tokens) <= plan.sms.most_few_rows) {
    launch_config.num_blocks = max_of(launch_config.num_blocks, plan.sms.of_few_rows);
  }
  if (plan.dtype == Dtype::kFloat32 || args.message.num_topk != 0 || args.bias[0] != nullptr ||
      args.bias[1] != nullptr) {
    launch_config.num_blocks = max_of(launch_config.num_blocks, plan.sms.of_more_sums);
  }
  const int num_blocks = launch_config.num_blocks;
  args.num_window_slots =
      min_of(TokenWindow::kMaxSlots,
             max_of(kMinWindowSlots, ceil_div(kTuning.num_window_tokens, num_blocks)));
  args.num_staged_senders =
      min_of(args.num_senders * num_blocks,
             max_of(kTuning.min_staged_senders, min_of(num_blocks, kTuning.max_staged_senders)));
  // Of longer chunks fewer senders keep the links busy, and what is under way beyond that the sums
  // wait for.
  const int rows_of_rank = args.num_rows / world_.num_ranks;
  const auto chunk_rows =
      static_cast<int>(std::bit_ceil(static_cast<unsigned>(ceil_div(rows_of_rank, kMaxChunks))));
  if (chunk_rows > 1) {
    constexpr int kHalf = kTuning.min_staged_senders / 2;
    const int num_senders = min_of(kTuning.senders_of_twos, kHalf + 2 * kHalf / chunk_rows);
    args.num_staged_senders = min_of(args.num_staged_senders, num_senders);
  } else if (rows_of_rank * (world_.num_ranks - 1) > args.most_single_rows) {
    // With fewer blocks the sums keep senders waiting, at least of more than two ranks.
    constexpr int kFewBlocks = 24;
    const bool has_few_blocks = world_.num_ranks > 2 && num_blocks < kFewBlocks;
    args.num_staged_senders =
        min_of(args.num_staged_senders,
               has_few_blocks ? kTuning.senders_of_twos : kTuning.senders_of_few_twos);
  }
  if (args.staging_line != 0) {
    check_block("staging", args.staging_line,
                static_cast<size_t>(args.num_staging_rows) * args.message.slot_bytes());
  }
  return launch_config;
}

template <class Target>
void Engine<Target>::combine(const CombinePlan& plan, CombineArgs args, uint64_t stream) {
  const LaunchConfig launch_config = complete_combine(plan, &args);
  detail::with_dtype<detail::OfDtype>(plan.dtype, [&]<class Of>(Of) {
    launch<CombineKernel<Of::kDtype, false>>(launch_config, args, stream);
  });
}

}  // namespace deep_comm
