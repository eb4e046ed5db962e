// combine, staged mode: every row and every sum has a slot of its own at its destination (see
// combine_staging.cuh). So nobody waits for credit, and any block may send, add or forward.
//
// grid   any number of blocks: warp 0 publishes, num_senders warps move rows inside the node, or,
//        with one rank per node, to other nodes (combine_staged_send.cuh), the others add
//        (combine_staged_add.cuh); num_forwarders of them first add rows that cross to other nodes,
//        then tokens like the rest
// words  recv_line[chunk / 8].landed[chunk % 8] · owner: receiver · written by the sender's block
//                                · fence and relaxed store / acquire sys
//        landed[node][chunk]   · the same between nodes · stored, or put after the sums on a queue
//        added[node][chunk]    · this rank · complete sums of a chunk, if several warps add them;
//                                zero at rest
//        taken (num_chunks, 0: to return, last: to forward) · this rank · see sync/generation.cuh
// waits  landed in the node: unblocked by the sender of the chunk, which waits only for its
//        publisher, which waits for nobody. landed between nodes: by the node's forwarding warps,
//        which wait only for rows of their node; with one rank per node by its sending warps, which
//        wait only for their publisher
#pragma once

#include "device/internode/combine_staged_add.cuh"
#include "device/internode/combine_staged_send.cuh"

namespace deep_comm {

// One warp; lane w publishes what mover w has landed.
class StagedPublisher {
 public:
  DC_DEVICE StagedPublisher(const TierContexts& contexts, const InternodeCombineArgs& args,
                            StagedEntry* entry)
      : contexts_(contexts),
        args_(args),
        entry_(entry),
        num_local_senders_(args.tiers.ranks_per_node() == 1 ? 0 : args.num_senders) {}

  DC_DEVICE void run() {
    publish_landed(contexts_.node, entry_->progress, entry_->landed,
                   args_.num_senders + args_.num_forwarders, [&](int item) {
                     const bool is_local = arch::lane_idx() < num_local_senders_;
                     if (is_local && item >= 0) ChunksInNode::publish_chunk(contexts_.node, item);
                     publish_sums(is_local ? -1 : item);
                   });
  }

 private:
  // The whole warp, after a fence. Lanes with a chunk, or a sum of one, pass it. The last sum of a
  // chunk sends the chunk.
  DC_DEVICE void publish_sums(int item) const {
    const RailTier& tier = args_.tiers.rail;
    const SumItem sums(item);
    bool is_complete = item >= 0, is_counted = false;
    int num_rows = 0;
    if (is_complete) {
      num_rows = entry_->tables.chunks_to(args_, sums.node).rows_of(sums.chunk);
      is_counted = num_rows > 1 && args_.tiers.ranks_per_node() > 1;
      if (is_counted) is_complete = count_sum(sums, num_rows);
    }
    if (!arch::any(kFullMask, is_complete)) return;
    // pairs with: the fence before, in the blocks that counted — the chunk's sums. After it their
    // word may be stored, and the NIC may read them.
    if (arch::any(kFullMask, is_counted) && !arch::fault(Fault::kSkipRailFence))
      arch::fence_acq_rel_sys();
    uint8_t* near = is_complete ? near_segment(args_.world, tier, sums.node) : nullptr;
    if (near != nullptr) publish_stored_sums(contexts_.rail, args_, sums, num_rows, near);
    // Hands what each lane has counted to lane 0, which puts.
    arch::sync_warp();
    for (uint32_t far = arch::ballot(kFullMask, is_complete && near == nullptr); far != 0;
         far &= far - 1) {
      const int lane = arch::ffs(far) - 1;
      put_sums(SumItem(arch::shfl(kFullMask, item, lane)), arch::shfl(kFullMask, num_rows, lane));
    }
  }
  // Whether this was the chunk's last sum.
  DC_DEVICE bool count_sum(const SumItem& sums, int num_rows) const {
    uint32_t* added =
        reinterpret_cast<uint32_t*>(args_.world.bases[args_.world.rank] +
                                    args_.tiers.rail.layout.added_of(sums.node, sums.chunk));
    const bool is_last =
        arch::atomic_add_relaxed_gpu(added, 1u) + 1 == static_cast<uint32_t>(num_rows);
    if (is_last) arch::st_relaxed_gpu(added, 0u);
    return is_last;
  }
  // The whole warp, after that fence.
  DC_DEVICE void put_sums(const SumItem& sums, int num_rows) const {
    const RailTier& tier = args_.tiers.rail;
    const size_t slot_bytes = args_.message.slot_bytes();
    const int first = entry_->tables.chunks_to(args_, sums.node).first_row(sums.chunk);
    const int qp = tier.landed_qp(sums.chunk);
    arch::rail_put_warp(tier.port, sums.node, qp,
                        staging_at_node(contexts_.rail, tier, sums.node) + first * slot_bytes,
                        entry_->node_slots[sums.node] + first * slot_bytes,
                        static_cast<uint32_t>(num_rows * slot_bytes));
    if (arch::lane_idx() != 0) return;
    // pairs with: TokenAdder::await_sum at the node — the put above, on the same queue
    arch::rail_signal(tier.port, sums.node, qp, tier.layout.landed_of(tier.node, sums.chunk),
                      Tagged::pack(contexts_.rail.generation, 1));
  }

  const TierContexts& contexts_;
  const InternodeCombineArgs& args_;
  StagedEntry* entry_;
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
