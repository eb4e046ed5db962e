// The low-latency methods of Engine's Python face, the same for both targets.
#pragma once

#include "bind/bind_engine.hpp"

namespace deep_comm {

inline PayloadFormat payload_format_of(const std::string& name) {
  if (name == "bfloat16") return PayloadFormat::kBfloat16;
  if (name == "fp8") return PayloadFormat::kFp8;
  throw std::invalid_argument("format = " + name + ", must be bfloat16 or fp8");
}

inline CombineRows combine_rows_of(const std::string& name) {
  if (name == "sums") return CombineRows::kSums;
  if (name == "reduced") return CombineRows::kReduced;
  if (name == "selections") return CombineRows::kSelections;
  throw std::invalid_argument("rows = " + name + ", must be sums, reduced or selections");
}

template <class Target>
void bind_low_latency(pybind11::class_<Engine<Target>>& engine) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<Target>;
  using Release = MaybeRelease<Target::kIsSynchronous>;
  using ptr = uintptr_t;
  engine.def("enable_low_latency", &Type::enable_low_latency, py::kw_only(), "num_bytes"_a);
  engine.def_property_readonly("low_latency_bytes", &Type::low_latency_bytes);
  engine.def_static(
      "low_latency_region_bytes",
      [](int num_ranks, int num_max_tokens, int hidden, int num_topk, int num_experts, int num_blocks,
         const std::string& format, bool one_rounding) {
        const LowLatencyShape shape = low_latency_shape(num_max_tokens, hidden, num_topk, num_experts, num_blocks,
                                                        payload_format_of(format));
        return LowLatencyRegion::bytes_for(shape, num_ranks, one_rounding);
      },
      py::kw_only(), "num_ranks"_a, "num_max_tokens"_a, "hidden"_a, "num_topk"_a, "num_experts"_a, "num_blocks"_a,
      "format"_a, "one_rounding"_a = false);

  engine.def(
      "low_latency_dispatch",
      [](Type& self, ptr x, ptr topk_idx, int topk_idx_bytes, ptr topk_weights, int num_tokens, int num_max_tokens,
         int hidden, int num_topk, int num_experts, int num_blocks, const std::string& format, bool round_scale,
         bool use_ue8m0, bool is_compact, bool send, bool receive, ptr ticket, ptr recv_x, ptr recv_scales,
         ptr recv_count, ptr src_info, ptr layout_range, ptr num_recv, ptr compact_idx, ptr compact_weights,
         ptr recv_tokens, ptr places, ptr recv_weights, ptr cumulative_stats, ptr wait_stats, bool is_reporting,
         uint64_t stream) {
        const PayloadFormat payload = payload_format_of(format);
        LowLatencyDispatchArgs args{};
        args.shape = low_latency_shape(num_max_tokens, hidden, num_topk, num_experts, num_blocks, payload);
        args.phases = {send, receive, as_pointer<uint32_t>(ticket)};
        args.num_tokens = num_tokens;
        args.x = as_pointer<uint8_t>(x);
        args.topk_idx = as_pointer<void>(topk_idx);
        args.topk_idx_bytes = topk_idx_bytes;
        args.topk_weights = as_pointer<float>(topk_weights);
        args.round_scale = round_scale;
        args.out = {.is_compact = is_compact,
                    .recv_x = as_pointer<uint8_t>(recv_x),
                    .recv_scales = as_pointer<void>(recv_scales),
                    .use_ue8m0 = use_ue8m0,
                    .recv_count = as_pointer<int32_t>(recv_count),
                    .src_info = as_pointer<int32_t>(src_info),
                    .layout_range = as_pointer<int64_t>(layout_range),
                    .num_recv = as_pointer<int32_t>(num_recv),
                    .compact_idx = as_pointer<int32_t>(compact_idx),
                    .compact_weights = as_pointer<float>(compact_weights),
                    .recv_tokens = as_pointer<int32_t>(recv_tokens),
                    .places = as_pointer<int32_t>(places),
                    .recv_weights = as_pointer<float>(recv_weights),
                    .cumulative_stats = as_pointer<int32_t>(cumulative_stats),
                    .wait_stats = as_pointer<int64_t>(wait_stats)};
        Release release;
        self.low_latency_dispatch(args, payload, is_reporting, stream);
      },
      py::kw_only(), "x"_a, "topk_idx"_a, "topk_idx_bytes"_a, "topk_weights"_a, "num_tokens"_a, "num_max_tokens"_a,
      "hidden"_a, "num_topk"_a, "num_experts"_a, "num_blocks"_a, "format"_a, "round_scale"_a, "use_ue8m0"_a,
      "is_compact"_a, "send"_a, "receive"_a, "ticket"_a, "recv_x"_a, "recv_scales"_a, "recv_count"_a, "src_info"_a,
      "layout_range"_a, "num_recv"_a, "compact_idx"_a, "compact_weights"_a, "recv_tokens"_a, "places"_a,
      "recv_weights"_a, "cumulative_stats"_a, "wait_stats"_a, "is_reporting"_a, "stream"_a);

  engine.def("wait_low_latency_num_tokens", &Type::wait_low_latency_num_tokens,
             py::call_guard<py::gil_scoped_release>());

  engine.def(
      "low_latency_combine",
      [](Type& self, ptr x, ptr recv_tokens, ptr places, ptr recv_weights, ptr topk_idx, int topk_idx_bytes,
         ptr topk_weights, int num_tokens, int num_max_tokens, int hidden, int num_topk, int num_experts,
         int num_blocks, const std::string& rows, bool send, bool receive, ptr ticket, ptr combined_x, ptr wait_stats,
         uint64_t stream) {
        LowLatencyCombineArgs args{};
        args.shape = low_latency_shape(num_max_tokens, hidden, num_topk, num_experts, num_blocks,
                                       PayloadFormat::kBfloat16);
        args.phases = {send, receive, as_pointer<uint32_t>(ticket)};
        const CombineRows combine_rows = combine_rows_of(rows);
        args.x = as_pointer<uint8_t>(x);
        args.recv_tokens = as_pointer<int32_t>(recv_tokens);
        args.places = as_pointer<int32_t>(places);
        args.recv_weights = as_pointer<float>(recv_weights);
        args.num_tokens = num_tokens;
        args.topk_idx = as_pointer<void>(topk_idx);
        args.topk_idx_bytes = topk_idx_bytes;
        args.topk_weights = as_pointer<float>(topk_weights);
        args.combined_x = as_pointer<uint8_t>(combined_x);
        args.wait_stats = as_pointer<int64_t>(wait_stats);
        Release release;
        self.low_latency_combine(args, combine_rows, stream);
      },
      py::kw_only(), "x"_a, "recv_tokens"_a, "places"_a, "recv_weights"_a, "topk_idx"_a, "topk_idx_bytes"_a,
      "topk_weights"_a, "num_tokens"_a, "num_max_tokens"_a, "hidden"_a, "num_topk"_a, "num_experts"_a,
      "num_blocks"_a, "rows"_a, "send"_a, "receive"_a, "ticket"_a, "combined_x"_a, "wait_stats"_a, "stream"_a);
}

}  // namespace deep_comm
