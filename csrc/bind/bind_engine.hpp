// Engine's Python face, the same for both targets. Pointers travel as integers; 0 stands for "not
// given".
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/bindings.hpp"
#include "device/layout/output.cuh"
#include "host/engine.hpp"

namespace deep_comm {

template <class T>
T* as_pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline Dtype dtype_of(const std::string& name) {
  if (name == "bfloat16") return Dtype::kBfloat16;
  if (name == "float16") return Dtype::kFloat16;
  if (name == "float32") return Dtype::kFloat32;
  throw std::invalid_argument("dtype = " + name + ", must be bfloat16, float16 or float32");
}

// Offsets in a segment travel to peers in lines.
inline uint32_t line_of(const char* name, size_t offset) {
  if (offset % kLineBytes != 0) {
    throw std::invalid_argument(std::string(name) + " = " + std::to_string(offset) +
                                ", must be a multiple of " + std::to_string(kLineBytes));
  }
  return static_cast<uint32_t>(offset / kLineBytes);
}

inline void bind_records(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<ErrorRecord>(m, "ErrorRecord", py::module_local())
      .def_readonly("kind", &ErrorRecord::kind)
      .def_readonly("kernel", &ErrorRecord::kernel)
      .def_readonly("stage", &ErrorRecord::stage)
      .def_readonly("word", &ErrorRecord::word)
      .def_readonly("rank", &ErrorRecord::rank)
      .def_readonly("peer", &ErrorRecord::peer)
      .def_readonly("channel", &ErrorRecord::channel)
      .def_readonly("seen", &ErrorRecord::seen)
      .def_readonly("expected", &ErrorRecord::expected)
      .def_readonly("waited_ns", &ErrorRecord::waited_ns)
      .def_readonly("index", &ErrorRecord::index);
  py::class_<OutputLayout>(m, "OutputLayout", py::module_local())
      .def_readonly("x", &OutputLayout::x)
      .def_readonly("scales", &OutputLayout::scales)
      .def_readonly("topk_idx", &OutputLayout::topk_idx)
      .def_readonly("topk_weights", &OutputLayout::topk_weights)
      .def_readonly("num_bytes", &OutputLayout::num_bytes);
  py::class_<Counts>(m, "Counts", py::module_local())
      .def_readonly("num_recv_tokens", &Counts::num_recv_tokens)
      .def_readonly("max_num_tokens", &Counts::max_num_tokens)
      .def_readonly("is_direct", &Counts::is_direct)
      .def_readonly("num_recv_tokens_per_expert", &Counts::num_recv_tokens_per_expert);
}

// Releases the GIL where the call may last: everywhere on a synchronous target, in waits on the
// other.
template <bool kReleases>
struct MaybeRelease {
  pybind11::gil_scoped_release release;
};
template <>
struct MaybeRelease<false> {
  MaybeRelease() {}
};

template <class Target>
pybind11::class_<Engine<Target>> bind_engine(pybind11::module_& m) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<Target>;
  using Release = MaybeRelease<Target::kIsSynchronous>;
  using ptr = uintptr_t;
  bind_records(m);
  py::class_<Type> engine(m, "Engine", py::module_local());
  engine.def_static("workspace_bytes", &Type::workspace_bytes, py::kw_only(), "num_ranks"_a,
                    "num_max_experts"_a);
  engine.def_static(
      "ring_bytes",
      [](int num_ranks, int num_channels, int num_slots, int row_bytes, int scale_row_bytes,
         int num_topk) {
        return Type::ring_bytes(num_ranks, {num_channels, 1, num_slots}, row_bytes, scale_row_bytes,
                                num_topk);
      },
      py::kw_only(), "num_ranks"_a, "num_channels"_a, "num_slots"_a, "row_bytes"_a,
      "scale_row_bytes"_a, "num_topk"_a);
  engine.def_static("staging_row_bytes", &Type::staging_row_bytes, py::kw_only(), "row_bytes"_a,
                    "num_topk"_a);
  engine.def_static(
      "output_layout",
      [](int64_t num_rows, int row_bytes, int scale_row_bytes, int num_topk, int topk_idx_bytes) {
        return OutputLayout::make(num_rows, row_bytes, scale_row_bytes, num_topk, topk_idx_bytes);
      },
      py::kw_only(), "num_rows"_a, "row_bytes"_a, "scale_row_bytes"_a, "num_topk"_a,
      "topk_idx_bytes"_a);
  engine.def_property_readonly("num_launches", &Type::num_launches);
  engine.def_readwrite("smem_bytes_limit", &Type::smem_bytes_limit);
  engine.def_readwrite("skips_launches", &Type::skips_launches);

  engine.def(
      "get_dispatch_layout",
      [](Type& self, ptr topk_idx, int topk_idx_bytes, int num_tokens, int num_topk,
         int num_experts, int ranks_per_node, ptr num_tokens_per_rank, ptr num_tokens_per_node,
         ptr num_tokens_per_expert, ptr is_token_in_rank, uint64_t stream) {
        LayoutArgs args{};
        args.topk = {as_pointer<void>(topk_idx), topk_idx_bytes, num_topk, num_experts};
        args.num_tokens = num_tokens;
        args.ranks_per_node = ranks_per_node;
        args.num_tokens_per_rank = as_pointer<int32_t>(num_tokens_per_rank);
        args.num_tokens_per_node = as_pointer<int32_t>(num_tokens_per_node);
        args.num_tokens_per_expert = as_pointer<int32_t>(num_tokens_per_expert);
        args.is_token_in_rank = as_pointer<uint8_t>(is_token_in_rank);
        Release release;
        self.get_dispatch_layout(args, stream);
      },
      py::kw_only(), "topk_idx"_a, "topk_idx_bytes"_a, "num_tokens"_a, "num_topk"_a,
      "num_experts"_a, "ranks_per_node"_a, "num_tokens_per_rank"_a, "num_tokens_per_node"_a,
      "num_tokens_per_expert"_a, "is_token_in_rank"_a, "stream"_a);

  engine.def(
      "notify_dispatch",
      [](Type& self, ptr topk_idx, int topk_idx_bytes, ptr num_tokens_per_rank,
         ptr num_tokens_per_expert, ptr is_token_in_rank, int num_tokens, int num_topk,
         int num_experts, int row_bytes, int scale_row_bytes, int expert_alignment,
         size_t output_offset, size_t src_offset, int num_output_rows, bool is_exact,
         int num_channels, int num_send_tokens, int num_slots, ptr rank_prefix_matrix,
         ptr channel_prefix_matrix, ptr send_head, ptr num_recv_tokens_per_expert, ptr recv_counts,
         uint64_t stream, ptr first_rows, ptr expert_offsets, ptr expert_counts,
         ptr num_expanded) {
        NotifyArgs args{};
        args.header.fields[static_cast<int>(HeaderField::kNumTopk)] = num_topk;
        args.header.fields[static_cast<int>(HeaderField::kRowBytes)] = row_bytes;
        args.header.fields[static_cast<int>(HeaderField::kScaleRowBytes)] = scale_row_bytes;
        args.num_tokens_per_rank = as_pointer<int32_t>(num_tokens_per_rank);
        args.num_tokens_per_expert = as_pointer<int32_t>(num_tokens_per_expert);
        args.is_token_in_rank = as_pointer<uint8_t>(is_token_in_rank);
        if (topk_idx != 0) {
          args.topk = {as_pointer<void>(topk_idx), topk_idx_bytes, num_topk, num_experts};
        }
        args.place = {line_of("output_offset", output_offset), line_of("src_offset", src_offset),
                      num_output_rows, is_exact};
        args.num_tokens = num_tokens;
        args.num_experts = num_experts;
        args.expert_alignment = expert_alignment;
        args.rank_prefix_matrix = as_pointer<int32_t>(rank_prefix_matrix);
        args.channel_prefix_matrix = as_pointer<int32_t>(channel_prefix_matrix);
        args.send_head = as_pointer<int32_t>(send_head);
        args.num_recv_tokens_per_expert = as_pointer<int32_t>(num_recv_tokens_per_expert);
        args.recv_counts = as_pointer<int32_t>(recv_counts);
        args.expansion = {as_pointer<int32_t>(first_rows), as_pointer<int32_t>(expert_offsets),
                          as_pointer<int32_t>(expert_counts), as_pointer<int32_t>(num_expanded)};
        Release release;
        self.notify_dispatch(args, {num_channels, num_send_tokens, num_slots}, stream);
      },
      py::kw_only(), "topk_idx"_a, "topk_idx_bytes"_a, "num_tokens_per_rank"_a,
      "num_tokens_per_expert"_a, "is_token_in_rank"_a, "num_tokens"_a, "num_topk"_a,
      "num_experts"_a, "row_bytes"_a, "scale_row_bytes"_a, "expert_alignment"_a, "output_offset"_a,
      "src_offset"_a, "num_output_rows"_a, "is_exact"_a, "num_channels"_a, "num_send_tokens"_a,
      "num_slots"_a, "rank_prefix_matrix"_a, "channel_prefix_matrix"_a, "send_head"_a,
      "num_recv_tokens_per_expert"_a, "recv_counts"_a, "stream"_a, "first_rows"_a = 0, "expert_offsets"_a = 0,
      "expert_counts"_a = 0, "num_expanded"_a = 0);

  engine.def("set_generation", &Type::set_generation, "generation"_a);
  engine.def("wait_counts", &Type::wait_counts, py::call_guard<py::gil_scoped_release>());

  engine.def(
      "dispatch",
      [](Type& self, ptr x, int row_bytes, int num_tokens, ptr x_scales, int scale_bytes,
         int num_scales, int64_t scale_token_stride, int64_t scale_column_stride, ptr topk_idx,
         int topk_idx_bytes, ptr topk_weights, int num_topk, int num_experts, ptr is_token_in_rank,
         ptr send_head, ptr rank_prefix_matrix, ptr channel_prefix_matrix, ptr recv_x,
         ptr recv_x_scales, ptr recv_topk_idx, ptr recv_topk_weights, ptr recv_src_idx,
         ptr recv_channel_prefix_matrix, int num_recv_rows, bool fill_tail, bool zero_tail, size_t output_offset,
         size_t src_offset, bool follows_notify, bool is_speculative, int num_channels,
         int num_send_tokens, int num_slots, uint64_t stream, ptr send_row, ptr send_rows,
         ptr num_expanded, ptr recv_rows, ptr source, bool round_scale, bool use_ue8m0) {
        DispatchArgs args{};
        args.output_line = line_of("output_offset", output_offset);
        args.src_line = line_of("src_offset", src_offset);
        args.follows_notify = follows_notify;
        args.is_speculative = is_speculative;
        args.fill_tail = fill_tail;
        args.zero_tail = zero_tail;
        args.is_token_in_rank = as_pointer<uint8_t>(is_token_in_rank);
        args.send_head = as_pointer<int32_t>(send_head);
        args.rank_prefix_matrix = as_pointer<int32_t>(rank_prefix_matrix);
        args.channel_prefix_matrix = as_pointer<int32_t>(channel_prefix_matrix);
        args.num_tokens = num_tokens;
        args.num_experts = num_experts;
        args.x = as_pointer<uint8_t>(x);
        args.x_scales = as_pointer<uint8_t>(x_scales);
        args.scale_bytes = scale_bytes;
        args.num_scales = num_scales;
        args.scale_token_stride = scale_token_stride;
        args.scale_column_stride = scale_column_stride;
        args.topk_idx = as_pointer<void>(topk_idx);
        args.topk_idx_bytes = topk_idx_bytes;
        args.topk_weights = as_pointer<float>(topk_weights);
        args.recv_x = as_pointer<uint8_t>(recv_x);
        args.recv_x_scales = as_pointer<uint8_t>(recv_x_scales);
        args.recv_topk_idx = as_pointer<void>(recv_topk_idx);
        args.recv_topk_weights = as_pointer<float>(recv_topk_weights);
        args.recv_src_idx = as_pointer<int32_t>(recv_src_idx);
        args.recv_channel_prefix_matrix = as_pointer<int32_t>(recv_channel_prefix_matrix);
        args.num_recv_rows = num_recv_rows;
        args.send_row = as_pointer<int32_t>(send_row);
        args.send_rows = as_pointer<int32_t>(send_rows);
        args.num_expanded = as_pointer<int32_t>(num_expanded);
        args.recv_rows = as_pointer<int32_t>(recv_rows);
        args.source = as_pointer<uint8_t>(source);
        args.scale_format = {round_scale, use_ue8m0};
        Release release;
        self.dispatch(args, {num_channels, num_send_tokens, num_slots}, num_topk, row_bytes,
                      stream);
      },
      py::kw_only(), "x"_a, "row_bytes"_a, "num_tokens"_a, "x_scales"_a, "scale_bytes"_a,
      "num_scales"_a, "scale_token_stride"_a, "scale_column_stride"_a, "topk_idx"_a,
      "topk_idx_bytes"_a, "topk_weights"_a, "num_topk"_a, "num_experts"_a, "is_token_in_rank"_a,
      "send_head"_a, "rank_prefix_matrix"_a, "channel_prefix_matrix"_a, "recv_x"_a,
      "recv_x_scales"_a, "recv_topk_idx"_a, "recv_topk_weights"_a, "recv_src_idx"_a,
      "recv_channel_prefix_matrix"_a, "num_recv_rows"_a, "fill_tail"_a, "zero_tail"_a, "output_offset"_a,
      "src_offset"_a, "follows_notify"_a, "is_speculative"_a, "num_channels"_a, "num_send_tokens"_a,
      "num_slots"_a, "stream"_a, "send_row"_a = 0, "send_rows"_a = 0, "num_expanded"_a = 0,
      "recv_rows"_a = 0, "source"_a = 0, "round_scale"_a = false, "use_ue8m0"_a = false);

  engine.def_property_readonly("data_offset", &Type::data_offset);
  engine.def_property_readonly("data_bytes", &Type::data_bytes);
  engine.def(
      "combine",
      [](Type& self, ptr x, const std::string& dtype, int hidden, ptr topk_weights, int num_topk,
         ptr bias_0, ptr bias_1, int num_tokens, int num_recv_rows, ptr rank_prefix_matrix,
         ptr channel_prefix_matrix, ptr recv_channel_prefix_matrix, ptr send_head, ptr combined_x,
         ptr combined_topk_weights, size_t staging_offset, int num_staging_rows, int num_channels,
         int num_send_tokens, int num_slots, uint64_t stream) {
        const Dtype type = dtype_of(dtype);
        if (staging_offset % kLineBytes != 0) {
          throw std::invalid_argument("staging_offset must be a multiple of 128");
        }
        CombineArgs args{};
        args.staging_line = static_cast<uint32_t>(staging_offset / kLineBytes);
        args.num_staging_rows = num_staging_rows;
        args.channel_prefix_matrix = as_pointer<int32_t>(channel_prefix_matrix);
        args.rank_prefix_matrix = as_pointer<int32_t>(rank_prefix_matrix);
        args.recv_channel_prefix_matrix = as_pointer<int32_t>(recv_channel_prefix_matrix);
        args.send_head = as_pointer<int32_t>(send_head);
        args.num_tokens = num_tokens;
        args.num_rows = num_recv_rows;
        args.x = as_pointer<uint8_t>(x);
        args.topk_weights = as_pointer<float>(topk_weights);
        args.bias[0] = as_pointer<uint8_t>(bias_0);
        args.bias[1] = as_pointer<uint8_t>(bias_1);
        args.combined_x = as_pointer<uint8_t>(combined_x);
        args.combined_topk_weights = as_pointer<float>(combined_topk_weights);
        const int row_bytes = hidden * (type == Dtype::kFloat32 ? 4 : 2);
        Release release;
        self.combine(args, type, {num_channels, num_send_tokens, num_slots}, num_topk, row_bytes,
                     stream);
      },
      py::kw_only(), "x"_a, "dtype"_a, "hidden"_a, "topk_weights"_a, "num_topk"_a, "bias_0"_a,
      "bias_1"_a, "num_tokens"_a, "num_recv_rows"_a, "rank_prefix_matrix"_a,
      "channel_prefix_matrix"_a, "recv_channel_prefix_matrix"_a, "send_head"_a, "combined_x"_a,
      "combined_topk_weights"_a, "staging_offset"_a, "num_staging_rows"_a, "num_channels"_a,
      "num_send_tokens"_a, "num_slots"_a, "stream"_a);

  engine.def("poll_error", &Type::poll_error);
  engine.def("clear_error", &Type::clear_error);
  engine.def("reset", &Type::reset);
  engine.def("close", &Type::close);
  return engine;
}

}  // namespace deep_comm
