// Staging of combine between nodes: memory for every row that returns to a rank. So nobody waits
// for credit. A rank's staging, in its receive region:
//
//   [ rows that the node's other ranks return to it, ranks ascending
//   | sums that the other nodes send it, nodes ascending
//   | sums that it sends, as it forwarded the rows: to be put from there ]
//
// Rows of one local rank lie in the order in which that rank received them, hence by (node, token)
// of their sources. Sums of a node lie by token. Both ends know a row's place in either list from
// notify.
#pragma once

#include "device/channel/landed.cuh"
#include "device/internode/tiers.cuh"
#include "device/layout/channel_range.cuh"
#include "device/layout/prefix_sum.cuh"
#include "device/sync/landed_items.cuh"

namespace deep_comm {

enum class SumMode : int { kFailed, kRings, kStaged };

inline constexpr int kMaxStagedNodes = kWarpSize;  // a lane per node

// The rows of one local rank that return to another, cut into chunks of 1 << shift that end at the
// borders between nodes.
struct PairChunks {
  int shift;

  DC_DEVICE static PairChunks of(int num_rows) {
    return {shift_for(max_of(1, ceil_div(num_rows, kMaxChunks - kMaxStagedNodes)))};
  }
  // The number of a row's chunk, for a rank of `node`: a chunk that two nodes share counts as two.
  DC_DEVICE int at(int place, int node) const { return (place >> shift) + node; }
  DC_DEVICE int count(int begin, int end) const {
    return begin == end ? 0 : ((end - 1) >> shift) - (begin >> shift) + 1;
  }
};

// The sums of one node for another. If they are stored, a chunk is what one warp brings: small ones
// let a token be added sooner (docs/design/0041). Otherwise a chunk is a put.
DC_DEVICE RailChunks sum_chunks(const InternodeCombineArgs& args, int num_rows) {
  const bool in_twos = args.tiers.ranks_per_node() == 1 && num_rows > args.most_single_rows;
  const int stored = in_twos ? 2 : 1;
  return RailChunks::of(num_rows,
                        args.tiers.rail.are_all_near ? stored : args.num_rail_send_tokens);
}

// What every warp of a block looks up; in shared memory. Prefix sums over the nodes.
struct StagedTables {
  int32_t returned[kMaxRanks][kMaxStagedNodes + 1];  // rows of x that return to a local rank
  int32_t x_starts[kMaxRanks][kMaxStagedNodes];      // where they begin in x
  PairChunks returned_chunks[kMaxRanks];
  int32_t num_crossing[kMaxRanks];  // chunks of them, of other nodes' tokens; see ChunksInNode
  int32_t num_returned[kMaxRanks];  // and of this node's
  int32_t received[kMaxRanks][kMaxStagedNodes + 1];  // rows that a local rank returns to this one
  PairChunks received_chunks[kMaxRanks];
  int32_t forwarded[kMaxStagedNodes + 1];  // rows that this rank forwards
  int32_t sent[kMaxStagedNodes];           // this rank's tokens at a node

  // The whole block, before a barrier.
  DC_DEVICE void fill(const InternodeCombineArgs& args) {
    const int num_nodes = args.tiers.num_nodes(), num_local = args.tiers.ranks_per_node();
    const int lane = arch::lane_idx(), num_channels = args.rail_rings.num_channels;
    for (int local = arch::warp_idx(); local < num_local; local += arch::num_warps()) {
      const int source = lane * num_local + local;
      const bool is_source = lane < num_nodes;
      const int end = is_source ? arch::ld_nc(args.recv_rank_prefix_sum + source) : 0;
      const int begin =
          is_source && source > 0 ? arch::ld_nc(args.recv_rank_prefix_sum + source - 1) : 0;
      const int sum = prefix_sum(end - begin);
      const PairChunks chunks = PairChunks::of(arch::shfl(kFullMask, sum, num_nodes - 1));
      int most = 0;
      if (is_source && lane != args.tiers.rail.node) most = chunks.count(sum - (end - begin), sum);
      most = arch::reduce_max(kFullMask, most);
      const int own_end = arch::shfl(kFullMask, sum, args.tiers.rail.node);
      const int own_rows = arch::shfl(kFullMask, end - begin, args.tiers.rail.node);
      if (lane == 0) {
        returned[local][0] = 0;
        returned_chunks[local] = chunks;
        num_crossing[local] = most * (num_nodes - 1);
        num_returned[local] = num_crossing[local] + chunks.count(own_end - own_rows, own_end);
        received_chunks[local] =
            PairChunks::of(arch::ld_nc(args.forward_slots + num_nodes * num_local + local));
      }
      if (is_source) {
        returned[local][lane + 1] = sum;
        x_starts[local][lane] = begin;
      }
    }
    for (int idx = arch::thread_idx(); idx < (num_nodes + 1) * num_local;
         idx += arch::num_threads()) {
      received[idx % num_local][idx / num_local] = arch::ld_nc(args.forward_slots + idx);
    }
    for (int node = arch::thread_idx(); node < num_nodes; node += arch::num_threads()) {
      forwarded[node + 1] = arch::ld_nc(args.recv_node_prefix_sum + node);
      sent[node] = arch::ld_nc(args.node_channel_prefix + (node + 1) * num_channels - 1);
    }
    if (arch::thread_idx() == 0) forwarded[0] = 0;
  }
  // The sums that this rank sends to `node`, in the chunks of their words.
  DC_DEVICE RailChunks chunks_to(const InternodeCombineArgs& args, int node) const {
    return sum_chunks(args, forwarded[node + 1] - forwarded[node]);
  }
  // Those that `node` sends here.
  DC_DEVICE RailChunks chunks_from(const InternodeCombineArgs& args, int node) const {
    return sum_chunks(args, sent[node]);
  }
};

// This rank's staging according to its tables, in rows.
class StagingPlan {
 public:
  DC_DEVICE StagingPlan(const InternodeCombineArgs& args, const StagedTables& tables)
      : args_(args), tables_(tables) {}

  DC_DEVICE int from_local(int local) const {
    int row = 0;
    DC_NO_UNROLL
    for (int other = 0; other < local; ++other) {
      if (other != args_.world.rank) row += tables_.received[other][args_.tiers.num_nodes()];
    }
    return row;
  }
  DC_DEVICE int from_node(int node) const {
    int row = from_local(args_.tiers.ranks_per_node());
    DC_NO_UNROLL
    for (int other = 0; other < node; ++other) {
      if (other != args_.tiers.rail.node) row += tables_.sent[other];
    }
    return row;
  }
  // First of the rows that this rank forwards for `node`.
  DC_DEVICE int to_node(int node) const {
    const int own = args_.tiers.rail.node;
    const int own_rows = node > own ? tables_.forwarded[own + 1] - tables_.forwarded[own] : 0;
    return from_node(args_.tiers.num_nodes()) + tables_.forwarded[node] - own_rows;
  }
  DC_DEVICE bool has_room() const {
    return args_.staging_line != 0 &&
           tables_.forwarded[args_.tiers.num_nodes()] <= args_.num_forward_rows &&
           to_node(args_.tiers.num_nodes()) <= args_.num_staging_rows;
  }
  DC_DEVICE uint32_t line_of(int row) const {
    return args_.staging_line + static_cast<uint32_t>(static_cast<size_t>(row) *
                                                      args_.message.slot_bytes() / kLineBytes);
  }
  DC_DEVICE uint8_t* slot(int row) const {
    return args_.world.bases[args_.world.rank] +
           static_cast<size_t>(args_.staging_line) * kLineBytes +
           static_cast<size_t>(row) * args_.message.slot_bytes();
  }

 private:
  const InternodeCombineArgs& args_;
  const StagedTables& tables_;
};

// What the warps of one combining block share, in shared memory after the senders' stages. Warp 0
// publishes, the next num_senders warps send, the others add.
struct alignas(16) StagedEntry {
  static constexpr int kMaxRows = kMaxStagedNodes + kMaxRanks + 2;  // of one token, with biases
  static constexpr int kMaxMovers = Progress::kMaxWords;

  SumMode mode;
  // Staged mode: where the rows that return to each local rank begin there; where the sums for each
  // node begin, there or among those to be put.
  uint8_t* rank_slots[kMaxRanks];
  uint8_t* node_slots[kMaxStagedNodes];
  Progress progress;               // of the senders, then of the adding warps that forward
  LandedItems<kMaxMovers> landed;  // chunks
  StagedTables tables;

  DC_DEVICE static StagedEntry* of_block(const InternodeCombineArgs& args) {
    return reinterpret_cast<StagedEntry*>(arch::dynamic_smem() + args.entry_offset);
  }
  DC_HOST_DEVICE static size_t num_bytes(int num_adders) {
    return sizeof(StagedEntry) + sizeof(const uint8_t*) * kMaxRows * num_adders;
  }
  // The rows that an adding warp adds.
  DC_DEVICE const uint8_t** rows(int adder) {
    return reinterpret_cast<const uint8_t**>(this + 1) + adder * kMaxRows;
  }
  DC_DEVICE void reset() {
    progress.reset();
    landed.reset();
  }
};

// Where the rows that this rank returns to local rank `owner` begin. All ranks have entered.
DC_DEVICE uint8_t* staging_at_local(const Context& node, int owner) {
  const World& world = node.world;
  const ArrivedLine* line = world.arrived_line(world.rank, owner);
  const uint64_t* word = &line->staging_line[node.generation & 1u];
  return world.bases[owner] +
         static_cast<size_t>(Tagged::unpack(arch::ld_relaxed_sys(word)).value) * kLineBytes;
}

// Where the sums that this rank sends to `node` begin, as an offset in the segment there. That node
// has entered.
DC_DEVICE size_t staging_at_node(const Context& rail, const RailTier& tier, int node) {
  const uint64_t* word = own_word(
      rail.world, tier.layout.staging_line_of(static_cast<int>(rail.generation & 1u), node));
  return static_cast<size_t>(Tagged::unpack(arch::ld_relaxed_sys(word)).value) * kLineBytes;
}

// Block 0, warp 0: tells the ranks of both tiers where their rows belong, and then that this one
// has entered. The node learns whether all ranks on this rank's rail have room.
DC_DEVICE bool announce_staging(const TierContexts& contexts, const InternodeCombineArgs& args,
                                const StagedTables& tables) {
  const World& world = args.world;
  const RailTier& tier = args.tiers.rail;
  const int parity = static_cast<int>(contexts.node.generation & 1u), lane = arch::lane_idx();
  const StagingPlan plan(args, tables);
  // Without forward_slots there are no tables.
  bool has_room = args.staging_line != 0 && plan.has_room();
  for (int node = lane; node < tier.num_nodes(); node += kWarpSize) {
    if (node == tier.node) continue;
    // pairs with: the loads below and in staging_at_node, after the arrival on the same queue
    write_rail_word_first(
        world, tier, node, 0, tier.layout.staging_line_of(parity, tier.node),
        Tagged::pack(contexts.rail.generation, has_room ? plan.line_of(plan.from_node(node)) : 0));
  }
  announce_on_rail(contexts.rail, tier, args.signature);
  if (!await_rail_arrivals(contexts.rail, tier, args.signature)) {
    announce_dispute(contexts);
    return false;
  }
  for (int node = lane; node < tier.num_nodes(); node += kWarpSize) {
    if (node != tier.node && staging_at_node(contexts.rail, tier, node) == 0) has_room = false;
  }
  has_room = arch::all(kFullMask, has_room);
  if (lane < world.num_ranks) {
    ArrivedLine* line = world.arrived_line(lane, world.rank);
    arch::st_relaxed_sys(
        &line->staging_line[parity],
        Tagged::pack(contexts.node.generation, has_room ? plan.line_of(plan.from_local(lane)) : 0));
    arch::st_relaxed_sys(&line->staging_rows[parity],
                         Tagged::pack(contexts.node.generation, has_room));
  }
  announce_arrival(contexts.node, args.signature);
  return true;
}

// Where the sums for `node` begin, there or among those to be put. All ranks have entered.
DC_DEVICE uint8_t* node_slots_of(const Context& rail, const InternodeCombineArgs& args,
                                 const StagedTables& tables, int node) {
  const RailTier& tier = args.tiers.rail;
  const StagingPlan plan(args, tables);
  uint8_t* near = near_segment(args.world, tier, node);
  return near != nullptr ? near + staging_at_node(rail, tier, node) : plan.slot(plan.to_node(node));
}

// Warp 0 of every block: waits for all ranks. The mode is the same in every block of every rank,
// unless one has failed: each rank answers for its rail, and the ranks of a node are on all rails.
DC_DEVICE SumMode enter_combine(const TierContexts& contexts, const InternodeCombineArgs& args,
                                StagedEntry* entry) {
  const World& world = args.world;
  const int peer = arch::lane_idx();
  bool ok = true;
  if (arch::block_idx() == 0) ok = announce_staging(contexts, args, entry->tables);
  ok = ok && await_all_entered(contexts.node, Stage::kEntryBarrier, args.signature);
  if (!ok) return SumMode::kFailed;
  bool has_room = true;
  if (peer < world.num_ranks) {
    const ArrivedLine* line = world.arrived_line(world.rank, peer);
    const uint64_t* word = &line->staging_rows[contexts.node.generation & 1u];
    has_room = Tagged::unpack(arch::ld_relaxed_sys(word)).value != 0;
    entry->rank_slots[peer] = staging_at_local(contexts.node, peer);
  }
  if (args.staging_line != 0 && peer < args.tiers.num_nodes() && peer != args.tiers.rail.node) {
    entry->node_slots[peer] = node_slots_of(contexts.rail, args, entry->tables, peer);
  }
  return arch::all(kFullMask, has_room) ? SumMode::kStaged : SumMode::kRings;
}

}  // namespace deep_comm
