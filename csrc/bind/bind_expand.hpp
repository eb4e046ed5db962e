// The methods of Engine's Python face that belong to expanded outputs, the same for both targets.
#pragma once

#include "bind/bind_engine.hpp"
#include "bind/numbers.hpp"
#include "host/numbering_layout.hpp"

namespace deep_comm {

// What both ways of filling an expanded output are told: ExpandArgs, ExpandReceivedArgs.
template <class Args>
void set_expanded_output(Args& args, uintptr_t recv_rows, uintptr_t expert_offsets,
                         uintptr_t expert_counts, int num_topk, int num_local_experts, int num_rows,
                         int num_tokens_limit, int row_bytes, int scale_row_bytes,
                         bool zero_padding, uintptr_t x, uintptr_t scales, uintptr_t expert_idx,
                         int expert_idx_bytes, uintptr_t weights) {
  args.recv_rows = as_pointer<int32_t>(recv_rows);
  args.expert_offsets = as_pointer<int32_t>(expert_offsets);
  args.expert_counts = as_pointer<int32_t>(expert_counts);
  args.num_topk = num_topk;
  args.num_local_experts = num_local_experts;
  args.num_rows = num_rows;
  args.num_tokens_limit = num_tokens_limit;
  args.row_bytes = row_bytes;
  args.scale_row_bytes = scale_row_bytes;
  args.zero_padding = zero_padding;
  args.x = as_pointer<uint8_t>(x);
  args.scales = as_pointer<uint8_t>(scales);
  args.expert_idx = as_pointer<void>(expert_idx);
  args.expert_idx_bytes = expert_idx_bytes;
  args.weights = as_pointer<float>(weights);
}

template <class... Given>
std::array<uint64_t, sizeof...(Given)> as_numbers(Given... given) {
  return {static_cast<uint64_t>(given)...};
}

// The kernels of one tier, as functions of plain numbers: what calls in one native step call
// (bind/quick_forms.hpp), and Python's steps by name.
template <class Target>
struct ExpandCalls {
  using Type = Engine<Target>;
  using Release = MaybeRelease<Target::kIsSynchronous>;
  template <size_t kCount>
  using Numbers = std::array<uint64_t, kCount>;

  static void number_rows(Type* engine, const Numbers<10>& numbers) {
    const auto [topk_idx, topk_idx_bytes, num_tokens, num_topk, num_experts, first_rows, send_row,
                send_rows, num_blocks, stream] = numbers;
    NumberRowsArgs args{};
    args.topk_idx = as_pointer<void>(topk_idx);
    args.topk_idx_bytes = static_cast<int>(topk_idx_bytes);
    args.num_tokens = static_cast<int>(num_tokens);
    args.num_topk = static_cast<int>(num_topk);
    args.num_experts = static_cast<int>(num_experts);
    args.first_rows = as_pointer<int32_t>(first_rows);
    args.send_row = as_pointer<int32_t>(send_row);
    args.send_rows = as_pointer<int32_t>(send_rows);
    Release release;
    engine->number_rows(args, {static_cast<int>(num_blocks), 1, 1}, stream);
  }

  static void expand_rows(Type* engine, const Numbers<20>& numbers) {
    const auto [rank_prefix_matrix, recv_rows, expert_offsets, expert_counts, num_topk,
                num_local_experts, num_rows, num_tokens_limit, row_bytes, scale_row_bytes,
                zero_padding, x, scales, expert_idx, expert_idx_bytes, weights, fill_src_idx,
                fill_rows, num_blocks, stream] = numbers;
    ExpandArgs args{};
    args.rank_prefix_matrix = as_pointer<int32_t>(rank_prefix_matrix);
    set_expanded_output(args, recv_rows, expert_offsets, expert_counts, static_cast<int>(num_topk),
                        static_cast<int>(num_local_experts), static_cast<int>(num_rows),
                        static_cast<int>(num_tokens_limit), static_cast<int>(row_bytes),
                        static_cast<int>(scale_row_bytes), zero_padding != 0, x, scales, expert_idx,
                        static_cast<int>(expert_idx_bytes), weights);
    args.fill_src_idx = as_pointer<int32_t>(fill_src_idx);
    args.fill_rows = as_pointer<int32_t>(fill_rows);
    Release release;
    engine->expand_rows(args, {static_cast<int>(num_blocks), 1, 1}, stream);
  }

  static void reduce_experts(Type* engine, const Numbers<14>& numbers) {
    const auto [rank_prefix_matrix, recv_rows, num_topk, num_rows, num_tokens_limit, dtype, hidden,
                x, row_weights, reduced_x, weights, reduced_weights, num_blocks, stream] = numbers;
    const auto type = static_cast<Dtype>(dtype);
    ReduceExpertsArgs args{};
    args.rank_prefix_matrix = as_pointer<int32_t>(rank_prefix_matrix);
    args.recv_rows = as_pointer<int32_t>(recv_rows);
    args.num_topk = static_cast<int>(num_topk);
    args.num_rows = static_cast<int>(num_rows);
    args.num_tokens_limit = static_cast<int>(num_tokens_limit);
    args.row_bytes = static_cast<int>(hidden) * (type == Dtype::kFloat32 ? 4 : 2);
    args.x = as_pointer<uint8_t>(x);
    args.row_weights = as_pointer<float>(row_weights);
    args.reduced_x = as_pointer<uint8_t>(reduced_x);
    args.weights = as_pointer<float>(weights);
    args.reduced_weights = as_pointer<float>(reduced_weights);
    Release release;
    engine->reduce_experts(args, type, {static_cast<int>(num_blocks), 1, 1}, stream);
  }
};

template <class Target>
void bind_expand(pybind11::module_& m, pybind11::class_<Engine<Target>>& engine) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<Target>;
  using Release = MaybeRelease<Target::kIsSynchronous>;
  using Calls = ExpandCalls<Target>;
  using ptr = uintptr_t;
  engine.def_static(
      "numbering_layout",
      [](int64_t num_ranks, int64_t num_experts, int64_t num_local_experts, int64_t num_tokens,
         int64_t num_topk) {
        const auto layout =
            NumberingLayout::make(num_ranks, num_experts, num_local_experts, num_tokens, num_topk);
        return py::make_tuple(layout.expert_offsets, layout.expert_counts, layout.num_expanded,
                              layout.first_rows, layout.send_row, layout.send_rows,
                              layout.num_bytes);
      },
      py::kw_only(), "num_ranks"_a, "num_experts"_a, "num_local_experts"_a, "num_tokens"_a,
      "num_topk"_a);
  engine.def("expand_calls", [](const py::object& self) {
    auto* type = self.cast<Type*>();
    return py::make_tuple(
        number_function<10, &Calls::number_rows>("number_rows", type, self),
        number_function<20, &Calls::expand_rows>("expand_rows", type, self),
        number_function<14, &Calls::reduce_experts>("reduce_experts", type, self));
  });
  py::class_<SourceLayout>(m, "SourceLayout", py::module_local())
      .def_readonly("recv_rows", &SourceLayout::recv_rows)
      .def_readonly("num_bytes", &SourceLayout::num_bytes);
  engine.def_static("source_layout", &SourceLayout::make, py::kw_only(), "num_rows"_a,
                    "num_topk"_a);
  engine.def_property_readonly_static(
      "place_bytes", [](const py::object&) { return MessageLayout::kDstRowBytes; });
  engine.def(
      "number_rows",
      [](Type& self, ptr topk_idx, int topk_idx_bytes, int num_tokens, int num_topk,
         int num_experts, ptr first_rows, ptr send_row, ptr send_rows, int num_channels,
         uint64_t stream) {
        Calls::number_rows(&self,
                           as_numbers(topk_idx, topk_idx_bytes, num_tokens, num_topk, num_experts,
                                      first_rows, send_row, send_rows, num_channels, stream));
      },
      py::kw_only(), "topk_idx"_a, "topk_idx_bytes"_a, "num_tokens"_a, "num_topk"_a,
      "num_experts"_a, "first_rows"_a, "send_row"_a, "send_rows"_a, "num_channels"_a, "stream"_a);
  engine.def(
      "expand_rows",
      [](Type& self, ptr rank_prefix_matrix, ptr recv_rows, ptr expert_offsets, ptr expert_counts,
         int num_topk, int num_local_experts, int num_rows, int num_tokens_limit, int row_bytes,
         int scale_row_bytes, bool zero_padding, ptr x, ptr scales, ptr expert_idx,
         int expert_idx_bytes, ptr weights, ptr fill_src_idx, ptr fill_rows, int num_channels,
         uint64_t stream) {
        Calls::expand_rows(
            &self,
            as_numbers(rank_prefix_matrix, recv_rows, expert_offsets, expert_counts, num_topk,
                       num_local_experts, num_rows, num_tokens_limit, row_bytes, scale_row_bytes,
                       zero_padding, x, scales, expert_idx, expert_idx_bytes, weights, fill_src_idx,
                       fill_rows, num_channels, stream));
      },
      py::kw_only(), "rank_prefix_matrix"_a, "recv_rows"_a, "expert_offsets"_a, "expert_counts"_a,
      "num_topk"_a, "num_local_experts"_a, "num_rows"_a, "num_tokens_limit"_a, "row_bytes"_a,
      "scale_row_bytes"_a, "zero_padding"_a, "x"_a, "scales"_a, "expert_idx"_a,
      "expert_idx_bytes"_a, "weights"_a, "fill_src_idx"_a, "fill_rows"_a, "num_channels"_a,
      "stream"_a);
  engine.def(
      "number_received",
      [](Type& self, ptr num_received, ptr topk_idx, int topk_idx_bytes, int num_tokens_limit,
         int num_topk, int num_local_experts, int expert_alignment, int num_rows,
         ptr expert_offsets, ptr expert_counts, ptr recv_rows, int num_channels, uint64_t stream) {
        NumberReceivedArgs args{};
        args.rank_prefix_matrix = as_pointer<int32_t>(num_received);
        args.topk_idx = as_pointer<void>(topk_idx);
        args.topk_idx_bytes = topk_idx_bytes;
        args.num_tokens_limit = num_tokens_limit;
        args.num_topk = num_topk;
        args.num_experts = num_local_experts;
        args.expert_alignment = expert_alignment;
        args.num_rows = num_rows;
        args.expert_offsets = as_pointer<int32_t>(expert_offsets);
        args.expert_counts = as_pointer<int32_t>(expert_counts);
        args.recv_rows = as_pointer<int32_t>(recv_rows);
        Release release;
        self.number_received(args, {num_channels, 1, 1}, stream);
      },
      py::kw_only(), "num_received"_a, "topk_idx"_a, "topk_idx_bytes"_a, "num_tokens_limit"_a,
      "num_topk"_a, "num_local_experts"_a, "expert_alignment"_a, "num_rows"_a, "expert_offsets"_a,
      "expert_counts"_a, "recv_rows"_a, "num_channels"_a, "stream"_a);
  engine.def(
      "expand_received",
      [](Type& self, ptr num_received, ptr recv_x, ptr recv_scales, ptr recv_weights, ptr recv_rows,
         ptr expert_offsets, ptr expert_counts, int num_topk, int num_local_experts, int num_rows,
         int num_tokens_limit, int row_bytes, int scale_row_bytes, bool zero_padding, ptr x,
         ptr scales, ptr expert_idx, int expert_idx_bytes, ptr weights, int num_channels,
         uint64_t stream) {
        ExpandReceivedArgs args{};
        args.rank_prefix_matrix = as_pointer<int32_t>(num_received);
        args.recv_x = as_pointer<uint8_t>(recv_x);
        args.recv_scales = as_pointer<uint8_t>(recv_scales);
        args.recv_weights = as_pointer<float>(recv_weights);
        set_expanded_output(args, recv_rows, expert_offsets, expert_counts, num_topk,
                            num_local_experts, num_rows, num_tokens_limit, row_bytes,
                            scale_row_bytes, zero_padding, x, scales, expert_idx, expert_idx_bytes,
                            weights);
        Release release;
        self.expand_received(args, {num_channels, 1, 1}, stream);
      },
      py::kw_only(), "num_received"_a, "recv_x"_a, "recv_scales"_a, "recv_weights"_a, "recv_rows"_a,
      "expert_offsets"_a, "expert_counts"_a, "num_topk"_a, "num_local_experts"_a, "num_rows"_a,
      "num_tokens_limit"_a, "row_bytes"_a, "scale_row_bytes"_a, "zero_padding"_a, "x"_a, "scales"_a,
      "expert_idx"_a, "expert_idx_bytes"_a, "weights"_a, "num_channels"_a, "stream"_a);
  engine.def(
      "reduce_experts",
      [](Type& self, ptr rank_prefix_matrix, ptr recv_rows, int num_topk, int num_rows,
         int num_tokens_limit, const std::string& dtype, int hidden, ptr x, ptr row_weights,
         ptr reduced_x, ptr weights, ptr reduced_weights, int num_channels, uint64_t stream) {
        Calls::reduce_experts(
            &self, as_numbers(rank_prefix_matrix, recv_rows, num_topk, num_rows, num_tokens_limit,
                              static_cast<int>(dtype_of(dtype)), hidden, x, row_weights, reduced_x,
                              weights, reduced_weights, num_channels, stream));
      },
      py::kw_only(), "rank_prefix_matrix"_a, "recv_rows"_a, "num_topk"_a, "num_rows"_a,
      "num_tokens_limit"_a, "dtype"_a, "hidden"_a, "x"_a, "row_weights"_a, "reduced_x"_a,
      "weights"_a, "reduced_weights"_a, "num_channels"_a, "stream"_a);
  engine.def(
      "transpose_scales",
      [](Type& self, ptr src, ptr dst, int num_rows, int num_columns, int64_t column_stride,
         int num_channels, uint64_t stream) {
        TransposeScalesArgs args{};
        args.src = as_pointer<uint32_t>(src);
        args.dst = as_pointer<uint32_t>(dst);
        args.num_rows = num_rows;
        args.num_columns = num_columns;
        args.column_stride = column_stride;
        Release release;
        self.transpose_scales(args, {num_channels, 1, 1}, stream);
      },
      py::kw_only(), "src"_a, "dst"_a, "num_rows"_a, "num_columns"_a, "column_stride"_a,
      "num_channels"_a, "stream"_a);
}

}  // namespace deep_comm
