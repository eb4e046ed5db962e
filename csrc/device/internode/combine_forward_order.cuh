// combine, staged mode: the order in which rows leave for other nodes, and how their chunks are
// published.
#pragma once

#include "device/internode/combine_staging.cuh"
#include "device/layout/divisor.cuh"
#include "device/sync/work_queue.cuh"

namespace deep_comm {

// Rows that this rank forwards to other nodes, in the runs that one warp moves, for an AskedQueue:
// one rail chunk after the other, the nodes in rotation. With one rank per node a run is a whole
// chunk. With several it is one row, which takes its warp longer.
class ForwardedRuns {
 public:
  static constexpr int kEnd = -1, kNone = -2;

  DC_DEVICE ForwardedRuns(const InternodeCombineArgs& args, const StagedTables& tables)
      : args_(&args),
        tables_(&tables),
        num_others_(args.tiers.num_nodes() - 1),
        by_others_(Divisor::make(max_of(num_others_, 1))) {
    static_assert(kMaxRailChunks * kMaxStagedNodes < Divisor::kMaxNumerator);
    int num_rounds = 0;
    DC_NO_UNROLL
    for (int node = 0; node < args.tiers.num_nodes(); ++node) {
      if (node == args.tiers.rail.node) continue;
      const RailChunks chunks = tables.chunks_to(args, node);
      num_rounds = max_of(num_rounds, chunks.num_chunks());
      if (!are_chunks()) runs_shift_ = max_of(runs_shift_, chunks.shift);
    }
    num_items_ = static_cast<uint32_t>(num_rounds * num_others_) << runs_shift_;
  }

  // With one rank per node these are all the chunks that are taken.
  DC_DEVICE static uint32_t* counter(const Context& node) {
    return &taken_work(node)->num_chunks[node.world.num_ranks - 1];
  }

  struct Run {
    int node;   // -1: there is none
    int first;  // row, among those for the node
    int num_rows;
    int chunk;
  };
  DC_DEVICE Run run(int item) const {
    if (item < 0) return {-1, 0, 0, 0};
    const int node = item >> kNodeShift, first = item & ((1 << kNodeShift) - 1);
    const RailChunks chunks = tables_->chunks_to(*args_, node);
    const int chunk = chunks.chunk_of(first);
    return {node, first, are_chunks() ? chunks.rows_of(chunk) : 1, chunk};
  }

  DC_DEVICE int at(uint32_t number) const {
    if (number >= num_items_) return kEnd;
    const int chunk_idx = static_cast<int>(number >> runs_shift_);
    const int run = static_cast<int>(number) - (chunk_idx << runs_shift_);
    const int round = by_others_.quotient(chunk_idx);
    int node = args_->tiers.rail.node + 1 + chunk_idx - round * num_others_;
    if (node > num_others_) node -= num_others_ + 1;
    const RailChunks chunks = tables_->chunks_to(*args_, node);
    const int row = chunks.first_row(round) + run;
    const bool is_row = run < 1 << chunks.shift && row < chunks.num_rows;
    return is_row ? node << kNodeShift | row : kNone;
  }

 private:
  static constexpr int kNodeShift = 25;

  DC_DEVICE bool are_chunks() const { return args_->tiers.ranks_per_node() == 1; }

  const InternodeCombineArgs* args_;
  const StagedTables* tables_;
  int num_others_;  // nodes
  Divisor by_others_;
  int runs_shift_ = 0;  // a chunk has at most 1 << runs_shift_ runs
  uint32_t num_items_ = 0;
};

// A chunk of sums, for the publisher.
struct SumItem {
  DC_DEVICE static int pack(int node, int chunk) { return node * kMaxRailChunks + chunk; }
  DC_DEVICE explicit SumItem(int item)
      : node(item / kMaxRailChunks), chunk(item % kMaxRailChunks) {}

  int node;
  int chunk;
};

// One lane, after a fence: the chunk's sums have been stored at the node, whose segment is `near`.
DC_DEVICE void publish_stored_sums(const Context& rail, const InternodeCombineArgs& args,
                                   const SumItem& sums, int num_rows, uint8_t* near) {
  const RailTier& tier = args.tiers.rail;
  arch::rail_count(tier.port, sums.node, tier.landed_qp(sums.chunk),
                   static_cast<uint32_t>(num_rows * args.message.slot_bytes()));
  // With the fence, a release; pairs with: TokenAdder::await_sum at the node — the chunk's sums
  arch::st_relaxed_sys(
      reinterpret_cast<uint64_t*>(near + tier.layout.landed_of(tier.node, sums.chunk)),
      Tagged::pack(rail.generation, 1));
}

}  // namespace deep_comm
