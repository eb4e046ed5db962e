#include "host/ring_plan.hpp"

#include <algorithm>
#include <string>

#include "host/require.hpp"

namespace deep_comm {

ChannelConfig plan_channels(const Config& config, bool is_given, int num_channels,
                            const RingResources& resources,
                            const std::function<size_t(int, int)>& ring_bytes) {
  const int channels = !is_given && num_channels > 0 ? num_channels : config.num_sms;
  if (channels < 1 || channels > kMaxChannels) {
    refuse_argument("config.num_sms", static_cast<int64_t>(channels),
                    "must lie in 1.." + std::to_string(kMaxChannels));
  }
  if (resources.max_sms && channels > *resources.max_sms) {
    refuse_argument("config.num_sms", static_cast<int64_t>(channels),
                    "must not exceed the device's " + std::to_string(*resources.max_sms) + " SMs");
  }
  int slots = config.num_slots();
  const size_t wanted_bytes = ring_bytes(channels, slots);
  const std::string of_channels = std::to_string(channels) + " channels with rings of ";
  if (is_given && wanted_bytes > resources.num_nvl_bytes) {
    refuse_memory("num_nvl_bytes", resources.num_nvl_bytes, wanted_bytes,
                  of_channels + std::to_string(slots) + " slots");
  }
  while (ring_bytes(channels, slots) > resources.num_ring_bytes) {
    if (slots == 1) {
      const size_t num_other_bytes = resources.num_nvl_bytes - resources.num_ring_bytes;
      refuse_memory("num_nvl_bytes", resources.num_nvl_bytes, wanted_bytes + num_other_bytes,
                    of_channels + (is_given ? "" : "the default ") +
                        std::to_string(config.num_slots()) +
                        " slots (with fewer, and slower, from " +
                        std::to_string(ring_bytes(channels, 1) + num_other_bytes) +
                        " on). Calls whose rows fit in the receive region are without rings, and "
                        "faster: it is what num_nvl_bytes has beyond 64 MiB, from 128 MiB on");
    }
    slots /= 2;
  }
  return {channels, std::min(config.nvl_send_tokens, slots), slots};
}

}  // namespace deep_comm
