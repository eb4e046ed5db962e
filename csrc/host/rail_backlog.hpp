// What a software NIC has been asked for and has not carried out yet; knows nothing of how that is
// done.
//
// Signals of a queue stay in order, and behind the puts that stood before them. What waits in one is
// put together: puts of neighbouring bytes become one, and of signals to one word the last is enough,
// since nobody could tell that an older value had been late. With a speed, puts of all queues leave
// one after the other, in the order in which they were asked for, each for as long as it takes, and
// signals leave when what stands before them on their queue has left. Who carries them out may be
// told some time ahead, and when each may be.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace deep_comm {

struct NicOp {
  uint8_t* dst;
  const uint8_t* src;
  uint64_t num_bytes;  // 0: a signal, which writes `value` to dst
  uint64_t value;
  uint64_t since_ns;    // when it was asked for
  uint64_t at_ns = 0;   // when it may be seen; set when it is visited
  uint64_t number = 0;  // of all that were pushed; a put that has grown: of its oldest part
};

class RailBacklog {
 public:
  // Larger puts would keep the signals behind them, and other queues, waiting.
  static constexpr uint64_t kMaxPutBytes = 1 << 20;

  // bytes_per_s: 0: no limit. ahead_ns: so long before they may happen operations are visited.
  RailBacklog(int num_queues, double bytes_per_s, uint64_t ahead_ns = 0)
      : queues_(static_cast<size_t>(num_queues)),
        ns_per_byte_(bytes_per_s > 0 ? 1e9 / bytes_per_s : 0),
        ahead_ns_(ahead_ns) {}

  bool is_empty() const { return active_.empty(); }

  void push(int queue_idx, NicOp op) {
    Queue& queue = queues_[static_cast<size_t>(queue_idx)];
    op.number = num_pushed_++;
    if (op.num_bytes > 0) {
      if (!extend_a_put(queue.ops, op)) queue.ops.push_back(op);
    } else {
      drop_older_signal(queue.ops, op);
      queue.ops.push_back(op);
    }
    if (queue.is_active) return;
    queue.is_active = true;
    active_.push_back(queue_idx);
  }

  // One step of every queue that may make one now: visit(queue_idx, op). A step is a put, or all
  // the signals up to the next one. With a speed, the put of one queue. Returns whether any did.
  template <class Visit>
  bool advance(uint64_t now_ns, Visit visit) {
    bool has_moved = false;
    for (size_t place = 0; place < active_.size();) {
      Queue& queue = queue_at(place);
      if (!is_paced() && is_put(queue.ops.front())) {
        leave(place, 0, visit);
        has_moved = true;
      } else {
        while (!queue.ops.empty() && !is_put(queue.ops.front()) && may_be_told(queue, now_ns)) {
          leave(place, queue.sent_ns, visit);
          has_moved = true;
        }
      }
      if (!rest_if_empty(place)) ++place;
    }
    return (is_paced() && use_wire(now_ns, visit)) || has_moved;
  }

 private:
  static constexpr size_t kReach = 16;  // operations that a new one is compared with

  struct Queue {
    std::deque<NicOp> ops;
    uint64_t sent_ns = 0;  // when the last of its puts has left
    bool is_active = false;
  };

  static bool continues(const NicOp& put, const NicOp& next) {
    return next.dst == put.dst + put.num_bytes && next.src == put.src + put.num_bytes;
  }
  static bool extend(NicOp& put, const NicOp& next) {
    if (put.num_bytes == 0 || next.num_bytes == 0 ||
        put.num_bytes + next.num_bytes > kMaxPutBytes) {
      return false;
    }
    if (continues(next, put)) {
      put.dst = next.dst;
      put.src = next.src;
    } else if (!continues(put, next)) {
      return false;
    }
    put.num_bytes += next.num_bytes;
    return true;
  }

  // Neighbours are filled in any order. The signals behind that put wait for the longer one.
  static bool extend_a_put(std::deque<NicOp>& ops, const NicOp& next) {
    for (size_t back = 1; back <= ops.size() && back <= kReach; ++back) {
      if (extend(*(ops.end() - static_cast<ptrdiff_t>(back)), next)) return true;
    }
    return false;
  }

  // What stood before and behind it may now be one put.
  static void drop_older_signal(std::deque<NicOp>& ops, const NicOp& signal) {
    for (size_t back = 1; back <= ops.size() && back <= kReach; ++back) {
      const auto older = ops.end() - static_cast<ptrdiff_t>(back);
      if (older->num_bytes > 0 || older->dst != signal.dst) continue;
      const auto next = ops.erase(older);
      if (next != ops.begin() && next != ops.end() && extend(*(next - 1), *next)) ops.erase(next);
      return;
    }
  }

  bool is_paced() const { return ns_per_byte_ > 0; }
  static bool is_put(const NicOp& op) { return op.num_bytes > 0; }
  Queue& queue_at(size_t place) { return queues_[static_cast<size_t>(active_[place])]; }

  bool may_be_told(const Queue& queue, uint64_t now_ns) const {
    return !is_paced() || now_ns + ahead_ns_ >= queue.sent_ns;
  }

  template <class Visit>
  void leave(size_t place, uint64_t at_ns, Visit& visit) {
    Queue& queue = queue_at(place);
    NicOp op = queue.ops.front();
    op.at_ns = at_ns;
    queue.ops.pop_front();
    visit(active_[place], op);
  }
  bool rest_if_empty(size_t place) {
    Queue& queue = queue_at(place);
    if (!queue.ops.empty()) return false;
    queue.is_active = false;
    active_[place] = active_.back();
    active_.pop_back();
    return true;
  }

  // The put that was asked for first, if the wire is free for it. In turns of the queues, receivers
  // who take rows in the order in which they were sent would wait for the slowest queue, and find
  // all the others' rows behind its last one.
  template <class Visit>
  bool use_wire(uint64_t now_ns, Visit& visit) {
    if (now_ns + ahead_ns_ < wire_free_ns_) return false;
    size_t first = active_.size();
    for (size_t place = 0; place < active_.size(); ++place) {
      const NicOp& op = queue_at(place).ops.front();
      if (!is_put(op)) continue;
      if (first == active_.size() || op.number < queue_at(first).ops.front().number) first = place;
    }
    if (first == active_.size()) return false;
    Queue& queue = queue_at(first);
    const NicOp& op = queue.ops.front();
    // Whoever asks may be late by what it did meanwhile, which a NIC would not be.
    const uint64_t begin_ns = std::max(wire_free_ns_, op.since_ns);
    wire_free_ns_ =
        begin_ns + static_cast<uint64_t>(ns_per_byte_ * static_cast<double>(op.num_bytes));
    queue.sent_ns = wire_free_ns_;
    leave(first, queue.sent_ns, visit);
    rest_if_empty(first);
    return true;
  }

  std::vector<Queue> queues_;
  std::vector<int> active_;  // those with something to do
  double ns_per_byte_;
  uint64_t ahead_ns_;
  uint64_t wire_free_ns_ = 0;  // when the last put of all has left
  uint64_t num_pushed_ = 0;
};

}  // namespace deep_comm
