// combine, staged mode: the rows of one sum. Finds them, waits for them, adds them.
#pragma once

#include "device/internode/combine_staging.cuh"
#include "device/move/reduce.cuh"

namespace deep_comm {

// The rows of this node that one sum needs. Lane j < M handles local rank j's row: in the staging,
// or in x for this rank's own.
class LocalRows {
 public:
  DC_DEVICE LocalRows(const Context& node, const InternodeCombineArgs& args,
                      const StagedTables& tables)
      : context_(node), args_(args), tables_(tables) {
    const int lane = arch::lane_idx();
    is_rank_ = lane < args.world.num_ranks;
    is_peer_ = is_rank_ && lane != args.world.rank;
    if (!is_peer_) return;
    const StagingPlan plan(args, tables);
    base_ = plan.slot(plan.from_local(lane));
  }

  // OrderedPlace of a forwarded row's part, of `node` and `channel`. row: among all that this rank
  // forwards.
  DC_DEVICE int look_up(int node, int channel, int row) const {
    if (!is_rank_) return -1;
    const int lane = arch::lane_idx();
    const int num_nodes = args_.tiers.num_nodes(), num_local = args_.world.num_ranks;
    const int head =
        arch::ld_nc(args_.send_rank_head + static_cast<int64_t>(row) * num_local + lane);
    const int start = arch::ld_nc(args_.forward_slots + (num_nodes + 1) * num_local +
                                  (channel * num_nodes + node) * num_local + lane);
    return head < 0 ? -1 : start + head;
  }
  // Waits for the part at `word` (from look_up). Returns its row, or null. *ok: the wait did not
  // fail.
  DC_DEVICE const uint8_t* await_row(int node, int word, bool* ok) {
    *ok = true;
    if (word < 0) return nullptr;
    const int lane = arch::lane_idx(), place = OrderedPlace::place(word);
    if (!is_peer_) {
      const int64_t row =
          static_cast<int64_t>(tables_.x_starts[lane][node]) + place - tables_.received[lane][node];
      // A worst-case handle may name rows that were dropped, which dispatch has reported. Any row
      // will do.
      own_row_ = min_of<int64_t>(row, args_.num_rows - 1);
      return args_.x + own_row_ * args_.message.row_bytes;
    }
    const int chunk = tables_.received_chunks[lane].at(place, node);
    if (chunk != known_chunk_) {
      known_chunk_ = chunk;
      uint32_t seen = 0;
      *ok = arch::fault(Fault::kSkipArrival) ||
            await_tagged(context_, landed_word(args_.world, args_.world.rank, lane, chunk),
                         {Stage::kReduce, Word::kLanded, lane, -1}, 1, &seen);
    }
    return base_ + static_cast<size_t>(place) * args_.message.slot_bytes();
  }
  // After await_row: the index of this rank's own row in x; in its lane.
  DC_DEVICE int64_t own_row() const { return own_row_; }

 private:
  const Context& context_;
  const InternodeCombineArgs& args_;
  const StagedTables& tables_;
  bool is_rank_;
  bool is_peer_;
  const uint8_t* base_ = nullptr;
  int known_chunk_ = -1;  // has landed
  int64_t own_row_ = 0;
};

// The channel of a row among those that a node has sent here. The whole warp.
DC_DEVICE int channel_of_row(const InternodeCombineArgs& args, int node, int row) {
  const int num_channels = args.rail_rings.num_channels;
  const int32_t* prefix = args.recv_node_channel_prefix + node * num_channels;
  int channel = 0;
  for (int base = 0; base < num_channels; base += kWarpSize) {
    const int lane_channel = base + arch::lane_idx();
    const bool is_before = lane_channel < num_channels && arch::ld_nc(prefix + lane_channel) <= row;
    const int num_before = arch::popc(arch::ballot(kFullMask, is_before));
    channel += num_before;
    if (num_before < kWarpSize) break;
  }
  return channel;
}

// A warp's list of rows: this node's, the biases, the other nodes' sums; and the weights that follow
// each row that has come.
struct RowList {
  const uint8_t** rows;  // shared memory
  int num_local = 0;     // of this node
  int own = -1;          // index in `rows` of the row that lies in x
  int64_t own_row = 0;
  int first_sum = 0;  // of the other nodes
  int num_rows = 0;
  int own_sum_at = -1;  // this node's sum comes before row own_sum_at; -1: there is none

  DC_DEVICE const float* weights(const InternodeCombineArgs& args, int idx) const {
    return idx == own ? args.topk_weights + own_row * args.message.num_topk
                      : reinterpret_cast<const float*>(rows[idx] + args.message.row_bytes);
  }
  // The whole warp; lane j passes local rank j's row, or null, and its OrderedPlace.
  DC_DEVICE void add_local(const InternodeCombineArgs& args, const uint8_t* row, int word,
                           int64_t own_x_row) {
    const int rank = args.world.rank;
    const uint32_t present = arch::ballot(kFullMask, row != nullptr);
    const int position = position_in_node(args, present, word);
    if (row != nullptr) rows[position] = row;
    num_local = first_sum = num_rows = arch::popc(present);
    const int own_position = arch::shfl(kFullMask, position, rank);
    if ((present >> rank & 1u) != 0) own = own_position;
    own_row = arch::shfl(kFullMask, own_x_row, rank);
  }
  DC_DEVICE void add_biases(const InternodeCombineArgs& args, int token) {
    DC_UNROLL
    for (int bias = 0; bias < 2; ++bias) {
      if (args.bias[bias] == nullptr) continue;
      // Every lane stores the same.
      rows[first_sum++] = args.bias[bias] + static_cast<int64_t>(token) * args.message.row_bytes;
    }
  }
  // Lane n passes node n's sum, or null; `own_node` passes none.
  DC_DEVICE void add_sums(const InternodeCombineArgs& args, int token, const uint8_t* row,
                          int own_node) {
    const uint32_t present = arch::ballot(kFullMask, row != nullptr);
    const int position = args.order.position_of_lane(token, present, 0);
    if (row != nullptr) rows[first_sum + position] = row;
    if (num_local > 0) own_sum_at = first_sum + arch::shfl(kFullMask, position, own_node);
    num_rows = first_sum + arch::popc(present);
  }
};

// One warp: dst = round(biases, then the nodes' sums in their order). This node's sum is
// computed from its rows and rounded like the others. All loads of a step are issued before the
// first row is added: otherwise each would cost a trip to memory. A sum lives for one vector of a
// step, which leaves registers for loads.
template <Dtype kDtype, int kRows, int kUnroll>
DC_DEVICE void reduce_few(uint8_t* dst, const RowList& list, int num_vecs) {
  using Type = Numeric<kDtype>;
  const int lane = arch::lane_idx();
  const Vec16* rows[kRows];
  DC_UNROLL
  for (int idx = 0; idx < kRows; ++idx) {
    rows[idx] = reinterpret_cast<const Vec16*>(list.rows[idx]) + lane;
  }
  Vec16* out = reinterpret_cast<Vec16*>(dst) + lane;
  const auto add = [&](const Vec16* vecs) {
    float sum[Type::kPerVec] = {};
    Vec16 own{};
    DC_UNROLL
    for (int idx = 0; idx < kRows; ++idx) {
      if (idx == list.own_sum_at) Type::add(sum, own);
      Type::add(sum, vecs[idx]);
      if (idx + 1 != list.num_local) continue;
      own = Type::round(sum);  // this node's rows are complete
      DC_UNROLL
      for (int part = 0; part < Type::kPerVec; ++part) sum[part] = 0.0f;
    }
    if (list.own_sum_at == kRows) Type::add(sum, own);
    return Type::round(sum);
  };
  const int num_steps = num_vecs / (kWarpSize * kUnroll);
  DC_NO_UNROLL
  for (int step = 0; step < num_steps; ++step) {
    Vec16 vecs[kUnroll][kRows];
    DC_UNROLL
    for (int part = 0; part < kUnroll; ++part) {
      DC_UNROLL
      for (int idx = 0; idx < kRows; ++idx) {
        vecs[part][idx] = arch::ld_weak(rows[idx] + part * kWarpSize);
      }
    }
    DC_UNROLL
    for (int part = 0; part < kUnroll; ++part) {
      arch::st_streaming(out + part * kWarpSize, add(vecs[part]));
    }
    DC_UNROLL
    for (int idx = 0; idx < kRows; ++idx) rows[idx] += kUnroll * kWarpSize;
    out += kUnroll * kWarpSize;
  }
  DC_NO_UNROLL
  for (int vec = num_steps * kWarpSize * kUnroll + lane; vec < num_vecs; vec += kWarpSize) {
    Vec16 vecs[kRows];
    DC_UNROLL
    for (int idx = 0; idx < kRows; ++idx) vecs[idx] = arch::ld_weak(rows[idx]);
    arch::st_streaming(out, add(vecs));
    DC_UNROLL
    for (int idx = 0; idx < kRows; ++idx) rows[idx] += kWarpSize;
    out += kWarpSize;
  }
}

// The same for any number of rows, a few at a time.
template <Dtype kDtype>
DC_DEVICE void reduce_many(uint8_t* dst, const RowList& list, int num_rows, int num_vecs) {
  using Type = Numeric<kDtype>;
  constexpr int kInFlight = 4;
  Vec16* out = reinterpret_cast<Vec16*>(dst);
  for (int vec = arch::lane_idx(); vec < num_vecs; vec += kWarpSize) {
    float sum[Type::kPerVec] = {};
    Vec16 own{};
    for (int first = 0; first < num_rows; first += kInFlight) {
      Vec16 vecs[kInFlight];
      DC_UNROLL
      for (int idx = 0; idx < kInFlight; ++idx) {
        if (first + idx < num_rows) {
          vecs[idx] = arch::ld_weak(reinterpret_cast<const Vec16*>(list.rows[first + idx]) + vec);
        }
      }
      DC_UNROLL
      for (int idx = 0; idx < kInFlight; ++idx) {
        if (first + idx >= num_rows) continue;
        if (first + idx == list.own_sum_at) Type::add(sum, own);
        Type::add(sum, vecs[idx]);
        if (first + idx + 1 != list.num_local) continue;
        own = Type::round(sum);
        DC_UNROLL
        for (int part = 0; part < Type::kPerVec; ++part) sum[part] = 0.0f;
      }
    }
    if (list.own_sum_at == num_rows) Type::add(sum, own);
    arch::st_streaming(out + vec, Type::round(sum));
  }
}

// A call, so that the caller's registers are saved once per row, not within its loops.
template <Dtype kDtype>
DC_DEVICE_COLD void reduce_nodes(uint8_t* dst, RowList list, int num_rows, int num_vecs) {
  switch (num_rows) {
    case 1:
      return reduce_few<kDtype, 1, 7>(dst, list, num_vecs);
    case 2:
      return reduce_few<kDtype, 2, 4>(dst, list, num_vecs);
    case 3:
      return reduce_few<kDtype, 3, 2>(dst, list, num_vecs);
    case 4:
      return reduce_few<kDtype, 4, 2>(dst, list, num_vecs);
    default:
      return reduce_many<kDtype>(dst, list, num_rows, num_vecs);
  }
}

// One warp: the weights that belong to the row; biases have none.
DC_DEVICE void reduce_node_weights(const InternodeCombineArgs& args, const RowList& list,
                                   float* out) {
  for (int k = arch::lane_idx(); k < args.message.num_topk; k += kWarpSize) {
    float own = 0.0f, sum = 0.0f;
    for (int idx = 0; idx < list.num_local; ++idx)
      own += arch::ld_weak(list.weights(args, idx) + k);
    for (int idx = list.first_sum; idx < list.num_rows; ++idx) {
      if (idx == list.own_sum_at) sum += own;
      sum += arch::ld_weak(list.weights(args, idx) + k);
    }
    if (list.own_sum_at == list.num_rows) sum += own;
    arch::st_weak(out + k, sum);
  }
}

}  // namespace deep_comm
