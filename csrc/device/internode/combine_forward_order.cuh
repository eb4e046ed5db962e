// combine, staged mode: the order in which rows leave for other nodes, and where they go.
#pragma once

#include "device/internode/combine_staging.cuh"
#include "device/layout/divisor.cuh"
#include "device/sync/work_queue.cuh"

namespace deep_comm {

// Rows that this rank forwards to other nodes, for an AskedQueue: one rail chunk after the other,
// the nodes in rotation.
class ForwardedRows {
 public:
  static constexpr int kEnd = -1, kNone = -2;

  DC_DEVICE ForwardedRows(const InternodeCombineArgs& args, const StagedTables& tables)
      : args_(&args),
        tables_(&tables),
        num_others_(args.tiers.num_nodes() - 1),
        by_others_(Divisor::make(max_of(num_others_, 1))) {
    static_assert(kMaxRailChunks * kMaxStagedNodes < Divisor::kMaxNumerator);
    int num_rounds = 0;
    DC_NO_UNROLL
    for (int node = 0; node < args.tiers.num_nodes(); ++node) {
      if (node == args.tiers.rail.node) continue;
      const RailChunks chunks = tables.chunks_of(args, node);
      num_rounds = max_of(num_rounds, chunks.num_chunks());
      most_shift_ = max_of(most_shift_, chunks.shift);
    }
    num_items_ = static_cast<uint32_t>(num_rounds * num_others_) << most_shift_;
  }

  static DC_DEVICE AskedQueue<ForwardedRows> ask(const Context& node,
                                                 const InternodeCombineArgs& args,
                                                 const StagedTables& tables) {
    return {ForwardedRows(args, tables), &taken_work(node)->num_chunks[args.world.rank]};
  }

  DC_DEVICE static int node_of(int item) { return item >> kNodeShift; }
  // Among those for the node.
  DC_DEVICE static int row_of(int item) { return item & ((1 << kNodeShift) - 1); }
  // What the publisher learns when the row has landed.
  DC_DEVICE static int sum_item(const InternodeCombineArgs& args, const StagedTables& tables,
                                int node, int row) {
    return node * kMaxRailChunks + tables.chunks_of(args, node).chunk_of(row);
  }

  DC_DEVICE int at(uint32_t number) const {
    if (number >= num_items_) return kEnd;
    const int chunk_idx = static_cast<int>(number >> most_shift_);
    const int row_of_chunk = static_cast<int>(number) - (chunk_idx << most_shift_);
    const int round = by_others_.quotient(chunk_idx);
    int node = args_->tiers.rail.node + 1 + chunk_idx - round * num_others_;
    if (node > num_others_) node -= num_others_ + 1;
    const RailChunks chunks = tables_->chunks_of(*args_, node);
    const int row = chunks.first_row(round) + row_of_chunk;
    const bool is_row = row_of_chunk < 1 << chunks.shift && row < chunks.num_rows;
    return is_row ? node << kNodeShift | row : kNone;
  }

 private:
  static constexpr int kNodeShift = 25;

  const InternodeCombineArgs* args_;
  const StagedTables* tables_;
  int num_others_;  // nodes
  Divisor by_others_;
  int most_shift_ = 0;  // of a node's chunks
  uint32_t num_items_ = 0;
};

// Lane n: the slot of the first row for node n, there or among those to be put. After enter_combine.
DC_DEVICE uint8_t* sums_target(const Context& rail, const InternodeCombineArgs& args,
                               const StagedTables& tables) {
  const RailTier& tier = args.tiers.rail;
  const int node = arch::lane_idx();
  if (node >= tier.num_nodes() || node == tier.node) return nullptr;
  const StagingPlan plan(args, tables);
  uint8_t* near = near_segment(args.world, tier, node);
  return near != nullptr ? near + staging_at_node(rail, tier, node) : plan.slot(plan.to_node(node));
}

}  // namespace deep_comm
