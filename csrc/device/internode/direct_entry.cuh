// How a dispatch finds out whether all rows of all ranks have a slot, and where.
//
// A rank has room if its outputs lie in its receive region and the staging between nodes holds what
// arrives over its rail. It says so before its arrival, first over the rail, then inside the node
// for all of its rail. So all ranks of the group see the same result.
// Before its arrival a rank also tells its near rail peers where their rows begin in its outputs.
#pragma once

#include "device/internode/tiers.cuh"
#include "device/layout/output.cuh"
#include "device/layout/tier_output.cuh"
#include "device/sync/landed_items.cuh"

namespace deep_comm {

enum class TierMode : int { kFailed, kRings, kDirect };

// A local rank's outputs, as this rank addresses them.
struct TierOutput {
  uint8_t* x;
  uint8_t* scales;
  uint8_t* topk_idx;
  float* topk_weights;
  int32_t* src_idx;  // null, like src_meta: no handle is made
  int32_t* src_meta;
  int64_t num_rows;
};

// Final rows at a node's rank of this local index, from the first one that this rank sends there.
// Empty where a row may have to be put.
struct StraightRows {
  uint8_t* x;
  uint8_t* scales;
  int64_t num_rows;
};

// Of one block, in shared memory.
struct DirectEntry {
  static constexpr int kMaxSenders = 12;

  TierMode mode;
  Progress progress;
  LandedItems<kMaxSenders> landed;  // tokens, by sender
  TierOutput outputs[kMaxRanks];

  DC_DEVICE static DirectEntry* of(const InternodeDispatchArgs& args) {
    return reinterpret_cast<DirectEntry*>(arch::dynamic_smem() + args.entry_offset);
  }
  DC_HOST_DEVICE static size_t num_bytes(int num_nodes, int ranks_per_node) {
    return align_up<size_t>(
        sizeof(DirectEntry) + num_nodes * (sizeof(StraightRows) + 4 * (ranks_per_node + 1)), 16);
  }
  // After this struct: [N], by node; then [M, N], where the rows that node n's rank of this local
  // index sends to local rank m begin; then [N], rows that this block has stored for node n.
  DC_DEVICE StraightRows* straight_rows() { return reinterpret_cast<StraightRows*>(this + 1); }
  DC_DEVICE int32_t* starts(const TwoTier& tiers) {
    return reinterpret_cast<int32_t*>(straight_rows() + tiers.num_nodes());
  }
  DC_DEVICE uint32_t* num_stored(const TwoTier& tiers) {
    return reinterpret_cast<uint32_t*>(starts(tiers) + tiers.num_nodes() * tiers.ranks_per_node());
  }
  // The block, before a barrier.
  DC_DEVICE void reset(const TwoTier& tiers) {
    progress.reset();
    landed.reset();
    for (int node = arch::thread_idx(); node < tiers.num_nodes(); node += arch::num_threads())
      num_stored(tiers)[node] = 0;
  }
};

// Where the rows of a source begin in this rank's outputs.
DC_DEVICE int start_of(const InternodeDispatchArgs& args, int source) {
  return source == 0 ? 0 : arch::ld_nc(args.recv_rank_prefix_sum + source - 1);
}

// Rows that this rank's outputs have, for those who store there.
DC_DEVICE int num_output_rows(const InternodeDispatchArgs& args) {
  return args.is_early ? arch::ld_nc(args.recv_rank_prefix_sum + args.tiers.num_ranks() - 1)
                       : static_cast<int>(args.num_recv_rows);
}

// Rows that this rank forwards for a node.
DC_DEVICE int num_rows_from(const InternodeDispatchArgs& args, int node) {
  return arch::ld_nc(args.recv_node_prefix_sum + node) -
         (node == 0 ? 0 : arch::ld_nc(args.recv_node_prefix_sum + node - 1));
}

// Where this rank announces to a local one.
DC_DEVICE TierAnnouncement* announcement_to(const Context& node, const TwoTier& tiers, int local) {
  return reinterpret_cast<TierAnnouncement*>(
      node.world.bases[local] +
      tiers.rail.layout.announcement_of(node.world.rank, static_cast<int>(node.generation & 1u)));
}
DC_DEVICE const TierAnnouncement* announcement_by(const Context& node, const TwoTier& tiers,
                                                  int local) {
  return reinterpret_cast<const TierAnnouncement*>(
      node.world.bases[node.world.rank] +
      tiers.rail.layout.announcement_of(local, static_cast<int>(node.generation & 1u)));
}

// Block 0, one warp: tells the node where its rows begin. Whether there is room follows when the rail
// has answered; that wait ends in a barrier, which orders these stores before the arrivals.
DC_DEVICE void announce_starts(const Context& node, const InternodeDispatchArgs& args) {
  const TwoTier& tiers = args.tiers;
  const int num_nodes = tiers.num_nodes(), num_local = tiers.ranks_per_node();
  const int parity = static_cast<int>(node.generation & 1u);
  const size_t offset =
      tiers.rail.layout.announcement_of(node.world.rank, parity) + sizeof(TierAnnouncement);
  DC_NO_UNROLL
  for (int idx = arch::lane_idx(); idx < num_nodes * num_local; idx += kWarpSize) {
    const int local = idx % num_local, source = idx;  // that local index at node idx / num_local
    int32_t* starts = reinterpret_cast<int32_t*>(node.world.bases[local] + offset);
    arch::st_weak(starts + idx / num_local, start_of(args, source));
  }
}

// Block 0, one warp: tells the rank of this local index at every node that stores reach where that
// rank's rows belong in the outputs of this one. This rank's arrival follows, by the same lane.
// Returns whether this rank has room, the same in all lanes. What it loads is loaded before any of it
// is used.
DC_DEVICE bool announce_straight_rows(const Context& context, const InternodeDispatchArgs& args) {
  const TwoTier& tiers = args.tiers;
  const RailTier& tier = tiers.rail;
  const int parity = static_cast<int>(context.generation & 1u);
  const int num_slots = args.staging.rows_per_node(!tier.are_all_near);
  const int num_rows = arch::ld_nc(args.recv_rank_prefix_sum + tiers.num_ranks() - 1);
  const int num_forward = arch::ld_nc(args.recv_node_prefix_sum + tiers.num_nodes() - 1);
  const bool has_outputs = args.output_line != 0 && args.send_slots != nullptr;
  // Forwarded rows that do not fit are an error in either mode: see fill_tail_rows.
  bool has_room = has_outputs && num_rows <= args.num_recv_rows &&
                  (!args.is_early || num_forward <= args.num_forward_rows);
  DC_NO_UNROLL
  for (int node = arch::lane_idx(); node < tiers.num_nodes(); node += kWarpSize) {
    if (node == tier.node) continue;
    const int start = start_of(args, node * tiers.ranks_per_node() + context.world.rank);
    const int num_from = num_rows_from(args, node);
    uint8_t* near = near_segment(context.world, tier, node);
    if (num_from > num_slots) has_room = false;
    if (near == nullptr) continue;
    RailOutput* output =
        reinterpret_cast<RailOutput*>(near + tier.layout.rail_output_of(tier.node, parity));
    arch::st_weak(&output->output_line, args.output_line);
    arch::st_weak(&output->start, start);
    arch::st_weak(&output->num_rows,
                  args.is_early ? num_rows : static_cast<int>(args.num_recv_rows));
  }
  return arch::all(kFullMask, has_room);
}

// Of a peer's outputs: its sizes are this rank's, as they are part of the operation's signature.
DC_DEVICE OutputLayout layout_of_peer(const InternodeDispatchArgs& args, int64_t num_rows) {
  return OutputLayout::make(num_rows, args.message.row_bytes, args.message.scale_row_bytes,
                            args.message.num_topk, args.topk_idx_bytes);
}

// What the rank of this local index at `node` has announced here. It has arrived.
DC_DEVICE RailOutput load_rail_output(const Context& context, const RailTier& tier, int node) {
  const int parity = static_cast<int>(context.generation & 1u);
  const RailOutput* output = reinterpret_cast<const RailOutput*>(
      own_word(context.world, tier.layout.rail_output_of(node, parity)));
  return {arch::ld_weak(&output->output_line), arch::ld_weak(&output->start),
          arch::ld_weak(&output->num_rows)};
}

// near: that rank's segment.
DC_DEVICE StraightRows straight_rows_of(const InternodeDispatchArgs& args, uint8_t* near,
                                        const RailOutput& output) {
  const int64_t start = output.start;
  const OutputLayout layout = layout_of_peer(args, output.num_rows);
  uint8_t* block = near + static_cast<size_t>(output.output_line) * kLineBytes;
  return {block + layout.x + start * args.message.row_bytes,
          block + layout.scales + start * args.message.scale_row_bytes, output.num_rows - start};
}

// Block 0, one warp. False: a wait failed.
DC_DEVICE bool announce_room(const TierContexts& contexts, const InternodeDispatchArgs& args) {
  const RailTier& tier = args.tiers.rail;
  const World& world = contexts.node.world;
  const uint32_t generation = contexts.node.generation;
  const int parity = static_cast<int>(generation & 1u), lane = arch::lane_idx();
  bool has_room = announce_straight_rows(contexts.node, args);
  DC_NO_UNROLL
  for (int node = lane; node < tier.num_nodes(); node += kWarpSize) {
    if (node == tier.node) continue;
    // pairs with: the load below at the node, after this rank's arrival on the same queue
    write_rail_word_first(world, tier, node, 0, tier.layout.room_of(tier.node, parity),
                          Tagged::pack(generation, has_room));
  }
  announce_on_rail(contexts.rail, tier, args.signature);
  announce_starts(contexts.node, args);
  if (!await_rail_arrivals(contexts.rail, tier, args.signature)) {
    announce_dispute(contexts);
    return false;
  }
  DC_NO_UNROLL
  for (int node = lane; node < tier.num_nodes(); node += kWarpSize) {
    if (node == tier.node) continue;
    const uint64_t* word = own_word(world, tier.layout.room_of(node, parity));
    if (Tagged::unpack(arch::ld_relaxed_sys(word)).value == 0) has_room = false;
  }
  has_room = arch::all(kFullMask, has_room);
  if (lane < world.num_ranks) {
    TierAnnouncement* announcement = reinterpret_cast<TierAnnouncement*>(
        world.bases[lane] + tier.layout.announcement_of(world.rank, parity));
    arch::st_weak(&announcement->has_room, static_cast<uint32_t>(has_room));
    arch::st_weak(&announcement->output_line, args.output_line);
    arch::st_weak(&announcement->src_line, args.src_line);
    arch::st_weak(&announcement->num_rows, num_output_rows(args));
  }
  // The lane that has stored a rank's announcement releases it.
  announce_arrival(contexts.node, args.signature);
  return true;
}

// announced: by local rank `local`.
DC_DEVICE TierOutput output_of(const InternodeDispatchArgs& args, const World& world, int local,
                               const TierAnnouncement& announced) {
  const int64_t num_rows = announced.num_rows;
  const OutputLayout layout = layout_of_peer(args, num_rows);
  uint8_t* block = world.bases[local] + static_cast<size_t>(announced.output_line) * kLineBytes;
  uint8_t* sources =
      announced.src_line == 0
          ? nullptr
          : world.bases[local] + static_cast<size_t>(announced.src_line) * kLineBytes;
  return {block + layout.x,
          block + layout.scales,
          block + layout.topk_idx,
          reinterpret_cast<float*>(block + layout.topk_weights),
          reinterpret_cast<int32_t*>(sources),
          sources == nullptr
              ? nullptr
              : reinterpret_cast<int32_t*>(sources + TierSourceLayout::make(num_rows).src_meta),
          num_rows};
}

// Warp 0: finds where all rows belong. Each lane loads what it needs of a local rank, of a node and
// of a pair of them before it uses any of it.
DC_DEVICE void find_outputs(const Context& context, const InternodeDispatchArgs& args,
                            DirectEntry* entry) {
  const TwoTier& tiers = args.tiers;
  const RailTier& tier = tiers.rail;
  const int num_nodes = tiers.num_nodes(), num_local = tiers.ranks_per_node();
  DC_NO_UNROLL
  for (int idx = arch::lane_idx(); idx < num_nodes * num_local; idx += kWarpSize) {
    const TierAnnouncement* of_pair = announcement_by(context, tiers, idx / num_nodes);
    const int start =
        arch::ld_weak(reinterpret_cast<const int32_t*>(of_pair + 1) + idx % num_nodes);
    const bool is_local = idx < num_local;
    const bool is_node = idx < num_nodes && idx != tier.node,
               is_straight = is_node && tier.are_all_near;
    TierAnnouncement announced{};
    if (is_local) {
      const TierAnnouncement* of_local = announcement_by(context, tiers, idx);
      announced.output_line = arch::ld_weak(&of_local->output_line);
      announced.src_line = arch::ld_weak(&of_local->src_line);
      announced.num_rows = arch::ld_weak(&of_local->num_rows);
    }
    RailOutput straight{};
    uint8_t* near = nullptr;
    if (is_straight) {
      straight = load_rail_output(context, tier, idx);
      near = near_segment(context.world, tier, idx);
    }
    entry->starts(tiers)[idx] = start;
    if (is_local) entry->outputs[idx] = output_of(args, context.world, idx, announced);
    if (is_node) {
      entry->straight_rows()[idx] =
          is_straight ? straight_rows_of(args, near, straight) : StraightRows{};
    }
  }
}

// Early dispatch, one thread: tells the host the mode, for which it waits after the counts.
DC_DEVICE void report_mode_to_host(const InternodeDispatchArgs& args, bool is_direct) {
  arch::st_relaxed_sys(&args.counts->is_direct, static_cast<int32_t>(is_direct));
  // pairs with: Engine::wait_internode_counts on the host — is_direct
  // order-proof: in a simulation the host reads it after the end of the kernel
  arch::st_release_sys(&args.counts->dispatch_sequence, args.sequence);
}

// Warp 0 of every block: waits for all ranks and finds where their outputs lie. The mode is the
// same in every block of every rank, unless one has failed.
DC_DEVICE void enter_direct(const TierContexts& contexts, const InternodeDispatchArgs& args,
                            DirectEntry* entry) {
  const TwoTier& tiers = args.tiers;
  const int lane = arch::lane_idx();
  bool ok = true;
  if (arch::block_idx() == 0) ok = announce_room(contexts, args);
  ok = ok && await_all_entered(contexts.node, Stage::kEntryBarrier, args.signature);
  bool has_room = true;
  if (ok && lane < tiers.ranks_per_node()) {
    has_room = arch::ld_weak(&announcement_by(contexts.node, tiers, lane)->has_room) != 0;
  }
  const bool is_direct = arch::all(kFullMask, has_room);
  if (ok && is_direct) find_outputs(contexts.node, args, entry);
  if (lane == 0) {
    if (args.is_early && ok && arch::block_idx() == 0) report_mode_to_host(args, is_direct);
    entry->mode = !ok ? TierMode::kFailed : is_direct ? TierMode::kDirect : TierMode::kRings;
    if (ok) note(contexts.node, TraceStep::kEntered, static_cast<uint32_t>(entry->mode));
  }
}

}  // namespace deep_comm
