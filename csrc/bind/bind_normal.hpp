// Normal mode of Engine's Python face, the same for both targets. What calls of one form have in
// common is planned once; a plan is a function of a call's addresses and sizes, in the order of the
// structured bindings below.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>
#include <vector>

#include "bind/arguments.hpp"
#include "bind/numbers.hpp"

namespace deep_comm {

inline pybind11::list list_of(const std::vector<int>& numbers) {
  pybind11::list list(numbers.size());
  for (size_t position = 0; position < numbers.size(); ++position) {
    PyList_SET_ITEM(list.ptr(), position, PyLong_FromLong(numbers[position]));
  }
  return list;
}

template <class Target>
struct NormalCalls {
  using Type = Engine<Target>;
  using Release = MaybeRelease<Target::kIsSynchronous>;
  template <size_t kCount>
  using Numbers = std::array<uint64_t, kCount>;
  template <class Plan>
  struct Bound {
    Type* engine;
    Plan plan;
  };

  static void layout(Type* engine, const Numbers<11>& numbers) {
    const auto [topk_idx, topk_idx_bytes, num_tokens, num_topk, num_experts, ranks_per_node,
                num_tokens_per_rank, num_tokens_per_node, num_tokens_per_expert, is_token_in_rank,
                stream] = numbers;
    LayoutArgs args{};
    args.topk = {as_pointer<void>(topk_idx), static_cast<int>(topk_idx_bytes),
                 static_cast<int>(num_topk), static_cast<int>(num_experts)};
    args.num_tokens = static_cast<int>(num_tokens);
    args.ranks_per_node = static_cast<int>(ranks_per_node);
    args.num_tokens_per_rank = as_pointer<int32_t>(num_tokens_per_rank);
    args.num_tokens_per_node = as_pointer<int32_t>(num_tokens_per_node);
    args.num_tokens_per_expert = as_pointer<int32_t>(num_tokens_per_expert);
    args.is_token_in_rank = as_pointer<uint8_t>(is_token_in_rank);
    Release release;
    engine->get_dispatch_layout(args, stream);
  }

  static void notify(const Bound<NotifyPlan>& self, const Numbers<19>& numbers) {
    const auto [topk_idx, num_tokens_per_expert, is_token_in_rank, num_tokens, has_weights,
                output_offset, src_offset, num_output_rows, is_exact, rank_prefix_matrix,
                channel_prefix_matrix, send_head, num_recv_tokens_per_expert, recv_counts,
                first_rows, expert_offsets, expert_counts, num_expanded, stream] = numbers;
    NotifyArgs args = self.plan.args;
    args.topk.data = as_pointer<void>(topk_idx);
    args.num_tokens_per_expert = as_pointer<int32_t>(num_tokens_per_expert);
    args.is_token_in_rank = as_pointer<uint8_t>(is_token_in_rank);
    args.num_tokens = static_cast<int>(num_tokens);
    args.header.fields[static_cast<int>(HeaderField::kHasWeights)] = has_weights != 0;
    args.place = {line_of("output_offset", output_offset), line_of("src_offset", src_offset),
                  static_cast<int>(num_output_rows), is_exact != 0};
    args.rank_prefix_matrix = as_pointer<int32_t>(rank_prefix_matrix);
    args.channel_prefix_matrix = as_pointer<int32_t>(channel_prefix_matrix);
    args.send_head = as_pointer<int32_t>(send_head);
    args.num_recv_tokens_per_expert = as_pointer<int32_t>(num_recv_tokens_per_expert);
    args.recv_counts = as_pointer<int32_t>(recv_counts);
    args.expansion = {as_pointer<int32_t>(first_rows), as_pointer<int32_t>(expert_offsets),
                      as_pointer<int32_t>(expert_counts), as_pointer<int32_t>(num_expanded)};
    Release release;
    self.engine->notify_dispatch(self.plan, args, stream);
  }

  // What Engine::wait_counts found, in the order of Counts; or None.
  static pybind11::object wait_counts(Type* engine, const Numbers<0>& /*none*/) {
    std::optional<Counts> counts;
    {
      pybind11::gil_scoped_release release;
      counts = engine->wait_counts();
    }
    if (!counts) return pybind11::none();
    return pybind11::make_tuple(counts->num_recv_tokens, counts->max_num_tokens, counts->is_direct,
                                list_of(counts->num_recv_tokens_per_expert));
  }

  static void dispatch(const Bound<DispatchPlan>& self, const Numbers<28>& numbers) {
    enum Flags : uint64_t { kFillTail = 1, kZeroTail = 2, kFollowsNotify = 4, kIsSpeculative = 8 };
    const auto [num_experts, is_token_in_rank, send_head, rank_prefix_matrix, channel_prefix_matrix,
                x, num_tokens, x_scales, scale_token_stride, scale_column_stride, topk_idx,
                topk_weights, recv_x, recv_x_scales, recv_topk_idx, recv_topk_weights, recv_src_idx,
                recv_channel_prefix_matrix, num_recv_rows, output_offset, src_offset, flags,
                send_row, send_rows, num_expanded, recv_rows, source, stream] = numbers;
    const DispatchOptions& options = self.plan.options;
    if ((recv_src_idx != 0) != options.makes_handle || (send_row != 0) != options.is_expanded ||
        (source != 0) != options.is_quantised) {
      throw std::invalid_argument("addresses that are not of the planned form");
    }
    DispatchArgs args = self.plan.variant(output_offset != 0).args;
    args.output_line = line_of("output_offset", output_offset);
    args.src_line = line_of("src_offset", src_offset);
    args.fill_tail = (flags & kFillTail) != 0;
    args.zero_tail = (flags & kZeroTail) != 0;
    args.follows_notify = (flags & kFollowsNotify) != 0;
    args.is_speculative = (flags & kIsSpeculative) != 0;
    args.num_experts = static_cast<int>(num_experts);
    args.is_token_in_rank = as_pointer<uint8_t>(is_token_in_rank);
    args.send_head = as_pointer<int32_t>(send_head);
    args.rank_prefix_matrix = as_pointer<int32_t>(rank_prefix_matrix);
    args.channel_prefix_matrix = as_pointer<int32_t>(channel_prefix_matrix);
    args.x = as_pointer<uint8_t>(x);
    args.num_tokens = static_cast<int>(num_tokens);
    args.x_scales = as_pointer<uint8_t>(x_scales);
    args.scale_token_stride = static_cast<int64_t>(scale_token_stride);
    args.scale_column_stride = static_cast<int64_t>(scale_column_stride);
    args.topk_idx = as_pointer<void>(topk_idx);
    args.topk_weights = as_pointer<float>(topk_weights);
    args.recv_x = as_pointer<uint8_t>(recv_x);
    args.recv_x_scales = as_pointer<uint8_t>(recv_x_scales);
    args.recv_topk_idx = as_pointer<void>(recv_topk_idx);
    args.recv_topk_weights = as_pointer<float>(recv_topk_weights);
    args.recv_src_idx = as_pointer<int32_t>(recv_src_idx);
    args.recv_channel_prefix_matrix = as_pointer<int32_t>(recv_channel_prefix_matrix);
    args.num_recv_rows = static_cast<int>(num_recv_rows);
    args.send_row = as_pointer<int32_t>(send_row);
    args.send_rows = as_pointer<int32_t>(send_rows);
    args.num_expanded = as_pointer<int32_t>(num_expanded);
    args.recv_rows = as_pointer<int32_t>(recv_rows);
    args.source = as_pointer<uint8_t>(source);
    Release release;
    self.engine->dispatch(self.plan, args, stream);
  }

  static void combine(const Bound<CombinePlan>& self, const Numbers<15>& numbers) {
    const auto [num_recv_rows, rank_prefix_matrix, channel_prefix_matrix,
                recv_channel_prefix_matrix, send_head, x, topk_weights, bias_0, bias_1, num_tokens,
                combined_x, combined_topk_weights, staging_offset, num_staging_rows, stream] =
        numbers;
    CombineArgs args = self.plan.args;
    args.staging_line = line_of("staging_offset", staging_offset);
    args.num_staging_rows = static_cast<int>(num_staging_rows);
    args.channel_prefix_matrix = as_pointer<int32_t>(channel_prefix_matrix);
    args.rank_prefix_matrix = as_pointer<int32_t>(rank_prefix_matrix);
    args.recv_channel_prefix_matrix = as_pointer<int32_t>(recv_channel_prefix_matrix);
    args.send_head = as_pointer<int32_t>(send_head);
    args.num_tokens = static_cast<int>(num_tokens);
    args.num_rows = static_cast<int>(num_recv_rows);
    args.x = as_pointer<uint8_t>(x);
    args.topk_weights = as_pointer<float>(topk_weights);
    args.bias[0] = as_pointer<uint8_t>(bias_0);
    args.bias[1] = as_pointer<uint8_t>(bias_1);
    args.combined_x = as_pointer<uint8_t>(combined_x);
    args.combined_topk_weights = as_pointer<float>(combined_topk_weights);
    Release release;
    self.engine->combine(self.plan, args, stream);
  }
};

template <class Target>
void bind_normal(pybind11::class_<Engine<Target>>& engine) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<Target>;
  using Calls = NormalCalls<Target>;
  engine.def("plan_layout", [](const py::object& self) {
    return number_function<11, &Calls::layout>("get_dispatch_layout", self.cast<Type*>(), self);
  });
  engine.def("counts_waiter", [](const py::object& self) {
    return number_function<0, &Calls::wait_counts>("wait_counts", self.cast<Type*>(), self);
  });
  engine.def(
      "plan_notify",
      [](const py::object& self, int num_channels, int num_send_tokens, int num_slots,
         int row_bytes, int scale_row_bytes, int num_topk, int topk_idx_bytes, int num_experts,
         int expert_alignment, bool counts_choices, bool is_expanded) {
        auto* type = self.cast<Type*>();
        const NotifyOptions options{{num_channels, num_send_tokens, num_slots},
                                    row_bytes,
                                    scale_row_bytes,
                                    num_topk,
                                    topk_idx_bytes,
                                    num_experts,
                                    expert_alignment,
                                    counts_choices,
                                    is_expanded};
        using Bound = typename Calls::template Bound<NotifyPlan>;
        return number_function<19, &Calls::notify>("notify_dispatch",
                                                   Bound{type, type->plan_notify(options)}, self);
      },
      py::kw_only(), "num_channels"_a, "num_send_tokens"_a, "num_slots"_a, "row_bytes"_a,
      "scale_row_bytes"_a, "num_topk"_a, "topk_idx_bytes"_a, "num_experts"_a, "expert_alignment"_a,
      "counts_choices"_a, "is_expanded"_a);
  engine.def(
      "plan_dispatch",
      [](const py::object& self, int num_channels, int num_send_tokens, int num_slots,
         int row_bytes, int scale_bytes, int num_scales, int num_topk, int topk_idx_bytes,
         bool makes_handle, bool is_expanded, bool is_quantised, bool round_scale, bool use_ue8m0) {
        auto* type = self.cast<Type*>();
        const DispatchOptions options{{num_channels, num_send_tokens, num_slots},
                                      row_bytes,
                                      scale_bytes,
                                      num_scales,
                                      num_topk,
                                      topk_idx_bytes,
                                      makes_handle,
                                      is_expanded,
                                      is_quantised,
                                      {round_scale, use_ue8m0}};
        using Bound = typename Calls::template Bound<DispatchPlan>;
        return number_function<28, &Calls::dispatch>(
            "dispatch", Bound{type, type->plan_dispatch(options)}, self);
      },
      py::kw_only(), "num_channels"_a, "num_send_tokens"_a, "num_slots"_a, "row_bytes"_a,
      "scale_bytes"_a, "num_scales"_a, "num_topk"_a, "topk_idx_bytes"_a, "makes_handle"_a,
      "is_expanded"_a, "is_quantised"_a, "round_scale"_a, "use_ue8m0"_a);
  engine.def(
      "plan_combine",
      [](const py::object& self, int num_channels, int num_send_tokens, int num_slots,
         const std::string& dtype, int row_bytes, int num_topk, int few_rows, int few_rows_sms) {
        auto* type = self.cast<Type*>();
        using Bound = typename Calls::template Bound<CombinePlan>;
        return number_function<15, &Calls::combine>(
            "combine",
            Bound{type,
                  type->plan_combine({num_channels, num_send_tokens, num_slots}, dtype_of(dtype),
                                     num_topk, row_bytes, FewRows{few_rows, few_rows_sms})},
            self);
      },
      py::kw_only(), "num_channels"_a, "num_send_tokens"_a, "num_slots"_a, "dtype"_a, "row_bytes"_a,
      "num_topk"_a, "few_rows"_a = 0, "few_rows_sms"_a = 0);
}

}  // namespace deep_comm
