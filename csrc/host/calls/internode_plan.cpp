#include "host/calls/internode_plan.hpp"

#include <algorithm>
#include <string>

#include "host/calls/dispatch.hpp"
#include "host/ring_sizes.hpp"

namespace deep_comm {

namespace {

// As plan_channels needs it, whose channels are one SM each, with half as many slots: a channel has
// two SMs here.
Config with_channels_of_two_sms(Config config) {
  config.num_sms = std::max(1, config.num_sms / 2);
  config.nvl_recv_tokens *= 2;
  return config;
}

RingPlan make_plan(const CallContext& context, const TwoTierKey& key,
                   const DispatchRecord* handle) {
  const GroupShape& group = context.group;
  const auto node_bytes = [&](int channels, int slots) {
    return two_tier_ring_bytes(group.ranks_per_node, channels, slots, key.row_bytes,
                               key.scale_row_bytes, key.num_topk);
  };
  const auto rail_bytes = [&](int channels, int slots) {
    return rail_ring_bytes(group.num_nodes, channels, slots, key.row_bytes, key.scale_row_bytes,
                           key.num_topk);
  };
  const bool is_given = key.choice.given.has_value();
  const Config config = key.choice.config_for(key.row_bytes + key.scale_row_bytes);
  if (is_given && (config.num_sms < 2 || config.num_sms % 2 != 0)) {
    refuse_argument("config.num_sms", static_cast<int64_t>(config.num_sms),
                    "must be even and at least 2 between nodes");
  }
  RingResources resources = context.rings;
  if (resources.max_sms) *resources.max_sms /= 2;
  RingPlan plan;
  plan.channels = plan_channels(with_channels_of_two_sms(config), is_given, key.num_channels,
                                resources, node_bytes);
  const int channels = plan.channels.num_channels;
  if (handle != nullptr) require_channels(*handle, channels, "num_sms / 2");

  int slots = config.rdma_recv_tokens;
  const size_t most_bytes = context.rings.num_rdma_bytes;
  while (!is_given && slots > 1 && rail_bytes(channels, slots) > most_bytes) slots /= 2;
  if (rail_bytes(channels, slots) > most_bytes) {
    const int wanted = config.rdma_recv_tokens;
    const std::string fewer = is_given ? ""
                                       : " (with fewer, and slower, from " +
                                             std::to_string(rail_bytes(channels, slots)) + " on)";
    refuse_memory("num_rdma_bytes", most_bytes, rail_bytes(channels, wanted),
                  std::to_string(channels) + " channels with rings of " + std::to_string(wanted) +
                      " slots to each of " + std::to_string(group.num_nodes) + " nodes" + fewer);
  }
  plan.rail = {std::min(config.rdma_send_tokens, slots), slots};
  // A few SMs fill the links, but not the memory of a GPU: docs/design/0036.
  const std::optional<int> max_sms = context.rings.max_sms;
  const bool names_sms = is_given || key.choice.names_sms;
  plan.num_local_blocks = names_sms || !max_sms ? 2 * channels : *max_sms;
  return plan;
}

}  // namespace

RingPlan plan_two_tiers(CallContext& context, const ConfigChoice& choice, int row_bytes,
                        int scale_row_bytes, int num_topk, const DispatchRecord* handle) {
  const TwoTierKey key{choice, row_bytes, scale_row_bytes, num_topk,
                       handle == nullptr ? 0 : handle->num_channels};
  return context.two_tier_plans.get(key, [&] { return make_plan(context, key, handle); });
}

}  // namespace deep_comm
