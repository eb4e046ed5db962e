// Names in the error record that a failing thread writes: kernels, stages, words, kinds of failure.
// Device code stores the number. The host turns it into the text given here.
#pragma once

#include "device/arch/types.cuh"

namespace deep_comm {

enum class ErrorKind : uint32_t {
  kNone,
  kPeerTimeout,     // a peer's word did not arrive before the deadline
  kConfigMismatch,  // a peer entered another operation, or the same with other arguments
  kExpertIndex,     // an expert index outside [-1, num_experts)
  kOverflow,        // more rows arrive than the output has
  kMaskedOut,       // the other ranks have masked this one
  kInterrupted,     // the host left a call in the middle
  kCount
};

enum class Kernel : uint32_t {
  kLayout,
  kNotifyDispatch,
  kDispatch,
  kCombine,
  kLowLatencyDispatch,
  kLowLatencyCombine,
  kInternodeCount,
  kInternodeNotify,
  kInternodeDispatch,
  kInternodeCombine,
  kBarrier,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kMatmul,
  kNumberRows,
  kExpandRows,
  kReduceExperts,
  kTransposeScales,
  kNumberReceived,
  kExpandReceived,
  kShrinkBarrier,
  kSignalWord,
  kAwaitWord,
  kPush,
  kAddSlots,
  kCount
};

enum class Stage : uint32_t {
  kEntryBarrier,    // all ranks have entered this kernel
  kCounts,          // exchange of token counts
  kChannelOffsets,  // start and end of a channel's rows
  kRingCredit,      // sender: a free slot
  kRingTail,        // receiver: a filled slot
  kReduce,          // combine: a row to add
  kDone,            // direct dispatch: all rows of a peer have landed
  kRetire,          // combine: progress of this block's own reducing warps
  kCheckArguments,
  kBufferCredit,   // low latency: a peer has read what the buffer held before
  kRows,           // low latency: a piece of a row, its scales or its routes
  kWeights,        // low latency combine: a token's weights
  kAnnounced,      // low latency: a peer has begun the same operation
  kParticipants,   // low latency: block 0 of this rank has found the participants
  kRailBarrier,    // all ranks of this local index have entered this kernel
  kRailCredit,     // rail sender: a free slot
  kRailTail,       // forwarder, or the reducer of combine: a row from another node
  kBlamed,         // a neighbour gave up waiting for that rank
  kShrinkBarrier,  // the ranks that go on without others
  kStaged,         // collectives: parts of a peer's input
  kSummed,         // collectives: parts of a peer's sum
  kSignal,         // a word of symmetric memory
  kCount
};

enum class Word : uint32_t {
  kArrived,
  kDone,
  kHead,
  kTail,
  kStartOffset,
  kEndOffset,
  kProgress,
  kTopkIdx,
  kNumRecvRows,
  kHeader,     // a field of NotifyHeader; the record's `channel` is its index
  kOperation,  // the low half of `arrived`: which kernel, with which arguments
  kConsumed,
  kAnnounced,
  kTokenCount,
  kWeight,
  kRoute,
  kRow,
  kScale,
  kMask,
  kRailArrived,
  kRailHead,
  kRailTail,
  kRailHeader,  // a field of RailHeader; the record's `channel` is its index
  kNumForwardRows,
  kBlamed,
  kLanded,
  kProposal,  // ranks to be left out, a bit each
  kStaged,
  kSummed,
  kSignal,
  kCount
};

inline constexpr const char* kErrorKindNames[] = {"none",         "peer_timeout", "config_mismatch",
                                                  "expert_index", "overflow",     "masked_out",
                                                  "interrupted"};
inline constexpr const char* kKernelNames[] = {"get_dispatch_layout",
                                               "notify_dispatch",
                                               "dispatch",
                                               "combine",
                                               "low_latency_dispatch",
                                               "low_latency_combine",
                                               "internode_count",
                                               "internode_notify",
                                               "internode_dispatch",
                                               "internode_combine",
                                               "barrier",
                                               "all_gather",
                                               "reduce_scatter",
                                               "all_reduce",
                                               "matmul",
                                               "number_rows",
                                               "expand_rows",
                                               "reduce_experts",
                                               "transpose_scales",
                                               "number_received",
                                               "expand_received",
                                               "reset",
                                               "signal",
                                               "wait",
                                               "push",
                                               "add_slots"};
inline constexpr const char* kStageNames[] = {
    "entry_barrier",  "counts",       "channel_offsets", "ring_credit",   "ring_tail", "reduce",
    "done",           "retire",       "check_arguments", "buffer_credit", "rows",      "weights",
    "announced",      "participants", "rail_barrier",    "rail_credit",   "rail_tail", "blamed",
    "shrink_barrier", "staged",       "summed",          "signal"};
inline constexpr const char* kWordNames[] = {
    "arrived",   "done",         "head",           "tail",      "start_offset", "end_offset",
    "progress",  "topk_idx",     "num_recv_rows",  "header",    "operation",    "consumed",
    "announced", "token_count",  "weight",         "route",     "row",          "scale",
    "mask",      "rail_arrived", "rail_head",      "rail_tail", "rail_header",  "num_forward_rows",
    "blamed",    "landed",       "reset(without)", "staged",    "summed",       "signal"};
static_assert(sizeof(kErrorKindNames) / sizeof(char*) == static_cast<size_t>(ErrorKind::kCount));
static_assert(sizeof(kKernelNames) / sizeof(char*) == static_cast<size_t>(Kernel::kCount));
static_assert(sizeof(kStageNames) / sizeof(char*) == static_cast<size_t>(Stage::kCount));
static_assert(sizeof(kWordNames) / sizeof(char*) == static_cast<size_t>(Word::kCount));

#if !DEEP_COMM_TARGET_CUDA
// Device code on the host target prints names. On CUDA only numbers are stored.
inline const char* name_of(Kernel kernel) { return kKernelNames[static_cast<int>(kernel)]; }
inline const char* name_of(Stage stage) { return kStageNames[static_cast<int>(stage)]; }
inline const char* name_of(Word word) { return kWordNames[static_cast<int>(word)]; }
#endif

}  // namespace deep_comm
