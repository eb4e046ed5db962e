// internode_dispatch: every token is sent once to each node that holds one of its experts, and
// there to the ranks that hold one.
//
// in     x [T, H] any dtype, optional x_scales, topk_idx, topk_weights; is_token_in_rank,
//        send_node_head, prefixes
// out    recv_x [Q, H] sorted by (source rank, source token), with scales, local expert ids,
//        weights, recv_src_idx, recv_src_meta; send_rank_head [F, M]
// path   rank (n, l) → rail → rank (n', l) → NVLink → rank (n', j); tokens for the own node skip
//        only the NIC
// modes  direct (dispatch_direct.cuh) if all ranks have room, else rings. Quantised: rows are cast
//        by their source, see direct_send.cuh; in rings a channel's block casts them before. Early:
//        launched after notify before the host knows the counts; if a rank has no room, or notify
//        has failed, no rank sends anything, and the host launches again
// grid   rings: two blocks per channel c
//          2 c      warps [0, S): rail senders, each serves some of the nodes;
//                   warp S + i: receiver from local rank i
//          2 c + 1  warp j: forwarder to local rank j; warp M: returns credits on the rail
// words  rail tail, head · channel/rail.cuh · put by the NIC on one queue each, after the rows
//        recv_line.tail, send_line.head · channel/ring.cuh · lane = channel
//        counts->is_direct, dispatch_sequence · host memory · early: written by block 0 after the
//        entry barrier
// before nothing: entry is a barrier over both tiers
// after  outputs complete on this stream
// waits  rail credit: unblocked by the forwarders' warp M there; rail tail: by the sender; ring
//        credit: by the receiver, which waits for rows only. Forwarders and senders serve the nodes
//        in one rotation, so step k of all ranks waits only for steps up to k: no cycle
//        (docs/design/0007)
// slots  a rail slot is free when all M forwarders have passed it; a send slot is free when its
//        credit has returned
// not promised: which node's rows arrive first
#pragma once

#include "device/internode/dispatch_direct.cuh"
#include "device/internode/dispatch_forward.cuh"
#include "device/internode/dispatch_receive.cuh"
#include "device/internode/dispatch_send.cuh"

namespace deep_comm {

// Fills the rows past the received ones, spread over the whole grid, and reports rows that do not
// fit.
DC_DEVICE void fill_tail_rows(const Context& context, const InternodeDispatchArgs& args) {
  const TwoTier& tiers = args.tiers;
  const int num_rows = arch::ld_nc(args.recv_rank_prefix_sum + tiers.num_ranks() - 1);
  const int num_forward = arch::ld_nc(args.recv_node_prefix_sum + tiers.num_nodes() - 1);
  const bool fits = num_rows <= args.num_recv_rows;
  if ((!fits || num_forward > args.num_forward_rows) && arch::block_idx() == 0 &&
      arch::thread_idx() == 0) {
    report_error(context,
                 {ErrorKind::kOverflow,
                  {Stage::kCheckArguments, fits ? Word::kNumForwardRows : Word::kNumRecvRows,
                   context.world.rank, -1},
                  static_cast<uint64_t>(fits ? num_forward : num_rows),
                  static_cast<uint64_t>(fits ? args.num_forward_rows : args.num_recv_rows),
                  0,
                  -1});
  }
  if (!args.fill_tail) return;
  const int num_topk = args.message.num_topk;
  const int64_t num_threads = static_cast<int64_t>(arch::num_blocks()) * arch::num_threads();
  const int64_t thread =
      static_cast<int64_t>(arch::block_idx()) * arch::num_threads() + arch::thread_idx();
  for (int64_t row = num_rows + thread; row < args.num_recv_rows; row += num_threads) {
    arch::st_weak(args.recv_src_idx + row, -1);
    arch::st_weak(args.recv_src_meta + 2 * row, -1);
    arch::st_weak(args.recv_src_meta + 2 * row + 1, 0);
    for (int k = 0; k < num_topk; ++k) {
      store_expert(args.recv_topk_idx, row * num_topk + k, args.topk_idx_bytes, -1);
      if (args.recv_topk_weights != nullptr) {
        arch::st_weak(args.recv_topk_weights + row * num_topk + k, 0.0f);
      }
    }
  }
  if (args.zero_tail && args.num_recv_rows > num_rows) {
    const int64_t num_tail = args.num_recv_rows - num_rows;
    const int64_t first_vec = static_cast<int64_t>(num_rows) * args.message.row_bytes / 16;
    const int64_t num_vecs = num_tail * args.message.row_bytes / 16;
    Vec16* x = reinterpret_cast<Vec16*>(args.recv_x) + first_vec;
    for (int64_t vec = thread; vec < num_vecs; vec += num_threads) arch::st_weak(x + vec, Vec16{});
    const int64_t first_scale = static_cast<int64_t>(num_rows) * args.num_scales;
    for (int64_t scale = thread; scale < num_tail * args.num_scales; scale += num_threads) {
      const uint64_t zero = 0;
      scatter_element(args.recv_x_scales + (first_scale + scale) * args.scale_bytes,
                      reinterpret_cast<const uint8_t*>(&zero), args.scale_bytes);
    }
  }
  for (int64_t row = num_forward + thread; row < args.num_forward_rows; row += num_threads) {
    for (int local = 0; local < tiers.ranks_per_node(); ++local) {
      arch::st_weak(args.send_rank_head + row * tiers.ranks_per_node() + local, -1);
    }
  }
}

template <bool kIsQuantised>
DC_DEVICE void run_outer_block(const TierContexts& contexts, const InternodeDispatchArgs& args,
                               int channel) {
  if constexpr (kIsQuantised) {
    const ChannelRange range =
        ChannelRange::of(args.num_tokens, args.rail_rings.num_channels, channel);
    QuantisedRows{
        const_cast<uint8_t*>(args.x), const_cast<uint8_t*>(args.x_scales), args.source,
        args.message.row_bytes,       args.message.scale_row_bytes,        args.scale_format}
        .cast(range.begin, range.end);
    arch::sync_block();  // before the senders, for whatever node, read them
  }
  const int receiver = arch::warp_idx() - args.num_sender_warps;
  if (receiver < 0) {
    send_to_nodes<kIsQuantised>(contexts.rail, args, channel, arch::warp_idx());
  } else if (receiver < args.tiers.ranks_per_node()) {
    receive_from_rank(contexts.node, args, channel, receiver);
  }
}

DC_DEVICE void run_forwarding_block(const TierContexts& contexts, const InternodeDispatchArgs& args,
                                    ForwardTeam* team, int channel) {
  const int num_local = args.tiers.ranks_per_node();
  if (arch::warp_idx() < num_local) {
    forward_to_rank(contexts, args, team, channel, arch::warp_idx());
  } else if (arch::warp_idx() == num_local) {
    return_rail_credits(contexts, args, team, channel);
  }
}

// Ring mode; the whole grid.
template <bool kIsQuantised>
DC_DEVICE void dispatch_by_tier_rings(const TierContexts& contexts,
                                      const InternodeDispatchArgs& args) {
  ForwardTeam* team = ForwardTeam::of_block();
  team->reset();
  arch::sync_block();
  const int channel = arch::block_idx() / 2;
  if (arch::block_idx() % 2 == 0) {
    run_outer_block<kIsQuantised>(contexts, args, channel);
  } else {
    run_forwarding_block(contexts, args, team, channel);
  }
}

// A sending warp of direct mode. Its loads begin before the mode is known. If this rank's own
// outputs lie in its receive region, the mode is probably direct.
template <bool kIsQuantised>
DC_DEVICE void enter_and_send(const TierContexts& contexts, const InternodeDispatchArgs& args,
                              DirectEntry* entry, int sender_idx) {
  TokenSender<kIsQuantised> sender(contexts.node, args, entry, sender_idx);
  sender.begin();
  arch::sync_block_apart();
  if (entry->mode == TierMode::kDirect) {
    sender.run();
  } else {
    sender.give_up();
  }
}

template <bool kIsQuantised>
DC_DEVICE void internode_dispatch(const InternodeDispatchArgs& args) {
  const TierContexts contexts =
      TierContexts::make(args.world, args.tiers, Kernel::kInternodeDispatch);
  note_in_block(contexts.node, TraceStep::kBegun);
  // No other rank sends either: all of them compare the same headers. Not even the generation
  // advances.
  if ((args.is_early || args.fill_tail) && notify_has_failed(args.world)) return;
  DirectEntry* entry = DirectEntry::of(args);
  entry->reset(args.tiers);
  const int sender = arch::warp_idx() - 1;
  if (args.output_line != 0 && sender >= 0 && sender < args.num_send_warps) {
    enter_and_send<kIsQuantised>(contexts, args, entry, sender);
  } else {
    if (arch::warp_idx() == 0) enter_direct(contexts, args, entry);
    arch::sync_block_apart();
    if (entry->mode == TierMode::kDirect) run_direct_warp(contexts, args, entry);
  }
  if (entry->mode == TierMode::kDirect) {
    fill_tail_rows(contexts.node, args);
    leave_direct(contexts, args.tiers);
    return;
  }
  arch::sync_block();  // senders that began for nothing have freed the stages
  if (entry->mode == TierMode::kRings && !args.is_early) {
    fill_tail_rows(contexts.node, args);
    dispatch_by_tier_rings<kIsQuantised>(contexts, args);
  }
  leave_tiers(contexts);
}

}  // namespace deep_comm
