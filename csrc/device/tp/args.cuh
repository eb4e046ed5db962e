// The arguments of the kernels of tensor parallelism. R ranks.
#pragma once

#include "device/layout/workspace.cuh"
#include "device/move/reduce.cuh"

namespace deep_comm {

// What is staged, then loaded from the peers: see collective.cuh.
enum class Collective : int {
  kAllGather,
  kReduceScatter,
  kAllReduceOnce,   // everybody adds everything
  kAllReduceTwice,  // everybody adds a shard, and loads the others' sums
  kCount
};

// Warps of a block after the first one, by what they do. 0: the operation has no such work.
struct CollectiveRoles {
  int num_stage_warps;
  int num_reduce_warps;
  int num_gather_warps;

  DC_HOST_DEVICE int num_warps() const {
    return 1 + num_stage_warps + num_reduce_warps + num_gather_warps;
  }
};

struct CollectiveArgs {
  World world;
  Collective op;
  const uint8_t* x;  // [num_bytes]
  uint8_t* out;      // all-gather: [R * num_bytes]; reduce-scatter: [shard_bytes]; else as x
  int64_t num_bytes;
  // Shards of x: of R ranks, or one. The last may be shorter, or empty. In a staging each has
  // shard_vecs vectors.
  int64_t shard_bytes;
  int64_t shard_vecs;
  int64_t part_vecs;  // of a shard, that a block takes at a time
  int num_parts;      // of a block
  CollectiveRoles roles;
  uint64_t staging;        // the first of two, from the segment's start
  uint64_t staging_bytes;  // of one
  uint32_t signature;      // of operation and arguments, equal on all ranks
};

// signal_word and await_word, of one stream.
struct WordArgs {
  World world;
  uint64_t* word;   // signal: the peer's; await: this rank's
  uint64_t* count;  // await: signals that earlier awaits have taken; else null
  int peer;
};

}  // namespace deep_comm
