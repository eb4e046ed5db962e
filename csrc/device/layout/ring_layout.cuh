// The slots of all rings in a rank's data region: [channel, source rank, slot].
#pragma once

#include "device/arch/types.cuh"

namespace deep_comm {

struct RingLayout {
  int num_ranks;
  int num_channels;
  int num_slots;
  size_t slot_bytes;

  DC_HOST_DEVICE size_t num_bytes() const {
    return static_cast<size_t>(num_channels) * num_ranks * num_slots * slot_bytes;
  }
  // First slot of the ring that `source` fills, from the start of the data region.
  DC_HOST_DEVICE size_t ring_offset(int channel, int source) const {
    return (static_cast<size_t>(channel) * num_ranks + source) * num_slots * slot_bytes;
  }
};

// The slots of one ring, as either end addresses them.
struct RingSlots {
  uint8_t* base;
  uint32_t num_slots;
  size_t slot_bytes;

  DC_HOST_DEVICE uint8_t* slot(uint32_t row_idx) const {
    const uint32_t slot = row_idx < num_slots ? row_idx : row_idx % num_slots;
    return base + static_cast<size_t>(slot) * slot_bytes;
  }
};

}  // namespace deep_comm
