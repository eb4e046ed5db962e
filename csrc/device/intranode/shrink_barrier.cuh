// shrink_barrier: the barrier of the ranks that go on without others (docs/design/0043).
// Buffer.reset(without=...) runs it twice: before and after each rank zeroes its words.
//
// in     number, odd: the first barrier of a reset. This rank's kernels have ended, and it launches
//        none before the second barrier
//        number, even: the second. This rank's words are zero
//        world.absent: the ranks to be left out
// out    result: the number that all have agreed on, and whether all have agreed
// grid   one block of one warp; lane p handles rank p
// words  proposal · owner: receiver · written by each peer, also into absent ranks' segments, which
//                   learn who disagrees · read by the ranks that are not absent · release/acquire
//                   sys · generation: the barrier's number, which only grows; zeroed only by a
//                   reset of all ranks
//        masked_out, abort · owner: the absent rank · written by the others · read at entry of its
//                   kernels and by its waits · zeroed only by a reset of all ranks
// waits  proposal: unblocked by the peer's own shrink barrier
// after  the first: no kernel of the participants runs. The second: all of their words are zero
//
// Numbers. A rank proposes its last number plus one, odd for a first barrier, and goes on with the
// highest proposal that it has seen. So a rank that failed and tries again takes along those that
// come for the first time: their lower numbers count as well, because all that the first barrier
// needs is that each rank has come. A rank in its second barrier that finds a peer in a new first
// one begins anew.
#pragma once

#include "device/intranode/args.cuh"
#include "device/sync/barrier.cuh"

namespace deep_comm {

// Ranks notice one after the other that one is silent. A rank that has waited for it is late for
// the next.
inline constexpr uint64_t kShrinkBarrierPatience = 4;

// Lane p of the awaited ranks: rank p's proposal, at least `number`.
DC_DEVICE bool await_proposal(const Context& context, int peer, uint32_t number, Tagged* proposal) {
  const World& world = context.world;
  const WaitFor wait{Stage::kShrinkBarrier, Word::kProposal, peer, -1};
  uint64_t raw = 0;
  const bool arrived = await<Scope::kSys>(
      context, world.proposal(world.rank, peer), wait, Tagged::pack(number, world.absent),
      [=](uint64_t word) { return Tagged::unpack(word).has_reached(number); }, &raw);
  *proposal = Tagged::unpack(raw);
  if (arrived && is_masked_out(world)) {
    report_masked_out(context, wait, 0);
    return false;
  }
  if (!arrived || proposal->value == world.absent) return arrived;
  report_error(context, {ErrorKind::kConfigMismatch, wait, proposal->value, world.absent, 0, -1});
  abort_rank(context);
  return false;
}

// Tells an absent rank that it is left out, whatever it is doing.
DC_DEVICE void mask_out(const ShrinkBarrierArgs& args, int peer) {
  const World& world = args.world;
  arch::st_relaxed_sys(world.masked_out(peer), 1u);
  if (args.tells_low_latency) arch::st_relaxed_sys(world.vote(peer, world.rank, peer), 1);
  // Wakes the waits there. pairs with: may_go_on — the words above
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
  if (is_peer) {
    // pairs with: await_proposal at the peer — this rank's kernels have ended, or its words are zero
    // order-proof: a launch of the simulation begins with a release of all before it
    arch::st_release_sys(world.proposal(peer, world.rank), Tagged::pack(args.number, world.absent));
  }
  bool ok = true;
  Tagged proposal{world.absent, args.number};
  if (is_awaited) ok = await_proposal(context, peer, args.number, &proposal);
  const bool is_answered = !ok && proposal.has_reached(args.number);  // but not as it should be
  // The end of the kernel hands each lane's acquire on. Before that nobody needs another lane's.
  ok = arch::all(kFullMask, ok);
  // A peer in its second barrier has passed the first one.
  uint32_t highest = is_first ? proposal.generation - 1 | 1u : proposal.generation;
  if (!ok) highest = args.number;
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    highest = max_of(highest, arch::shfl_xor(kFullMask, highest, mask));
  }
  // A rank that has waited in vain will come again, perhaps leaving out more ranks. A peer that
  // comes meanwhile must not see this proposal.
  const bool takes_back = !ok && !arch::any(kFullMask, is_answered);
  if (takes_back && is_peer && !arch::fault(Fault::kKeepProposal)) {
    arch::st_relaxed_sys(world.proposal(peer, world.rank), uint64_t{0});
  }
  if (ok && is_first && is_peer && world.is_absent(peer)) mask_out(args, peer);
  if (peer != 0) return;
  arch::st_relaxed_sys(&args.result->number, highest);
  const bool has_agreed = ok && (is_first || highest == args.number);
  arch::st_relaxed_sys(&args.result->has_agreed, has_agreed ? 1u : 0u);
}

}  // namespace deep_comm
