// barrier: what the streams of all ranks have got before it comes before what they get after it.
#pragma once

#include "host/calls/call_context.hpp"

namespace deep_comm {

void barrier(CallContext& context);

}  // namespace deep_comm
