// Expanded outputs between nodes: rows are numbered by the rank that has them, and gathered.
//
// A dispatch brings each token once, as without `expand`, into memory that nobody else sees. The kernels
// here are local: docs/design/0025.
#pragma once

#include "host/calls/internode_rows.hpp"

namespace deep_comm {

// After a dispatch: where its rows belong in an output of num_rows. `num_received`: address of an
// int32, how many tokens this rank has received.
struct ReceivedNumbering {
  ExpansionRecord expansion;
  MadeTensor storage;
};
ReceivedNumbering number_received(CallContext& context, const TierRows& received,
                                  const TierRowForm& form, uintptr_t num_received,
                                  int num_local_experts, int expert_alignment, int64_t num_rows,
                                  int num_local_blocks, CallOrder& order);

// [M, H], [M, S], [M], [M]
struct GatheredRows {
  MadeTensor x, scales, topk_idx, topk_weights;
};
// `received` by expert. What came without top-k has neither experts nor weights; experts only if the
// caller needs them.
GatheredRows expand_received(CallContext& context, const TierRows& received,
                             const TierRowForm& form, uintptr_t num_received,
                             const ExpansionRecord& expansion, bool zero_padding,
                             bool needs_experts, int num_local_blocks, CallOrder& order);

}  // namespace deep_comm
