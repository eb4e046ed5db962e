// Whole calls of normal mode in one step for the host's hot path: layout, cached dispatch, dispatch
// with new routing, combine. What a call consists of are the same functions that Python calls: the
// region's, the plan's, the streams'. Only plain calls, all but layouts of a form that was called
// before; everything else is left to Python, untouched.
#include <pybind11/stl.h>

#include "bind/bindings.hpp"
#include "bind/quick_combine.hpp"
#include "bind/quick_dispatch.hpp"
#include "bind/quick_handled.hpp"
#include "bind/quick_layout.hpp"
#include "bind/quick_new_dispatch.hpp"
#include "bind/quick_new_tiers.hpp"
#include "bind/quick_prefill.hpp"
#include "bind/quick_tiers.hpp"
#include "device/move/reduce.cuh"

namespace deep_comm {

namespace py = pybind11;
using namespace quick;

namespace {

Dtype number_of(TypeCode code) {
  if (code == TypeCode{4, 16}) return Dtype::kBfloat16;
  return code.second == 16 ? Dtype::kFloat16 : Dtype::kFloat32;
}

template <size_t kCount>
void def_add_dispatch(py::class_<Calls, Shared>& calls, const char* name,
                      Forms<CachedForm<kCount>> Calls::*forms) {
  using namespace pybind11::literals;
  calls.def(
      name,
      [forms](const Shared& self, py::object config, py::object standard, TypeCode dtype,
              TypeCode scale_dtype, int64_t hidden, int64_t num_scales, int64_t num_channels,
              int64_t num_local_blocks, bool is_expanded, int64_t cast, py::object launch) {
        const Rows rows{dtype_of(dtype), dtype_of(scale_dtype), hidden, num_scales, cast};
        const auto is_same = [&](const CachedForm<kCount>& known) {
          return known.rows == rows && known.num_channels == num_channels &&
                 known.is_expanded == is_expanded && known.named.is(config.ptr(), standard.ptr());
        };
        if ((*self.*forms).find(is_same) != nullptr) return;
        (*self.*forms)
            .add({{std::move(config), std::move(standard)},
                  rows,
                  num_channels,
                  num_local_blocks,
                  is_expanded,
                  NumberCall<kCount>(std::move(launch))});
      },
      py::kw_only(), "config"_a, "default"_a, "dtype"_a, "scale_dtype"_a, "hidden"_a,
      "num_scales"_a, "num_channels"_a, "num_local_blocks"_a = 0, "is_expanded"_a = false,
      "cast"_a = 0, "launch"_a);
}

template <class Form, size_t kNotify, size_t kLaunch, class Slab>
void def_add_new_dispatch(py::class_<Calls, Shared>& calls, const char* name,
                          Forms<Form> Calls::*forms) {
  using namespace pybind11::literals;
  calls.def(
      name,
      [forms](const Shared& self, py::object config, py::object standard, TypeCode dtype,
              TypeCode scale_dtype, int64_t hidden, int64_t num_scales, int64_t num_topk,
              int64_t num_experts, int64_t alignment, int idx_bytes, bool has_layout,
              bool is_expanded, int64_t num_local_experts, int64_t num_local_blocks, int64_t cast,
              py::object notify, py::object launch, py::object slab_of) {
        Form form{{.named = {std::move(config), std::move(standard)},
                   .rows = {dtype_of(dtype), dtype_of(scale_dtype), hidden, num_scales, cast},
                   .num_topk = num_topk,
                   .num_experts = num_experts,
                   .alignment = alignment,
                   .idx_bytes = idx_bytes,
                   .has_layout = has_layout,
                   .is_expanded = is_expanded,
                   .num_local_experts = num_local_experts,
                   .num_local_blocks = num_local_blocks},
                  NumberCall<kNotify>(std::move(notify)),
                  NumberCall<kLaunch>(std::move(launch)),
                  Layouts<Slab>(std::move(slab_of))};
        const auto is_same = [&](const Form& known) { return known.is_like(form); };
        if ((*self.*forms).find(is_same) == nullptr) (*self.*forms).add(std::move(form));
      },
      py::kw_only(), "config"_a, "default"_a, "dtype"_a, "scale_dtype"_a, "hidden"_a,
      "num_scales"_a, "num_topk"_a, "num_experts"_a, "alignment"_a, "idx_bytes"_a, "has_layout"_a,
      "is_expanded"_a, "num_local_experts"_a, "num_local_blocks"_a, "cast"_a = 0, "notify"_a,
      "launch"_a, "slab_of"_a);
}

template <size_t kCount>
void def_add_combine(py::class_<Calls, Shared>& calls, const char* name,
                     Forms<CombineForm<kCount>> Calls::*forms) {
  using namespace pybind11::literals;
  calls.def(
      name,
      [forms](const Shared& self, py::object config, py::object standard, TypeCode dtype,
              py::object torch_dtype, int64_t hidden, int64_t num_topk, int64_t num_channels,
              int64_t num_local_blocks, bool has_default_sms, uint64_t staging_row_bytes,
              py::object launch) {
        const auto is_same = [&](const CombineForm<kCount>& known) {
          return known.dtype == dtype_of(dtype) && known.hidden == hidden &&
                 known.num_topk == num_topk && known.num_channels == num_channels &&
                 known.has_default_sms == has_default_sms &&
                 known.named.is(config.ptr(), standard.ptr());
        };
        if ((*self.*forms).find(is_same) != nullptr) return;
        (*self.*forms)
            .add({{std::move(config), std::move(standard)},
                  dtype_of(dtype),
                  std::move(torch_dtype),
                  hidden,
                  num_topk,
                  num_channels,
                  num_local_blocks,
                  has_default_sms,
                  staging_row_bytes,
                  static_cast<uint64_t>(number_of(dtype)),
                  NumberCall<kCount>(std::move(launch))});
      },
      py::kw_only(), "config"_a, "default"_a, "dtype"_a, "torch_dtype"_a, "hidden"_a, "num_topk"_a,
      "num_channels"_a, "num_local_blocks"_a = 0, "has_default_sms"_a = false,
      "staging_row_bytes"_a, "launch"_a);
}

}  // namespace

void bind_quick_normal(py::module_& m) {
  using namespace pybind11::literals;
  m.def("expanded_choices", &expanded_choices, "num_ranks"_a, "most_rows"_a, "num_tokens"_a,
        "places"_a, "num_experts"_a, "expert_alignment"_a);
  py::class_<Calls, Shared> calls(m, "QuickNormal", py::module_local());
  calls
      .def(py::init([](py::object tensor_type, const py::object& exchange_api, py::object empty,
                       py::object part, int device_type, int device_index, int num_ranks,
                       int ranks_per_node, uint64_t heap_base, py::object memory, py::object take,
                       py::object count_layout, py::object streams, py::object likely_rows,
                       py::object expected, py::object likely_forwarded, py::object wait_counts,
                       py::object wait_tier_counts, const py::tuple& expand_calls,
                       py::object float32, py::object int32, py::object uint8) {
             return std::make_shared<Calls>(
                 Calls{.parts = {StreamParts::make(std::move(streams)),
                                 {std::move(tensor_type), exchange_api, std::move(empty),
                                  std::move(part), device_type, device_index},
                                 num_ranks,
                                 ranks_per_node,
                                 heap_base,
                                 std::move(memory),
                                 NumberCall<5>(std::move(take)),
                                 NumberCall<11>(std::move(count_layout)),
                                 NumberCall<1>(std::move(likely_rows)),
                                 LikelyRows(std::move(expected), num_ranks),
                                 NumberCall<1>(std::move(likely_forwarded)),
                                 NumberCall<10>(expand_calls[0]),
                                 NumberCall<20>(expand_calls[1]),
                                 NumberCall<14>(expand_calls[2]),
                                 NumberCall<0>(std::move(wait_counts)),
                                 NumberCall<1>(std::move(wait_tier_counts)),
                                 std::move(float32),
                                 std::move(int32),
                                 std::move(uint8)},
                       .cached_dispatches = {},
                       .new_dispatches = {},
                       .combines = {},
                       .tier_dispatches = {},
                       .new_tier_dispatches = {},
                       .tier_combines = {}});
           }),
           "tensor_type"_a, "exchange_api"_a, "empty"_a, "part"_a, "device_type"_a,
           "device_index"_a, py::kw_only(), "num_ranks"_a, "ranks_per_node"_a, "heap_base"_a,
           "memory"_a, "take"_a, "count_layout"_a, "streams"_a, "likely_rows"_a, "expected"_a, "likely_forwarded"_a, "wait_counts"_a,
           "wait_tier_counts"_a, "expand_calls"_a, "float32"_a, "int32"_a, "uint8"_a)
      .def(
          "layout",
          [](const Shared& self, int64_t num_ranks, int64_t num_nodes, int64_t num_max_experts,
             int64_t num_max_topk, const py::object& int32, py::object boolean,
             py::object event_type, bool is_synchronous) {
            const auto vector = [&](int64_t size) { return TensorForm::vector(size, int32); };
            return object_function<4, &quick_layout>(
                "quick_layout",
                QuickLayout{.parts = {self, &self->parts},
                            .num_ranks = num_ranks,
                            .num_nodes = num_nodes,
                            .num_max_experts = num_max_experts,
                            .num_max_topk = num_max_topk,
                            .per_rank = vector(num_ranks),
                            .per_node = vector(num_nodes),
                            .boolean = std::move(boolean),
                            .event_type = std::move(event_type),
                            .is_synchronous = is_synchronous},
                py::none());
          },
          py::kw_only(), "num_ranks"_a, "num_nodes"_a, "num_max_experts"_a, "num_max_topk"_a,
          "int32"_a, "boolean"_a, "event_type"_a, "is_synchronous"_a)
      .def("calls",
           [](const Shared& self) {
             const auto call = [&]<size_t kCount, auto kBody>(const char* name) {
               return object_function<kCount, kBody>(name, self, py::none());
             };
             return py::make_tuple(
                 call.template operator()<8, &quick_dispatch>("quick_dispatch"),
                 call.template operator()<16, &quick_new_dispatch>("quick_new_dispatch"),
                 call.template operator()<8, &quick_combine>("quick_combine"));
           })
      .def(
          "handled_calls",
          [](const Shared& self, bool is_internode, py::object event_type, bool is_synchronous) {
            const HandledCalls calls{self, std::move(event_type), is_synchronous};
            const auto call = [&]<auto kBody>(const char* name) {
              return object_function<7, kBody>(name, HandledCalls(calls), py::none());
            };
            if (is_internode) {
              return py::make_tuple(
                  call.template operator()<&handled_dispatch<&quick_tier_dispatch>>("dispatch"),
                  call.template operator()<&handled_combine<&quick_tier_combine>>("combine"));
            }
            return py::make_tuple(
                call.template operator()<&handled_dispatch<&quick_dispatch>>("dispatch"),
                call.template operator()<&handled_combine<&quick_combine>>("combine"));
          },
          py::kw_only(), "is_internode"_a, "event_type"_a, "is_synchronous"_a)
      .def(
          "layer",
          [](const Shared& self, py::object context, py::object buffer, py::object default_of,
             py::object default_config_type, bool is_synchronous, py::object finish_unmoved,
             py::object maker, TypeCode dtype, int64_t hidden, int64_t max_tokens, int64_t num_topk,
             py::object num_experts, py::object max_rows, py::object alignment,
             py::object batch_type, py::dict common, const py::object& state_type,
             const py::object& rule) {
            const py::type rule_type = py::type::of(rule);
            const bool has_padding = alignment.cast<int64_t>() > 1;
            const auto layer = std::make_shared<LayerPrefill>(
                LayerPrefill{.calls = self,
                             .context = std::move(context),
                             .buffer = std::move(buffer),
                             .default_of = std::move(default_of),
                             .default_config_type = std::move(default_config_type),
                             .finish_unmoved = std::move(finish_unmoved),
                             .maker = std::move(maker),
                             .dtype = dtype_of(dtype),
                             .hidden = hidden,
                             .max_tokens = max_tokens,
                             .num_topk = num_topk,
                             .num_experts = std::move(num_experts),
                             .max_rows = std::move(max_rows),
                             .alignment = std::move(alignment),
                             .has_padding = has_padding,
                             .is_synchronous = is_synchronous,
                             .batch_type = std::move(batch_type),
                             .common = std::move(common),
                             .state_type = state_type,
                             .made_slot = Slot(state_type, "_made"),
                             .weights_slot = Slot(state_type, "weights"),
                             .rule = rule,
                             .decode_tokens = Slot(rule_type, "decode_tokens"),
                             .num_steps = Slot(rule_type, "num_steps"),
                             .num_changes = Slot(rule_type, "num_changes"),
                             .begins_with_decode = Slot(rule_type, "begins_with_decode")});
            return py::make_tuple(
                object_function<5, &begin_prefill>("begin", SharedPrefill(layer), py::none()),
                object_function<2, &end_prefill>("end", SharedPrefill(layer), py::none()));
          },
          py::kw_only(), "context"_a, "buffer"_a, "default_of"_a, "default_config_type"_a,
          "is_synchronous"_a, "finish_unmoved"_a, "maker"_a, "dtype"_a, "hidden"_a, "max_tokens"_a,
          "num_topk"_a, "num_experts"_a, "max_rows"_a, "alignment"_a, "batch_type"_a, "common"_a,
          "state_type"_a, "rule"_a)
      .def_static("told_of_batch", &told_of_batch)
      .def("tier_calls", [](const Shared& self) {
        return py::make_tuple(
            object_function<8, &quick_tier_dispatch>("quick_tier_dispatch", self, py::none()),
            object_function<17, &quick_new_tier_dispatch>("quick_new_tier_dispatch", self,
                                                          py::none()),
            object_function<8, &quick_tier_combine>("quick_tier_combine", self, py::none()));
      });
  def_add_new_dispatch<NewDispatch, 19, 28, SlabParts>(calls, "add_new_dispatch",
                                                       &Calls::new_dispatches);
  def_add_new_dispatch<NewTierDispatch, 17, 32, TierSlabParts>(calls, "add_new_tier_dispatch",
                                                               &Calls::new_tier_dispatches);
  def_add_dispatch(calls, "add_dispatch", &Calls::cached_dispatches);
  def_add_dispatch(calls, "add_tier_dispatch", &Calls::tier_dispatches);
  def_add_combine(calls, "add_combine", &Calls::combines);
  def_add_combine(calls, "add_tier_combine", &Calls::tier_combines);
}

}  // namespace deep_comm
