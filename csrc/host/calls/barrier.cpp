#include "host/calls/barrier.hpp"

namespace deep_comm {

void barrier(CallContext& context, int digest) {
  context.begin();
  CallOrder order(context.order, {});
  context.launch([&] { context.engine.barrier(digest, order.stream()); });
  order.finish({}, nullptr);
  context.end();
}

}  // namespace deep_comm
