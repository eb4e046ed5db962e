// Layouts, dispatch and combine between nodes as functions of plain numbers, for the host's hot path:
// what a form of call has in common is bound once, the rest are addresses and counts.
#pragma once

#include <optional>
#include <utility>

#include "bind/bind_engine.hpp"
#include "bind/numbers.hpp"

namespace deep_comm {

template <class Target>
struct TierCalls {
  using Type = Engine<Target>;
  using Release = MaybeRelease<Target::kIsSynchronous>;
  template <size_t kCount>
  using Numbers = std::array<uint64_t, kCount>;

  struct Notify {
    Type* engine;
    ChannelConfig config;
    RailConfig rail;
    RailHeader header;
    int num_experts, expert_alignment;
  };
  struct Dispatch {
    Type* engine;
    ChannelConfig config;
    RailConfig rail;
    int row_bytes, scale_bytes, num_scales, num_topk, topk_idx_bytes;
    ScaleFormat scale_format;
  };
  struct Combine {
    Type* engine;
    ChannelConfig config;
    RailConfig rail;
    Dtype dtype;
    int row_bytes, num_topk;
  };

  // Numbers as NormalCalls::layout has them.
  static void layout(Type* engine, const Numbers<11>& numbers) {
    const auto [topk_idx, topk_idx_bytes, num_tokens, num_topk, num_experts, ranks_per_node,
                num_tokens_per_rank, num_tokens_per_node, num_tokens_per_expert, is_token_in_rank,
                stream] = numbers;
    InternodeLayoutArgs args{};
    args.topk_idx = as_pointer<void>(topk_idx);
    args.topk_idx_bytes = static_cast<int>(topk_idx_bytes);
    args.num_tokens = static_cast<int>(num_tokens);
    args.num_topk = static_cast<int>(num_topk);
    args.num_experts = static_cast<int>(num_experts);
    args.num_tokens_per_rank = as_pointer<int32_t>(num_tokens_per_rank);
    args.num_tokens_per_node = as_pointer<int32_t>(num_tokens_per_node);
    args.num_tokens_per_expert = as_pointer<int32_t>(num_tokens_per_expert);
    args.is_token_in_rank = as_pointer<uint8_t>(is_token_in_rank);
    const Release release(engine->launches_last());
    engine->internode_layout(args, stream);
  }

  static void notify(const Notify& self, const Numbers<17>& numbers) {
    const auto [num_tokens_per_expert, is_token_in_rank, num_tokens, node_channel_prefix,
                rank_channel_prefix, send_node_head, send_places, recv_node_channel_prefix,
                recv_node_prefix_sum, recv_rank_channel_start, recv_rank_prefix_sum, combine_start,
                forward_places, num_recv_tokens_per_expert, num_recv_tokens_per_rank, has_weights,
                stream] = numbers;
    InternodeNotifyArgs args{};
    args.header = self.header;
    args.header.fields[static_cast<int>(RailField::kHasWeights)] = has_weights != 0;
    args.num_experts = self.num_experts;
    args.expert_alignment = self.expert_alignment;
    args.num_tokens_per_expert = as_pointer<int32_t>(num_tokens_per_expert);
    args.node_channel_prefix = as_pointer<int32_t>(node_channel_prefix);
    args.rank_channel_prefix = as_pointer<int32_t>(rank_channel_prefix);
    args.recv_node_channel_prefix = as_pointer<int32_t>(recv_node_channel_prefix);
    args.recv_node_prefix_sum = as_pointer<int32_t>(recv_node_prefix_sum);
    args.recv_rank_channel_start = as_pointer<int32_t>(recv_rank_channel_start);
    args.recv_rank_prefix_sum = as_pointer<int32_t>(recv_rank_prefix_sum);
    args.combine_start = as_pointer<int32_t>(combine_start);
    args.forward_places = as_pointer<int32_t>(forward_places);
    args.num_recv_tokens_per_expert = as_pointer<int32_t>(num_recv_tokens_per_expert);
    args.num_recv_tokens_per_rank = as_pointer<int32_t>(num_recv_tokens_per_rank);
    const Release release(self.engine->launches_last());
    self.engine->internode_notify(args, as_pointer<uint8_t>(is_token_in_rank),
                                  static_cast<int>(num_tokens), as_pointer<int32_t>(send_node_head),
                                  as_pointer<int32_t>(send_places), self.config, self.rail, stream);
  }

  // (is_early) -> what Engine::wait_internode_counts found, in the order of ops.notify.Counts; or
  // None.
  static pybind11::object wait_counts(Type* engine, const Numbers<1>& numbers) {
    std::optional<TwoTierCounts> counts;
    {
      pybind11::gil_scoped_release release;
      counts = engine->wait_internode_counts(numbers[0] != 0);
    }
    if (!counts) return pybind11::none();
    return pybind11::make_tuple(counts->num_recv_tokens, counts->max_num_tokens, counts->is_direct,
                                list_of(counts->num_recv_tokens_per_expert),
                                counts->num_forward_tokens, counts->num_returning_rows);
  }

  static void dispatch(const Dispatch& self, const Numbers<32>& numbers) {
    enum Flags : uint64_t { kFillTail = 1, kZeroTail = 2, kIsEarly = 4 };
    const auto [num_experts, is_token_in_rank, send_node_head, recv_node_channel_prefix,
                recv_node_prefix_sum, recv_rank_channel_start, recv_rank_prefix_sum,
                node_channel_prefix, send_places, x, num_tokens, x_scales, scale_token_stride,
                scale_column_stride, topk_idx, topk_weights, recv_x, recv_x_scales, recv_topk_idx,
                recv_topk_weights, num_recv_rows, num_forward_rows, output_offset, recv_src_idx,
                recv_src_meta, send_rank_head, src_offset, combine_start, forward_places, flags,
                source, stream] = numbers;
    InternodeDispatchArgs args{};
    args.output_line = line_of("output_offset", output_offset);
    args.src_line = line_of("src_offset", src_offset);
    args.send_places = as_pointer<int32_t>(send_places);
    args.node_channel_prefix = as_pointer<int32_t>(node_channel_prefix);
    args.forward_places = as_pointer<int32_t>(forward_places);
    args.fill_tail = (flags & kFillTail) != 0;
    args.zero_tail = (flags & kZeroTail) != 0;
    args.is_early = (flags & kIsEarly) != 0;
    args.is_token_in_rank = as_pointer<uint8_t>(is_token_in_rank);
    args.send_node_head = as_pointer<int32_t>(send_node_head);
    args.recv_node_channel_prefix = as_pointer<int32_t>(recv_node_channel_prefix);
    args.recv_node_prefix_sum = as_pointer<int32_t>(recv_node_prefix_sum);
    args.recv_rank_channel_start = as_pointer<int32_t>(recv_rank_channel_start);
    args.recv_rank_prefix_sum = as_pointer<int32_t>(recv_rank_prefix_sum);
    args.combine_start = as_pointer<int32_t>(combine_start);
    args.num_tokens = static_cast<int>(num_tokens);
    args.num_experts = static_cast<int>(num_experts);
    args.x = as_pointer<uint8_t>(x);
    args.x_scales = as_pointer<uint8_t>(x_scales);
    args.scale_bytes = self.scale_bytes;
    args.num_scales = self.num_scales;
    args.scale_token_stride = static_cast<int64_t>(scale_token_stride);
    args.scale_column_stride = static_cast<int64_t>(scale_column_stride);
    args.topk_idx = as_pointer<void>(topk_idx);
    args.topk_idx_bytes = self.topk_idx_bytes;
    args.topk_weights = as_pointer<float>(topk_weights);
    args.recv_x = as_pointer<uint8_t>(recv_x);
    args.recv_x_scales = as_pointer<uint8_t>(recv_x_scales);
    args.recv_topk_idx = as_pointer<void>(recv_topk_idx);
    args.recv_topk_weights = as_pointer<float>(recv_topk_weights);
    args.recv_src_idx = as_pointer<int32_t>(recv_src_idx);
    args.recv_src_meta = as_pointer<int32_t>(recv_src_meta);
    args.send_rank_head = as_pointer<int32_t>(send_rank_head);
    args.num_recv_rows = static_cast<int>(num_recv_rows);
    args.num_forward_rows = static_cast<int>(num_forward_rows);
    args.source = as_pointer<uint8_t>(source);
    args.scale_format = self.scale_format;
    const Release release(self.engine->launches_last());
    self.engine->internode_dispatch(args, self.config, self.rail, self.num_topk, self.row_bytes,
                                    stream);
  }

  static void combine(const Combine& self, const Numbers<20>& numbers) {
    const auto [send_node_head, send_rank_head, recv_node_channel_prefix, recv_node_prefix_sum,
                recv_rank_channel_start, recv_rank_prefix_sum, node_channel_prefix, forward_places,
                num_recv_rows, num_forward_rows, x, topk_weights, bias_0, bias_1, num_tokens,
                combined_x, combined_topk_weights, staging_offset, num_staging_rows, stream] =
        numbers;
    InternodeCombineArgs args{};
    args.send_node_head = as_pointer<int32_t>(send_node_head);
    args.send_rank_head = as_pointer<int32_t>(send_rank_head);
    args.recv_node_channel_prefix = as_pointer<int32_t>(recv_node_channel_prefix);
    args.recv_node_prefix_sum = as_pointer<int32_t>(recv_node_prefix_sum);
    args.recv_rank_channel_start = as_pointer<int32_t>(recv_rank_channel_start);
    args.recv_rank_prefix_sum = as_pointer<int32_t>(recv_rank_prefix_sum);
    args.num_tokens = static_cast<int>(num_tokens);
    args.num_rows = static_cast<int>(num_recv_rows);
    args.x = as_pointer<uint8_t>(x);
    args.topk_weights = as_pointer<float>(topk_weights);
    args.bias[0] = as_pointer<uint8_t>(bias_0);
    args.bias[1] = as_pointer<uint8_t>(bias_1);
    args.combined_x = as_pointer<uint8_t>(combined_x);
    args.combined_topk_weights = as_pointer<float>(combined_topk_weights);
    args.node_channel_prefix = as_pointer<int32_t>(node_channel_prefix);
    args.forward_places = as_pointer<int32_t>(forward_places);
    args.num_forward_rows = static_cast<int>(num_forward_rows);
    args.staging_line = line_of("staging_offset", staging_offset);
    args.num_staging_rows = static_cast<int>(num_staging_rows);
    const Release release(self.engine->launches_last());
    self.engine->internode_combine(args, self.dtype, self.config, self.rail, self.num_topk,
                                   self.row_bytes, stream);
  }
};

template <class Target>
void bind_tier_plans(pybind11::class_<Engine<Target>>& engine) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<Target>;
  using Calls = TierCalls<Target>;
  engine.def("plan_internode_layout", [](const py::object& self) {
    return number_function<11, &Calls::layout>("internode_layout", self.cast<Type*>(), self);
  });
  engine.def("tier_counts_waiter", [](const py::object& self) {
    return number_function<1, &Calls::wait_counts>("wait_counts", self.cast<Type*>(), self);
  });
  engine.def(
      "plan_internode_notify",
      [](const py::object& self, int num_channels, int num_send_tokens, int num_slots,
         int num_rail_send_tokens, int num_rail_slots, int row_bytes, int scale_row_bytes,
         int num_topk, int cast, int num_experts, int expert_alignment) {
        RailHeader header{};
        header.fields[static_cast<int>(RailField::kNumTopk)] = num_topk;
        header.fields[static_cast<int>(RailField::kRowBytes)] = row_bytes;
        header.fields[static_cast<int>(RailField::kScaleRowBytes)] = scale_row_bytes;
        header.fields[static_cast<int>(RailField::kCast)] = cast;
        const typename Calls::Notify form{self.cast<Type*>(),
                                          {num_channels, num_send_tokens, num_slots},
                                          {num_rail_send_tokens, num_rail_slots},
                                          header,
                                          num_experts,
                                          expert_alignment};
        return number_function<17, &Calls::notify>("internode_notify", form, self);
      },
      py::kw_only(), "num_channels"_a, "num_send_tokens"_a, "num_slots"_a, "num_rail_send_tokens"_a,
      "num_rail_slots"_a, "row_bytes"_a, "scale_row_bytes"_a, "num_topk"_a, "cast"_a,
      "num_experts"_a, "expert_alignment"_a);
  engine.def(
      "plan_internode_dispatch",
      [](const py::object& self, int num_channels, int num_send_tokens, int num_slots,
         int num_rail_send_tokens, int num_rail_slots, int row_bytes, int scale_bytes,
         int num_scales, int num_topk, int topk_idx_bytes, bool round_scale, bool use_ue8m0) {
        const typename Calls::Dispatch form{self.cast<Type*>(),
                                            {num_channels, num_send_tokens, num_slots},
                                            {num_rail_send_tokens, num_rail_slots},
                                            row_bytes,
                                            scale_bytes,
                                            num_scales,
                                            num_topk,
                                            topk_idx_bytes,
                                            {round_scale, use_ue8m0}};
        return number_function<32, &Calls::dispatch>("internode_dispatch", form, self);
      },
      py::kw_only(), "num_channels"_a, "num_send_tokens"_a, "num_slots"_a, "num_rail_send_tokens"_a,
      "num_rail_slots"_a, "row_bytes"_a, "scale_bytes"_a, "num_scales"_a, "num_topk"_a,
      "topk_idx_bytes"_a, "round_scale"_a, "use_ue8m0"_a);
  engine.def(
      "plan_internode_combine",
      [](const py::object& self, int num_channels, int num_send_tokens, int num_slots,
         int num_rail_send_tokens, int num_rail_slots, const std::string& dtype, int row_bytes,
         int num_topk) {
        const typename Calls::Combine form{self.cast<Type*>(),
                                           {num_channels, num_send_tokens, num_slots},
                                           {num_rail_send_tokens, num_rail_slots},
                                           dtype_of(dtype),
                                           row_bytes,
                                           num_topk};
        return number_function<20, &Calls::combine>("internode_combine", form, self);
      },
      py::kw_only(), "num_channels"_a, "num_send_tokens"_a, "num_slots"_a, "num_rail_send_tokens"_a,
      "num_rail_slots"_a, "dtype"_a, "row_bytes"_a, "num_topk"_a);
}

}  // namespace deep_comm
