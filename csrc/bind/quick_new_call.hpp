// What a caller gives to a dispatch with new routing, of one tier or two.
#pragma once

#include "bind/quick_calls.hpp"

namespace deep_comm::quick {

// What the caller gives of the routing.
struct Routing {
  TensorView idx, weights, per_rank, per_expert, mask;
  bool has_weights, has_layout;
  int64_t num_experts = 0;

  bool read(const Parts& parts, PyObject* const* arguments, int64_t num_tokens) {
    constexpr DlDataType kDlBool = {6, 8, 1};
    const TorchTensors& torch = parts.torch;
    has_weights = arguments[2] != Py_None;
    has_layout = arguments[5] != Py_None;
    if (!torch.view(arguments[1], &idx) || !is_indices(idx) || idx.extent(0) != num_tokens ||
        (has_weights &&
         !torch.matrix(arguments[2], kDlFloat32, num_tokens, idx.extent(1), &weights))) {
      return false;
    }
    if (!has_layout) {
      return arguments[3] == Py_None && arguments[4] == Py_None &&
             as_number(arguments[6], &num_experts);
    }
    if (!torch.view(arguments[4], &per_expert) || per_expert.num_dims() != 1) return false;
    num_experts = per_expert.extent(0);
    int64_t named = num_experts;
    return torch.vector(arguments[3], kDlInt32, parts.num_ranks, &per_rank) &&
           torch.vector(arguments[4], kDlInt32, num_experts, &per_expert) &&
           torch.matrix(arguments[5], kDlBool, num_tokens, parts.num_ranks, &mask) &&
           (arguments[6] == Py_None || as_number(arguments[6], &named)) && named == num_experts;
  }

  void keep(const Parts& parts, PyObject* const* arguments, const Order& order) const {
    parts.keep(arguments[1], idx, order);
    if (has_weights) parts.keep(arguments[2], weights, order);
    if (!has_layout) return;
    parts.keep(arguments[4], per_expert, order);
    parts.keep(arguments[5], mask, order);
  }
};

// Such a call as Python hands it over:
// (x or (x, scales), topk_idx, topk_weights, num_tokens_per_rank, num_tokens_per_expert,
//  is_token_in_rank, num_experts, num_worst_tokens, expert_alignment, zero_tail, config, default,
//  asynchronous, expand, zero_padding, cast)
struct NewCall {
  PyObject* const* arguments;
  Payload payload;
  Routing routing;
  int64_t num_rows, alignment;  // num_rows 0: the host waits for counts
  bool zero_tail, is_expanded, zero_padding;

  // False: it is not a plain call.
  bool read(const Parts& parts, PyObject* const* given) {
    arguments = given;
    zero_tail = given[9] == Py_True;
    is_expanded = given[13] == Py_True;
    zero_padding = given[14] == Py_True;
    if (!payload.read(parts.torch, given[0], given[15]) ||
        !routing.read(parts, given, payload.num_tokens())) {
      return false;
    }
    // Where rows belong, and how many, follows from the choices alone, as in NewDispatch.
    if (is_expanded) routing.has_layout = false;
    return as_number(given[7], &num_rows) && num_rows <= INT32_MAX &&
           as_number(given[8], &alignment) && is_boolean(given[9]) && is_asynchronous(given[12]) &&
           is_boolean(given[13]) && is_boolean(given[14]) &&
           !(is_expanded ? zero_tail : zero_padding);
  }

  template <class Form>
  std::shared_ptr<const Form> find(const Forms<Form>& forms) const {
    const TensorView& idx = routing.idx;
    return forms.find([&](const Form& known) {
      return known.num_topk == idx.extent(1) && known.idx_bytes == idx.element_bytes() &&
             known.num_experts == routing.num_experts && known.alignment == alignment &&
             known.has_layout == routing.has_layout && known.is_expanded == is_expanded &&
             payload.is(known.rows) && known.named.is(arguments[10], arguments[11]);
    });
  }

  // Room for as many rows as may come, `likely` () best first: `take` (num_rows) says whether there
  // is. False: there is none.
  template <class Likely, class Take>
  bool reserve(const Likely& likely, const Take& take) const {
    if (num_rows > 0) return take(num_rows);
    for (const py::handle rows : py::object(likely())) {
      if (take(rows.cast<int64_t>())) return true;
    }
    return false;
  }

  void keep(const Parts& parts, const Order& order) const {
    quick::keep(parts, arguments[0], payload, order);
    routing.keep(parts, arguments, order);
  }
};

}  // namespace deep_comm::quick
