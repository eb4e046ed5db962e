// The arguments of the intranode kernels: one named struct per kernel, from the binding to the
// device. R ranks, T local tokens, H hidden, K top-k, E experts, C channels, N received rows.
#pragma once

#include "device/layout/message.cuh"
#include "device/layout/ring_layout.cuh"
#include "device/layout/workspace.cuh"
#include "device/move/quantise.cuh"
#include "device/move/reduce.cuh"
#include "device/move/sum_order.cuh"

namespace deep_comm {

struct LayoutArgs {
  World world;
  TopkIdx topk;
  ExpertMap experts;
  int num_tokens;
  int ranks_per_node;
  int num_nodes;
  int tokens_per_block;
  int32_t* num_tokens_per_rank;    // out [R]
  int32_t* num_tokens_per_node;    // out [num_nodes], or null
  int32_t* num_tokens_per_expert;  // out [E]
  uint8_t* is_token_in_rank;       // out [T, R]
};

struct BarrierArgs {
  World world;
  uint32_t signature;
};

// What all ranks must agree on before a dispatch. notify_dispatch compares it field by field.
struct NotifyHeader {
  int fields[kNumHeaderFields];
};
enum class HeaderField : int {
  kNumExperts,
  kNumTopk,
  kDtypes,  // of x and its scales: PayloadForm::dtypes
  kRowBytes,
  kScaleRowBytes,
  kNumChannels,
  kNumSendTokens,
  kNumSlots,
  kExpertAlignment,  // of expanded outputs; 0: not expanded
  kCast,             // of x before it is sent: PayloadForm::cast
  kHasWeights,       // top-k weights are sent
  kNumCompared,
  // The other fields inform the peers and are not compared.
  kNumTokens = kNumCompared,  // of this rank; the maximum over the ranks goes to the host
  kOutputLine,                // where the outputs of the next dispatch will lie: OutputLocation
  kSrcLine,
  kOutputRows,
  kBadExpertIndex,  // this rank's routing had an index out of range
  kCount
};
inline constexpr const char* kHeaderFieldNames[] = {
    "num_experts",
    "num_topk",
    "dtypes",
    "row_bytes (hidden size of x times the size of its elements)",
    "scale_row_bytes (scales of a row times their size)",
    "num_channels (config.num_sms)",
    "config.num_max_nvl_chunked_send_tokens",
    "config.num_max_nvl_chunked_recv_tokens",
    "expert_alignment with expand (0: without)",
    "use_fp8 + round_scale + use_ue8m0",
    "topk_weights",
    "num_tokens",
    "output_line",
    "src_line",
    "output_rows",
    "topk_idx"};
static_assert(sizeof(kHeaderFieldNames) / sizeof(char*) ==
              static_cast<size_t>(HeaderField::kCount));
static_assert(static_cast<int>(HeaderField::kCount) <= kNumHeaderFields);

// Totals that the host waits for; host memory that kernels reach.
struct CountsBlock {
  uint32_t sequence;  // released last: the host's number of this notify
  int32_t num_recv_tokens;
  int32_t max_num_tokens;  // maximum over the ranks
  int32_t is_direct;       // the outputs announced to this notify suffice on all ranks
  // [num_local_experts], aligned; allocated for num_max_experts
  int32_t num_recv_tokens_per_expert[1];
};

// Where a rank's outputs begin in its segment, in lines; 0: not in its receive region.
struct OutputLocation {
  uint32_t output_line;
  uint32_t src_line;  // recv_src_idx
  int num_rows;       // that fit
  // The block is laid out for the rows that arrive, whose number the host does not know yet.
  // Otherwise for num_rows.
  bool is_exact;
};

// Where the rows of expanded outputs belong; all null without expand.
struct ExpansionArgs {
  // out [E]: first row of this rank for each expert, in the output of the expert's rank
  int32_t* first_rows;
  // out [num_local_experts + 1]: where the group of each local expert begins here
  int32_t* expert_offsets;
  int32_t* expert_counts;  // out [num_local_experts]: rows of each group, without padding
  int32_t* num_rows;       // out [R]: rows of every rank's output, with padding
};

struct NotifyArgs {
  World world;
  NotifyHeader header;
  // Either the top-k indices (is_token_in_rank is an output then), or the result of
  // get_dispatch_layout.
  TopkIdx topk;
  uint8_t* is_token_in_rank;             // [T, R]
  const int32_t* num_tokens_per_expert;  // [E], or null
  int num_tokens;
  ExpertMap experts;
  int num_channels;
  int expert_alignment;
  OutputLocation place;  // of the next dispatch
  uint32_t sequence;
  CountsBlock* counts;
  int32_t* rank_prefix_matrix;          // out [R, R]
  int32_t* channel_prefix_matrix;       // out [R, C]
  int32_t* send_head;                   // out [T, R]
  int32_t* num_recv_tokens_per_expert;  // out [num_local_experts], or null
  int32_t* recv_counts;  // out [1 + R]: rows that this rank receives, in total and from each rank
  ExpansionArgs expansion;
};

// What a dispatch does besides moving rows. Each form is compiled separately, so plain rows pay for
// none of it.
template <bool kIsExpanded, bool kIsQuantised>
struct DispatchForm {
  static constexpr bool kExpanded = kIsExpanded;    // received rows are grouped by local expert
  static constexpr bool kQuantised = kIsQuantised;  // bfloat16 rows are sent as FP8
};

// The warps of a block in ring mode. It has ends 0 to R - 1 for the ranks that it sends to, this one
// last, and R to 2 R - 2 for the peers that it receives from, in the same order. The warps of an end
// take its rows in turn.
struct RingWarps {
  int of_send_end;
  int of_receive_end;

  DC_HOST_DEVICE int count(int num_ranks) const {
    return num_ranks * of_send_end + (num_ranks - 1) * of_receive_end;
  }
  DC_DEVICE int of_end(int num_ranks, int end) const {
    return end < num_ranks ? of_send_end : of_receive_end;
  }
  DC_DEVICE int first_of(int num_ranks, int end) const {
    const int num_sending = min_of(end, num_ranks);
    return num_sending * of_send_end + (end - num_sending) * of_receive_end;
  }
  DC_DEVICE int end_of(int num_ranks, int warp) const {
    const int num_senders = num_ranks * of_send_end;
    return warp < num_senders ? warp / of_send_end
                              : num_ranks + (warp - num_senders) / of_receive_end;
  }
};

struct DispatchArgs {
  World world;
  uint32_t signature;
  bool fill_tail;
  bool zero_tail;  // payload and scales as well
  MessageLayout message;
  // Shared memory: the stages of either mode, then the mbarriers of each mode, then a
  // DispatchEntry. The memory of an mbarrier is used for nothing else while the kernel runs.
  size_t ring_barriers_offset;
  size_t direct_barriers_offset;
  size_t entry_offset;
  // ring mode
  StageLayout stage;
  RingLayout ring;
  int num_send_tokens;
  RingWarps ring_warps;
  // direct mode
  StageLayout direct_stage;
  int num_move_warps;  // of a block; the next num_meta_warps write metadata, if there is any
  int num_meta_warps;  // expanded: at least one, since they also publish what has landed
  // first line of this rank's output block in its segment; 0: elsewhere
  uint32_t output_line;
  uint32_t src_line;  // the same for recv_src_idx
  // A notify ran just before. If it found that direct mode is possible, its barrier and its words
  // serve this kernel too (docs/design/0009).
  bool follows_notify;
  // Launched before the result of that notify is known. Without direct mode the kernel returns at
  // once and leaves no trace.
  bool is_speculative;
  // routing
  const uint8_t* is_token_in_rank;       // [T, R]
  const int32_t* send_head;              // [T, R]
  const int32_t* rank_prefix_matrix;     // [R, R]
  const int32_t* channel_prefix_matrix;  // [R, C]
  int num_tokens;
  ExpertMap experts;
  // payload
  const uint8_t* x;         // [T, row_bytes]
  const uint8_t* x_scales;  // [T, num_scales] at any strides, or null
  int scale_bytes;
  int num_scales;
  int64_t scale_token_stride;   // in scales
  int64_t scale_column_stride;  // in scales
  const void* topk_idx;         // [T, K], or null
  int topk_idx_bytes;
  const float* topk_weights;  // [T, K], or null: routing only
  // quantised: x and x_scales are the engine's own; ring mode fills them from `source`
  const uint8_t* source;  // [T, H] bfloat16
  ScaleFormat scale_format;
  // expanded outputs: where the rows belong
  const int32_t* send_row;  // [T, R] output row of a token's first row at a rank, or -1
  // [T, K] output row of each top-k entry at its rank, or -1; null: cached
  const int32_t* send_rows;
  const int32_t* num_expanded;  // [R] rows that each rank's output needs
  // out [N, K] this rank's output rows of each received token, or -1; null: cached
  int32_t* recv_rows;
  // outputs; expanded: M rows and num_topk 1 (local expert and weight of the row), and N of
  // recv_src_idx and recv_rows
  uint8_t* recv_x;                      // [N, row_bytes]
  uint8_t* recv_x_scales;               // [N, num_scales], or null
  void* recv_topk_idx;                  // [N, K], or null
  float* recv_topk_weights;             // [N, K], or null
  int32_t* recv_src_idx;                // [N], or null
  int32_t* recv_channel_prefix_matrix;  // [R, C], or null
  int num_recv_rows;                    // rows of the outputs
};

// Numbers the rows of expanded outputs; local. Runs after notify_dispatch.
struct NumberRowsArgs {
  World world;
  const void* topk_idx;  // [T, K] int32 or int64
  int topk_idx_bytes;
  int num_tokens;
  int num_topk;
  ExpertMap experts;
  int tokens_per_block;
  const int32_t* first_rows;  // [E]
  int32_t* send_row;          // out [T, R]
  int32_t* send_rows;         // out [T, K]
};

// Rows grouped by local expert.
struct ExpandedOutput {
  int num_rows;              // M
  uint8_t* x;                // [M, row_bytes]
  uint8_t* scales;           // [M, scale_row_bytes], or null
  void* expert_idx;          // out [M], or null
  float* weights;            // [M], or null
  const int32_t* recv_rows;  // [N, K]
};

// Completes expanded outputs.
struct ExpandArgs {
  World world;
  const int32_t* rank_prefix_matrix;  // [R, R]
  const int32_t* expert_offsets;      // [num_local_experts + 1]
  const int32_t* expert_counts;       // [num_local_experts]
  int num_topk;
  int num_local_experts;
  int num_tokens_limit;  // N: of recv_rows
  int row_bytes;
  int scale_row_bytes;
  int expert_idx_bytes;
  bool zero_padding;
  ExpandedOutput output;
};

// Of the outputs of a dispatch inside a node, which writes the first row of every received token.
// Runs beside that dispatch or after it, right behind it in the stream. No peer waits for it.
struct ExpandRowsArgs : ExpandArgs {
  bool follows_notify;          // as in the dispatch
  bool is_speculative;          // likewise; `output` is then laid out for the rows that come:
  const int32_t* num_expanded;  // [R] rows that each rank's output needs
  int32_t* src_idx;             // [N], in front of recv_rows; if speculative
  int32_t* fill_src_idx;        // [N], -1 past the received tokens; null: all N are received
  int32_t* fill_rows;           // [N, K], likewise
};

// Numbers received rows that have no output row yet, between nodes; local. `world` is this rank
// alone, here and in the structs below.
struct NumberReceivedArgs {
  World world;
  int rank;                           // in the group, for errors
  const int32_t* rank_prefix_matrix;  // [1, 1]: rows received
  const void* topk_idx;               // [N, K] local experts, int32 or int64
  int topk_idx_bytes;
  int num_tokens_limit;  // N
  int num_topk;
  int num_experts;  // local experts
  int expert_alignment;
  int num_rows;             // M: of the outputs
  int num_numbering_warps;  // of a block: the warps for whose counters its shared memory has room
  int32_t* expert_offsets;  // out [num_experts + 1]
  int32_t* expert_counts;   // out [num_experts]
  int32_t* recv_rows;       // out [N, K], -1 past the received rows
};

// Expanded outputs of received rows that had no output row on the way; local.
struct ExpandReceivedArgs : ExpandArgs {
  const uint8_t* recv_x;       // [N, row_bytes]
  const uint8_t* recv_scales;  // [N, scale_row_bytes], or null
  const float* recv_weights;   // [N, K], or null
};

// Adds the rows that a token has on this rank; local. Runs beside combine inside a node, between
// nodes before it.
struct ReduceExpertsArgs {
  World world;
  const int32_t* rank_prefix_matrix;  // [R, R]
  const int32_t* recv_rows;           // [N, K]
  int num_topk;
  int num_rows;          // M
  int num_tokens_limit;  // N
  int row_bytes;
  const uint8_t* x;          // [M, row_bytes]
  const float* row_weights;  // [M] factors, or null
  uint8_t* reduced_x;        // out [N, row_bytes]
  const float* weights;      // [M] to be returned by top-k entry, or null
  float* reduced_weights;    // out [N, K], or null
};

// Transposes scales from rows to columns; local. Runs after dispatch.
struct TransposeScalesArgs {
  World world;
  const uint32_t* src;  // [N, S]
  uint32_t* dst;        // out [S, column_stride], of which N are written
  int num_rows;
  int num_columns;
  int64_t column_stride;
};

struct CombineArgs {
  World world;
  uint32_t signature;
  MessageLayout message;
  StageLayout stage;
  int num_senders;         // warps of a block that send; at least R - 1
  int num_ring_senders;    // ring mode: of them, those that send to a peer
  size_t barriers_offset;  // shared memory: stages, mbarriers, CombineEntry
  size_t entry_offset;
  RingLayout ring;
  int num_send_tokens;
  uint32_t staging_line;  // first line of this rank's staging in its segment; 0: none
  int num_staging_rows;
  int num_staged_senders;  // staged mode: sending warps of all blocks
  int num_window_slots;    // staged mode: tokens that a block works on at a time
  int most_single_rows;    // staged mode: up to so many rows of a rank are sent one by one
  const int32_t* rank_prefix_matrix;          // [R, R]
  const int32_t* channel_prefix_matrix;       // [R, C]
  const int32_t* recv_channel_prefix_matrix;  // [R, C]
  const int32_t* send_head;                   // [T, R]
  int num_tokens;
  int num_rows;                  // rows of x
  const uint8_t* x;              // [N, row_bytes]
  const float* topk_weights;     // [N, K], or null
  const uint8_t* bias[2];        // [T, row_bytes], or null
  SumOrder order;                // of a token's rows, after the biases
  uint8_t* combined_x;           // out [T, row_bytes]
  float* combined_topk_weights;  // out [T, K], or null
};

// The sums of an expanded output, beside the combine that they are for.
struct CombineSumsArgs {
  World world;
  CombineArgs combine;
  ReduceExpertsArgs sums;
};

// The result of a shrink barrier; host memory that kernels reach.
struct ShrinkBarrierResult {
  uint32_t number;      // agreed on by all, or this rank's last proposal
  uint32_t has_agreed;  // 1: all have arrived and name the same ranks
};

struct ShrinkBarrierArgs {
  World world;             // absent: the ranks to be left out from now on
  uint32_t number;         // proposed: odd for the first barrier of a reset, even for the second
  bool tells_low_latency;  // also mask them in low-latency calls
  ShrinkBarrierResult* result;
};

}  // namespace deep_comm
