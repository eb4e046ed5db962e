// Warp collectives: lanes meet, the last one to come computes for all, and all go on.
#include <cstdio>

#include "executor.hpp"
#include "ops.hpp"
#include "simulated_memory.hpp"

namespace deep_comm::simt {
namespace {

// What a lane gets from a lane outside of the mask: on the GPU the value is undefined.
constexpr uint64_t kUndefined = 0xa5a5a5a5'a5a5a5a5u;

std::string hex(uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", mask);
  return text;
}

void shuffle(Warp& warp, uint32_t mask, WarpOp op) {
  for (uint32_t left = mask; left; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    const auto argument = static_cast<int>(warp.arguments[lane]);
    int source = lane;
    switch (op) {
      case WarpOp::kShfl:
        source = argument & (kLanes - 1);
        break;
      case WarpOp::kShflXor:
        source = lane ^ argument;
        break;
      case WarpOp::kShflUp:
        source = lane - argument;
        break;
      default:
        source = lane + argument;
        break;
    }
    if (source < 0 || source >= kLanes) source = lane;  // past the end: one's own value
    warp.results[lane] = mask >> source & 1 ? warp.values[source] : kUndefined;
  }
}

uint32_t vote(const Warp& warp, uint32_t mask) {
  uint32_t ballot = 0;
  for (uint32_t left = mask; left; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    ballot |= static_cast<uint32_t>(warp.values[lane] != 0) << lane;
  }
  return ballot;
}

void broadcast(Warp& warp, uint32_t mask, uint64_t result) {
  for (uint32_t left = mask; left; left &= left - 1) warp.results[__builtin_ctz(left)] = result;
}

void match(Warp& warp, uint32_t mask) {
  for (uint32_t left = mask; left;) {
    const uint64_t value = warp.values[__builtin_ctz(left)];
    uint32_t same = 0;
    for (uint32_t rest = left; rest; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      same |= static_cast<uint32_t>(warp.values[lane] == value) << lane;
    }
    left &= ~same;
    broadcast(warp, same, same);
  }
}

void complete(Warp& warp, uint32_t mask, WarpOp op) {
  switch (op) {
    case WarpOp::kSync:
      break;
    case WarpOp::kShfl:
    case WarpOp::kShflXor:
    case WarpOp::kShflUp:
    case WarpOp::kShflDown:
      shuffle(warp, mask, op);
      break;
    case WarpOp::kBallot:
      broadcast(warp, mask, vote(warp, mask));
      break;
    case WarpOp::kAny:
      broadcast(warp, mask, vote(warp, mask) != 0);
      break;
    case WarpOp::kAll:
      broadcast(warp, mask, vote(warp, mask) == mask);
      break;
    case WarpOp::kMatchAny:
      match(warp, mask);
      break;
    case WarpOp::kElect:
      // The same lane every time, as in the hardware: bulk copies belong to the thread that issued.
      for (int lane = 0; lane < kLanes; ++lane) warp.results[lane] = lane == 0;
      break;
  }
}

[[noreturn]] void refuse_mask(Fiber* self, WarpOp op, uint32_t mask) {
  const Warp* warp = self->warp;
  std::string call = std::string(name_of(op)) + " with mask " + hex(mask);
  if (!(mask >> self->lane & 1)) {
    t_state.executor->fail(self, call + ": the mask lacks the calling lane");
  }
  t_state.executor->fail(self, call + ": the mask names lanes " + hex(mask & warp->gone) +
                                   ", which have exited or do not exist");
}

// A lane that waits elsewhere for us, and that we would wait for here.
[[noreturn]] void refuse_divergence(Fiber* self, WarpOp op, uint32_t mask,
                                    const PendingCollective& other) {
  t_state.executor->fail(self, std::string("diverged: calls ") + name_of(op) + " with mask " +
                                   hex(mask) + " while lanes " + hex(other.arrived) +
                                   " of its warp wait for it in " + name_of(other.op) +
                                   " with mask " + hex(other.mask));
}

}  // namespace

const char* name_of(WarpOp op) {
  switch (op) {
    case WarpOp::kSync:
      return "sync_warp";
    case WarpOp::kShfl:
      return "shfl";
    case WarpOp::kShflXor:
      return "shfl_xor";
    case WarpOp::kShflUp:
      return "shfl_up";
    case WarpOp::kShflDown:
      return "shfl_down";
    case WarpOp::kBallot:
      return "ballot";
    case WarpOp::kAny:
      return "any";
    case WarpOp::kAll:
      return "all";
    case WarpOp::kMatchAny:
      return "match_any";
    case WarpOp::kElect:
      return "elect_one";
  }
  return "?";
}

uint64_t warp_collective(WarpOp op, uint32_t mask, uint64_t value, uint32_t argument) {
  Fiber* self = t_state.current;
  Warp& warp = *self->warp;
  const int lane = self->lane;
  const uint32_t bit = 1u << lane;
  if (!(mask & bit) || (mask & warp.gone)) [[unlikely]]
    refuse_mask(self, op, mask);

  PendingCollective* pending = nullptr;
  for (int i = 0; i < warp.num_pending; ++i) {
    PendingCollective& other = warp.pending[i];
    if (other.mask == mask && other.op == op) {
      pending = &other;
    } else if ((other.mask & bit) && (mask & other.arrived)) [[unlikely]] {
      refuse_divergence(self, op, mask, other);
    }
  }
  Meeting own_meeting;  // of the first to arrive
  warp.values[lane] = value;
  warp.arguments[lane] = argument;
  if (t_state.simulated) arrive_at_warp(self, op, pending ? pending->meeting : own_meeting);

  const uint32_t arrived = (pending ? pending->arrived : 0) | bit;
  if (arrived != mask) {
    if (!pending) {
      pending = &warp.pending[warp.num_pending++];
      *pending = PendingCollective{.mask = mask, .arrived = 0, .op = op, .meeting = own_meeting};
    }
    pending->arrived = arrived;
    self->wait = Wait::kCollective;
    t_state.executor->suspend(self);
    return warp.results[lane];
  }

  complete(warp, mask, op);
  const Meeting meeting = pending ? pending->meeting : own_meeting;
  if (t_state.simulated) leave_warp(self, op, meeting);
  if (pending) *pending = warp.pending[--warp.num_pending];
  // From the last lane to the first: those made ready last run first.
  for (uint32_t left = mask & ~bit; left;) {
    const int other = 31 - __builtin_clz(left);
    left &= ~(1u << other);
    Fiber* fiber = warp.lanes[other];
    fiber->wait = Wait::kNone;
    if (t_state.simulated) leave_warp(fiber, op, meeting);
    t_state.executor->make_ready_hot(fiber);
  }
  return warp.results[lane];
}

}  // namespace deep_comm::simt
