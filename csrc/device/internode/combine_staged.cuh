// combine, staged mode: every row and every sum has a slot of its own at its destination (see
// combine_staging.cuh). So nobody waits for credit, and any block may send, add or forward.
//
// grid   any number of blocks: warp 0 publishes, num_senders warps move rows inside the node, or,
//        with one rank per node, to other nodes (combine_staged_send.cuh), the others add
//        (combine_staged_add.cuh); num_forwarders of them first add rows that cross to other nodes,
//        then tokens like the rest
// words  recv_line[chunk / 8].landed[chunk % 8] · owner: receiver · written by the sender's
//                                publisher · fence and relaxed store / acquire sys
//        landed[node][chunk]   · the same between nodes · stored, or put after the sums on a queue
//        added[node][chunk]    · this rank · complete sums of a chunk; zero at rest
//        taken (num_chunks, own: rows to forward) · this rank · see sync/generation.cuh
// waits  landed in the node: unblocked by the sender of the chunk, which waits only for its
//        publisher, which waits for nobody. landed between nodes: by the node's forwarding warps,
//        which wait only for rows of their node; with one rank per node by its sending warps, which
//        wait only for their publisher
#pragma once

#include "device/internode/combine_staged_add.cuh"
#include "device/internode/combine_staged_send.cuh"

namespace deep_comm {

// One warp; lane w publishes what mover w has landed. One fence serves all movers: see
// publisher.cuh.
class StagedPublisher {
 public:
  DC_DEVICE StagedPublisher(const TierContexts& contexts, const InternodeCombineArgs& args,
                            StagedEntry* entry)
      : contexts_(contexts),
        args_(args),
        entry_(entry),
        num_movers_(args.num_senders + args.num_forwarders),
        num_local_senders_(args.tiers.ranks_per_node() == 1 ? 0 : args.num_senders) {}

  DC_DEVICE void run() {
    const int lane = arch::lane_idx(), mover = min_of(lane, num_movers_ - 1);
    LandedItems& landed = entry_->landed;
    uint32_t num_published = 0;
    while (true) {
      const uint32_t rung = arch::ld_acquire_cta(&entry_->progress.bell);
      arch::sync_warp();
      // Relaxed: with the fence below an acquire.
      const uint32_t word = arch::ld_relaxed_cta(&entry_->progress.words[mover]);
      const uint32_t num_landed = word & ~Progress::kFinished;
      if (arch::any(kFullMask, num_landed != num_published)) {
        // pairs with: Progress::report — the movers' stores, and their items.
        // With the stores of rows' words, a release; also with the counts of sums: see
        // publish_sums. pairs with: LocalRows::await_row — the chunks' rows
        arch::fence_acq_rel_sys();
        while (arch::any(kFullMask, num_landed != num_published)) {
          const bool has_item = lane == mover && num_landed != num_published;
          const int item = has_item ? landed.items[mover][num_published % LandedItems::kDepth] : -1;
          if (has_item && lane < num_local_senders_) publish_rows(item);
          publish_sums(lane >= num_local_senders_ ? item : -1);
          if (num_landed != num_published) ++num_published;
        }
        // pairs with: LandedItems::post — the items have been read
        if (lane == mover) arch::st_release_cta(&landed.num_published[mover], num_published);
      }
      if (arch::all(kFullMask, (word & Progress::kFinished) != 0)) return;
      if (!await_bell(contexts_.node, &entry_->progress.bell, rung)) return;
    }
  }

 private:
  // One lane, after the fence.
  DC_DEVICE void publish_rows(int item) const {
    const World& world = args_.world;
    arch::st_relaxed_sys(
        returned_word(world, item / kMaxPairChunks, world.rank, item % kMaxPairChunks),
        Tagged::pack(contexts_.node.generation, 1));
  }

  // The whole warp, after the fence. Lanes with a finished sum pass its chunk. The last sum of a
  // chunk sends the chunk.
  DC_DEVICE void publish_sums(int item) const {
    const RailTier& tier = args_.tiers.rail;
    bool is_complete = false;
    int num_rows = 0;
    if (item >= 0) {
      const int node = item / kMaxRailChunks, chunk = item % kMaxRailChunks;
      num_rows = entry_->tables.chunks_of(args_, node).rows_of(chunk);
      uint32_t* added = reinterpret_cast<uint32_t*>(args_.world.bases[args_.world.rank] +
                                                    tier.layout.added_of(node, chunk));
      is_complete = arch::atomic_add_relaxed_gpu(added, 1u) + 1 == static_cast<uint32_t>(num_rows);
      if (is_complete) arch::st_relaxed_gpu(added, 0u);
    }
    if (!arch::any(kFullMask, is_complete)) return;
    // pairs with: the fence in run, in the blocks that counted before — the chunk's sums. After it
    // their word may be stored, and the NIC may read them.
    if (!arch::fault(Fault::kSkipRailFence)) arch::fence_acq_rel_sys();
    const int node = item / kMaxRailChunks, chunk = item % kMaxRailChunks;
    const uint32_t num_bytes = static_cast<uint32_t>(num_rows) * args_.message.slot_bytes();
    uint8_t* near = is_complete ? near_segment(args_.world, tier, node) : nullptr;
    if (near != nullptr) {
      arch::rail_count(tier.port, node, tier.landed_qp(chunk), num_bytes);
      // With the fence, a release; pairs with: TokenAdder::await_sum at the node — the chunk's sums
      arch::st_relaxed_sys(
          reinterpret_cast<uint64_t*>(near + tier.layout.landed_of(tier.node, chunk)),
          Tagged::pack(contexts_.rail.generation, 1));
    }
    // Hands what each lane has counted to lane 0, which puts.
    arch::sync_warp();
    for (uint32_t far = arch::ballot(kFullMask, is_complete && near == nullptr); far != 0;
         far &= far - 1) {
      const int lane = arch::ffs(far) - 1;
      put_sums(arch::shfl(kFullMask, node, lane), arch::shfl(kFullMask, chunk, lane),
               arch::shfl(kFullMask, num_bytes, lane));
    }
  }
  // The whole warp, after that fence.
  DC_DEVICE void put_sums(int node, int chunk, uint32_t num_bytes) const {
    const RailTier& tier = args_.tiers.rail;
    const StagingPlan plan(args_, entry_->tables);
    const int first = entry_->tables.chunks_of(args_, node).first_row(chunk);
    const int qp = tier.landed_qp(chunk);
    arch::rail_put_warp(tier.port, node, qp,
                        staging_at_node(contexts_.rail, tier, node) +
                            static_cast<size_t>(first) * args_.message.slot_bytes(),
                        plan.slot(plan.to_node(node) + first), num_bytes);
    if (arch::lane_idx() != 0) return;
    // pairs with: TokenAdder::await_sum at the node — the put above, on the same queue
    arch::rail_signal(tier.port, node, qp, tier.layout.landed_of(tier.node, chunk),
                      Tagged::pack(contexts_.rail.generation, 1));
  }

  const TierContexts& contexts_;
  const InternodeCombineArgs& args_;
  StagedEntry* entry_;
  int num_movers_;
  int num_local_senders_;  // the first movers: their rows stay in the node
};

// Staged mode, the warps that do not send.
template <Dtype kDtype>
DC_DEVICE void add_staged(const TierContexts& contexts, const InternodeCombineArgs& args,
                          StagedEntry* entry) {
  const int adder = arch::warp_idx() - 1 - args.num_senders;
  if (adder < 0) {
    const bool is_early = arch::fault(Fault::kEarlyRailDone);
    if (is_early && arch::lane_idx() == 0) arch::rail_done(args.tiers.rail.port);
    StagedPublisher(contexts, args, entry).run();
    note_in_warp(contexts.node, TraceStep::kSent);
    // Block 0 announced itself before the block barrier. Since then only the publisher posts.
    if (!is_early && arch::lane_idx() == 0) arch::rail_done(args.tiers.rail.port);
    return;
  }
  if (adder >= args.num_adders) return;
  if (adder < args.num_forwarders) {
    SumForwarder<kDtype>(contexts, args, entry, adder).run();
    note_in_warp(contexts.node, TraceStep::kForwarded);
  }
  TokenAdder<kDtype>(contexts, args, entry, adder).run();
}

}  // namespace deep_comm
