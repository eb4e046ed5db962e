// The network between nodes, as both machines of the host target have it: puts and signals that
// complete some time after they are posted.
//
// What is promised, and nothing more: a signal becomes visible after all that was posted before it
// on the same queue (rank, peer, qp). Everything else may happen in any order: pieces of puts among
// each other, queues among each other, and all of them against the stores of the ranks. The source
// of a put is read at any time between its posting and its completion, from memory: stores that
// still wait in a buffer are not seen, and older values than those that its poster must see may be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <tuple>
#include <vector>

#include "random.hpp"

namespace deep_comm::simt {

// num_bytes 0: a signal, which writes `value` to the word at dst.
struct RailOp {
  int rank;  // whose NIC
  int peer;
  int qp;
  uint8_t* dst;
  const uint8_t* src;
  uint32_t num_bytes;
  uint64_t value;
  // What the NIC has read when it was posted; empty: it reads later.
  std::vector<uint8_t> early = {};
};

// What one rank has posted on one queue so far.
struct RailTraffic {
  int rank;
  int peer;
  int qp;
  uint64_t num_puts;
  uint64_t num_put_bytes;
  uint64_t num_signals;
};

// How bytes arrive on a machine.
class RailMemory {
 public:
  virtual ~RailMemory() = default;
  // `rank`: whose NIC writes
  virtual void land(const RailOp& put, uint32_t begin, uint32_t num_bytes) = 0;
  virtual void land_signal(int rank, uint64_t* word, uint64_t value) = 0;
};

class RailNetwork {
 public:
  // num_pieces: into how many parts, at most, a put falls; they land in any order.
  RailNetwork(RailMemory& memory, Random& random, uint32_t num_pieces, bool ordered)
      : memory_(memory), random_(random), num_pieces_(num_pieces), ordered_(ordered) {}

  void post(RailOp op);
  bool has_pending() const { return !active_.empty(); }
  // A piece or a signal, by chance, lands.
  void advance_one();
  // The NIC of `rank` delivers nothing any more, until `resume`.
  void stall(int rank);
  void resume(int rank);
  // All that `rank` has posted lands now, stalled or not.
  void flush(int rank);
  // What `rank` has posted is lost.
  void drop(int rank);
  // Everything that was ever posted, by queue.
  std::vector<RailTraffic> traffic() const;

 private:
  struct Pending {
    RailOp op;
    uint32_t pieces_left;  // bit per piece; a signal has one
  };
  struct Queue {
    int rank;
    bool is_stalled = false;
    int index = -1;  // in active_
    uint64_t num_puts = 0;
    uint64_t num_put_bytes = 0;
    uint64_t num_signals = 0;
    std::deque<Pending> ops;
  };

  void update(Queue& queue);
  void land_one(Queue& queue);
  void land_piece(Pending& pending);

  RailMemory& memory_;
  Random& random_;
  uint32_t num_pieces_;
  bool ordered_;  // false: a fault, signals overtake the puts before them
  std::map<std::tuple<int, int, int>, Queue> queues_;
  std::vector<Queue*> active_;  // with something to deliver
  std::vector<int> stalled_;    // ranks
};

}  // namespace deep_comm::simt
