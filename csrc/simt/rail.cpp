#include "rail.hpp"

#include <algorithm>
#include <utility>

namespace deep_comm::simt {
namespace {

constexpr uint32_t kPieceAlignment = 16;
// Puts of a queue that may land at once; more in flight show nothing new.
constexpr size_t kWindow = 8;

uint32_t piece_bytes(uint32_t num_bytes, uint32_t num_pieces) {
  const uint32_t bytes = (num_bytes + num_pieces - 1) / num_pieces;
  return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

}  // namespace

void RailNetwork::update(Queue& queue) {
  const bool wanted = !queue.ops.empty() && !queue.is_stalled;
  if (wanted == (queue.index >= 0)) return;
  if (wanted) {
    queue.index = static_cast<int>(active_.size());
    active_.push_back(&queue);
    return;
  }
  Queue* last = active_.back();
  active_[static_cast<size_t>(queue.index)] = last;
  last->index = queue.index;
  active_.pop_back();
  queue.index = -1;
}

void RailNetwork::post(RailOp op) {
  Queue& queue = queues_[{op.rank, op.peer, op.qp}];
  queue.rank = op.rank;
  queue.is_stalled = std::find(stalled_.begin(), stalled_.end(), op.rank) != stalled_.end();
  uint32_t num_pieces = 1;
  ++(op.num_bytes > 0 ? queue.num_puts : queue.num_signals);
  queue.num_put_bytes += op.num_bytes;
  if (op.num_bytes > 0) {
    const uint32_t bytes = piece_bytes(op.num_bytes, num_pieces_);
    num_pieces = (op.num_bytes + bytes - 1) / bytes;
  }
  queue.ops.push_back({std::move(op), (1u << num_pieces) - 1});
  update(queue);
}

void RailNetwork::land_piece(Pending& pending) {
  const RailOp& op = pending.op;
  if (op.num_bytes == 0) {
    pending.pieces_left = 0;
    memory_.land_signal(op.rank, reinterpret_cast<uint64_t*>(op.dst), op.value);
    return;
  }
  uint32_t skip = static_cast<uint32_t>(
      random_.below(static_cast<uint64_t>(__builtin_popcount(pending.pieces_left))));
  uint32_t left = pending.pieces_left;
  while (skip-- > 0) left &= left - 1;
  const auto piece = static_cast<uint32_t>(__builtin_ctz(left));
  pending.pieces_left &= ~(1u << piece);
  const uint32_t bytes = piece_bytes(op.num_bytes, num_pieces_);
  const uint32_t begin = piece * bytes;
  memory_.land(op, begin, std::min(bytes, op.num_bytes - begin));
}

void RailNetwork::advance_one() { land_one(*active_[random_.below(active_.size())]); }

void RailNetwork::flush(int rank) {
  resume(rank);
  for (auto& [key, queue] : queues_) {
    while (queue.rank == rank && !queue.ops.empty()) land_one(queue);
  }
}

void RailNetwork::land_one(Queue& queue) {
  // The puts up to the first signal may land now; the signal only once it is at the front.
  size_t num_open = 0;
  while (num_open < queue.ops.size() && num_open < kWindow &&
         (!ordered_ || queue.ops[num_open].op.num_bytes > 0)) {
    ++num_open;
  }
  const size_t chosen = num_open == 0 ? 0 : random_.below(num_open);
  land_piece(queue.ops[chosen]);
  if (queue.ops[chosen].pieces_left == 0) {
    queue.ops.erase(queue.ops.begin() + static_cast<ptrdiff_t>(chosen));
  }
  update(queue);
}

void RailNetwork::stall(int rank) {
  stalled_.push_back(rank);
  for (auto& [key, queue] : queues_) {
    if (queue.rank != rank) continue;
    queue.is_stalled = true;
    update(queue);
  }
}

void RailNetwork::resume(int rank) {
  std::erase(stalled_, rank);
  for (auto& [key, queue] : queues_) {
    if (queue.rank != rank) continue;
    queue.is_stalled = false;
    update(queue);
  }
}

std::vector<RailTraffic> RailNetwork::traffic() const {
  std::vector<RailTraffic> posted;
  for (const auto& [key, queue] : queues_) {
    const auto& [rank, peer, qp] = key;
    posted.push_back({rank, peer, qp, queue.num_puts, queue.num_put_bytes, queue.num_signals});
  }
  return posted;
}

void RailNetwork::drop(int rank) {
  for (auto& [key, queue] : queues_) {
    if (queue.rank != rank) continue;
    queue.ops.clear();
    update(queue);
  }
}

}  // namespace deep_comm::simt
