// combine in one step.
#pragma once

#include "bind/quick_calls.hpp"

namespace deep_comm::quick {

// (x, topk_weights, KnownHandle.numbers, home_stream, config, default, asynchronous)
//   -> (combined_x, combined_topk_weights), or None.
inline py::object quick_combine(const Shared& calls, PyObject* const* arguments) {
  const Parts& parts = calls->parts;
  TensorView x, weights;
  Known known;
  const bool has_weights = arguments[1] != Py_None;
  if (!parts.torch.view(arguments[0], &x) || x.num_dims() != 2 || !x.is_contiguous() ||
      x.address() % 16 != 0 || !known.read(arguments[2]) || x.extent(0) != known.num_rows ||
      !is_asynchronous(arguments[6]) ||
      (has_weights &&
       !parts.torch.matrix(arguments[1], kDlFloat32, known.num_rows, -1, &weights))) {
    return py::none();
  }
  const int64_t num_topk = has_weights ? weights.extent(1) : 0;
  const auto form = calls->combines.find([&](const Combine& other) {
    return x.is(other.dtype) && x.extent(1) == other.hidden && num_topk == other.num_topk &&
           other.num_channels == known.num_channels && other.named.is(arguments[4], arguments[5]);
  });
  Order order;
  if (form == nullptr || (has_weights && num_topk == 0) || !parts.begin(arguments[6], &order) ||
      !is_home(arguments[3], parts, order)) {
    return py::none();
  }
  uintptr_t sums = 0, weight_sums = 0;
  const auto matrix = [&](int64_t num_columns, const py::object& dtype, uintptr_t* address) {
    return parts.empty(TorchTensors::matrix_form(known.num_tokens, num_columns, dtype), order,
                       address);
  };
  py::object combined = matrix(form->hidden, form->torch_dtype, &sums);
  py::object combined_weights = py::none();
  if (has_weights) {
    combined_weights = matrix(num_topk, parts.float32, &weight_sums);
    weight_sums = parts.given(weight_sums);
  }
  // As ops/combine.py counts them.
  int64_t num_peers = parts.num_ranks - 1;
  if (known.num_topk > 0 && known.num_topk < num_peers) num_peers = known.num_topk;
  const uint64_t num_staging_rows = static_cast<uint64_t>(known.num_tokens * num_peers);
  py::object staging;  // given back behind the launch: whoever gets it writes behind this kernel
  uint64_t offset = 0;
  const bool has_staging =
      parts.take_block(num_staging_rows * form->staging_row_bytes, order, true, &staging, &offset);
  form->launch({static_cast<uint64_t>(known.num_recv_rows), known.rank_prefix, known.channel_prefix,
                known.recv_channel_prefix, known.send_head, parts.given(x.address()),
                has_weights ? parts.given(weights.address()) : 0, 0, 0,
                static_cast<uint64_t>(known.num_tokens), parts.given(sums), weight_sums, offset,
                has_staging ? num_staging_rows : 0, order.stream});
  parts.end(order);
  parts.keep(arguments[0], x, order);
  if (has_weights) parts.keep(arguments[1], weights, order);
  return py::make_tuple(std::move(combined), std::move(combined_weights));
}

}  // namespace deep_comm::quick
