// The tokens of one channel: [begin, end) of a rank's num_tokens, contiguous and in order. So rows
// sorted by channel are sorted by token.
#pragma once

#include "device/arch/types.cuh"

namespace deep_comm {

struct ChannelRange {
  int begin;
  int end;

  DC_HOST_DEVICE static ChannelRange of(int num_tokens, int num_channels, int channel) {
    const int per_channel = ceil_div(num_tokens, num_channels);
    const int begin = min_of(channel * per_channel, num_tokens);
    return {begin, min_of(begin + per_channel, num_tokens)};
  }
};

}  // namespace deep_comm
