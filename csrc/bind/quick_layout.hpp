// get_dispatch_layout in one step.
#pragma once

#include "bind/context_state.hpp"
#include "bind/quick_forms.hpp"

namespace deep_comm::quick {

struct QuickLayout {
  std::shared_ptr<const Parts> parts;
  int64_t num_ranks, num_nodes, num_max_experts, num_max_topk;
  TensorForm per_rank, per_node;
  py::object boolean;
  py::object event_type;  // of synchronous calls; needs no __init__
  bool is_synchronous;    // Backend.is_synchronous
  // Of the outputs of the call before, whose forms most calls share: per_expert, per_rank, mask,
  // per_node.
  int64_t num_tokens = -1, num_experts = -1;
  TensorBlock<4> outputs{py::object()};

  void set_forms(int64_t tokens, int64_t experts) {
    outputs = TensorBlock<4>(per_rank.dtype());
    outputs.put(0, TensorForm::vector(experts, per_rank.dtype()), sizeof(int32_t));
    outputs.put(1, per_rank, sizeof(int32_t));
    outputs.put(2, TorchTensors::matrix_form(tokens, num_ranks, boolean), sizeof(bool));
    if (num_nodes > 1) outputs.put(3, per_node, sizeof(int32_t));
    num_tokens = tokens;
    num_experts = experts;
  }
};

// (Context, topk_idx, num_experts, asynchronous) -> num_tokens_per_rank, num_tokens_per_node (None
// inside a node), num_tokens_per_expert, is_token_in_rank and, of a synchronous call, its event; or
// None.
inline py::object quick_layout(QuickLayout& self, PyObject* const* given) {
  PyObject* const* const arguments = given + 1;
  const Parts& parts = *self.parts;
  TensorView idx;
  if (!PyLong_CheckExact(arguments[1]) || !parts.torch.view(arguments[0], &idx) ||
      !is_indices(idx) || !is_sound(given[0]) || idx.extent(1) < 1 ||
      idx.extent(1) > self.num_max_topk || !is_asynchronous(arguments[2])) {
    return py::none();
  }
  int overflow = 0;
  const int64_t num_experts = PyLong_AsLongLongAndOverflow(arguments[1], &overflow);
  Order order;
  if (overflow != 0 || num_experts < 1 || num_experts > self.num_max_experts ||
      !parts.begin(arguments[2], &order)) {
    return py::none();
  }
  const int64_t num_tokens = idx.extent(0);
  if (num_tokens != self.num_tokens || num_experts != self.num_experts) {
    self.set_forms(num_tokens, num_experts);
  }
  auto [tensors, addresses] = parts.pieces(self.outputs, order);
  auto& [per_expert, per_rank, mask, per_node] = tensors;
  if (self.num_nodes == 1) per_node = py::none();
  parts.count_layout({parts.given(idx.address()), static_cast<uint64_t>(idx.element_bytes()),
                      static_cast<uint64_t>(num_tokens), static_cast<uint64_t>(idx.extent(1)),
                      static_cast<uint64_t>(num_experts), static_cast<uint64_t>(self.num_ranks),
                      addresses[1], addresses[3], addresses[0], parts.given(addresses[2]),
                      order.stream});
  parts.end(order);
  parts.keep(arguments[0], idx, order);
  end_call(given[0], self.is_synchronous);
  if (order.is_async) {
    return py::make_tuple(std::move(per_rank), std::move(per_node), std::move(per_expert),
                          std::move(mask));
  }
  return py::make_tuple(std::move(per_rank), std::move(per_node), std::move(per_expert),
                        std::move(mask), without_init(self.event_type));
}

}  // namespace deep_comm::quick
