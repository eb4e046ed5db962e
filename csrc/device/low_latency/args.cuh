// The arguments of the low-latency kernels. R ranks, T local tokens, M the maximum number of tokens
// of a rank, H hidden, K top-k, E experts, L local experts (of the rank that has most), S scales of
// a row.
#pragma once

#include "device/layout/expert_map.cuh"
#include "device/layout/low_latency.cuh"
#include "device/move/quantise_fp4.cuh"

namespace deep_comm {

// The shape that the ranks agree on. FP8 rows have a float32 scale per block of columns, NVFP4 rows
// a byte per block, four in a word.
inline LowLatencyShape low_latency_shape(int num_max_tokens, int hidden, int num_topk,
                                         int num_experts, int num_blocks, PayloadFormat format) {
  LowLatencyShape shape{};
  shape.num_max_tokens = num_max_tokens;
  shape.hidden = hidden;
  shape.num_topk = num_topk;
  shape.num_experts = num_experts;
  shape.num_blocks = num_blocks;
  shape.row_bytes = hidden * static_cast<int>(sizeof(Bf16));
  if (format == PayloadFormat::kFp8) {
    shape.row_bytes = hidden;
    shape.num_scales = hidden / kScaleBlock;
  } else if (format == PayloadFormat::kNvFp4) {
    shape.row_bytes = hidden / 2;
    shape.num_scales = hidden / kFp4ScaleWord;
  }
  shape.prepare();
  return shape;
}

// The phases of an operation that one launch runs.
struct Phases {
  bool send;
  bool receive;
  // Without `send`: holds the operation to receive. With it: receives the number of the operation
  // that is sent. In device memory, so that a graph that replays both phases receives what it has
  // sent.
  uint32_t* ticket;  // or null
};

// How a dispatch sends its rows; depends on how much of them a block has. kStrips and kWhole are
// only for callers that can_stage.
enum class DispatchRows : int {
  // At most one token per block:
  kStrips,  // a quarter row at most: staged in shared memory, to all peers at once
  kHalves,  // less than a row: by threads' stores, all blocks to the same peers in one order
  kWhole,   // a row: staged, the first peer's before the routes, the others' after them
  // Any number of tokens:
  kMany,  // by threads' stores, neighbouring blocks to different peers
};

constexpr bool uses_stage(DispatchRows rows) {
  return rows == DispatchRows::kStrips || rows == DispatchRows::kWhole;
}

inline DispatchRows dispatch_rows(int num_tokens, int num_blocks, bool can_stage_strips,
                                  bool can_stage_rows) {
  if (num_tokens > num_blocks) return DispatchRows::kMany;
  if (4 * num_tokens <= num_blocks && can_stage_strips) return DispatchRows::kStrips;
  return 2 * num_tokens > num_blocks && can_stage_rows ? DispatchRows::kWhole
                                                       : DispatchRows::kHalves;
}

// Outputs of dispatch. A row has an index in [L, R*M] or, compact, in [R*M].
struct LowLatencyOutputs {
  bool is_compact;
  uint8_t* recv_x;    // [L, R*M, row] or [R*M, row]
  void* recv_scales;  // layout: see ScaleOutputs; null in BF16
  bool use_ue8m0;
  int32_t* recv_count;     // [L]
  int32_t* src_info;       // [L, R*M] or [R*M]: source token
  int64_t* layout_range;   // [L, R] or [R]: first row << 32 | rows
  int32_t* num_recv;       // compact: [1]
  int32_t* compact_idx;    // compact: [R*M, K], see idx_of
  int32_t first_idx;       // of local expert 0: 0, or its global index
  int32_t other_idx;       // where none is selected: -1, or the index of another rank's expert
  float* compact_weights;  // compact: [R*M, K], or null
  // for combine
  int32_t* recv_tokens;  // [R]: tokens of each source
  int32_t* recv_rows;    // [R, M, K] or [R, M]: rows of a token's top-k entries on this rank, or -1
  float* recv_weights;   // [R, M, K], or null
  // statistics
  int32_t* cumulative_stats;  // [L], += rows, or null
  int64_t* wait_stats;        // [R], += nanoseconds, or null

  // The index of a selection in compact_idx; local_expert is negative if it is no expert of this
  // rank.
  DC_HOST_DEVICE int32_t idx_of(int local_expert) const {
    return local_expert < 0 ? other_idx : first_idx + local_expert;
  }
};

struct LowLatencyDispatchArgs {
  World world;
  LowLatencyRegion region;
  LowLatencyShape shape;
  ExpertMap experts;
  uint32_t signature;  // 16 bits: what must be equal on all ranks
  Phases phases;
  bool can_shrink;        // a silent rank is masked, and the call goes on without it
  LowLatencySplit split;  // of T among the blocks
  const uint8_t* x;       // [T, H] bfloat16
  const void* topk_idx;   // [T, K]
  int topk_idx_bytes;
  const float* topk_weights;  // [T, K], or null
  bool round_scale;
  const float* global_scale;  // [1] NVFP4, or null: 1
  // Host memory, or null: receives the maximum number of tokens of a rank, together with
  // report_sequence, the host's number of this dispatch.
  uint64_t* report;
  uint32_t report_sequence;
  LowLatencyOutputs out;
};

// What is returned.
enum class CombineRows : int {
  kSums,     // one row per token and rank: its rows there, weighted and added
  kReduced,  // compact: one row per token and rank, as the caller has reduced it
  // one row per top-k entry, unchanged; weighted and added at the source, rounded once
  kSelections,
};

struct LowLatencyCombineArgs {
  World world;
  LowLatencyRegion region;
  LowLatencyShape shape;
  ExpertMap experts;
  uint32_t signature;
  Phases phases;
  bool can_shrink;  // a silent rank is masked, and the call goes on without it
  // as expert rank
  const uint8_t* x;            // [L, R*M, H] or [R*M, H] bfloat16
  const int32_t* recv_tokens;  // [R]
  const int32_t* recv_rows;    // [R, M, K] or [R, M]
  const float* recv_weights;   // [R, M, K] if dispatch sent the weights, else null
  // as source
  LowLatencySplit split;  // of T among the blocks
  const void* topk_idx;   // [T, K]
  int topk_idx_bytes;
  const float* topk_weights;  // [T, K]; null: reduced rows, or recv_weights
  uint8_t* combined_x;        // [T, H] bfloat16
  int64_t* wait_stats;        // [R], or null
};

}  // namespace deep_comm
