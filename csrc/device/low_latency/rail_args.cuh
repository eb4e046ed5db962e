// The arguments of the low-latency kernels of a group of several nodes: those of one node's, and
// what reaches further. `region` of the base is not used; R in shapes is the group's ranks; places
// and recv_weights are by slot, [R, M, K], not by token.
#pragma once

#include "device/layout/low_latency_rail.cuh"
#include "device/low_latency/args.cuh"

namespace deep_comm {

struct RailReach {
  LowLatencyGroup group;
  LowLatencyRailWords words;
  LowLatencyRailRegion region;
  // A rank with so many tokens sends each once to a node, where the first rank hands it on over
  // NVLink. Ranks need not agree: messages say how they come.
  int hand_on_tokens;
};

// What combine needs to know of a received row: its source's token, and how many of the ranks of
// that token's experts come before this one.
struct ReturnAddress {
  int token;
  int order;

  DC_HOST_DEVICE int32_t pack() const {
    return static_cast<int32_t>(static_cast<uint32_t>(order) << 16 | token);
  }
  DC_HOST_DEVICE static ReturnAddress unpack(int32_t packed) {
    return {packed & 0xffff, static_cast<int>(static_cast<uint32_t>(packed) >> 16)};
  }
};

struct LowLatencyRailDispatchArgs : LowLatencyDispatchArgs {
  RailReach reach;
  int32_t* num_rows;  // out [2, R]: rows from each source, and how many of them were handed on
  int32_t* return_addresses;  // out [R, M]: ReturnAddress, by slot
};

struct LowLatencyRailCombineArgs : LowLatencyCombineArgs {
  RailReach reach;
  const int32_t* num_rows;          // [2, R]
  const int32_t* return_addresses;  // [R, M]
};

}  // namespace deep_comm
