// The final rows of direct dispatch, which are known before any of them is moved. The notify that
// has found them may still run: its words order these loads, so they are no loads of inputs.
#pragma once

#include "device/intranode/args.cuh"

namespace deep_comm {

// The rows of tokens in one receiver's output; one lane handles one receiver. `look_up` loads ahead
// what a token needs, since each look-up costs a trip to memory.
class FinalRows {
 public:
  DC_DEVICE FinalRows(const DispatchArgs& args, int peer)
      : args_(args), peer_(peer), per_channel_(ceil_div(args.num_tokens, args.ring.num_channels)) {
    const World& world = args.world;
    before_rank_ =
        world.rank == 0
            ? 0
            : arch::ld_weak(args.rank_prefix_matrix + (world.rank - 1) * world.num_ranks + peer);
  }
  DC_DEVICE void look_up(int token) {
    head_ = -1;
    if (token >= args_.num_tokens) return;
    const int channel = token / per_channel_;
    const int32_t* prefix = args_.channel_prefix_matrix + peer_ * args_.ring.num_channels;
    head_ = arch::ld_weak(args_.send_head + static_cast<int64_t>(token) * args_.world.num_ranks +
                          peer_);
    before_channel_ = channel == 0 ? 0 : arch::ld_weak(prefix + channel - 1);
  }
  // Of the token looked up last; -1: not sent there.
  DC_DEVICE int64_t row() const {
    return head_ < 0 ? -1 : static_cast<int64_t>(before_rank_) + before_channel_ + head_;
  }
  // The same among the rows of this rank alone, if the token is sent there.
  DC_DEVICE int row_of_rank() const { return before_channel_ + head_; }

 private:
  const DispatchArgs& args_;
  int peer_;
  int per_channel_;
  int before_rank_;
  int before_channel_ = 0;
  int head_ = -1;
};

// The same interface for expanded outputs: a token's first output row.
class FirstRows {
 public:
  DC_DEVICE FirstRows(const DispatchArgs& args, int peer) : args_(args), peer_(peer) {}
  DC_DEVICE void look_up(int token) {
    const int64_t position = static_cast<int64_t>(token) * args_.world.num_ranks + peer_;
    row_ = token >= args_.num_tokens ? -1 : arch::ld_nc(args_.send_row + position);
  }
  DC_DEVICE int64_t row() const { return row_; }

 private:
  const DispatchArgs& args_;
  int peer_;
  int row_ = -1;
};

}  // namespace deep_comm
