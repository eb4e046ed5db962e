// A dispatch that has been sent and whose counts the host has not waited for, of either tier.
#pragma once

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

// `order` is paused until the call is received; `inputs` are kept as long. The context's `pending`
// from now on: also where the caller drops it, since kernels use what it holds and peers count on this
// rank.
std::shared_ptr<PendingDispatch> make_pending(CallContext& context,
                                              std::unique_ptr<CallOrder> order,
                                              std::unique_ptr<LaunchedCall> launched,
                                              std::vector<Object> inputs);

}  // namespace deep_comm
