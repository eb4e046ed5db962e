// The methods of Engine's Python face for groups of several nodes, the same for both targets.
#pragma once

#include "bind/bind_engine.hpp"
#include "bind/bind_tier_plans.hpp"

namespace deep_comm {

template <class Target>
void bind_internode(pybind11::class_<Engine<Target>>& engine) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<Target>;
  using Release = MaybeRelease<Target::kIsSynchronous>;
  using ptr = uintptr_t;

  engine.def_property_readonly_static("has_rail",
                                      [](const py::object&) { return Target::kHasRail; });
  engine.def_static("rail_workspace_bytes", &rail_workspace_bytes, py::kw_only(),
                    "num_nodes"_a, "ranks_per_node"_a, "num_max_experts"_a);
  engine.def_static("rail_ring_bytes", &rail_ring_bytes, py::kw_only(), "num_nodes"_a,
                    "num_channels"_a, "num_slots"_a, "row_bytes"_a, "scale_row_bytes"_a,
                    "num_topk"_a);
  engine.def_static("two_tier_ring_bytes", &two_tier_ring_bytes, py::kw_only(),
                    "ranks_per_node"_a, "num_channels"_a, "num_slots"_a, "row_bytes"_a,
                    "scale_row_bytes"_a, "num_topk"_a);
  engine.def(
      "enable_internode",
      [](Type& self, int node, int num_nodes, std::vector<uintptr_t> rail_bases, int num_qps,
         size_t num_bytes, const std::vector<int>& rail_pes, ptr rail_kernels, ptr rail_base,
         ptr rail_qps, double nic_bytes_per_s, bool is_alone, bool is_near) {
        InternodeOptions options{node, num_nodes, std::move(rail_bases), num_qps, num_bytes, {}};
        options.rail.nic_bytes_per_s = nic_bytes_per_s;
        options.rail.is_alone = is_alone;
        options.rail.is_near = is_near;
        std::vector<RailPeer> peers;
        if (rail_kernels != 0) {
          if (rail_pes.size() != options.rail_bases.size()) {
            throw std::invalid_argument("rail_pes must have as many entries as rail_bases");
          }
          for (size_t peer = 0; peer < rail_pes.size(); ++peer) {
            peers.push_back({as_pointer<uint8_t>(options.rail_bases[peer]), rail_pes[peer]});
          }
          options.rail.nvshmem = {as_pointer<const RailKernels>(rail_kernels), peers.data(),
                                  as_pointer<uint8_t>(rail_base), as_pointer<int32_t>(rail_qps)};
        }
        self.enable_internode(options);
      },
      py::kw_only(), "node"_a, "num_nodes"_a, "rail_bases"_a, "num_qps"_a, "num_bytes"_a,
      "rail_pes"_a = std::vector<int>{}, "rail_kernels"_a = 0, "rail_base"_a = 0, "rail_qps"_a = 0,
      "nic_bytes_per_s"_a = 0.0, "is_alone"_a = false, "is_near"_a = false);
  engine.def_property_readonly("rail_put_bytes", &Type::rail_put_bytes);
  engine.def("quiet_rail", &Type::quiet_rail, py::call_guard<py::gil_scoped_release>());

  engine.def(
      "internode_places",
      [](Type& self, ptr is_token_in_rank, int num_tokens, int num_channels, ptr send_places,
         uint64_t stream) {
        const Release release(self.launches_last());
        self.internode_places(as_pointer<uint8_t>(is_token_in_rank), num_tokens, num_channels,
                              as_pointer<int32_t>(send_places), stream);
      },
      py::kw_only(), "is_token_in_rank"_a, "num_tokens"_a, "num_channels"_a, "send_places"_a,
      "stream"_a);
  engine.def_static(
      "tier_source_layout",
      [](int64_t num_rows) {
        const TierSourceLayout layout = TierSourceLayout::make(num_rows);
        return std::make_pair(layout.src_meta, layout.num_bytes);
      },
      py::kw_only(), "num_rows"_a);

  bind_tier_plans(engine);
}

}  // namespace deep_comm
