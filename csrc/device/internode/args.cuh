// The arguments of the internode kernels: one named struct per kernel, from the binding to the
// device. N nodes, M ranks per node, R = N * M ranks, T local tokens, K top-k, E experts, C
// channels, Q received rows, F rows that this rank forwards: tokens that ranks of its local index
// send to its node.
#pragma once

#include "device/channel/rail.cuh"
#include "device/layout/message.cuh"
#include "device/layout/rail.cuh"
#include "device/layout/ring_layout.cuh"
#include "device/layout/tier_output.cuh"
#include "device/layout/workspace.cuh"
#include "device/move/quantise.cuh"
#include "device/move/reduce.cuh"
#include "device/move/sum_order.cuh"

namespace deep_comm {

// Both tiers as one rank sees them. `world` of a kernel's arguments is the node: its ranks are the
// M local ones.
struct TwoTier {
  RailTier rail;
  int rank;  // in the group

  DC_HOST_DEVICE int num_nodes() const { return rail.num_nodes(); }
  DC_HOST_DEVICE int ranks_per_node() const { return rail.layout.ranks_per_node; }
  DC_HOST_DEVICE int num_ranks() const { return num_nodes() * ranks_per_node(); }
};

// What all ranks must agree on before a dispatch. internode_notify compares it field by field.
enum class RailField : int {
  kNumExperts,
  kNumTopk,
  kDtypes,  // of x and its scales: PayloadForm::dtypes
  kRowBytes,
  kScaleRowBytes,
  kNumChannels,
  kNumSendTokens,
  kNumSlots,
  kNumRailSendTokens,
  kNumRailSlots,
  kCast,            // of x before it is sent: PayloadForm::cast
  kHasWeights,      // top-k weights are sent
  kBadExpertIndex,  // not compared: this rank's routing had an index out of range
  kNumTokens,       // not compared: the maximum over the ranks goes to the host
  kCount
};
inline constexpr const char* kRailFieldNames[] = {
    "num_experts",
    "num_topk",
    "dtypes",
    "row_bytes (hidden size of x times the size of its elements)",
    "scale_row_bytes (scales of a row times their size)",
    "num_channels (config.num_sms / 2)",
    "config.num_max_nvl_chunked_send_tokens",
    "config.num_max_nvl_chunked_recv_tokens",
    "config.num_max_rdma_chunked_send_tokens",
    "config.num_max_rdma_chunked_recv_tokens",
    "use_fp8 + round_scale + use_ue8m0",
    "topk_weights",
    "topk_idx",
    "num_tokens"};
static_assert(sizeof(kRailFieldNames) / sizeof(char*) == static_cast<size_t>(RailField::kCount));
static_assert(static_cast<int>(RailField::kCount) <= kNumRailHeaderFields);

static_assert(kMaxRanks <= OrderedRanks::kMaxLocal);

struct RailHeader {
  int fields[kNumRailHeaderFields];
};

struct InternodeLayoutArgs {
  World world;
  TwoTier tiers;
  const void* topk_idx;  // [T, K] int32 or int64
  int topk_idx_bytes;
  int num_tokens;
  int num_topk;
  ExpertMap experts;
  int tokens_per_block;
  int32_t* num_tokens_per_rank;    // out [R]
  int32_t* num_tokens_per_node;    // out [N]
  int32_t* num_tokens_per_expert;  // out [E]
  uint8_t* is_token_in_rank;       // out [T, R]
};

struct InternodeCountArgs {
  World world;
  TwoTier tiers;
  const uint8_t* is_token_in_rank;  // [T, R]
  int num_tokens;
  int num_channels;
  // out [N, C]  tokens that this rank sends to node n in channels 0..c
  int32_t* node_channel_prefix;
  int32_t* rank_channel_prefix;  // out [R, C]  the same by rank
  // out [T, N]  ordinal of a token among those its channel sends to a node, or -1
  int32_t* send_node_head;
  // out [T, N + R], or null. The place of a token at a target, first the nodes, then the ranks: its
  // ordinal among all tokens of this rank that go there, or -1
  int32_t* send_slots;
};

// Totals that the host waits for; host memory that kernels reach.
struct InternodeCounts {
  uint32_t sequence;  // released last: the host's number of this notify
  int32_t num_recv_tokens;
  int32_t num_forward_tokens;
  int32_t max_num_tokens;      // maximum over the ranks
  int32_t num_returning_rows;  // that the node's other ranks return to this one in combine
  // Early dispatch. is_direct: its rows are being written to their final rows; otherwise no rank
  // has sent any. The sequence is released last.
  uint32_t dispatch_sequence;
  int32_t is_direct;
  // [num_local_experts], aligned; allocated for num_max_experts
  int32_t num_recv_tokens_per_expert[1];
};

struct InternodeBarrierArgs {
  World world;
  TwoTier tiers;
  uint32_t signature;
};

struct InternodeNotifyArgs {
  World world;
  TwoTier tiers;
  RailHeader header;
  const int32_t* num_tokens_per_expert;  // [E]
  const int32_t* node_channel_prefix;    // [N, C]
  const int32_t* rank_channel_prefix;    // [R, C]
  ExpertMap experts;
  int num_channels;
  int expert_alignment;
  uint32_t sequence;
  InternodeCounts* counts;
  // out [N, C]  rows of source node n to forward in channels 0..c
  int32_t* recv_node_channel_prefix;
  int32_t* recv_node_prefix_sum;     // out [N]     rows of nodes 0..n to forward
  int32_t* recv_rank_channel_start;  // out [R, C]  where the rows of channel c of source r begin
  int32_t* recv_rank_prefix_sum;     // out [R]     rows of sources 0..r
  int32_t* combine_start;  // out [C, N, M]  where a node's rows begin in combine's ring of a rank
  int32_t* forward_slots;  // out [N + 1, M], [C, N, M]: see InternodeCombineArgs
  int32_t* num_recv_tokens_per_expert;  // out [num_local_experts]
  int32_t* num_recv_tokens_per_rank;    // out [R]
};

struct InternodeDispatchArgs {
  World world;
  TwoTier tiers;
  uint32_t signature;
  // fill rows past the received ones; for a bounded dispatch right after its notify
  bool fill_tail;
  bool zero_tail;  // also their payload and scales
  RailMessage message;
  RingLayout ring;  // inside the node; a lane is a channel
  RailRings rail_rings;
  int num_send_tokens;       // rows between two publications inside the node
  int num_rail_send_tokens;  // rows per put; without rings rounded up to a power of two
  int num_sender_warps;
  // direct mode (dispatch_direct.cuh)
  PlacedRailMessage placed;
  RailStaging staging;
  StageLayout send_stage;
  StageLayout forward_stage;
  // of a block, after the warp that enters and publishes; then those that forward (or write metadata,
  // where there is nothing to forward), and those that write metadata
  int num_send_warps;
  int num_forward_warps;
  int num_meta_warps;
  // Shared memory: the stages of sending warps, then
  size_t forward_stages_offset;
  size_t barriers_offset;  // of sending warps, then of forwarding warps
  size_t entry_offset;     // DirectEntry
  // First line of this rank's outputs in its segment; 0: elsewhere, and no stages
  uint32_t output_line;
  uint32_t src_line;
  const int32_t* send_slots;           // [T, N + R]
  const int32_t* node_channel_prefix;  // [N, C]
  const int32_t* forward_slots;        // see InternodeCombineArgs; with send_rank_head
  // routing
  const uint8_t* is_token_in_rank;          // [T, R]
  const int32_t* send_node_head;            // [T, N]
  const int32_t* recv_node_channel_prefix;  // [N, C]
  const int32_t* recv_node_prefix_sum;      // [N]
  const int32_t* recv_rank_channel_start;   // [R, C]
  const int32_t* recv_rank_prefix_sum;      // [R]
  const int32_t* combine_start;             // [C, N, M], with send_rank_head
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
  const float* topk_weights;  // [T, K], or null
  // outputs
  uint8_t* recv_x;           // [Q, row_bytes]
  uint8_t* recv_x_scales;    // [Q, num_scales], or null
  void* recv_topk_idx;       // [Q, K], or null
  float* recv_topk_weights;  // [Q, K], or null
  int32_t* recv_src_idx;     // [Q], or null
  // [Q, 2]: source node, mask of the node's ranks that got the token; or null
  int32_t* recv_src_meta;
  // [F, M]: OrderedPlace of a forwarded row in combine's ring of a rank; or null
  int32_t* send_rank_head;
  SumOrder order;        // of a token's ranks, for these words
  int num_recv_rows;     // Q
  int num_forward_rows;  // F
  // quantised: x and x_scales are the engine's own; rings fill them from `source`
  const uint8_t* source;  // [T, H] bfloat16
  ScaleFormat scale_format;
  // Launched before the host knows the counts. The outputs have at least as many rows as arrive and
  // are laid out for those; otherwise no rank sends anything.
  bool is_early;
  uint32_t sequence;
  InternodeCounts* counts;
};

struct InternodeCombineArgs {
  World world;
  TwoTier tiers;
  uint32_t signature;
  MessageLayout message;
  RingLayout ring;
  RailRings rail_rings;
  int num_send_tokens;
  int num_rail_send_tokens;
  int num_reduce_warps;  // rings: of either block of a channel
  // staged mode
  StageLayout stage;
  int num_senders;       // warps of a block that move rows of x
  int num_adders;        // the next warps, which add
  int num_forwarders;    // of these, so many forward first; 0: one rank per node
  int most_single_rows;  // up to so many sums for a node are stored one by one, else in twos
  size_t stages_offset;  // shared memory: stages, mbarriers, StagedEntry
  size_t barriers_offset;
  size_t entry_offset;
  uint32_t staging_line;  // first line of this rank's staging in its segment; 0: none
  int num_staging_rows;
  int num_forward_rows;                // F: rows of send_rank_head
  const int32_t* node_channel_prefix;  // [N, C]
  // [N + 1, M]: rows that a local rank returns to this one from nodes before n. Then [C, N, M]:
  // what is added to an entry of send_rank_head to get the row's place among all rows of that rank.
  // Null: no staging
  const int32_t* forward_slots;
  const int32_t* send_node_head;            // [T, N]
  const int32_t* send_rank_head;            // [F, M], OrderedPlace
  const int32_t* recv_node_channel_prefix;  // [N, C]
  const int32_t* recv_node_prefix_sum;      // [N]
  const int32_t* recv_rank_channel_start;   // [R, C]
  const int32_t* recv_rank_prefix_sum;      // [R]
  int num_tokens;
  int num_rows;                  // rows of x
  const uint8_t* x;              // [Q, row_bytes]
  const float* topk_weights;     // [Q, K], or null
  const uint8_t* bias[2];        // [T, row_bytes], or null
  SumOrder order;                // of the nodes' sums, after the biases, and of the rows in a node
  uint8_t* combined_x;           // out [T, row_bytes]
  float* combined_topk_weights;  // out [T, K], or null
};

// Lane j: where local rank j's row, of `present` (a bit each), stands in the sum of the node. word:
// its OrderedPlace.
DC_DEVICE int position_in_node(const InternodeCombineArgs& args, uint32_t present, int word) {
  if (!args.order.is_ascending()) return OrderedPlace::position(word);
  return arch::popc(present & ((1u << arch::lane_idx()) - 1));
}

// Rows of one (source rank, channel): [begin, end) of the received rows.
struct RowRange {
  int begin;
  int end;
};

template <class Args>
DC_DEVICE RowRange received_rows(const Args& args, int source, int channel) {
  const int num_channels = args.rail_rings.num_channels;
  const int position = source * num_channels + channel;
  const int num_ranks = args.tiers.num_ranks();
  const int end = position + 1 < num_ranks * num_channels
                      ? arch::ld_nc(args.recv_rank_channel_start + position + 1)
                      : arch::ld_nc(args.recv_rank_prefix_sum + num_ranks - 1);
  return {arch::ld_nc(args.recv_rank_channel_start + position), end};
}

// Rows that this rank forwards for one (source node, channel): [begin, end) of F.
template <class Args>
DC_DEVICE RowRange forwarded_rows(const Args& args, int node, int channel) {
  const int32_t* prefix = args.recv_node_channel_prefix + node * args.rail_rings.num_channels;
  const int start = node == 0 ? 0 : arch::ld_nc(args.recv_node_prefix_sum + node - 1);
  const int before = channel == 0 ? 0 : arch::ld_nc(prefix + channel - 1);
  return {start + before, start + arch::ld_nc(prefix + channel)};
}

}  // namespace deep_comm
