// The low-latency methods of Engine's Python face, the same for both targets.
#pragma once

#include "bind/bind_engine.hpp"
#include "bind/quick_decode.hpp"

namespace deep_comm {

inline PayloadFormat payload_format_of(const std::string& name) {
  if (name == "bfloat16") return PayloadFormat::kBfloat16;
  if (name == "fp8") return PayloadFormat::kFp8;
  if (name == "nvfp4") return PayloadFormat::kNvFp4;
  throw std::invalid_argument("format = " + name + ", must be bfloat16, fp8 or nvfp4");
}

// Offsets of the parts of the metadata block that there are.
template <class Target>
pybind11::dict metadata_offsets(const BoundLowLatencyPlan<Target>& self) {
  const LowLatencyMetadata& layout = self.plan.metadata;
  const std::pair<const char*, size_t> parts[] = {{"recv_count", layout.recv_count},
                                                  {"num_recv", layout.num_recv},
                                                  {"ticket", layout.ticket},
                                                  {"recv_tokens", layout.recv_tokens},
                                                  {"layout_range", layout.layout_range},
                                                  {"src_info", layout.src_info},
                                                  {"places", layout.places},
                                                  {"recv_weights", layout.recv_weights},
                                                  {"compact_idx", layout.compact_idx},
                                                  {"compact_weights", layout.compact_weights},
                                                  {"num_rows", layout.num_rows},
                                                  {"return_addresses", layout.return_addresses}};
  pybind11::dict offsets;
  for (const auto& [name, offset] : parts) {
    if (offset != LowLatencyMetadata::kNone) offsets[name] = offset;
  }
  return offsets;
}

template <class Target>
void low_latency_dispatch(const BoundLowLatencyPlan<Target>* self,
                          const std::array<uint64_t, 16>& numbers) {
  const auto [x, topk_idx, topk_idx_bytes, topk_weights, num_tokens, recv_x, recv_scales, metadata,
              cumulative_stats, wait_stats, send, receive, has_ticket, is_reporting, stream,
              global_scale] = numbers;
  const MaybeRelease<Target::kIsSynchronous> release(self->engine->launches_last());
  self->engine->low_latency_dispatch(
      self->plan,
      {x, topk_idx, static_cast<int>(topk_idx_bytes), topk_weights, static_cast<int>(num_tokens),
       recv_x, recv_scales, metadata, cumulative_stats, wait_stats, send != 0, receive != 0,
       has_ticket != 0, is_reporting != 0, global_scale},
      stream);
}

template <class Target>
void low_latency_combine(const BoundLowLatencyPlan<Target>* self,
                         const std::array<uint64_t, 14>& numbers) {
  const auto [x, metadata, topk_idx, topk_idx_bytes, topk_weights, num_tokens, rows, use_logfmt,
              combined_x, wait_stats, send, receive, ticket, stream] = numbers;
  if (rows >= kNumCombineRows) throw std::invalid_argument("rows must be 0, 1 or 2");
  const MaybeRelease<Target::kIsSynchronous> release(self->engine->launches_last());
  self->engine->low_latency_combine(
      self->plan,
      {x, metadata, topk_idx, static_cast<int>(topk_idx_bytes), topk_weights,
       static_cast<int>(num_tokens), static_cast<CombineRows>(rows), use_logfmt != 0, combined_x,
       wait_stats, send != 0, receive != 0, ticket},
      stream);
}

template <class Target>
void bind_low_latency(pybind11::module_& m, pybind11::class_<Engine<Target>>& engine) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<Target>;
  engine.def("enable_low_latency", &Type::enable_low_latency, py::kw_only(), "num_bytes"_a,
             "can_shrink"_a = false, "begins_early"_a = true);
  engine.def_readwrite("low_latency_hand_on_tokens", &Type::low_latency_hand_on_tokens);
  engine.def_property_readonly("max_ranks", [](const Type&) { return kMaxRanks; });
  engine.def_property_readonly("masked_offset", &Type::masked_offset);
  engine.def_property_readonly("votes_offset", &Type::votes_offset);
  engine.def_property_readonly("rail_masked_offset", &Type::rail_masked_offset);
  engine.def("set_low_latency_sequence", &Type::set_low_latency_sequence, "sequence"_a);
  engine.def("reset_low_latency", &Type::reset_low_latency);
  engine.def_property_readonly("low_latency_bytes", &Type::low_latency_bytes);
  engine.def_static(
      "low_latency_region_bytes",
      [](int num_ranks, int num_max_tokens, int hidden, int num_topk, int num_experts,
         int num_blocks, const std::string& format, bool one_rounding, bool is_internode,
         bool can_shrink) {
        const LowLatencyShape shape = low_latency_shape(
            num_max_tokens, hidden, num_topk, num_experts, num_blocks, payload_format_of(format));
        return low_latency_region_bytes(shape, num_ranks, one_rounding, is_internode, can_shrink);
      },
      py::kw_only(), "num_ranks"_a, "num_max_tokens"_a, "hidden"_a, "num_topk"_a, "num_experts"_a,
      "num_blocks"_a, "format"_a, "one_rounding"_a = false, "is_internode"_a = false,
      "can_shrink"_a = false);
  engine.def_static("low_latency_rail_workspace_bytes", &low_latency_rail_workspace_bytes,
                    py::kw_only(), "num_ranks"_a, "num_max_experts"_a);
  engine.def("low_latency_max_experts", &Type::low_latency_max_experts, py::kw_only(),
             "num_topk"_a);

  using Plan = BoundLowLatencyPlan<Target>;
  py::class_<Plan>(m, "LowLatencyPlan", py::module_local())
      .def_property_readonly("num_blocks",
                             [](const Plan& self) { return self.plan.options.num_blocks; })
      .def_property_readonly("num_metadata_bytes",
                             [](const Plan& self) { return self.plan.metadata.num_bytes; })
      .def_property_readonly("metadata", &metadata_offsets<Target>)
      // Functions of plain numbers: names would cost a call microseconds.
      .def_property_readonly("dispatch",
                             [](const py::object& self) {
                               return number_function<16, &low_latency_dispatch<Target>>(
                                   "low_latency_dispatch", self.cast<const Plan*>(), self);
                             })
      .def_property_readonly("combine", [](const py::object& self) {
        return number_function<14, &low_latency_combine<Target>>("low_latency_combine",
                                                                 self.cast<const Plan*>(), self);
      });

  engine.def(
      "plan_low_latency",
      [](Type& self, int num_max_tokens, int hidden, int num_topk, int num_experts, int num_blocks,
         const std::string& format, bool round_scale, bool use_ue8m0, bool is_compact,
         bool has_weights) {
        return Plan{
            &self, self.plan_low_latency({num_max_tokens, hidden, num_topk, num_experts, num_blocks,
                                          payload_format_of(format), round_scale, use_ue8m0,
                                          is_compact, has_weights})};
      },
      py::keep_alive<0, 1>(), py::kw_only(), "num_max_tokens"_a, "hidden"_a, "num_topk"_a,
      "num_experts"_a, "num_blocks"_a, "format"_a, "round_scale"_a, "use_ue8m0"_a, "is_compact"_a,
      "has_weights"_a);
  engine.def("wait_low_latency_num_tokens", &Type::wait_low_latency_num_tokens,
             py::call_guard<py::gil_scoped_release>());
  bind_quick_low_latency<Target>(m, engine).def(
      "layer", &layer_calls<Target>, py::kw_only(), "shape"_a, "decode_tokens"_a, "rows"_a,
      "batch_type"_a, "common"_a, "state_type"_a, "words"_a, "rule"_a);
}

}  // namespace deep_comm
