// meet: ranks that go on without others come together, without those, before and after each of
// them sets its words to zero. Buffer.reset(without=...) is two such meetings (docs/design/0043).
//
// in     number, odd: the first meeting of a reset. This rank's kernels have ended, and nothing is
//        launched before the second one
//        number, even: the second. This rank's words are zeros
//        world.absent: the ranks to be done without
// out    result: the number that all have agreed on, whether they have met
// grid   one block of one warp; lane p looks after rank p
// words  proposal · owner: receiver · written by each peer, absent ones' words as well: they learn who
//                   disagrees · read by the ranks that are not absent · release/acquire sys · generation:
//                   the meeting's number, which only grows; zeroed by a reset of all ranks alone
//        masked_out, abort · owner: the absent rank · written by the others · read at entry of its
//                   kernels and by its waits · zeroed by a reset of all ranks alone
// waits  proposal: unblocked by the peer's own meeting
// after  the first: no kernel of the ranks that have met runs. The second: all of their words are zeros
//
// Numbers. A rank proposes one more than its last one, odd for a first meeting; the highest proposal
// is everybody's. So a rank that has tried in vain, and tries again, takes along those that come
// for the first time. Whoever is in a second meeting, and finds that a peer has begun anew, does so, too.
#pragma once

#include "device/intranode/args.cuh"
#include "device/sync/barrier.cuh"

namespace deep_comm {

// Ranks notice one after the other that one is silent: who has waited for it is late for the next.
inline constexpr uint64_t kShrinkBarrierPatience = 4;

// Lane p of those that are awaited: rank p's proposal, not lower than `number`.
DC_DEVICE bool await_proposal(const Context& context, int peer, uint32_t number, Tagged* proposal) {
  const World& world = context.world;
  const WaitFor wait{Stage::kShrinkBarrier, Word::kProposal, peer, -1};
  uint64_t raw = 0;
  const bool has_come = await<Scope::kSys>(
      context, world.proposal(world.rank, peer), wait, Tagged::pack(number, world.absent),
      [=](uint64_t word) { return Tagged::unpack(word).has_reached(number); }, &raw);
  *proposal = Tagged::unpack(raw);
  if (has_come && is_masked_out(world)) {
    report_masked_out(context, wait, 0);
    return false;
  }
  if (!has_come || proposal->value == world.absent) return has_come;
  report_error(context, {ErrorKind::kConfigMismatch, wait, proposal->value, world.absent, 0, -1});
  abort_rank(context);
  return false;
}

// Tells the ranks that are done without, whatever they are at.
DC_DEVICE void mask_out(const ShrinkBarrierArgs& args, int peer) {
  const World& world = args.world;
  arch::st_relaxed_sys(world.masked_out(peer), 1u);
  if (args.tells_low_latency) arch::st_relaxed_sys(world.vote(peer, world.rank, peer), 1);
  // What waits there wakes up. pairs with: may_go_on — the words above.
  arch::st_release_sys(&reinterpret_cast<LocalState*>(world.bases[peer])->abort, 1u);
}

DC_DEVICE void shrink_barrier(const ShrinkBarrierArgs& args) {
  const World& world = args.world;
  const Context context{.world = world,
                        .kernel = Kernel::kShrinkBarrier,
                        .generation = 0,
                        .patience = kShrinkBarrierPatience};
  const int peer = arch::lane_idx();
  const bool is_peer = peer < world.num_ranks && peer != world.rank;
  const bool is_awaited = is_peer && !world.is_absent(peer);
  const bool is_first = args.number % 2 == 1;
  uint32_t number = args.number, highest = number;
  bool ok = true, is_answered = false;
  do {
    number = highest;
    // pairs with: await_proposal at the peer — this rank's kernels have ended, or its words are zeros.
    if (is_peer) {
      arch::st_release_sys(world.proposal(peer, world.rank), Tagged::pack(number, world.absent));
    }
    Tagged proposal{world.absent, number};
    if (is_awaited) ok = await_proposal(context, peer, number, &proposal);
    is_answered = !ok && proposal.has_reached(number);  // otherwise than it should be
    arch::sync_warp();  // hands each lane's acquire to the whole warp
    ok = arch::all(kFullMask, ok);
    // A peer that is in its second meeting has been in the first one before.
    highest = is_first ? proposal.generation - 1 | 1u : proposal.generation;
    if (!ok) highest = number;
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
      highest = max_of(highest, arch::shfl_xor(kFullMask, highest, mask));
    }
  } while (is_first && highest != number);
  // Who has waited in vain will come again, perhaps with more ranks to be done without; who comes
  // meanwhile must not meet what he said before.
  if (!ok && !arch::any(kFullMask, is_answered) && is_peer) {
    arch::st_relaxed_sys(world.proposal(peer, world.rank), uint64_t{0});
  }
  if (ok && is_first && is_peer && world.is_absent(peer)) mask_out(args, peer);
  if (peer != 0) return;
  arch::st_relaxed_sys(&args.result->number, highest);
  arch::st_relaxed_sys(&args.result->has_agreed, ok && highest == number ? 1u : 0u);
}

}  // namespace deep_comm
