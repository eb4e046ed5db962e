// The rows that ranks return to each other in combine, in chunks: which there are, in which order a
// rank sends them, and the words about them. For combine's senders, and for combine_sums.
//
// words  recv_line.landed · owner: receiver · written by the sender's block, or by its sums: the
//        chunk is there
#pragma once

#include "device/channel/landed.cuh"
#include "device/intranode/args.cuh"
#include "device/layout/divisor.cuh"
#include "device/move/row_sender.cuh"

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

// One rank's rows to or from another, in chunks of 1 << shift.
struct ChunkedRows {
  int num_rows;
  int shift;

  // Small chunks let a token be added sooner. But many chunks of one row slow the senders down
  // (docs/design/0041).
  DC_DEVICE static ChunkedRows of(const CombineArgs& args, int num_rows) {
    const bool are_many = num_rows * (args.world.num_ranks - 1) > args.most_single_rows;
    return {num_rows, shift_for(max_of(are_many ? 2 : 1, ceil_div(num_rows, kMaxChunks)))};
  }
  DC_DEVICE int chunk_rows() const { return 1 << shift; }
  DC_DEVICE int num_chunks() const { return (num_rows + chunk_rows() - 1) >> shift; }
};

// The rows that return from this rank, in chunks. Those of all peers in rotation, so that every rank
// receives from all others at the same pace. kHasOwn: and of this rank itself. Whole warps call the
// methods; lane r holds the rows of rank r.
template <bool kHasOwn>
class ReturnedChunks {
 public:
  static constexpr int kEnd = -1, kNone = -2;

  DC_DEVICE explicit ReturnedChunks(const CombineArgs& args)
      : num_ranks_(args.world.num_ranks),
        rank_(args.world.rank),
        num_peers_(num_ranks_ - !kHasOwn),
        by_peers_(Divisor::make(max_of(num_peers_, 1))) {
    const int lane = arch::lane_idx();
    if (lane < num_ranks_) {
      first_row_ = static_cast<int>(first_row_of(args, lane));
      rows_ = ChunkedRows::of(args, num_rows_between(args, lane, rank_));
      if (kHasOwn || lane != rank_) num_chunks_ = rows_.num_chunks();
    }
    most_chunks_ = arch::reduce_max(kFullMask, num_chunks_);
  }

  // The number-th item (peer and number of a chunk), or kNone. The rotation advances with each round. Otherwise all ranks would
  // begin a round with the same peer.
  DC_DEVICE int at(uint32_t number) const {
    // Warps ask for few numbers behind the last chunk.
    static_assert(kMaxRanks * kMaxChunks < Divisor::kMaxNumerator / 2);
    const int chunk = by_peers_.quotient(static_cast<int>(number));
    if (chunk >= most_chunks_) return kEnd;
    const int turn = static_cast<int>(number) - chunk * num_peers_;
    const int step = turn + chunk - by_peers_.quotient(turn + chunk) * num_peers_;
    int peer = rank_ + 1 + step;
    if (peer >= num_ranks_) peer -= num_ranks_;
    return chunk < arch::shfl(kFullMask, num_chunks_, peer) ? peer * kMaxChunks + chunk : kNone;
  }
  // Without rows, if `item` is none.
  DC_DEVICE Chunk chunk(int item) const {
    if (item < 0) return {-1, -1, 0, 0, 0};
    const int peer = item / kMaxChunks, number = item % kMaxChunks;
    const int num_rows = arch::shfl(kFullMask, rows_.num_rows, peer);
    const int shift = arch::shfl(kFullMask, rows_.shift, peer);
    const int first = number << shift;
    return {item, peer, first, min_of(1 << shift, num_rows - first),
            static_cast<int64_t>(arch::shfl(kFullMask, first_row_, peer)) + first};
  }
  DC_DEVICE int most_chunk_rows() const { return 1 << arch::reduce_max(kFullMask, rows_.shift); }

 private:
  int num_ranks_;
  int rank_;
  int num_peers_;
  Divisor by_peers_;
  ChunkedRows rows_{};   // of this lane's rank
  int first_row_ = 0;    // of x
  int num_chunks_ = 0;   // that count for the rotation
  int most_chunks_ = 0;  // of any peer
};

}  // namespace deep_comm
