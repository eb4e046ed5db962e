// A dispatch that has been sent and whose counts the host has not waited for, of either tier.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "host/calls/dispatch.hpp"

namespace deep_comm {

// A dispatch whose kernels are on their way.
class LaunchedCall {
 public:
  virtual ~LaunchedCall() = default;
  // Waits for the counts and ends the call, once.
  virtual DispatchResult receive() = 0;
};

// Reserves the call's memory and launches it.
using LaunchOfCall = std::function<std::unique_ptr<LaunchedCall>(CallOrder& order)>;

// `inputs` are kept until the call is received. It is the context's `pending` until then, also where the
// caller drops it: kernels use what it holds, and peers count on this rank.
std::shared_ptr<PendingDispatch> launch_pending(CallContext& context, const StreamOptions& streams,
                                                std::vector<Object> inputs,
                                                const LaunchOfCall& launch);

}  // namespace deep_comm
