// Masks: a rank that stays silent until the deadline is masked, and the others go on without it.
// The rank whose wait expired masks it and sends a vote to all other ranks. Every wait for the
// masked rank reads the votes. So all survivors go on soon, at the cost of one deadline, and later
// kernels do not wait for the masked rank at all.
//
// Ranks that wait for a silent rank become late themselves, in this call or the next. So a rank
// that waits long writes from time to time that it is alive, and waits for it are renewed.
//
//   word    owner     written by             read by                  order     reset
//   masked  this rank its waits, host        its kernels              relaxed   clean
//   votes   receiver  any rank               the receiver's kernels   relaxed   clean, by all ranks
//   alive   receiver  waits of each rank,    waits for that rank      relaxed   clean, by all ranks
//                     a word each
#pragma once

#include "device/sync/context.cuh"

namespace deep_comm {

DC_DEVICE_COLD bool is_masked(const World& world, int peer) {
  if (arch::ld_relaxed_gpu(world.masked(peer)) != 0) return true;
  for (int from = 0; from < world.num_ranks; ++from) {
    if (from != world.rank && arch::ld_relaxed_sys(world.vote(world.rank, from, peer)) != 0)
      return true;
  }
  return false;
}

// True if this rank has masked `peer`. For the slow path, after a wait has failed.
DC_DEVICE bool is_given_up(const Context& context, int peer) {
  return context.can_shrink && is_masked(context.world, peer);
}

DC_DEVICE void mask_rank(const World& world, int peer) {
  arch::st_relaxed_gpu(world.masked(peer), 1);
  if (arch::fault(Fault::kSkipVote)) return;
  for (int owner = 0; owner < world.num_ranks; ++owner) {
    // pairs with: is_masked at the owner — nothing but the word itself
    if (owner != world.rank) arch::st_relaxed_sys(world.vote(owner, world.rank, peer), 1);
  }
}

// An expired wait is renewed at most so many times, and only if its peer has shown since that it is
// alive.
inline constexpr int kMaxRenewals = 3;

// What waits need of a context's masks; RailContext has its own (low_latency/rail_mask.cuh).
DC_DEVICE int own_rank(const Context& context) { return context.world.rank; }
DC_DEVICE bool is_masked(const Context& context, int peer) {
  return is_masked(context.world, peer);
}
DC_DEVICE void mask_rank(const Context& context, int peer) { mask_rank(context.world, peer); }
// The word of this rank by which `peer` shows that it is alive.
DC_DEVICE uint64_t* alive_word(const Context& context, int peer) {
  return context.world.alive(context.world.rank, peer);
}
DC_DEVICE void send_alive(const Context& context, uint64_t tick) {
  const World& world = context.world;
  for (int owner = 0; owner < world.num_ranks; ++owner) {
    // pairs with: may_go_on at the owner — nothing but the word itself
    if (owner != world.rank) arch::st_relaxed_sys(world.alive(owner, world.rank), tick);
  }
}

// Tells the other ranks that this one is alive while it waits. The first thread in each fraction of
// the timeout does it.
template <class AnyContext>
DC_DEVICE void say_alive(const AnyContext& context, uint64_t now_ns) {
  constexpr uint64_t kPerTimeout = 8;
  const uint64_t tick = 1 + now_ns / (context.world.timeout_ns / kPerTimeout + 1);
  uint64_t* own = alive_word(context, own_rank(context));
  const uint64_t last = arch::ld_relaxed_gpu(own);
  if (last == tick || arch::fault(Fault::kSkipAlive)) return;
  if (arch::atomic_cas_relaxed_gpu(own, last, tick) != last) return;
  send_alive(context, tick);
}

enum class Verdict { kGoOn, kWithout, kOut };

// What a wait for `peer` has to do: go on, stop because the peer is masked, or stop because this
// rank is.
template <class AnyContext>
DC_DEVICE Verdict verdict_on(const AnyContext& context, int peer) {
  if (is_masked(context, own_rank(context))) return Verdict::kOut;
  return is_masked(context, peer) ? Verdict::kWithout : Verdict::kGoOn;
}

}  // namespace deep_comm
