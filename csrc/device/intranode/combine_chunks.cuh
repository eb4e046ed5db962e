// The rows that ranks return to each other in combine, in chunks: which there are, in which order a
// rank sends them, and the words about them. For combine's senders, and for combine_sums.
//
// words  recv_line.landed · owner: receiver · written by the sender's publisher, or by its sums: the
//        chunk is there
#pragma once

#include "device/channel/landed.cuh"
#include "device/intranode/args.cuh"

namespace deep_comm {

// Rows that rank `from` sent to rank `to`.
DC_DEVICE int num_rows_between(const CombineArgs& args, int from, int to) {
  const int num_ranks = args.world.num_ranks;
  const int32_t* prefix = args.rank_prefix_matrix + to;
  return arch::ld_nc(prefix + from * num_ranks) -
         (from == 0 ? 0 : arch::ld_nc(prefix + (from - 1) * num_ranks));
}

// The first received row that `src` sent, if it sent any.
DC_DEVICE int64_t first_row_of(const CombineArgs& args, int src) {
  return src == 0 ? 0
                  : arch::ld_nc(args.rank_prefix_matrix + (src - 1) * args.world.num_ranks +
                                args.world.rank);
}

// One rank's rows to or from another, in chunks.
struct ChunkedRows {
  int num_rows;
  int chunk_rows;

  // Small chunks let a token be added sooner. But many chunks of one row slow the senders down
  // (docs/design/0041).
  DC_DEVICE static ChunkedRows of(const CombineArgs& args, int num_rows) {
    const bool are_many = num_rows * (args.world.num_ranks - 1) > args.most_single_rows;
    return {num_rows, max_of(are_many ? 2 : 1, ceil_div(num_rows, kMaxChunks))};
  }
  DC_DEVICE int num_chunks() const { return ceil_div(num_rows, chunk_rows); }
};

// Chunks of all peers in rotation, so that every rank receives from all others at the same pace.
// Lane r holds those of rank r. kHasOwn: and of this rank itself.
template <bool kHasOwn>
class ChunkRotation {
 public:
  static constexpr int kEnd = -1, kNone = -2;

  DC_DEVICE explicit ChunkRotation(const CombineArgs& args)
      : num_ranks_(args.world.num_ranks), rank_(args.world.rank) {
    const int lane = arch::lane_idx();
    if (lane < num_ranks_ && (kHasOwn || lane != rank_)) {
      num_chunks_ = ChunkedRows::of(args, num_rows_between(args, lane, rank_)).num_chunks();
    }
    for (int peer = 0; peer < num_ranks_; ++peer) {
      most_chunks_ = max_of(most_chunks_, arch::shfl(kFullMask, num_chunks_, peer));
    }
  }
  // The rotation advances with each round. Otherwise all ranks would begin a round with the same
  // peer.
  DC_DEVICE int at(uint32_t number) const {
    const uint32_t num_peers = num_ranks_ - !kHasOwn;
    if (num_peers == 0) return kEnd;
    const uint32_t chunk = number / num_peers;
    if (chunk >= most_chunks_) return kEnd;
    int peer = rank_ + 1 + (number + chunk) % num_peers;
    if (peer >= num_ranks_) peer -= num_ranks_;
    const bool is_one = chunk < arch::shfl(kFullMask, num_chunks_, peer);
    return is_one ? peer * kMaxChunks + static_cast<int>(chunk) : kNone;
  }

 private:
  int num_ranks_;
  int rank_;
  uint32_t num_chunks_ = 0;   // of this lane's rank
  uint32_t most_chunks_ = 0;  // of any peer
};
using RotatingChunks = ChunkRotation<false>;

struct Chunk {
  int item;   // peer and number: ChunkRotation::at
  int first;  // row, among those that return to the peer
  int num_rows;
  int64_t x_row;

  DC_DEVICE int peer() const { return item / kMaxChunks; }
  DC_DEVICE int number() const { return item % kMaxChunks; }
};

// The rows of the chunks. Whole warps; lane r holds those of rank r.
class ReturnedRows {
 public:
  DC_DEVICE explicit ReturnedRows(const CombineArgs& args) {
    const int peer = min_of(arch::lane_idx(), args.world.num_ranks - 1);
    rows_ = ChunkedRows::of(args, num_rows_between(args, peer, args.world.rank));
    first_row_ = static_cast<int>(first_row_of(args, peer));
  }
  // Without rows, if `item` is none.
  DC_DEVICE Chunk chunk(int item) const {
    if (item < 0) return {-1, 0, 0, 0};
    const int peer = item / kMaxChunks, number = item % kMaxChunks;
    const int num_rows = arch::shfl(kFullMask, rows_.num_rows, peer);
    const int chunk_rows = arch::shfl(kFullMask, rows_.chunk_rows, peer);
    const int first = number * chunk_rows;
    return {item, first, min_of(chunk_rows, num_rows - first),
            static_cast<int64_t>(arch::shfl(kFullMask, first_row_, peer)) + first};
  }
  DC_DEVICE int most_chunk_rows() const {
    int most = 0;
    for (int peer = 0; peer < kMaxRanks; ++peer) {
      most = max_of(most, arch::shfl(kFullMask, rows_.chunk_rows, peer));
    }
    return most;
  }

 private:
  ChunkedRows rows_;
  int first_row_;
};

}  // namespace deep_comm
