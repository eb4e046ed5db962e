// Masks in a group of several nodes: as in ../sync/mask.cuh, whose words are those of one node.
// Every rank has one word per rank in its memory. Any rank may set it; only a clean, or the host of
// its owner, clears it. So the set that a rank follows is the union of all votes.
//
// Ranks that wait for a silent rank become late themselves, in this call or the next. So a rank
// that waits long writes from time to time that it is alive, and waits for it are renewed.
//
//   word          owner      written by              read by             order     reset
//   masked        this rank  its waits, any rank's,  its kernels         relaxed   clean, host
//                            its host
//   alive         this rank  waits of each rank,     waits for that rank relaxed   clean
//                            a word each
//   participants  this rank  block 0 of dispatch's   its other blocks    relaxed   never: number
//                            receive phase
//
// A set of ranks in shared memory has a bit per rank, 32 in a word.
#pragma once

#include "device/low_latency/rail_args.cuh"
#include "device/sync/await.cuh"

namespace deep_comm {

// Peers of waits are ranks of the group.
struct RailContext : Context {
  const LowLatencyGroup* group;
  const LowLatencyRailWords* words;

  DC_DEVICE uint64_t* own_word(size_t words_of_ranks, int rank) const {
    return reinterpret_cast<uint64_t*>(world.bases[world.rank] + words_of_ranks) + rank;
  }
  DC_DEVICE uint64_t* mask_word(int rank) const { return own_word(words->masked, rank); }
};

DC_DEVICE RailContext rail_context(const World& world, const RailReach& reach, Kernel kernel,
                                   uint32_t operation, bool can_shrink) {
  return {{world, kernel, operation, can_shrink, {reach.group.rank, 0, 1}, 1},
          &reach.group,
          &reach.words};
}

// The segment of a rank that this rank's own stores reach, because it is of this node, or of
// another one that NVLink reaches; else null. Either all ranks of a node are reached, or none.
DC_DEVICE uint8_t* reached_segment(const World& world, const LowLatencyGroup& group, int peer) {
  if (group.is_near(peer)) return world.bases[peer - group.first_near];
  return arch::rail_near(group.port, group.first_peer + peer);
}

// Sends a word that no other data depends on. Every word has its own queue, so it never returns to
// an older value.
DC_DEVICE void send_word(const World& world, const LowLatencyGroup& group, int peer, size_t offset,
                         uint64_t value) {
  uint8_t* reached = reached_segment(world, group, peer);
  if (reached != nullptr) {
    arch::st_relaxed_sys(reinterpret_cast<uint64_t*>(reached + offset), value);
  } else {
    arch::rail_signal(group.port, group.first_peer + peer, group.word_qp(), offset, value);
  }
}

DC_DEVICE bool is_masked(const RailContext& context, int rank) {
  return arch::ld_relaxed_sys(context.mask_word(rank)) != 0;
}

// True if this kernel goes on without `peer`. For the slow path, after a wait has failed.
DC_DEVICE bool is_given_up(const RailContext& context, int peer) {
  return context.can_shrink && is_masked(context, peer);
}

// Sends one word to all other ranks: that of `rank`, in the array of words that begins at `words`.
DC_DEVICE void send_to_all(const RailContext& context, size_t words, int rank, uint64_t value) {
  for (int position = 0; position < context.group->num_ranks; ++position) {
    const int owner = context.group->rank_at(position);
    if (owner == context.group->rank) continue;
    send_word(context.world, *context.group, owner,
              words + sizeof(uint64_t) * static_cast<size_t>(rank), value);
  }
}

// Tells all ranks, also the masked one, which may only have been slow.
DC_DEVICE void mask_rank(const RailContext& context, int rank) {
  if (is_masked(context, rank)) return;  // another thread has told them
  arch::st_relaxed_sys(context.mask_word(rank), uint64_t{1});
  // pairs with: is_masked at the others — nothing but the word itself
  if (!arch::fault(Fault::kSkipVote)) send_to_all(context, context.words->masked, rank, 1);
}

DC_DEVICE int own_rank(const RailContext& context) { return context.group->rank; }
DC_DEVICE uint64_t* alive_word(const RailContext& context, int peer) {
  return context.own_word(context.words->alive, peer);
}
DC_DEVICE void send_alive(const RailContext& context, uint64_t tick) {
  // pairs with: may_go_on at the others — nothing but the word itself
  send_to_all(context, context.words->alive, context.group->rank, tick);
}

// That of a Context, by the masks above; the waits of a RailContext call it.
DC_DEVICE_COLD bool may_go_on(RailContext context, WaitFor wait, uint64_t seen, uint64_t expected,
                              uint64_t patience, WaitClock* clock) {
  return goes_on(context, wait, seen, expected, patience, clock);
}

// ---- sets of ranks ------------------------------------------------------------------------------

DC_HOST_DEVICE int num_set_words(int num_ranks) { return ceil_div(num_ranks, kWarpSize); }

DC_DEVICE uint32_t bit_in_set(int rank) { return 1u << rank % kWarpSize; }

DC_DEVICE bool is_in_set(const uint32_t* set, int rank) {
  return (set[rank / kWarpSize] & bit_in_set(rank)) != 0;
}

// Several threads may remove ranks at the same time. A barrier of the block follows.
DC_DEVICE void take_from_set(uint32_t* set, int rank) {
  uint32_t* word = set + rank / kWarpSize;
  uint32_t seen = arch::ld_relaxed_cta(word);
  while ((seen & bit_in_set(rank)) != 0) {
    const uint32_t found = arch::atomic_cas_relaxed_cta(word, seen, seen & ~bit_in_set(rank));
    if (found == seen) return;
    seen = found;
  }
}

// One warp: the ranks for which is_there(rank) holds.
template <class IsThere>
DC_DEVICE void make_set(uint32_t* set, int num_ranks, IsThere is_there) {
  for (int word = 0; word < num_set_words(num_ranks); ++word) {
    const int rank = word * kWarpSize + arch::lane_idx();
    const uint32_t bits = arch::ballot(kFullMask, rank < num_ranks && is_there(rank));
    if (arch::lane_idx() == 0) set[word] = bits;
  }
}

// One thread.
DC_DEVICE void copy_set(uint32_t* set, const uint32_t* from, int num_ranks) {
  for (int word = 0; word < num_set_words(num_ranks); ++word) set[word] = from[word];
}

}  // namespace deep_comm
