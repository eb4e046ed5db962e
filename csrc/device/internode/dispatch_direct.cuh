// dispatch, direct mode: every row has a slot wherever it is sent. So nobody waits for credit, and
// nothing is copied twice at a rank.
//
//   rank (n, l)                       rank (n', l)                          rank (n', j)
//   sender ──bulk stores──→ final rows of the own node
//          ──bulk stores──→ slots of the own rail peers ──forwarder──bulk──→ final rows
//          ──bulk stores──→ final rows there            ──forwarder──bulk──→ final rows
//          publisher ──landed[chunk]──→
//
// The last of these, straight rows: if all rows between nodes are stored, and for a row that (n', l)
// gets itself. Its slot has the metadata alone.
//
// grid   any number of blocks, roles by warp: [0, S) send the tokens they take; the next F forward
//        the chunks they take; then some write metadata of rows for the own node; one publishes
// smem   stages of senders, of forwarders, their mbarriers, DirectEntry
// words  landed[n][chunk]      · owner: receiver · written by node n's publisher, after the rows,
//                                stored or put on the queue of the chunk
//        added[n][chunk]       · this rank · rows of a put chunk that are in their slots;
//                                zero at rest
//        outputs[n]           · owner: a near sender · where this rank's rows from it belong;
//                                written before the arrival
//        offers, announcements · see direct_entry.cuh
//        done                  · owner: receiver · by each local rank's last block
// waits  landed: unblocked by the sender of the chunk, which waits only for its own publisher,
//        which waits for nobody; done: by every local rank's last block
// slots  of the rail are free when all ranks have entered the next kernel. A rank leaves when all
//        of its rows have arrived, hence were read where they were staged, and all that it staged
//        has been read
#pragma once

#include "device/internode/direct_forward.cuh"

namespace deep_comm {

// One warp: writes the metadata of the rows for this node's own ranks; quantised: except scales.
template <bool kIsQuantised>
DC_DEVICE void store_own_meta(const InternodeDispatchArgs& args, DirectEntry* entry, int token) {
  const TwoTier& tiers = args.tiers;
  const int lane = arch::lane_idx(), num_topk = args.message.num_topk, own = tiers.rail.node;
  const int num_local = tiers.ranks_per_node(), num_nodes = tiers.num_nodes();
  const int32_t* places = slots_of(args, token);
  const int row_of_node = arch::ld_nc(places + own);
  if (row_of_node < 0) return;
  const int my_place =
      lane < num_local ? arch::ld_nc(places + num_nodes + own * num_local + lane) : -1;
  const uint32_t rank_mask = arch::ballot(kFullMask, my_place >= 0);
  const ExpertMap map{args.num_experts, tiers.num_ranks()};
  for (int local = 0; local < num_local; ++local) {
    const int place = arch::shfl(kFullMask, my_place, local);
    const TierOutput& output = entry->outputs[local];
    const int64_t row = static_cast<int64_t>(entry->starts(tiers)[local * num_nodes + own]) + place;
    if (place < 0 || row >= output.num_rows) continue;
    if constexpr (!kIsQuantised) {
      store_input_scales(args, output.scales + row * args.num_scales * args.scale_bytes, token);
    }
    const int rank = own * num_local + local;
    const int first = map.first_expert(rank), count = map.num_local_experts(rank);
    for (int k = lane; k < num_topk; k += kWarpSize) {
      const int64_t position = static_cast<int64_t>(token) * num_topk + k;
      const int expert = load_expert(args.topk_idx, position, args.topk_idx_bytes) - first;
      const bool is_here = expert >= 0 && expert < count;
      store_expert(output.topk_idx, row * num_topk + k, args.topk_idx_bytes, is_here ? expert : -1);
      arch::st_weak(output.topk_weights + row * num_topk + k,
                    is_here && args.topk_weights != nullptr
                        ? arch::ld_nc(args.topk_weights + position)
                        : 0.0f);
    }
    if (lane == 0 && output.src_idx != nullptr) {
      arch::st_weak(output.src_idx + row, static_cast<int32_t>(token));
      arch::st_weak(output.src_meta + 2 * row, static_cast<int32_t>(own));
      arch::st_weak(output.src_meta + 2 * row + 1, static_cast<int32_t>(rank_mask));
    }
  }
  if (args.send_rank_head == nullptr) return;
  const int position = args.order.position_of_lane(token, rank_mask, own * num_local);
  write_rank_heads(args, own, row_of_node, OrderedPlace::pack(my_place, position));
}

// A warp of every block that does not send.
template <bool kIsQuantised>
DC_DEVICE void run_direct_warp(const TierContexts& contexts, const InternodeDispatchArgs& args,
                               DirectEntry* entry) {
  const int forwarder = arch::warp_idx() - args.num_send_warps;
  const int meta = forwarder - args.num_forward_warps;
  if (forwarder < args.num_forward_warps) {
    RowForwarder(contexts.rail, args, entry, forwarder).run();
    note_in_warp(contexts.node, TraceStep::kForwarded);
  } else if (meta < args.num_meta_warps) {
    const int first = meta * arch::num_blocks() + arch::block_idx();
    const int step = args.num_meta_warps * arch::num_blocks();
    for (int token = first; token < args.num_tokens; token += step) {
      store_own_meta<kIsQuantised>(args, entry, token);
    }
  } else if (meta == args.num_meta_warps) {
    const bool is_early = arch::fault(Fault::kEarlyRailDone);
    if (is_early && arch::lane_idx() == 0) arch::rail_done(args.tiers.rail.port);
    RowPublisher(contexts.node, args, entry).run();
    note_in_warp(contexts.node, TraceStep::kSent);
    // Block 0 announced itself before the block barrier. Since then only the publisher posts.
    if (!is_early && arch::lane_idx() == 0) arch::rail_done(args.tiers.rail.port);
  }
}

// Every thread of every block, last. The last block tells the neighbours that this rank is done,
// waits for theirs, and closes the generation.
DC_DEVICE void leave_direct(const TierContexts& contexts, const TwoTier& tiers) {
  const Context& context = contexts.node;
  const World& world = context.world;
  if (!exit_block(context).is_last) return;
  // A thread that failed set the abort word before it came here. Its rows may be missing.
  if (!is_aborted(world) && arch::thread_idx() < world.num_ranks) {
    const int peer = arch::thread_idx();
    // pairs with: the await below at the peer — every row and word that this rank has written into
    // its segment, including forwarded ones
    arch::st_release_sys(&announcement_to(context, tiers, peer)->done,
                         Tagged::pack(context.generation, 1));
    uint32_t done = 0;
    const bool ok = arch::fault(Fault::kSkipExitBarrier) ||
                    await_tagged(context, &announcement_by(context, tiers, peer)->done,
                                 {Stage::kDone, Word::kDone, peer, -1}, 1, &done);
    if (ok) note(context, TraceStep::kReceived);  // of the last neighbour that is done
  }
  // order-proof: matters after a failed wait alone, which share_failure must see. Otherwise the end
  // of the kernel follows.
  arch::sync_block();
  if (arch::thread_idx() == 0 && is_aborted(world)) share_failure(contexts);
  close_generation(context);
}

}  // namespace deep_comm
