// The control words of low-latency mode, in every rank's workspace. No shape moves them. So calls
// of different shapes do not disturb them, nor does zeroing the payload between calls.
//
//   [ LowLatencyState | consumed | announced | counts | masked | votes | alive ]
#pragma once

#include "device/layout/region.cuh"

namespace deep_comm {

inline constexpr int kMaxRanks = 8;  // peers of one NVLink node

// Blocks of a low-latency kernel. Block b of a rank exchanges data with block b of every other
// rank.
inline constexpr int kMaxLowLatencyBlocks = 160;

enum class LowLatencyKind : int { kDispatch, kCombine };
enum class Phase : int { kSend, kReceive };

// What a block knows of the operations of a kind. Block b of a launch of B blocks writes records b,
// b + B, b + 2B, … So a launch of any size finds what it needs in its own records, and its blocks
// need not agree on anything.
struct alignas(16) LowLatencyRecord {
  uint32_t sequence;  // number of the last operation sent
  uint32_t sent[2];   // by buffer: the last one that used it
  uint32_t unused;
};

// This rank alone.
struct alignas(kLineBytes) LowLatencyState {
  // Tagged, masks only: a bit for each source whose rows a dispatch places
  uint64_t participants;
  // by kind and buffer: the last one whose receive phase was launched; block 0
  uint32_t received[2][2];
  LowLatencyRecord records[2][kMaxLowLatencyBlocks];  // by kind
};

struct LowLatencyWords {
  size_t state;  // LowLatencyState
  // Tagged [kind, buffer, peer], a line each: the last operation of which that peer has read
  // everything
  size_t consumed;
  // Tagged [kind, buffer, kMaxRanks], by source: it has begun; value = signature, its tokens
  size_t announced;
  // Tagged [buffer, source, counts_stride]: tokens to this rank, then to each local expert
  size_t counts;
  size_t counts_stride;
  size_t masked;     // int32 [kMaxRanks]: not zero: this rank has masked that one
  size_t votes;      // int32 [kMaxRanks, kMaxRanks]: [from][rank]: `from` has masked `rank`
  size_t alive;      // uint64 [kMaxRanks]: a number that the rank changes while it waits
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
