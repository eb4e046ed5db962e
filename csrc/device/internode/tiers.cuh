// How a kernel over both tiers is entered and left.
//
// Entry: the ranks of one local index announce themselves over their rail. A rank that has heard
// from all of them announces itself to its node. So a rank that has heard from its node knows that
// all ranks of the group have entered, hence finished their earlier kernels: the rings of both
// tiers are free.
//
// Failure: a rank that gives up tells its node which rank it blames. Waits inside the node last
// longer than those on the rail. So a rank that waits for a neighbour which waits for a silent node
// learns the silent rank's name.
#pragma once

#include "device/internode/args.cuh"
#include "device/sync/barrier.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

inline constexpr uint32_t kAbortedByNeighbour = 2;

// One kernel's contexts: of the node, whose peers are local ranks, and of the rail, whose peers are
// nodes.
struct TierContexts {
  Context node;
  Context rail;

  DC_DEVICE static TierContexts make(const World& world, const TwoTier& tiers, Kernel kernel) {
    const uint32_t generation = current_generation(world);
    const int num_local = tiers.ranks_per_node();
    return {{world, kernel, generation, false, {tiers.rank, tiers.rail.node * num_local, 1}, 2},
            {world, kernel, generation, false, {tiers.rank, world.rank, num_local}, 1}};
  }
};

DC_DEVICE uint64_t* own_word(const World& world, size_t offset) {
  return reinterpret_cast<uint64_t*>(world.bases[world.rank] + offset);
}

// One warp: tells the ranks of this local index that this one has entered.
DC_DEVICE void announce_on_rail(const Context& rail, const RailTier& tier, uint32_t signature) {
  for (int node = arch::lane_idx(); node < tier.num_nodes(); node += kWarpSize) {
    if (node == tier.node) continue;
    // pairs with: await_rail_arrivals at the node — what was put there before, on the same queue,
    // or stored
    write_rail_word(rail.world, tier, node, 0, tier.layout.arrived_of(tier.node),
                    Tagged::pack(rail.generation, signature));
  }
}

// One warp: waits until all of them have entered; the result is uniform.
DC_DEVICE bool await_rail_arrivals(const Context& rail, const RailTier& tier, uint32_t signature) {
  bool ok = true;
  for (int node = arch::lane_idx(); node < tier.num_nodes() && ok; node += kWarpSize) {
    if (node == tier.node || arch::fault(Fault::kSkipEntryBarrier)) continue;
    const WaitFor wait{Stage::kRailBarrier, Word::kRailArrived, node, -1};
    const uint64_t expected = Tagged::pack(rail.generation, signature);
    uint64_t raw = 0;
    ok = await<Scope::kSys>(
        rail, own_word(rail.world, tier.layout.arrived_of(node)), wait, expected,
        [&](uint64_t word) { return Tagged::unpack(word).has_reached(rail.generation); }, &raw);
    ok = ok && agrees_on_operation(rail, Stage::kRailBarrier, node, raw, signature);
  }
  arch::sync_warp();  // hands each lane's acquire to the whole warp
  return arch::all(kFullMask, ok);
}

// One warp, after a failed wait on the rail. If the ranks disagree there, its neighbours learn that
// at entry. (They learn of a timeout from share_failure, after their own wait.)
DC_DEVICE void announce_dispute(const TierContexts& contexts) {
  const uint32_t kind = arch::ld_relaxed_sys(&contexts.node.world.error->kind);
  if (kind == static_cast<uint32_t>(ErrorKind::kConfigMismatch)) {
    announce_arrival(contexts.node, Operation::kDisputed);
  }
}

// One thread of the last block. What this rank learned from a neighbour becomes its own error; what
// it found itself is passed to its neighbours.
DC_DEVICE void share_failure(const TierContexts& contexts) {
  const World& world = contexts.node.world;
  LocalState* state = world.state();
  // pairs with: the release below at a neighbour — the rank it blames
  // order-proof: matters if no wait of this rank has seen the word. One that has fences behind it,
  // and the barriers and counts of blocks since then pass that on.
  const uint32_t abort = arch::ld_acquire_sys(&state->abort);
  if (abort == kAbortedByNeighbour) {
    const int blamed = static_cast<int>(arch::ld_relaxed_sys(&state->blamed)) - 1;
    Context context = contexts.node;
    context.names.first = 0;  // the blamed rank has its name in the group
    report_error(context, {ErrorKind::kPeerTimeout,
                           {Stage::kBlamed, Word::kBlamed, blamed, -1},
                           0,
                           0,
                           contexts.node.world.timeout_ns,
                           -1});
  } else if (abort != 0 && arch::ld_relaxed_sys(&world.error->kind) ==
                               static_cast<uint32_t>(ErrorKind::kPeerTimeout)) {
    const int32_t peer = arch::ld_relaxed_sys(&world.error->peer);
    if (peer < 0 || arch::fault(Fault::kSkipBlame)) return;
    for (int local = 0; local < world.num_ranks; ++local) {
      if (local == world.rank) continue;
      LocalState* theirs = reinterpret_cast<LocalState*>(world.bases[local]);
      if (arch::ld_relaxed_sys(&theirs->abort) != 0) continue;
      arch::st_relaxed_sys(&theirs->blamed, static_cast<uint32_t>(peer + 1));
      // pairs with: share_failure there — the blamed rank
      arch::st_release_sys(&theirs->abort, kAbortedByNeighbour);
    }
  }
}

// True if the notify before has failed: nothing may be sent.
DC_DEVICE bool notify_has_failed(const World& world) {
  const uint64_t word = arch::ld_relaxed_gpu(&world.state()->notified);
  return static_cast<NotifyResult>(Tagged::unpack(word).value) == NotifyResult::kFailed;
}

// Every thread of every block calls this last.
DC_DEVICE void leave_tiers(const TierContexts& contexts) {
  const BlockExit exit = exit_block(contexts.node);
  note_in_block(contexts.node, TraceStep::kLeft);
  if (!exit.is_last) return;
  if (arch::thread_idx() == 0 && is_aborted(contexts.node.world)) share_failure(contexts);
  close_generation(contexts.node);
}

}  // namespace deep_comm
