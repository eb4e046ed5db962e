// A cached dispatch in one step.
#pragma once

#include "bind/quick_calls.hpp"

namespace deep_comm::quick {

// (x or (x, scales), KnownHandle.numbers, home_stream, config, default, asynchronous, zero_padding,
//  cast) -> the same of the rows that have come, or None.
inline py::object quick_dispatch(const Shared& calls, PyObject* const* arguments) {
  const Parts& parts = calls->parts;
  Payload payload;
  Known known;
  if (!payload.read(parts.torch, arguments[0], arguments[7]) || !known.read(arguments[1]) ||
      payload.num_tokens() != known.num_tokens || !is_asynchronous(arguments[5]) ||
      !is_boolean(arguments[6])) {
    return py::none();
  }
  const auto& expansion = known.expansion;
  const auto form = calls->cached_dispatches.find([&](const CachedDispatch& other) {
    return other.num_channels == known.num_channels && payload.is(other.rows) &&
           other.is_expanded == expansion.has_value() && other.named.is(arguments[3], arguments[4]);
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
                known.send_head,
                known.rank_prefix,
                known.channel_prefix,
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
                0,
                0,
                static_cast<uint64_t>(known.num_rows),
                output.offset,
                0,
                0,
                expansion ? expansion->send_row : 0,
                0,
                expansion ? expansion->num_expanded : 0,
                0,
                sources.given_x,
                order.stream});
  if (expansion) {
    expand(parts,
           {.rank_prefix = known.rank_prefix,
            .expansion = *expansion,
            .num_rows = known.num_rows,
            .num_blocks = form->num_local_blocks,
            .zero_padding = arguments[6] == Py_True,
            .x = output.x,
            .scales = output.scales},
           form->rows, order);
  }
  parts.end(order);
  keep(parts, arguments[0], payload, order);
  return output.rows;
}

}  // namespace deep_comm::quick
