// get_dispatch_layout in one step.
#pragma once

#include "bind/quick_forms.hpp"

namespace deep_comm::quick {

struct QuickLayout {
  std::shared_ptr<const Parts> parts;
  int64_t num_ranks, num_nodes, num_max_experts, num_max_topk;
  TensorForm per_rank, per_node;
  py::object boolean;
  // Of the outputs of the call before, whose forms most calls share.
  int64_t num_tokens = -1, num_experts = -1;
  TensorForm per_expert = {}, mask = {};

  void set_forms(int64_t tokens, int64_t experts) {
    per_expert = {py::make_tuple(experts), py::make_tuple(1), per_rank.dtype};
    mask = {py::make_tuple(tokens, num_ranks), py::make_tuple(num_ranks, 1), boolean};
    num_tokens = tokens;
    num_experts = experts;
  }
};

// (topk_idx, num_experts, asynchronous) -> num_tokens_per_rank, num_tokens_per_node (None inside a
// node), num_tokens_per_expert and is_token_in_rank, or None.
inline py::object quick_layout(QuickLayout& self, PyObject* const* arguments) {
  const Parts& parts = *self.parts;
  TensorView idx;
  if (!PyLong_CheckExact(arguments[1]) || !parts.torch.view(arguments[0], &idx) ||
      !is_indices(idx) || idx.extent(1) < 1 || idx.extent(1) > self.num_max_topk ||
      !is_asynchronous(arguments[2])) {
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
  uintptr_t per_rank_address, per_node_address = 0, per_expert_address, mask_address;
  py::object per_rank = parts.empty(self.per_rank, order, &per_rank_address);
  py::object per_node = py::none();
  if (self.num_nodes > 1) per_node = parts.empty(self.per_node, order, &per_node_address);
  py::object per_expert = parts.empty(self.per_expert, order, &per_expert_address);
  py::object mask = parts.empty(self.mask, order, &mask_address);
  parts.count_layout({parts.given(idx.address()), static_cast<uint64_t>(idx.element_bytes()),
                      static_cast<uint64_t>(num_tokens), static_cast<uint64_t>(idx.extent(1)),
                      static_cast<uint64_t>(num_experts), static_cast<uint64_t>(self.num_ranks),
                      per_rank_address, per_node_address, per_expert_address,
                      parts.given(mask_address), order.stream});
  parts.end(order);
  parts.keep(arguments[0], idx, order);
  return py::make_tuple(std::move(per_rank), std::move(per_node), std::move(per_expert),
                        std::move(mask));
}

}  // namespace deep_comm::quick
