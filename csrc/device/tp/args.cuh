// The arguments of the kernels of tensor parallelism. R ranks.
#pragma once

#include "device/layout/workspace.cuh"
#include "device/move/reduce.cuh"

namespace deep_comm {

// What is pushed, then added or copied: see collective.cuh.
enum class Collective : int {
  kAllGather,
  kReduceScatter,
  kAllReduceOnce,   // everybody adds everything
  kAllReduceTwice,  // everybody adds a shard, and pushes the sums
  kAllReduceNorm,   // the same by whole rows; the sums get a residual, and rows are normalised
  kCount
};

// Who has added a shard pushes the sums.
constexpr bool spreads_sums(Collective op) {
  return op == Collective::kAllReduceTwice || op == Collective::kAllReduceNorm;
}

// Of a staging. Slot r holds what rank r has pushed, slot R + r the sums that it has pushed. Over memory
// with multicast a rank pushes into its own staging alone, a slot for each shard, and sums lie over
// what was added.
constexpr int num_slots(Collective op, int num_ranks, bool has_multicast) {
  if (has_multicast && op == Collective::kAllReduceOnce) return 1;
  return spreads_sums(op) && !has_multicast ? 2 * num_ranks : num_ranks;
}

// Warps of a block after the first one, by what they do. 0: the operation has no such work.
struct CollectiveRoles {
  int num_push_warps;    // of a block that pushes
  int num_reduce_warps;  // of one that takes what was pushed
  int num_gather_warps;
};

// Root mean square normalisation of rows of row_vecs vectors.
struct RowNorm {
  const uint8_t* residual;  // as x; added to the sums
  const uint8_t* weight;    // [row_vecs]
  uint8_t* normed;          // as x
  int64_t row_vecs;
  float eps;
};

struct CollectiveArgs {
  World world;
  Collective op;
  const uint8_t* x;  // [num_bytes]
  uint8_t* out;      // all-gather: [R * num_bytes]; reduce-scatter: [shard_bytes]; else as x
  int64_t num_bytes;
  // Shards of x: of R ranks, or one. The last may be shorter, or empty. A slot of a staging has
  // shard_vecs vectors.
  int64_t shard_bytes;
  int64_t shard_vecs;
  int64_t part_vecs;   // of a shard, that a warp takes at a time
  int64_t piece_vecs;  // of a part, that it pushes at a time
  int num_parts;       // of a shard
  CollectiveRoles roles;
  int num_push_blocks;    // those that push are the first ones
  int first_take_block;   // those that take begin here: behind them, or at 0 if there is one block
  uint64_t entry_offset;  // of the CollectiveEntry in shared memory
  uint64_t staging;       // of slots, from the segment's start
  uint32_t signature;     // of operation and arguments, equal on all ranks
  RowNorm norm;           // kAllReduceNorm
  uint8_t* multicast;     // window over all segments (see Multicast); null: there is none
};

// signal_word and await_word, of one stream.
struct WordArgs {
  World world;
  uint64_t* word;   // signal: the peer's; await: this rank's
  uint64_t* count;  // await: signals that earlier awaits have taken; else null
  int peer;
};

// begin_matmul, await_push and end_matmul: around products whose rows come from peers or go to them.
struct MatmulArgs {
  World world;
  uint64_t* sequence;    // of this rank, equal on all: products that have begun
  int64_t* fault;        // set by begin; 0, or 1 + the rank whose rows did not come in time
  const uint64_t* word;  // await_push: this rank's, that the peer's push sets to the sequence
  int peer;              // await_push
  uint32_t signature;    // begin: of operation and arguments, equal on all ranks
};

// What `fault` says when a product must not wait: this rank has failed.
inline constexpr int64_t kMustNotWait = -1;

// Rows to a peer's memory, then word := sequence there.
struct PushArgs {
  World world;
  const uint8_t* src;
  uint8_t* dst;
  int64_t num_bytes;
  const uint64_t* sequence;
  uint64_t* word;
};

// out := slots 0 + 1 + … + (R - 1), of which the peers have pushed theirs.
struct AddSlotsArgs {
  World world;
  const uint8_t* slots;  // [R], slot_vecs vectors apart
  int64_t slot_vecs;
  uint8_t* out;
  int64_t num_bytes;
  const uint64_t* words;  // of peer p at p * words_per_rank
  int words_per_rank;
  const uint64_t* sequence;
};

}  // namespace deep_comm
