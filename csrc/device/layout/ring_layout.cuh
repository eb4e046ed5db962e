// Where the slots of every ring lie in a rank's data region: [channel, strip, source rank, slot]. The words of a
// ring are found by its lane: the number of its (channel, strip).
#pragma once

#include "device/arch/types.cuh"

namespace deep_comm {

struct RingLayout {
  int num_ranks;
  int num_channels;
  int num_strips;
  int num_slots;
  size_t slot_bytes;

  DC_HOST_DEVICE int num_lanes() const { return num_channels * num_strips; }
  DC_HOST_DEVICE int channel_of(int lane) const { return lane / num_strips; }
  DC_HOST_DEVICE int strip_of(int lane) const { return lane % num_strips; }
  DC_HOST_DEVICE size_t num_bytes() const {
    return static_cast<size_t>(num_lanes()) * num_ranks * num_slots * slot_bytes;
  }
  // First slot of the ring that `source` fills, from the start of the data region.
  DC_HOST_DEVICE size_t ring_offset(int lane, int source) const {
    return (static_cast<size_t>(lane) * num_ranks + source) * num_slots * slot_bytes;
  }
};

}  // namespace deep_comm
