// A cached dispatch and a combine between nodes in one step each.
#pragma once

#include "bind/quick_calls.hpp"

namespace deep_comm::quick {

// What a handle that the Buffer has made says: KnownTierHandle.numbers.
struct KnownTiers {
  static constexpr size_t kCount = 16;
  uint64_t num_experts, mask, node_head, recv_node_prefix, recv_node_sum, recv_rank_start,
      recv_rank_sum, node_prefix, places, rank_head, forward_places;
  int64_t num_tokens, num_rows, num_forward_rows, num_channels, num_staging_rows;

  bool read(const Parts& parts, PyObject* numbers) {
    if (!PyTuple_CheckExact(numbers) || PyTuple_GET_SIZE(numbers) != kCount) return false;
    std::array<uint64_t, kCount> read;
    for (size_t position = 0; position < kCount; ++position) {
      read[position] = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(numbers, position));
    }
    const auto address = [&](size_t position) { return parts.given(read[position]); };
    const auto as_signed = [&](size_t position) { return static_cast<int64_t>(read[position]); };
    *this = {read[0],       address(1),    address(2),    address(3),   address(4),  address(5),
             address(6),    address(7),    address(8),    address(9),   address(10), as_signed(11),
             as_signed(12), as_signed(13), as_signed(14), as_signed(15)};
    return true;
  }
};

// (x or (x, scales), KnownTierHandle.numbers, home_stream, config, default, asynchronous,
//  zero_padding: False, cast: 0)
//   -> the same of the rows that have come, or None.
inline py::object quick_tier_dispatch(const Shared& calls, PyObject* const* arguments) {
  const Parts& parts = calls->parts;
  Payload payload;
  KnownTiers known;
  if (!payload.read(parts.torch, arguments[0], arguments[7]) || !known.read(parts, arguments[1]) ||
      payload.num_tokens() != known.num_tokens || !is_asynchronous(arguments[5]) ||
      arguments[6] != Py_False) {
    return py::none();
  }
  const auto form = calls->tier_dispatches.find([&](const CachedTierDispatch& other) {
    return other.num_channels == known.num_channels && payload.is(other.rows) &&
           other.named.is(arguments[3], arguments[4]);
  });
  Order order;
  CachedOutput output;
  if (form == nullptr || !parts.begin(arguments[5], &order) ||
      !is_home(arguments[2], parts, order) ||
      !output.take(parts, form->rows, known.num_rows, order)) {
    return py::none();
  }
  const Sources sources(parts, payload, form->rows, order);
  form->launch({known.num_experts,
                known.mask,
                known.node_head,
                known.recv_node_prefix,
                known.recv_node_sum,
                known.recv_rank_start,
                known.recv_rank_sum,
                known.node_prefix,
                known.places,
                sources.x,
                static_cast<uint64_t>(known.num_tokens),
                sources.x_scales,
                sources.token_stride,
                sources.column_stride,
                0,
                0,
                output.x,
                output.scales,
                0,
                0,
                static_cast<uint64_t>(known.num_rows),
                static_cast<uint64_t>(known.num_forward_rows),
                output.offset,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                order.stream});
  parts.end(order);
  keep(parts, arguments[0], payload, order);
  return output.rows;
}

// (x, topk_weights, KnownTierHandle.numbers, home_stream, config, default, asynchronous,
//  apply_weights: False)
//   -> (combined_x, combined_topk_weights), or None.
inline py::object quick_tier_combine(const Shared& calls, PyObject* const* arguments) {
  const Parts& parts = calls->parts;
  TensorView x, weights;
  KnownTiers known;
  const bool has_weights = arguments[1] != Py_None;
  if (!parts.torch.view(arguments[0], &x) || x.num_dims() != 2 || !x.is_contiguous() ||
      x.address() % 16 != 0 || !known.read(parts, arguments[2]) || x.extent(0) != known.num_rows ||
      !is_asynchronous(arguments[6]) || arguments[7] != Py_False ||
      (has_weights &&
       !parts.torch.matrix(arguments[1], kDlFloat32, known.num_rows, -1, &weights))) {
    return py::none();
  }
  const int64_t num_topk = has_weights ? weights.extent(1) : 0;
  const auto form = calls->tier_combines.find([&](const TierCombine& other) {
    return x.is(other.dtype) && x.extent(1) == other.hidden && num_topk == other.num_topk &&
           other.num_channels == known.num_channels && other.named.is(arguments[4], arguments[5]);
  });
  Order order;
  if (form == nullptr || (has_weights && num_topk == 0) || !parts.begin(arguments[6], &order) ||
      !is_home(arguments[3], parts, order)) {
    return py::none();
  }
  const CombinedOutput output(parts, *form, known.num_tokens, num_topk,
                              static_cast<uint64_t>(known.num_staging_rows), order);
  form->launch({known.node_head,
                known.rank_head,
                known.recv_node_prefix,
                known.recv_node_sum,
                known.recv_rank_start,
                known.recv_rank_sum,
                known.node_prefix,
                known.forward_places,
                static_cast<uint64_t>(known.num_rows),
                static_cast<uint64_t>(known.num_forward_rows),
                parts.given(x.address()),
                has_weights ? parts.given(weights.address()) : 0,
                0,
                0,
                static_cast<uint64_t>(known.num_tokens),
                output.sums_address,
                output.weights_address,
                output.staging_offset,
                output.num_staging_rows,
                order.stream});
  parts.end(order);
  parts.keep(arguments[0], x, order);
  if (has_weights) parts.keep(arguments[1], weights, order);
  return output.result();
}

}  // namespace deep_comm::quick
