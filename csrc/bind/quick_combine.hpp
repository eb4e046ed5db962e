// combine in one step.
#pragma once

#include "bind/quick_calls.hpp"

namespace deep_comm::quick {

// Rows as they travel: one a received token, with the weights that are to come home.
struct ReducedRows {
  uint64_t x, weights;
  py::object x_tensor, weights_tensor;  // what holds them
};

// Of rows [M, H], for the kernel `combine`. `row_weights` are multiplied with the rows, `weights`
// come along; 0: there are none.
inline ReducedRows reduce(const Parts& parts, const Combine& form, const Known& known, uint64_t x,
                          uint64_t row_weights, uint64_t weights, const Order& order) {
  const KnownExpansion& expansion = *known.expansion;
  const int64_t num_tokens = expansion.num_tokens_limit;
  ReducedRows reduced{};
  uintptr_t address = 0;
  reduced.x_tensor = parts.empty(
      TorchTensors::matrix_form(num_tokens, form.hidden, form.torch_dtype), order, &address);
  reduced.x = parts.given(address);
  if (weights != 0) {
    reduced.weights_tensor = parts.empty(
        TorchTensors::matrix_form(num_tokens, expansion.num_topk, parts.float32), order, &address);
    reduced.weights = parts.given(address);
  }
  const auto number = [](int64_t value) { return static_cast<uint64_t>(value); };
  parts.reduce_experts({known.rank_prefix, expansion.recv_rows, number(expansion.num_topk),
                        number(known.num_rows), number(num_tokens), form.dtype_number,
                        number(form.hidden), x, row_weights, reduced.x, weights, reduced.weights,
                        number(form.num_local_blocks), order.stream});
  return reduced;
}

// Rows that are a form's, launched. `num_topk`: of weights that come home; else those of an expansion
// are multiplied with the rows.
inline CombinedOutput launch_combine(const Parts& parts, const Combine& form, const Known& known,
                                     const TensorView& x, uint64_t weights, int64_t num_topk,
                                     const Order& order) {
  ReducedRows rows{parts.given(x.address()), weights, {}, {}};
  if (known.expansion) {
    rows = reduce(parts, form, known, rows.x, num_topk == 0 ? weights : 0,
                  num_topk == 0 ? 0 : weights, order);
  }
  // As ops/combine.py counts them.
  int64_t num_peers = parts.num_ranks - 1;
  if (known.num_topk > 0 && known.num_topk < num_peers) num_peers = known.num_topk;
  CombinedOutput output(parts, form, known.num_tokens, num_topk,
                        static_cast<uint64_t>(known.num_tokens * num_peers), order);
  form.launch({static_cast<uint64_t>(known.num_recv_rows), known.rank_prefix, known.channel_prefix,
               known.recv_channel_prefix, known.send_head, rows.x, rows.weights, 0, 0,
               static_cast<uint64_t>(known.num_tokens), output.sums_address, output.weights_address,
               output.staging_offset, output.num_staging_rows, order.stream});
  parts.end(order);
  return output;
}

inline std::shared_ptr<const Combine> combine_form(const Calls& calls, const TensorView& x,
                                                   int64_t num_topk, const Known& known,
                                                   PyObject* config, PyObject* standard) {
  return calls.combines.find([&](const Combine& other) {
    return x.is(other.dtype) && x.extent(1) == other.hidden && num_topk == other.num_topk &&
           other.num_channels == known.num_channels &&
           other.has_default_sms == known.has_default_sms && other.named.is(config, standard);
  });
}

// (x, topk_weights, KnownHandle.numbers, home_stream, config, default, asynchronous, apply_weights)
//   -> (combined_x, combined_topk_weights), or None.
inline py::object quick_combine(const Shared& calls, PyObject* const* arguments) {
  const Parts& parts = calls->parts;
  TensorView x, weights;
  Known known;
  const bool has_weights = arguments[1] != Py_None;
  if (!parts.torch.view(arguments[0], &x) || x.num_dims() != 2 || !x.is_contiguous() ||
      x.address() % 16 != 0 || !known.read(arguments[2]) || x.extent(0) != known.num_rows ||
      !is_asynchronous(arguments[6]) || !is_boolean(arguments[7])) {
    return py::none();
  }
  const bool applies_weights = arguments[7] == Py_True;
  const auto& expansion = known.expansion;
  if (applies_weights && !(expansion && has_weights)) return py::none();
  int64_t num_topk = 0;  // of weights that come home
  if (has_weights && expansion) {
    if (!parts.torch.vector(arguments[1], kDlFloat32, known.num_rows, &weights)) return py::none();
    if (!applies_weights) num_topk = expansion->num_topk;
  } else if (has_weights) {
    if (!parts.torch.matrix(arguments[1], kDlFloat32, known.num_rows, -1, &weights)) {
      return py::none();
    }
    num_topk = weights.extent(1);
    if (num_topk == 0) return py::none();
  }
  const auto form = combine_form(*calls, x, num_topk, known, arguments[4], arguments[5]);
  Order order;
  if (form == nullptr || !parts.begin(arguments[6], &order) ||
      !is_home(arguments[3], parts, order)) {
    return py::none();
  }
  const CombinedOutput output = launch_combine(
      parts, *form, known, x, has_weights ? parts.given(weights.address()) : 0, num_topk, order);
  parts.keep(arguments[0], x, order);
  if (has_weights) parts.keep(arguments[1], weights, order);
  return output.result();
}

}  // namespace deep_comm::quick
