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
  engine.def_static("rail_workspace_bytes", &Type::rail_workspace_bytes, py::kw_only(),
                    "num_nodes"_a, "ranks_per_node"_a, "num_max_experts"_a);
  engine.def_static("rail_ring_bytes", &Type::rail_ring_bytes, py::kw_only(), "num_nodes"_a,
                    "num_channels"_a, "num_slots"_a, "row_bytes"_a, "scale_row_bytes"_a,
                    "num_topk"_a);
  engine.def_static("two_tier_ring_bytes", &Type::two_tier_ring_bytes, py::kw_only(),
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
      "internode_layout",
      [](Type& self, ptr topk_idx, int topk_idx_bytes, int num_tokens, int num_topk,
         int num_experts, ptr num_tokens_per_rank, ptr num_tokens_per_node,
         ptr num_tokens_per_expert, ptr is_token_in_rank, uint64_t stream) {
        InternodeLayoutArgs args{};
        args.topk_idx = as_pointer<void>(topk_idx);
        args.topk_idx_bytes = topk_idx_bytes;
        args.num_tokens = num_tokens;
        args.num_topk = num_topk;
        args.num_experts = num_experts;
        args.num_tokens_per_rank = as_pointer<int32_t>(num_tokens_per_rank);
        args.num_tokens_per_node = as_pointer<int32_t>(num_tokens_per_node);
        args.num_tokens_per_expert = as_pointer<int32_t>(num_tokens_per_expert);
        args.is_token_in_rank = as_pointer<uint8_t>(is_token_in_rank);
        const Release release(self.launches_last());
        self.internode_layout(args, stream);
      },
      py::kw_only(), "topk_idx"_a, "topk_idx_bytes"_a, "num_tokens"_a, "num_topk"_a,
      "num_experts"_a, "num_tokens_per_rank"_a, "num_tokens_per_node"_a, "num_tokens_per_expert"_a,
      "is_token_in_rank"_a, "stream"_a);

  engine.def(
      "internode_notify",
      [](Type& self, ptr num_tokens_per_expert, ptr is_token_in_rank, int num_tokens, int num_topk,
         int num_experts, int row_bytes, int scale_row_bytes, int expert_alignment,
         int num_channels, int num_send_tokens, int num_slots, int num_rail_send_tokens,
         int num_rail_slots, int cast, ptr node_channel_prefix, ptr rank_channel_prefix,
         ptr send_node_head, ptr send_places, ptr recv_node_channel_prefix,
         ptr recv_node_prefix_sum, ptr recv_rank_channel_start, ptr recv_rank_prefix_sum,
         ptr combine_start, ptr forward_places, ptr num_recv_tokens_per_expert,
         ptr num_recv_tokens_per_rank, uint64_t stream) {
        InternodeNotifyArgs args{};
        args.header.fields[static_cast<int>(RailField::kNumTopk)] = num_topk;
        args.header.fields[static_cast<int>(RailField::kRowBytes)] = row_bytes;
        args.header.fields[static_cast<int>(RailField::kScaleRowBytes)] = scale_row_bytes;
        args.header.fields[static_cast<int>(RailField::kCast)] = cast;
        args.num_tokens_per_expert = as_pointer<int32_t>(num_tokens_per_expert);
        args.node_channel_prefix = as_pointer<int32_t>(node_channel_prefix);
        args.rank_channel_prefix = as_pointer<int32_t>(rank_channel_prefix);
        args.num_experts = num_experts;
        args.expert_alignment = expert_alignment;
        args.recv_node_channel_prefix = as_pointer<int32_t>(recv_node_channel_prefix);
        args.recv_node_prefix_sum = as_pointer<int32_t>(recv_node_prefix_sum);
        args.recv_rank_channel_start = as_pointer<int32_t>(recv_rank_channel_start);
        args.recv_rank_prefix_sum = as_pointer<int32_t>(recv_rank_prefix_sum);
        args.combine_start = as_pointer<int32_t>(combine_start);
        args.forward_places = as_pointer<int32_t>(forward_places);
        args.num_recv_tokens_per_expert = as_pointer<int32_t>(num_recv_tokens_per_expert);
        args.num_recv_tokens_per_rank = as_pointer<int32_t>(num_recv_tokens_per_rank);
        const Release release(self.launches_last());
        self.internode_notify(args, as_pointer<uint8_t>(is_token_in_rank), num_tokens,
                              as_pointer<int32_t>(send_node_head), as_pointer<int32_t>(send_places),
                              {num_channels, num_send_tokens, num_slots},
                              {num_rail_send_tokens, num_rail_slots}, stream);
      },
      py::kw_only(), "num_tokens_per_expert"_a, "is_token_in_rank"_a, "num_tokens"_a, "num_topk"_a,
      "num_experts"_a, "row_bytes"_a, "scale_row_bytes"_a, "expert_alignment"_a, "num_channels"_a,
      "num_send_tokens"_a, "num_slots"_a, "num_rail_send_tokens"_a, "num_rail_slots"_a, "cast"_a,
      "node_channel_prefix"_a, "rank_channel_prefix"_a, "send_node_head"_a, "send_places"_a,
      "recv_node_channel_prefix"_a, "recv_node_prefix_sum"_a, "recv_rank_channel_start"_a,
      "recv_rank_prefix_sum"_a, "combine_start"_a, "forward_places"_a,
      "num_recv_tokens_per_expert"_a, "num_recv_tokens_per_rank"_a, "stream"_a);
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

  engine.def("wait_internode_counts", &Type::wait_internode_counts, "is_early"_a,
             py::call_guard<py::gil_scoped_release>());

  bind_tier_plans(engine);
}

// Beside bind_records.
inline void bind_internode_records(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<TwoTierCounts>(m, "TwoTierCounts", py::module_local())
      .def_readonly("num_recv_tokens", &TwoTierCounts::num_recv_tokens)
      .def_readonly("num_forward_tokens", &TwoTierCounts::num_forward_tokens)
      .def_readonly("max_num_tokens", &TwoTierCounts::max_num_tokens)
      .def_readonly("is_direct", &TwoTierCounts::is_direct)
      .def_readonly("num_returning_rows", &TwoTierCounts::num_returning_rows)
      .def_readonly("num_recv_tokens_per_expert", &TwoTierCounts::num_recv_tokens_per_expert);
}

}  // namespace deep_comm
