// barrier: what the streams of all ranks have got before it comes before what they get after it.
#pragma once

#include "host/calls/call_context.hpp"

namespace deep_comm {

// digest: of what else the ranks must agree on.
void barrier(CallContext& context, int digest);

}  // namespace deep_comm
