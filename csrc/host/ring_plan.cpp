#include "host/ring_plan.hpp"

#include <algorithm>
#include <string>

#include "host/require.hpp"

namespace deep_comm {

namespace {

[[noreturn]] void refuse_memory(int64_t num_bytes, int64_t needed_bytes, std::string detail) {
  CallError error;
  error.error_class = CallError::Class::kBufferTooSmall;
  error.argument = "num_nvl_bytes";
  error.value = num_bytes;
  error.needed_bytes = needed_bytes;
  error.rule = std::move(detail);
  throw error;
}

}  // namespace

ChannelConfig plan_channels(const Config& config, bool is_given, int num_channels,
                            const RingResources& resources,
                            const std::function<size_t(int, int)>& ring_bytes) {
  const int channels = !is_given && num_channels > 0 ? num_channels : config.num_sms;
  if (channels < 1 || channels > kMostPlanChannels) {
    refuse_argument("config.num_sms", static_cast<int64_t>(channels),
                    "must lie in 1.." + std::to_string(kMostPlanChannels));
  }
  if (resources.max_sms && channels > *resources.max_sms) {
    refuse_argument("config.num_sms", static_cast<int64_t>(channels),
                    "must not exceed the device's " + std::to_string(*resources.max_sms) + " SMs");
  }
  int slots = config.num_slots();
  const size_t wanted_bytes = ring_bytes(channels, slots);
  const auto num_nvl_bytes = static_cast<int64_t>(resources.num_nvl_bytes);
  const std::string of_channels = std::to_string(channels) + " channels with rings of ";
  if (is_given && wanted_bytes > resources.num_nvl_bytes) {
    refuse_memory(num_nvl_bytes, static_cast<int64_t>(wanted_bytes),
                  of_channels + std::to_string(slots) + " slots");
  }
  while (ring_bytes(channels, slots) > resources.num_ring_bytes) {
    if (slots == 1) {
      const auto needed = static_cast<int64_t>(ring_bytes(channels, 1)) + num_nvl_bytes -
                          static_cast<int64_t>(resources.num_ring_bytes);
      refuse_memory(num_nvl_bytes, needed,
                    of_channels + "one slot (" + std::to_string(wanted_bytes) +
                        " bytes hold the default of " + std::to_string(config.num_slots()) +
                        " slots; without rings, and faster, are calls whose rows fit in the "
                        "receive region: what num_nvl_bytes has beyond 64 MiB, from 128 MiB on)");
    }
    slots /= 2;
  }
  return {channels, std::min(config.nvl_send_tokens, slots), slots};
}

}  // namespace deep_comm
