// The rules of two tiers, as the kernels have them, for deep_comm.scale, which counts with them.
#include <utility>

#include "bind/bindings.hpp"
#include "device/internode/notify.cuh"
#include "device/layout/channel_range.cuh"
#include "device/layout/low_latency_rail.cuh"
#include "device/layout/rail.cuh"

namespace py = pybind11;

namespace deep_comm {

void bind_scale(py::module_& m) {
  using namespace pybind11::literals;
  m.def(
      "channel_range",
      [](int num_tokens, int num_channels, int channel) {
        const ChannelRange range = ChannelRange::of(num_tokens, num_channels, channel);
        return std::pair(range.begin, range.end);
      },
      "num_tokens"_a, "num_channels"_a, "channel"_a);
  m.def("dispatch_node", &NodeOrder::dispatch_to, "node"_a, "channel"_a, "step"_a, "num_nodes"_a);
  m.def("combine_node", &NodeOrder::combine_to, "channel"_a, "step"_a, "num_nodes"_a);
  m.def(
      "dispatch_slot_bytes",
      [](int row_bytes, int scale_row_bytes, int num_topk) {
        return RailMessage{row_bytes, scale_row_bytes, num_topk}.slot_bytes();
      },
      "row_bytes"_a, "scale_row_bytes"_a, "num_topk"_a);
  m.def(
      "dispatch_row_bytes",
      [](int row_bytes, int scale_row_bytes, int num_topk) {
        return RailMessage{row_bytes, scale_row_bytes, num_topk}.num_bytes();
      },
      "row_bytes"_a, "scale_row_bytes"_a, "num_topk"_a);
  m.def(
      "combine_slot_bytes",
      [](int row_bytes, int num_topk) {
        return MessageLayout::of_combine(row_bytes, num_topk).slot_bytes();
      },
      "row_bytes"_a, "num_topk"_a);
  m.def(
      "low_latency_slot_bytes",
      [](int row_bytes, int num_scales, int num_topk) {
        return LowLatencySlot{num_topk, row_bytes, num_scales}.num_bytes();
      },
      "row_bytes"_a, "num_scales"_a, "num_topk"_a);
  m.def(
      "low_latency_count_bytes",
      [](int num_local_experts) {
        return static_cast<int>(sizeof(uint64_t)) *
               (LowLatencyRailWords::kExperts + num_local_experts);
      },
      "num_local_experts"_a);
  m.def(
      "notify_bytes",
      [](int num_channels, int ranks_per_node, int num_node_experts) {
        const CountsOffsets offsets{num_channels, ranks_per_node};
        const int num_words = offsets.node_experts() + num_node_experts;
        return align_up(static_cast<int>(sizeof(int32_t)) * num_words, 16);  // as it is put
      },
      "num_channels"_a, "ranks_per_node"_a, "num_node_experts"_a);
}

}  // namespace deep_comm
