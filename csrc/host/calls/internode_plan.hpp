// Rings of one call between nodes: inside the node and on the rail.
#pragma once

#include "host/calls/call_context.hpp"

namespace deep_comm {

// A caller's Config is taken as it is; what stands in for it is shrunk until it fits. `handle`: the
// plan must have as many channels; null: of new routing. Throws CallError: kArgument,
// kBufferTooSmall, kHandleMismatch.
RingPlan plan_two_tiers(CallContext& context, const ConfigChoice& choice, int row_bytes,
                        int scale_row_bytes, int num_topk, const DispatchRecord* handle);

}  // namespace deep_comm
