// The control words of low-latency mode, in every rank's workspace: no shape of a call moves them,
// so that calls of different shapes, and zeroing the payload between calls, disturb none.
//
//   [ LowLatencyState | consumed | announced | counts | masked | votes | alive ]
#pragma once

#include "device/layout/region.cuh"

namespace deep_comm {

inline constexpr int kMaxRanks = 8;  // peers of one NVLink node

// Blocks of a low-latency kernel; block b of a rank talks to block b of every other.
inline constexpr int kMaxLowLatencyBlocks = 160;

enum class LowLatencyKind : int { kDispatch, kCombine };
enum class Phase : int { kSend, kReceive };

// What a block of this rank knows of the operations of a kind. Block b of a launch of B blocks
// writes the records b, b + B, b + 2B, …: so a launch of any size finds in its own what it needs,
// and nothing has to be agreed between the blocks of one.
struct alignas(16) LowLatencyRecord {
  uint32_t sequence;  // number of the last operation that was sent
  uint32_t sent[2];   // the same of each half
  uint32_t unused;
};

// This rank alone.
struct alignas(kLineBytes) LowLatencyState {
  // Tagged: sources, a bit each, whose rows a dispatch places; with masks only
  uint64_t participants;
  uint32_t received[2]
                   [2];  // by kind and half: the last one whose receive phase was launched; block 0
  LowLatencyRecord records[2][kMaxLowLatencyBlocks];  // by kind
};

struct LowLatencyWords {
  size_t state;  // LowLatencyState
  // Tagged [kind, half, peer], a line each: the operation that peer has read what it got of
  size_t consumed;
  // Tagged [kind, half, kMaxRanks], by source: it has begun; value = signature, its tokens
  size_t announced;
  // Tagged [half, source, counts_stride]: tokens to this rank, then to each local expert
  size_t counts;
  size_t counts_stride;
  size_t masked;     // int32 [kMaxRanks]: this rank does without them
  size_t votes;      // int32 [kMaxRanks, kMaxRanks]: [from][rank]: `from` does without `rank`
  size_t alive;      // uint64 [kMaxRanks]: the last that a rank has said while it waited
  size_t num_bytes;  // of all these, from `state` on

  DC_HOST_DEVICE static constexpr LowLatencyWords make(RegionCursor* cursor, int num_ranks,
                                                       int num_max_experts) {
    LowLatencyWords words{};
    words.state = cursor->take(sizeof(LowLatencyState));
    words.consumed = cursor->take(2 * 2 * num_ranks * kLineBytes);
    words.announced = cursor->take(sizeof(uint64_t) * 2 * 2 * kMaxRanks);
    words.counts_stride =
        align_up<size_t>(1 + ceil_div(num_max_experts, num_ranks), kLineBytes / sizeof(uint64_t));
    words.counts = cursor->take(sizeof(uint64_t) * 2 * num_ranks * words.counts_stride);
    words.masked = cursor->take(sizeof(int32_t) * kMaxRanks);
    words.votes = cursor->take(sizeof(int32_t) * kMaxRanks * kMaxRanks);
    words.alive = cursor->take(sizeof(uint64_t) * kMaxRanks);
    words.num_bytes = words.alive + sizeof(uint64_t) * kMaxRanks - words.state;
    return words;
  }
};

}  // namespace deep_comm
