// The low-latency part of Engine's methods; included by engine_impl.hpp.
#pragma once

#include "host/engine.hpp"

namespace deep_comm {

template <class Target>
void Engine<Target>::enable_low_latency(size_t num_bytes) {
  using detail::require;
  check_open();
  require(low_latency_bytes_ == 0 && num_launches_ == 0, "low-latency mode is enabled once, before any launch");
  require(num_bytes % kLineBytes == 0 && num_bytes <= data_bytes_,
          "num_bytes = " + std::to_string(num_bytes) + ", must be a multiple of 128 within the heap");
  data_bytes_ -= num_bytes;
  low_latency_bytes_ = num_bytes;
  low_latency_region_ = LowLatencyRegion::make(world_.layout.data + data_bytes_, num_bytes);
  low_latency_report_ = static_cast<uint64_t*>(target_.allocate_mapped(sizeof(uint64_t)));
  target_.template prepare<LowLatencyDispatchKernel<PayloadFormat::kBfloat16>>();
  target_.template prepare<LowLatencyDispatchKernel<PayloadFormat::kFp8>>();
  target_.template prepare<LowLatencyCombineKernel<CombineRows::kSums>>();
  target_.template prepare<LowLatencyCombineKernel<CombineRows::kReduced>>();
  target_.template prepare<LowLatencyCombineKernel<CombineRows::kSelections>>();
}

template <class Target>
LaunchConfig Engine<Target>::low_latency_launch(const LowLatencyShape& shape, bool one_rounding) const {
  using detail::require;
  require(shape.num_blocks >= 1 && shape.num_blocks <= kMaxLowLatencyBlocks,
          "num_blocks = " + std::to_string(shape.num_blocks) + ", must lie in 1.." +
              std::to_string(kMaxLowLatencyBlocks));
  require(shape.num_max_tokens >= 1 && shape.num_max_tokens < 1 << 16,
          "num_max_tokens = " + std::to_string(shape.num_max_tokens) + ", must lie in 1..65535");
  require(shape.num_experts >= 1 && shape.num_experts <= num_max_experts_,
          "num_experts = " + std::to_string(shape.num_experts) + ", must lie in 1..num_max_experts = " +
              std::to_string(num_max_experts_));
  require(shape.num_topk >= 1 && shape.num_topk <= 2 * kWarpSize,
          "num_topk = " + std::to_string(shape.num_topk) + ", must lie in 1..64");
  const bool is_fp8 = shape.num_scales > 0;
  require(shape.hidden >= 8 && shape.hidden % (is_fp8 ? kScaleBlock : 8) == 0,
          "hidden = " + std::to_string(shape.hidden) + ", must be a positive multiple of 8, of 128 for FP8");
  const size_t needed = LowLatencyRegion::bytes_for(shape, world_.num_ranks, one_rounding);
  require(needed <= low_latency_bytes_, "this shape needs a low-latency region of " + std::to_string(needed) +
                                            " bytes, there are " + std::to_string(low_latency_bytes_));
  const int num_threads = Target::kTuning.low_latency_threads;
  const size_t smem_bytes = BlockMemory::num_bytes(shape, world_.num_ranks, num_threads / kWarpSize);
  require(smem_bytes <= static_cast<size_t>(Target::kTuning.smem_bytes_limit),
          "num_experts = " + std::to_string(shape.num_experts) +
              ", their counters must fit in a block's shared memory");
  return {.num_blocks = shape.num_blocks, .num_threads = num_threads, .smem_bytes = smem_bytes};
}

namespace detail {

// 16 bits of what all ranks must have alike; travels with every flag.
inline uint32_t low_latency_signature(Kernel kernel, const LowLatencyShape& shape, int options) {
  const int agreed[] = {shape.num_max_tokens, shape.hidden,    shape.num_topk, shape.num_experts,
                        shape.num_blocks,     shape.row_bytes, options};
  const uint32_t hash = Operation::signature(kernel, agreed, 7);
  return (hash ^ hash >> 16) & 0xffffu;
}

inline void require_phases(const Phases& phases) {
  require(phases.send || phases.receive, "an operation without a phase");
  require(phases.send || phases.ticket != nullptr, "the receive phase alone needs the ticket of its send phase");
}

}  // namespace detail

template <class Target>
void Engine<Target>::low_latency_dispatch(LowLatencyDispatchArgs args, PayloadFormat format, bool is_reporting,
                                          uint64_t stream) {
  detail::require_phases(args.phases);
  detail::require(args.num_tokens >= 0 && args.num_tokens <= args.shape.num_max_tokens,
                  "num_tokens = " + std::to_string(args.num_tokens) + ", must lie in 0..num_max_tokens");
  const LaunchConfig config = low_latency_launch(args.shape, false);
  args.region = low_latency_region_;
  if (is_reporting) {
    args.report = low_latency_report_;
    args.report_sequence = ++report_sequence_;
    report_stream_ = stream;
  }
  args.signature =
      detail::low_latency_signature(Kernel::kLowLatencyDispatch, args.shape, args.out.is_compact ? 1 : 0);
  if (format == PayloadFormat::kFp8) {
    launch<LowLatencyDispatchKernel<PayloadFormat::kFp8>>(config, args, stream);
  } else {
    launch<LowLatencyDispatchKernel<PayloadFormat::kBfloat16>>(config, args, stream);
  }
}

template <class Target>
std::optional<int> Engine<Target>::wait_low_latency_num_tokens() {
  check_open();
  detail::require(report_sequence_ != 0, "no low-latency dispatch has been asked to report");
  uint64_t word = 0;
  const auto has_come = [&] {
    word = __atomic_load_n(low_latency_report_, __ATOMIC_ACQUIRE);
    return Tagged::unpack(word).generation == report_sequence_;
  };
  for (int num_polls = 0; !has_come(); ++num_polls) {
    if (detail::load_acquire(&world_.error->is_written) != 0) return std::nullopt;
    // As in wait_counts: the kernel bounds its own waits.
    if (num_polls % 1024 == 1023 && target_.is_idle(report_stream_) && !has_come() &&
        detail::load_acquire(&world_.error->is_written) == 0) {
      throw std::runtime_error("low_latency_dispatch ended without a report: its receive phase has not run");
    }
  }
  return static_cast<int>(Tagged::unpack(word).value);
}

template <class Target>
void Engine<Target>::low_latency_combine(LowLatencyCombineArgs args, CombineRows rows, uint64_t stream) {
  detail::require_phases(args.phases);
  detail::require(args.num_tokens >= 0 && args.num_tokens <= args.shape.num_max_tokens,
                  "num_tokens = " + std::to_string(args.num_tokens) + ", must lie in 0..num_max_tokens");
  const LaunchConfig config = low_latency_launch(args.shape, rows == CombineRows::kSelections);
  args.region = low_latency_region_;
  args.signature =
      detail::low_latency_signature(Kernel::kLowLatencyCombine, args.shape, static_cast<int>(rows));
  switch (rows) {
    case CombineRows::kSums: return launch<LowLatencyCombineKernel<CombineRows::kSums>>(config, args, stream);
    case CombineRows::kReduced: return launch<LowLatencyCombineKernel<CombineRows::kReduced>>(config, args, stream);
    case CombineRows::kSelections:
      return launch<LowLatencyCombineKernel<CombineRows::kSelections>>(config, args, stream);
  }
}

}  // namespace deep_comm
