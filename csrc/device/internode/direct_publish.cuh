// dispatch, direct mode: the publishing warp. It writes the metadata of rows into their slots at other
// nodes, but for the scales, which the senders store. Then it tells these nodes, by chunks of rows, what has
// landed. Where stores do not reach a node, the slots are here, and it puts a chunk when all of the
// chunk's rows are in them.
#pragma once

#include "device/internode/direct_send.cuh"
#include "device/layout/divisor.cuh"

namespace deep_comm {

// The least rows of a chunk. A put carries a whole chunk; a stored row can be used at once.
DC_DEVICE RailChunks rail_chunks(const InternodeDispatchArgs& args, int num_rows) {
  return RailChunks::of(num_rows, args.tiers.rail.are_all_near ? 1 : args.num_rail_send_tokens);
}

class RowPublisher {
 public:
  DC_DEVICE RowPublisher(const Context& node, const InternodeDispatchArgs& args, DirectEntry* entry)
      : context_(node),
        args_(args),
        entry_(entry),
        by_others_(Divisor::make(max_of(1, args.tiers.num_nodes() - 1))),
        by_topk_(Divisor::make(max_of(1, args.message.num_topk))) {}

  // Returns when all sending warps have reported their last token.
  DC_DEVICE void run() {
    const int lane = arch::lane_idx(), sender = min_of(lane, args_.num_send_warps - 1);
    Progress& progress = entry_->progress;
    uint32_t num_published = 0;  // of this lane's sender
    while (true) {
      // Reads the bell before any lane reads its words: a later report rings again.
      const uint32_t rung = arch::ld_acquire_cta(&progress.bell);
      arch::sync_warp();
      // pairs with: Progress::report — the tokens' stores, and their numbers
      const uint32_t word = arch::ld_acquire_cta(&progress.words[sender]);
      const uint32_t num_landed = word & ~Progress::kFinished;
      if (arch::any(kFullMask, num_landed != num_published)) {
        // Hands each lane's acquire to all lanes: each publishes tokens of every sender.
        arch::sync_warp();
        publish(num_published, num_landed);
        num_published = num_landed;
        // pairs with: LandedItems::post — the tokens have been read
        if (lane == sender) arch::st_release_cta(&entry_->landed.num_published[sender], num_landed);
      }
      if (arch::all(kFullMask, (word & Progress::kFinished) != 0)) break;
      if (!await_bell(context_, &progress.bell, rung)) break;
    }
    count_stored();
  }

 private:
  // A row that has landed, in its slot or straight in its final row.
  struct LandedRow {
    int node;
    int chunk;
    bool completes;   // it completes the chunk
    bool is_counted;  // together with rows that other blocks have counted
  };

  // A token and a node that may receive it.
  struct Pair {
    int token;  // -1: none
    int node;
  };

  // Lane i: sender i's tokens [begin, end) by its own count.
  DC_DEVICE void publish(uint32_t begin, uint32_t end) {
    for_each_pair(begin, end, [&](const Pair& pair) { write_metas(pair); });
    arch::sync_warp();  // hands each lane's metadata to the lane that publishes its row
    // With the stores after it, a release; also with the counts of rows: see publish_chunks.
    // pairs with: RailRows::has_arrived — the rows and their metadata. Also before the NIC reads
    // them.
    if (!arch::fault(Fault::kSkipRailFence)) arch::fence_acq_rel_sys();
    for_each_pair(begin, end, [&](const Pair& pair) { publish_chunks(count_row(pair)); });
  }
  // Whole warps call visit(pair of this lane) for all pairs of these tokens and another node.
  template <class Visit>
  DC_DEVICE void for_each_pair(uint32_t begin, uint32_t end, Visit visit) const {
    const int num_nodes = args_.tiers.num_nodes(), num_others = num_nodes - 1;
    for (int first = 0;; first += kWarpSize) {
      int token = -1, index = first + arch::lane_idx();  // of this lane
      for (int sender = 0; sender < args_.num_send_warps; ++sender) {
        const uint32_t begins = arch::shfl(kFullMask, begin, sender);
        const int count = static_cast<int>(arch::shfl(kFullMask, end, sender) - begins);
        if (index >= 0 && index < count)
          token = entry_->landed.items[sender][(begins + index) % entry_->landed.kDepth];
        index -= count;
      }
      const int num_pairs = arch::popc(arch::ballot(kFullMask, token >= 0)) * num_others;
      if (num_pairs == 0) return;
      for (int base = 0; base < num_pairs; base += kWarpSize) {
        const int pair = base + arch::lane_idx(), index = by_others_.quotient(pair);
        const int of_pair = arch::shfl(kFullMask, token, index % kWarpSize);
        const int node = args_.tiers.rail.node + 1 + pair - index * num_others;
        visit({pair < num_pairs ? of_pair : -1, node < num_nodes ? node : node - num_nodes});
      }
    }
  }

  // A part of a batch's selections, one per lane and step.
  struct Selections {
    static constexpr int kSteps = 4, kNum = kSteps * kWarpSize;

    int experts[kSteps];
    float weights[kSteps];
  };

  // Which selection of the batch this lane has in a step: of the pair of lane `lane`, its k-th.
  struct Selected {
    int lane;
    int k;
  };
  DC_DEVICE Selected selected(int base, int step) const {
    const int idx = base + step * kWarpSize + arch::lane_idx(), lane = by_topk_.quotient(idx);
    return {lane, idx - lane * args_.message.num_topk};
  }
  DC_DEVICE Selections load_selections(const Pair& pair, int base, int num_selections) const {
    Selections loaded{};
    DC_UNROLL
    for (int step = 0; step < Selections::kSteps; ++step) {
      const Selected at = selected(base, step);
      const int64_t token = arch::shfl(kFullMask, pair.token, at.lane % kWarpSize);
      if (base + step * kWarpSize + arch::lane_idx() >= num_selections) continue;
      const int64_t position = token * args_.message.num_topk + at.k;
      loaded.experts[step] = load_expert(args_.topk_idx, position, args_.topk_idx_bytes);
      if (args_.topk_weights != nullptr)
        loaded.weights[step] = arch::ld_nc(args_.topk_weights + position);
    }
    return loaded;
  }
  // slot: of this lane's pair, or null.
  DC_DEVICE void store_selections(const Selections& loaded, uint8_t* slot, int base,
                                  int num_selections) const {
    const PlacedRailMessage& parts = args_.placed;
    DC_UNROLL
    for (int step = 0; step < Selections::kSteps; ++step) {
      const Selected at = selected(base, step);
      uint8_t* meta = reinterpret_cast<uint8_t*>(
          arch::shfl(kFullMask, reinterpret_cast<uint64_t>(slot), at.lane % kWarpSize));
      if (base + step * kWarpSize + arch::lane_idx() >= num_selections || meta == nullptr) continue;
      arch::st_weak(reinterpret_cast<int32_t*>(meta + parts.topk_idx_offset()) + at.k,
                    loaded.experts[step]);
      arch::st_weak(reinterpret_cast<float*>(meta + parts.topk_weights_offset()) + at.k,
                    loaded.weights[step]);
    }
  }

  // One row per lane, and one selection per lane and step. All rows wait for this warp, so what it
  // needs of a batch is loaded in one trip to memory, before any of it is used.
  DC_DEVICE void write_metas(const Pair& pair) const {
    const PlacedRailMessage& parts = args_.placed;
    const int num_local = args_.tiers.ranks_per_node(), first_rank = pair.node * num_local;
    const bool is_pair = pair.token >= 0;
    const int num_selections = arch::popc(arch::ballot(kFullMask, is_pair)) * parts.num_topk;
    const int32_t* places = slots_of(args_, max_of(pair.token, 0));
    const int row = is_pair ? arch::ld_nc(places + pair.node) : -1;
    int32_t words[kMaxRanks];  // the row's places at the ranks of that node
    DC_UNROLL
    for (int local = 0; local < kMaxRanks; ++local) {
      words[local] = is_pair && local < num_local
                         ? arch::ld_nc(places + args_.tiers.num_nodes() + first_rank + local)
                         : -1;
    }
    Selections loaded = load_selections(pair, 0, num_selections);
    uint8_t* slot = row < 0 ? nullptr : slot_for(args_, pair.node, row);
    if (slot != nullptr) {
      uint32_t present = 0;
      DC_UNROLL
      for (int local = 0; local < kMaxRanks; ++local)
        present |= static_cast<uint32_t>(words[local] >= 0) << local;
      const uint32_t positions = args_.order.positions(pair.token, present, first_rank);
      int32_t* out = reinterpret_cast<int32_t*>(slot + parts.slots_offset());
      DC_UNROLL
      for (int local = 0; local < kMaxRanks; ++local) {
        if (local >= num_local) continue;
        arch::st_weak(out + local,
                      OrderedPlace::pack(words[local], positions >> (4 * local) & 15u));
      }
      arch::st_weak(reinterpret_cast<int32_t*>(slot + parts.src_idx_offset()),
                    static_cast<int32_t>(pair.token));
    }
    for (int base = 0; base < num_selections; base += Selections::kNum) {
      if (base != 0) loaded = load_selections(pair, base, num_selections);
      store_selections(loaded, slot, base, num_selections);
    }
  }

  DC_DEVICE LandedRow count_row(const Pair& pair) {
    const TwoTier& tiers = args_.tiers;
    const int num_channels = args_.rail_rings.num_channels, node = pair.node;
    const int place = pair.token < 0 ? -1 : arch::ld_nc(slots_of(args_, pair.token) + node);
    if (place < 0) return {node, 0, false, false};
    const RailChunks chunks =
        rail_chunks(args_, arch::ld_nc(args_.node_channel_prefix + (node + 1) * num_channels - 1));
    const int chunk = chunks.chunk_of(place);
    if (near_segment(args_.world, tiers.rail, node) != nullptr)
      arch::atomic_add_relaxed_cta(entry_->num_stored(tiers) + node, 1u);
    if (chunks.shift == 0) return {node, chunk, true, false};
    uint32_t* counter = reinterpret_cast<uint32_t*>(args_.world.bases[args_.world.rank] +
                                                    tiers.rail.layout.added_of(node, chunk));
    const uint32_t num_before = arch::atomic_add_relaxed_gpu(counter, 1u);
    const bool completes = static_cast<int>(num_before) + 1 == chunks.rows_of(chunk);
    if (completes) arch::st_relaxed_gpu(counter, 0u);
    return {node, chunk, completes, completes};
  }

  DC_DEVICE void publish_chunks(const LandedRow& row) {
    const RailTier& tier = args_.tiers.rail;
    const uint64_t word = Tagged::pack(context_.generation, 1);
    if (arch::any(kFullMask, row.is_counted)) {
      // pairs with: the fence in publish, in the blocks that counted before — the chunk's rows. After
      // it their word may be stored, and the NIC may read them.
      // order-proof: the simulation has one time for all that a rank has put into memory, and the
      // rows of this block, which it has just fenced, are newer
      if (!arch::fault(Fault::kSkipRailFence)) arch::fence_acq_rel_sys();
    }
    uint8_t* near = row.completes ? near_segment(args_.world, tier, row.node) : nullptr;
    if (near != nullptr) {
      arch::st_relaxed_sys(
          reinterpret_cast<uint64_t*>(near + tier.layout.landed_of(tier.node, row.chunk)), word);
    }
    // Hands what each lane has counted to lane 0, which puts.
    // order-proof: as above
    arch::sync_warp();
    uint32_t pending = arch::ballot(kFullMask, row.completes && near == nullptr);
    for (; pending != 0; pending &= pending - 1) {
      const int lane = arch::ffs(pending) - 1;
      put_chunk(arch::shfl(kFullMask, row.node, lane), arch::shfl(kFullMask, row.chunk, lane),
                word);
    }
  }

  // The whole warp.
  DC_DEVICE void put_chunk(int node, int chunk, uint64_t word) {
    const RailTier& tier = args_.tiers.rail;
    const int num_rows =
        arch::ld_nc(args_.node_channel_prefix + (node + 1) * args_.rail_rings.num_channels - 1);
    const RailChunks chunks = rail_chunks(args_, num_rows);
    const int first = chunks.first_row(chunk);
    arch::rail_put_warp(
        tier.port, node, tier.landed_qp(chunk),
        args_.staging.recv_slot(true, node, tier.node, first),
        args_.world.bases[args_.world.rank] + args_.staging.send_slot(tier.node, node, first),
        static_cast<uint32_t>(chunks.rows_of(chunk) * args_.staging.slot_bytes));
    // pairs with: RailRows::has_arrived at the node — the put above, on the same queue
    if (arch::lane_idx() == 0) {
      arch::rail_signal(tier.port, node, tier.landed_qp(chunk),
                        tier.layout.landed_of(tier.node, chunk), word);
    }
  }

  // Counts the bytes that were stored over the rail.
  DC_DEVICE void count_stored() {
    const TwoTier& tiers = args_.tiers;
    // order-proof: the counts are sums of atomics, and the search for races sees plain accesses. The
    // vote before orders that on GPUs, too.
    arch::sync_warp();
    for (int node = arch::lane_idx(); node < tiers.num_nodes(); node += kWarpSize) {
      const uint32_t num_rows = entry_->num_stored(tiers)[node];
      if (num_rows > 0) {
        arch::rail_count(tiers.rail.port, node, 0,
                         static_cast<uint64_t>(num_rows) * args_.staging.slot_bytes);
      }
    }
  }

  const Context& context_;
  const InternodeDispatchArgs& args_;
  DirectEntry* entry_;
  Divisor by_others_;
  Divisor by_topk_;
};

}  // namespace deep_comm
