// What calls ask of an engine, whichever target it is for. The CUDA module hands its engine over once,
// as an object of this class; calls are compiled once, in _core.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "device/internode/args.cuh"
#include "device/intranode/args.cuh"
#include "device/low_latency/rail_args.cuh"
#include "device/tp/args.cuh"
#include "host/low_latency_plan.hpp"
#include "host/plans.hpp"

namespace deep_comm {

// The error record with its numbers turned into names.
struct ErrorRecord {
  std::string kind;
  std::string kernel;
  std::string stage;
  std::string word;
  int rank = -1;
  int peer = -1;
  int channel = -1;
  int64_t seen = 0;
  int64_t expected = 0;
  uint64_t waited_ns = 0;
  int64_t index = -1;
  std::string peer_kernel;  // word "operation": what the peer has entered
};

struct Counts {
  int num_recv_tokens = 0;
  int max_num_tokens = 0;  // of all ranks
  bool is_direct = false;  // the outputs announced to notify_dispatch serve
  std::vector<int> num_recv_tokens_per_expert;
};

// What internode_notify tells the host.
struct TwoTierCounts {
  int num_recv_tokens = 0;
  int num_forward_tokens = 0;  // tokens of ranks of this local index that go to this node
  int max_num_tokens = 0;      // of all ranks
  int num_returning_rows = 0;  // that the node's other ranks return in combine
  bool is_direct = false;      // an early dispatch has sent its rows
  std::vector<int> num_recv_tokens_per_expert;
};

// Arguments come as the kernels' own structs; the engine fills in what follows from its own state
// (world, message, pieces, ring, signature), and checks all that needs no tensor before a launch. A
// plan checks all that its options decide. It is for the engine that made it, and calls start from a
// copy of its args. Errors are std::invalid_argument and std::runtime_error.
class EngineCalls {
 public:
  virtual ~EngineCalls() = default;

  // Kernels have ended when a launch returns.
  virtual bool is_synchronous() const = 0;
  // Launches of kernels over both tiers block the host until the kernel has nearly ended.
  virtual bool launches_block() const = 0;
  virtual bool is_open() const = 0;
  // Open, and no kernel has left an error record.
  virtual bool is_sound() const = 0;
  virtual std::optional<ErrorRecord> poll_error() const = 0;
  // A call ends in the middle: its kernel gives up, and the record says so, until reset().
  virtual void note_interrupt() = 0;
  virtual size_t low_latency_bytes() const = 0;

  // Of all ranks of the group: ends when the streams of all have come to theirs.
  virtual void barrier(int digest, uint64_t stream) = 0;

  // ---- inside a node
  virtual void get_dispatch_layout(LayoutArgs args, uint64_t stream) = 0;
  virtual NotifyPlan plan_notify(const NotifyOptions& options) const = 0;
  virtual void notify_dispatch(const NotifyPlan& plan, NotifyArgs args, uint64_t stream) = 0;
  // Empty: the kernel failed; the error record says how.
  virtual std::optional<Counts> wait_counts() = 0;
  virtual DispatchPlan plan_dispatch(const DispatchOptions& options) const = 0;
  virtual void dispatch(const DispatchPlan& plan, const DispatchArgs& args, uint64_t stream) = 0;
  // Launches notify and, beside its end, the plain dispatch that follows it.
  virtual void notify_and_dispatch(const NotifyPlan& notify_plan, NotifyArgs notify,
                                   const DispatchPlan& plan, const DispatchArgs& args,
                                   uint64_t stream) = 0;
  // With expanded outputs: `expand` completes them, beside the dispatch, if may_run_beside and nothing
  // can wait in a circle (early_launches.hpp), on half of num_blocks; else behind it, on all.
  virtual void dispatch_expanded(const DispatchPlan& plan, const DispatchArgs& args,
                                 const ExpandRowsArgs& expand, int num_blocks, bool may_run_beside,
                                 uint64_t stream) = 0;
  virtual CombinePlan plan_combine(const ChannelConfig& config, Dtype dtype, int num_topk,
                                   int row_bytes, const CombineSms& sms) const = 0;
  virtual void combine(const CombinePlan& plan, CombineArgs args, uint64_t stream) = 0;
  // Of an expanded output: `sums` makes its rows and sends them. Combine adds them beside that, under the
  // condition of dispatch_expanded, the sums on three quarters of num_local_blocks; else behind it.
  virtual void combine_expanded(const CombinePlan& plan, CombineArgs args, ReduceExpertsArgs sums,
                                int num_local_blocks, bool may_run_beside, uint64_t stream) = 0;

  // ---- expanded outputs: local kernels, on as many blocks as `config` has channels
  virtual void number_rows(NumberRowsArgs args, const ChannelConfig& config, uint64_t stream) = 0;
  virtual void reduce_experts(const ReduceExpertsArgs& args, Dtype dtype,
                              const ChannelConfig& config, uint64_t stream) = 0;
  // Between nodes these two stand for number_rows and dispatch_expanded's second half, and the sums
  // come before combine. rank_prefix_matrix is [1, 1], here and in reduce_experts: the rows received.
  virtual void number_received(NumberReceivedArgs args, const ChannelConfig& config,
                               uint64_t stream) = 0;
  virtual void expand_received(const ExpandReceivedArgs& args, const ChannelConfig& config,
                               uint64_t stream) = 0;
  virtual void transpose_scales(const TransposeScalesArgs& args, const ChannelConfig& config,
                                uint64_t stream) = 0;

  // ---- low latency
  // Checks what calls with these options need.
  virtual LowLatencyPlan plan_low_latency(const LowLatencyOptions& options) const = 0;
  // The most experts that the kernels of a call can count in the shared memory of a block.
  virtual int low_latency_max_experts(int num_topk) const = 0;
  // With is_reporting, wait_low_latency_num_tokens may be called.
  virtual void low_latency_dispatch(const LowLatencyPlan& plan, const LowLatencyDispatchCall& call,
                                    uint64_t stream) = 0;
  // The most tokens that any rank had in the last reporting dispatch. Empty: a kernel failed.
  virtual std::optional<int> wait_low_latency_num_tokens() = 0;
  virtual void low_latency_combine(const LowLatencyPlan& plan, const LowLatencyCombineCall& call,
                                   uint64_t stream) = 0;

  // ---- tensor parallelism, inside a node
  // args: op, x, out, num_bytes, staging. As many blocks as the shards need, at most max_blocks.
  // digest: of the type and shape of x and what else the ranks compare.
  virtual void collective(CollectiveArgs args, Dtype dtype, int digest, int max_blocks,
                          uint64_t stream) = 0;
  virtual void signal_word(const WordArgs& args, uint64_t stream) = 0;
  virtual void await_word(const WordArgs& args, uint64_t stream) = 0;
  // digest: of operation and arguments, which the ranks compare.
  virtual void begin_matmul(MatmulArgs args, int digest, uint64_t stream) = 0;
  virtual void push(const PushArgs& args, uint64_t stream) = 0;
  virtual void await_push(const MatmulArgs& args, uint64_t stream) = 0;
  virtual void add_slots(const AddSlotsArgs& args, Dtype dtype, uint64_t stream) = 0;
  virtual void end_matmul(const MatmulArgs& args, uint64_t stream) = 0;

  // ---- between nodes
  virtual void internode_layout(InternodeLayoutArgs args, uint64_t stream) = 0;
  // Two launches: the channels' counts, then their exchange.
  virtual void internode_notify(InternodeNotifyArgs args, const uint8_t* is_token_in_rank,
                                int num_tokens, int32_t* send_node_head, int32_t* send_slots,
                                const ChannelConfig& config, const RailConfig& rail,
                                uint64_t stream) = 0;
  // send_slots alone, for a handle that comes without it. Local.
  virtual void internode_send_slots(const uint8_t* is_token_in_rank, int num_tokens,
                                    int num_channels, int32_t* send_slots, uint64_t stream) = 0;
  // Empty: the kernel failed. is_early: a dispatch was launched behind the notify, and says whether it
  // has sent.
  virtual std::optional<TwoTierCounts> wait_internode_counts(bool is_early) = 0;
  // args.output_line, args.src_line: of blocks in the receive region, or 0. dtypes:
  // PayloadForm::dtypes.
  virtual void internode_dispatch(InternodeDispatchArgs args, const ChannelConfig& config,
                                  const RailConfig& rail, int num_topk, int dtypes, int row_bytes,
                                  uint64_t stream) = 0;
  virtual void internode_combine(InternodeCombineArgs args, Dtype dtype,
                                 const ChannelConfig& config, const RailConfig& rail, int num_topk,
                                 int row_bytes, uint64_t stream) = 0;
};

}  // namespace deep_comm
