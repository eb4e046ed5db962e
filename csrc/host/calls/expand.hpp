// Expanded outputs inside a node: rows are numbered before a dispatch, copied while it runs. The kernels
// here are local. Their counterpart in combine is ReducedRows (calls/combine.hpp).
#pragma once

#include <cstdint>

#include "host/calls/call_context.hpp"
#include "host/calls/dispatch_outputs.hpp"
#include "host/numbering_layout.hpp"

namespace deep_comm {

// Where rows belong: filled by notify_dispatch, then by number_rows.
struct Numbering {
  MadeTensor storage;  // int32, laid out as NumberingLayout says
  NumberingLayout layout{};

  static Numbering make(CallContext& context, int num_experts, int64_t num_tokens, int num_topk,
                        CallOrder& order);
  uintptr_t at(size_t part) const { return storage.address + part; }
  ExpansionArgs notify_args() const;
};

// topk_idx [num_tokens, num_topk]
struct Selections {
  uintptr_t topk_idx;
  int topk_idx_bytes;
  int64_t num_tokens;
  int num_topk, num_experts;
};
void number_rows(CallContext& context, const Numbering& numbering, const Selections& selections,
                 int num_local_blocks, uint64_t stream);

// The first row of each token comes by the dispatch, its other rows and the padding by expand_rows.
struct ExpandRequest {
  const ExpansionRecord& expansion;
  bool zero_padding = false;
  bool fills_handle = false;  // rows of no token, where only a bound of their number is known
};
void dispatch_expanded(CallContext& context, const DispatchPlan& plan, const DispatchArgs& args,
                       const ExpandRequest& request, const RingPlan& rings, uint64_t stream);

}  // namespace deep_comm
