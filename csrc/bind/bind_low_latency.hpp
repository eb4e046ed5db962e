// The low-latency methods of Engine's Python face, the same for both targets.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "host/engine.hpp"

namespace deep_comm {

inline PayloadFormat payload_format_of(const std::string& name) {
  if (name == "bfloat16") return PayloadFormat::kBfloat16;
  if (name == "fp8") return PayloadFormat::kFp8;
  if (name == "nvfp4") return PayloadFormat::kNvFp4;
  throw std::invalid_argument("format = " + name + ", must be bfloat16, fp8 or nvfp4");
}

template <class Target>
void bind_low_latency(pybind11::class_<Engine<Target>>& engine) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<Target>;
  engine.def("enable_low_latency", &Type::enable_low_latency, py::kw_only(), "num_bytes"_a,
             "can_shrink"_a = false);
  engine.def_readwrite("low_latency_hand_on_tokens", &Type::low_latency_hand_on_tokens);
  engine.def_property_readonly("max_ranks", [](const Type&) { return kMaxRanks; });
  engine.def_property_readonly("masked_offset", &Type::masked_offset);
  engine.def_property_readonly("votes_offset", &Type::votes_offset);
  engine.def_property_readonly("rail_masked_offset", &Type::rail_masked_offset);
  engine.def("set_low_latency_sequence", &Type::set_low_latency_sequence, "sequence"_a,
             py::call_guard<py::gil_scoped_release>());
  engine.def("reset_low_latency", &Type::reset_low_latency,
             py::call_guard<py::gil_scoped_release>());
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
}

}  // namespace deep_comm
