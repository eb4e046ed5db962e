// The calls of one Buffer's normal mode that take one step, and what its dispatches share.
#pragma once

#include "bind/quick_forms.hpp"
#include "device/layout/output.cuh"

namespace deep_comm::quick {

struct Calls {
  Parts parts;
  Forms<CachedDispatch> cached_dispatches;
  Forms<NewDispatch> new_dispatches;
  Forms<Combine> combines;
  Forms<CachedTierDispatch> tier_dispatches;
  Forms<NewTierDispatch> new_tier_dispatches;
  Forms<TierCombine> tier_combines;
};
using Shared = std::shared_ptr<Calls>;

// What a dispatch sends, in the order of the plan's numbers.
struct Sources {
  uint64_t x = 0, x_scales = 0, token_stride = 0, column_stride = 0;
  uint64_t given_x = 0;  // that is cast on its way; 0: nothing is
  py::object scratch;    // of cast rows, for ring mode; given back behind the launch

  Sources(const Parts& parts, const Payload& payload, const Rows& form, const Order& order) {
    x = parts.given(payload.x.address());
    if (form.cast != 0) {
      uintptr_t address = 0;
      scratch = parts.empty(
          TorchTensors::matrix_form(payload.num_tokens(), form.row_bytes() + form.scale_row_bytes(),
                                    parts.uint8),
          order, &address);
      given_x = x;
      x = parts.given(address);
      x_scales = x + static_cast<uint64_t>(payload.num_tokens() * form.row_bytes());
      token_stride = static_cast<uint64_t>(form.num_scales);
      column_stride = 1;
      return;
    }
    if (!payload.has_scales) return;
    x_scales = parts.given(payload.scales.address());
    token_stride = static_cast<uint64_t>(payload.scales.stride(0));
    column_stride = static_cast<uint64_t>(payload.scales.stride(1));
  }
};

// x, or (x, scales), of a block.
inline py::object received(const Parts& parts, const Rows& form, const OutputLayout& layout,
                           int64_t num_rows, uint64_t offset, const py::object& block) {
  py::object rows = parts.matrix(offset + layout.x, num_rows, form.hidden, form.dtype, block);
  if (form.num_scales == 0) return rows;
  return py::make_tuple(std::move(rows), parts.matrix(offset + layout.scales, num_rows,
                                                      form.num_scales, form.scale_dtype, block));
}

// What a cached dispatch fills: a block of the region.
struct CachedOutput {
  py::object block, rows;      // rows: as `received`
  uint64_t offset, x, scales;  // 0: there are no scales

  // False: there is no room.
  bool take(const Parts& parts, const Rows& form, int64_t num_rows, const Order& order) {
    const OutputLayout layout =
        OutputLayout::make(num_rows, form.row_bytes(), form.scale_row_bytes(), 0, 0);
    if (!parts.take_block(layout.num_bytes, order, false, &block, &offset)) return false;
    rows = received(parts, form, layout, num_rows, offset, block);
    x = parts.heap_base + offset + layout.x;
    scales = form.num_scales > 0 ? parts.heap_base + offset + layout.scales : 0;
    return true;
  }
};

// What a combine fills, and where it stages what it receives.
struct CombinedOutput {
  py::object sums, weight_sums = py::none();
  uint64_t sums_address = 0, weights_address = 0;  // 0: no weights come home
  py::object staging;  // given back behind the launch: whoever gets it writes behind this kernel
  uint64_t staging_offset = 0, num_staging_rows = 0;  // 0: there is no room

  template <class Form>
  CombinedOutput(const Parts& parts, const Form& form, int64_t num_tokens, int64_t num_topk,
                 uint64_t most_staging_rows, const Order& order) {
    const auto matrix = [&](int64_t num_columns, const py::object& dtype, uint64_t* address) {
      uintptr_t made = 0;
      py::object tensor =
          parts.empty(TorchTensors::matrix_form(num_tokens, num_columns, dtype), order, &made);
      *address = parts.given(made);
      return tensor;
    };
    sums = matrix(form.hidden, form.torch_dtype, &sums_address);
    if (num_topk > 0) weight_sums = matrix(num_topk, parts.float32, &weights_address);
    if (parts.take_block(most_staging_rows * form.staging_row_bytes, order, true, &staging,
                         &staging_offset)) {
      num_staging_rows = most_staging_rows;
    }
  }
  py::object result() const { return py::make_tuple(sums, weight_sums); }
};

// An expanded output, in which the first row of every token is in place: the other rows, padding.
struct ExpandedOutput {
  uint64_t rank_prefix;
  KnownExpansion expansion;
  int64_t num_rows, num_blocks;
  bool zero_padding;
  uint64_t x, scales;
  uint64_t expert_idx = 0, expert_idx_bytes = 0, weights = 0;
  uint64_t fill_src_idx = 0, fill_rows = 0;  // with a bound of rows
};

inline void expand(const Parts& parts, const ExpandedOutput& out, const Rows& form,
                   const Order& order) {
  const KnownExpansion& expansion = out.expansion;
  const auto number = [](int64_t value) { return static_cast<uint64_t>(value); };
  parts.expand_rows({out.rank_prefix,
                     expansion.recv_rows,
                     expansion.expert_offsets,
                     expansion.expert_counts,
                     number(expansion.num_topk),
                     number(expansion.num_local_experts),
                     number(out.num_rows),
                     number(expansion.num_tokens_limit),
                     number(form.row_bytes()),
                     number(form.scale_row_bytes()),
                     out.zero_padding ? uint64_t{1} : uint64_t{0},
                     out.x,
                     out.scales,
                     out.expert_idx,
                     out.expert_idx_bytes,
                     out.weights,
                     out.fill_src_idx,
                     out.fill_rows,
                     number(out.num_blocks),
                     order.stream});
}

// The rows that a dispatch was given.
inline void keep(const Parts& parts, PyObject* given, const Payload& payload, const Order& order) {
  if (!payload.has_scales) return parts.keep(given, payload.x, order);
  parts.keep(PyTuple_GET_ITEM(given, 0), payload.x, order);
  parts.keep(PyTuple_GET_ITEM(given, 1), payload.scales, order);
}

}  // namespace deep_comm::quick
