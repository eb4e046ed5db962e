// The arguments of the low-latency kernels of a group of several nodes: those inside a node, and
// what is needed to reach other nodes. `region` of the base is not used. R in shapes is the number
// of the group's ranks. recv_rows and recv_weights are by slot, [R, M, K], not by token.
#pragma once

#include "device/layout/low_latency_rail.cuh"
#include "device/low_latency/args.cuh"

namespace deep_comm {

struct RailReach {
  LowLatencyGroup group;
  LowLatencyRailWords words;
  LowLatencyRailRegion region;
  // A rank with at least this many tokens sends each once per node, to the rank of its first top-k
  // entry there, which forwards it over NVLink. The ranks need not agree: every message says how it
  // is sent.
  int hand_on_tokens;
};

// What combine needs for a received row: the token at its source, and how many of the ranks of that
// token's experts precede this one.
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
  int32_t* num_rows;  // out [2, R]: rows from each source, and how many of them were forwarded
  int32_t* return_addresses;  // out [R, M]: ReturnAddress, by slot
};

struct LowLatencyRailCombineArgs : LowLatencyCombineArgs {
  RailReach reach;
  const int32_t* num_rows;          // [2, R]
  const int32_t* return_addresses;  // [R, M]
};

}  // namespace deep_comm
