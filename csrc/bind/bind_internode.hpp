// The methods of Engine's Python face for groups of several nodes, the same for both targets.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <vector>

#include "host/engine.hpp"
#include "host/tensor.hpp"

namespace deep_comm {

template <class Target>
void bind_internode(pybind11::class_<Engine<Target>>& engine) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<Target>;
  using ptr = uintptr_t;

  engine.def_static("rail_workspace_bytes", &rail_workspace_bytes, py::kw_only(), "num_nodes"_a,
                    "ranks_per_node"_a, "num_max_experts"_a);
  engine.def(
      "enable_internode",
      [](Type& self, int node, int num_nodes, std::vector<uintptr_t> rail_bases, int num_qps,
         size_t num_bytes, bool are_all_near, const std::vector<int>& rail_pes, ptr rail_kernels,
         ptr rail_base, ptr rail_qps, double nic_bytes_per_s, bool is_alone, bool is_near) {
        InternodeOptions options{node,         num_nodes, std::move(rail_bases), num_qps, num_bytes,
                                 are_all_near, {}};
        options.rail.nic_bytes_per_s = nic_bytes_per_s;
        options.rail.is_alone = is_alone;
        options.rail.is_near = is_near;
        std::vector<RailPeer> peers;
        if (rail_kernels != 0) {
          if (rail_pes.size() != options.rail_bases.size()) {
            throw std::invalid_argument("rail_pes must have as many entries as rail_bases");
          }
          for (size_t peer = 0; peer < rail_pes.size(); ++peer) {
            peers.push_back({pointer_of<uint8_t>(options.rail_bases[peer]), rail_pes[peer]});
          }
          options.rail.nvshmem = {pointer_of<const RailKernels>(rail_kernels), peers.data(),
                                  pointer_of<uint8_t>(rail_base), pointer_of<int32_t>(rail_qps)};
        }
        self.enable_internode(options);
      },
      py::kw_only(), "node"_a, "num_nodes"_a, "rail_bases"_a, "num_qps"_a, "num_bytes"_a,
      "are_all_near"_a, "rail_pes"_a = std::vector<int>{}, "rail_kernels"_a = 0, "rail_base"_a = 0,
      "rail_qps"_a = 0, "nic_bytes_per_s"_a = 0.0, "is_alone"_a = false, "is_near"_a = false);
  engine.def_property_readonly("rail_put_bytes", &Type::rail_put_bytes);
  engine.def("quiet_rail", &Type::quiet_rail, py::call_guard<py::gil_scoped_release>());
}

}  // namespace deep_comm
