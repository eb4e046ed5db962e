#include "host/calls/barrier.hpp"

namespace deep_comm {

void barrier(CallContext& context) {
  context.begin();
  CallOrder order(context.order, {});
  context.launch([&] { context.engine.barrier(order.stream()); });
  order.finish({}, nullptr);
  context.end();
}

}  // namespace deep_comm
