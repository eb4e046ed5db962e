// combine, staged mode, the sums: of a node's rows for the rail, and of a token's nodes at its
// owner. Rows and tokens are dealt while the kernel runs. With several ranks per node some warps
// forward until no row is left, then add tokens. The others add tokens only, and wait for the other
// nodes' sums. So every sum reaches the rail, whatever waits for whom.
#pragma once

#include "device/internode/combine_forward_order.cuh"
#include "device/internode/combine_staged_rows.cuh"

namespace deep_comm {

// One warp: adds the rows that cross to other nodes.
template <Dtype kDtype>
class SumForwarder {
 public:
  DC_DEVICE SumForwarder(const TierContexts& contexts, const InternodeCombineArgs& args,
                         StagedEntry* entry, int adder)
      : contexts_(contexts),
        args_(args),
        entry_(entry),
        mover_(args.num_senders + adder),
        rows_(entry->rows(adder)),
        local_(contexts.node, args, entry->tables),
        forwarded_(ForwardedRuns(args, entry->tables), ForwardedRuns::counter(contexts.node)) {}

  DC_DEVICE void run() {
    uint32_t num_done = 0;
    Run row = row_at(0);
    look_up(row);
    while (row.node >= 0) {
      const int place = place_;
      const Run next = row_at(num_done + 1);
      look_up(next);  // while this row is added
      bool ok = true;
      const uint8_t* part = local_.await_row(row.node, place, &ok);
      if (!arch::all(kFullMask, ok)) break;
      add_row(row.node, row.first, place, part);
      if (!entry_->landed.post(contexts_.node, mover_, num_done,
                               SumItem::pack(row.node, row.chunk)))
        break;
      ++num_done;
      if (arch::lane_idx() == 0) entry_->progress.report(mover_, num_done);
      row = next;
    }
    if (arch::lane_idx() == 0) entry_->progress.finish(mover_, num_done);
  }

 private:
  using Run = ForwardedRuns::Run;  // of one row

  DC_DEVICE Run row_at(uint32_t index) { return forwarded_.items().run(forwarded_.at(index)); }
  DC_DEVICE void look_up(const Run& row) {
    place_ = -1;
    if (row.node < 0) return;
    place_ = local_.look_up(row.node, channel_of_row(args_, row.node, row.first),
                            entry_->tables.forwarded[row.node] + row.first);
  }
  DC_DEVICE void add_row(int node, int row, int place, const uint8_t* part) {
    RowList list{rows_};
    list.add_local(args_, part, place, local_.own_row());
    // Hands the rows' addresses and each lane's acquire to the whole warp.
    arch::sync_warp();
    uint8_t* out = entry_->node_slots[node] + static_cast<size_t>(row) * args_.message.slot_bytes();
    const int row_bytes = args_.message.row_bytes;
    // Rounded once, as this node's rows are in a sum of its own.
    list.own_sum_at = list.num_local;
    reduce_nodes<kDtype>(out, list, list.num_local, row_bytes / 16);
    float* weights = reinterpret_cast<float*>(out + row_bytes);
    for (int k = arch::lane_idx(); k < args_.message.num_topk; k += kWarpSize) {
      float sum = 0.0f;
      for (int idx = 0; idx < list.num_local; ++idx)
        sum += arch::ld_weak(list.weights(args_, idx) + k);
      arch::st_weak(weights + k, sum);
    }
    // All lanes have used the addresses. Their parts of the sum, before the leader's report.
    arch::sync_warp();
  }

  const TierContexts& contexts_;
  const InternodeCombineArgs& args_;
  StagedEntry* entry_;
  int mover_;
  const uint8_t** rows_;
  LocalRows local_;
  AskedQueue<ForwardedRuns> forwarded_;
  int place_ = -1;
};

// One warp: adds the tokens it takes. Lane n < N handles node n's sum as well.
template <Dtype kDtype>
class TokenAdder {
 public:
  DC_DEVICE TokenAdder(const TierContexts& contexts, const InternodeCombineArgs& args,
                       StagedEntry* entry, int adder)
      : contexts_(contexts),
        args_(args),
        tables_(entry->tables),
        rows_(entry->rows(adder)),
        local_(contexts.node, args, entry->tables),
        tokens_({static_cast<uint32_t>(args.num_tokens)}, &taken_work(contexts.node)->num_tokens),
        per_channel_(max_of(1, ceil_div(args.num_tokens, args.rail_rings.num_channels))) {
    const int lane = arch::lane_idx(), own = args.tiers.rail.node;
    is_node_ = lane < args.tiers.num_nodes();
    if (!is_node_ || lane == own) return;
    const StagingPlan plan(args, tables_);
    base_ = plan.slot(plan.from_node(lane));
    chunks_ = tables_.chunks_from(args, lane);
  }

  DC_DEVICE void run() {
    Found next = find(0);
    look_up(0, next);
    for (uint32_t index = 0;; ++index) {
      const int token = tokens_.at(index);
      if (token < 0) return;
      const int sum_row = next.sum_row, place = place_;
      // While this token is added. Looking further ahead would need too many registers.
      next = find(index + 1);
      bool ok = true;
      const uint8_t* sum = await_sum(sum_row, &ok);
      bool local_ok = true;
      const uint8_t* part = local_.await_row(args_.tiers.rail.node, place, &local_ok);
      if (!arch::all(kFullMask, ok && local_ok)) return;
      look_up(index + 1, next);
      add_token(token, sum, place, part);
    }
  }

 private:
  // What is known of one token.
  struct Found {
    int channel;
    int sum_row;  // lane n: place among this rank's tokens at node n, or -1
  };

  DC_DEVICE Found find(uint32_t index) {
    const int token = tokens_.at(index);
    if (token < 0) return {0, -1};
    const int num_nodes = args_.tiers.num_nodes(), num_channels = args_.rail_rings.num_channels;
    const int channel = token / per_channel_;
    if (!is_node_) return {channel, -1};
    const int lane = arch::lane_idx();
    const int head =
        arch::ld_nc(args_.send_node_head + static_cast<int64_t>(token) * num_nodes + lane);
    const int before =
        channel == 0 ? 0
                     : arch::ld_nc(args_.node_channel_prefix + lane * num_channels + channel - 1);
    return {channel, head < 0 ? -1 : before + head};
  }
  // This rank has forwarded its own tokens to its own node.
  DC_DEVICE void look_up(uint32_t index, const Found& found) {
    const int own = args_.tiers.rail.node;
    const int row = arch::shfl(kFullMask, found.sum_row, own);
    place_ = -1;
    if (tokens_.at(index) < 0 || row < 0) return;
    place_ = local_.look_up(own, found.channel, tables_.forwarded[own] + row);
  }
  DC_DEVICE const uint8_t* await_sum(int sum_row, bool* ok) {
    if (sum_row < 0 || base_ == nullptr) return nullptr;
    const int chunk = chunks_.chunk_of(sum_row), node = arch::lane_idx();
    if (chunk != known_chunk_) {
      known_chunk_ = chunk;
      uint32_t seen = 0;
      *ok = arch::fault(Fault::kSkipArrival) ||
            await_tagged(contexts_.rail,
                         own_word(args_.world, args_.tiers.rail.layout.landed_of(node, chunk)),
                         {Stage::kReduce, Word::kLanded, node, -1}, 1, &seen);
    }
    return base_ + static_cast<size_t>(sum_row) * args_.message.slot_bytes();
  }
  DC_DEVICE void add_token(int token, const uint8_t* sum, int place, const uint8_t* part) {
    RowList list{rows_};
    list.add_local(args_, part, place, local_.own_row());
    list.add_biases(args_, token);
    list.add_sums(args_, token, sum, args_.tiers.rail.node);
    const int row_bytes = args_.message.row_bytes;
    // Hands the rows' addresses and each lane's acquire to the whole warp.
    arch::sync_warp();
    reduce_nodes<kDtype>(args_.combined_x + static_cast<int64_t>(token) * row_bytes, list,
                         list.num_rows, row_bytes / 16);
    if (args_.message.num_topk > 0) {
      reduce_node_weights(
          args_, list,
          args_.combined_topk_weights + static_cast<int64_t>(token) * args_.message.num_topk);
    }
    // All lanes have used the addresses.
    arch::sync_warp();
  }

  const TierContexts& contexts_;
  const InternodeCombineArgs& args_;
  const StagedTables& tables_;
  const uint8_t** rows_;
  LocalRows local_;
  AskedQueue<Numbered> tokens_;
  int per_channel_;
  bool is_node_;
  const uint8_t* base_ = nullptr;  // lane n: of node n's sums
  RailChunks chunks_{};
  int known_chunk_ = -1;  // has landed
  int place_ = -1;        // of the next token's local rows
};

}  // namespace deep_comm
