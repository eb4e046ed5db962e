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
                                  uintptr_t num_received, int num_local_experts,
                                  int expert_alignment, int64_t num_rows, int num_local_blocks,
                                  CallOrder& order);

// `received` by expert, in the framework's memory: [M, H], [M, S], [M], [M]. What came without top-k
// has neither experts nor weights; experts only if the caller needs them.
DispatchOutputs expand_received(CallContext& context, const TierRows& received,
                                uintptr_t num_received, const ExpansionRecord& expansion,
                                bool zero_padding, bool needs_experts, int num_local_blocks,
                                CallOrder& order);
// Of such rows.
OutputForm expanded_form(const TierRows& received, bool needs_experts);

}  // namespace deep_comm
