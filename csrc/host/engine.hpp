// The native half of a Buffer: one rank's workspace, its launches and its error record.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "device/intranode/args.cuh"
#include "device/low_latency/args.cuh"
#include "host/low_latency_plan.hpp"
#include "host/target.hpp"

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
};

struct Counts {
  int num_recv_tokens = 0;
  int max_num_tokens = 0;  // of all ranks
  bool is_direct = false;  // the outputs announced to notify_dispatch serve
  std::vector<int> num_recv_tokens_per_expert;
};

// Channels and rings of one call, as the user's Config asks for them.
struct ChannelConfig {
  int num_channels;
  int num_send_tokens;
  int num_slots;
};

struct EngineOptions {
  int rank;
  int num_ranks;
  int device;
  std::vector<uintptr_t> peer_bases;
  size_t heap_bytes;
  int num_max_experts;
  uint64_t timeout_ns;
};

// Arguments come as the kernels' own structs; the engine fills in what follows from its own state
// (world, message, pieces, ring, signature). Every check that needs no tensor is made here, before
// a launch.
template <class Target>
class Engine {
 public:
  Engine(const EngineOptions& options, Target target);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  static size_t workspace_bytes(int num_ranks, int num_max_experts);
  static size_t ring_bytes(int num_ranks, const ChannelConfig& config, int row_bytes,
                           int scale_row_bytes, int num_topk);
  // Bytes of one row in combine's staging.
  static size_t staging_row_bytes(int row_bytes, int num_topk) {
    return MessageLayout::of_combine(row_bytes, num_topk).slot_bytes();
  }

  void get_dispatch_layout(LayoutArgs args, uint64_t stream);
  void notify_dispatch(NotifyArgs args, const ChannelConfig& config, uint64_t stream);
  // Empty: the kernel failed; the error record says how.
  std::optional<Counts> wait_counts();
  void dispatch(DispatchArgs args, const ChannelConfig& config, int num_topk, int row_bytes,
                uint64_t stream);
  void combine(CombineArgs args, Dtype dtype, const ChannelConfig& config, int num_topk,
               int row_bytes, uint64_t stream);

  // Low-latency mode; defined in low_latency_impl.hpp.
  // Gives the last num_bytes of the heap to it. Once, before anything is launched.
  // can_shrink: its kernels do without ranks that stay silent.
  void enable_low_latency(size_t num_bytes, bool can_shrink);
  // From the segment's start: int32 [kMaxRanks] and [kMaxRanks, kMaxRanks], see sync/mask.cuh.
  size_t masked_offset() const { return world_.layout.low_latency.masked; }
  size_t votes_offset() const { return world_.layout.low_latency.votes; }
  // Numbers start anew and nobody is masked. Callers put a barrier before and after it.
  void reset_low_latency();
  size_t low_latency_bytes() const { return low_latency_bytes_; }
  // Checks what calls with these options need. A plan is for this engine alone.
  LowLatencyPlan plan_low_latency(const LowLatencyOptions& options) const;
  // With is_reporting, wait_low_latency_num_tokens may be called.
  void low_latency_dispatch(const LowLatencyPlan& plan, const LowLatencyDispatchCall& call, uint64_t stream);
  // The most tokens that any rank had in the last reporting dispatch. Empty: a kernel failed.
  std::optional<int> wait_low_latency_num_tokens();
  void low_latency_combine(const LowLatencyPlan& plan, const LowLatencyCombineCall& call, uint64_t stream);

  std::optional<ErrorRecord> poll_error() const;
  // Forgets a failure that left all ranks in step (everything but a timeout).
  void clear_error();
  void reset();
  // For tests of the wrap-around: the number of the last kernel, as if so many had run. On all ranks, between two
  // barriers of the hosts, when no kernel runs.
  void set_generation(uint32_t generation);
  void close();

  // Bytes from the segment's start to the data region, and the region's size.
  size_t data_offset() const { return world_.layout.data; }
  size_t data_bytes() const { return data_bytes_; }
  int64_t num_launches() const { return num_launches_; }
  // Shared memory a block may use: smaller values cut rows into more pieces (tests, smaller GPUs).
  int smem_bytes_limit = Target::kTuning.smem_bytes_limit;

 private:
  struct Shape {
    int num_senders;  // warps of a block that own stages
    StageLayout stage;
    RingLayout ring;
  };
  Shape shape_of(const ChannelConfig& config, const MessageLayout& message) const;
  void check_open() const;
  void check_num_experts(int num_experts) const;
  void check_counters(int num_experts, size_t smem_bytes) const;
  LaunchConfig low_latency_launch(const LowLatencyShape& shape) const;
  void check_output(const DispatchArgs& args, int num_topk, int scale_row_bytes,
                    int row_bytes) const;
  template <class KernelType>
  void launch(const LaunchConfig& config, typename KernelType::Args args, uint64_t stream);

  World world_{};
  Target target_;
  size_t data_bytes_ = 0;
  size_t low_latency_bytes_ = 0;
  bool can_shrink_ = false;
  LowLatencyRegion low_latency_region_{};
  int num_max_experts_ = 0;
  CountsBlock* counts_ = nullptr;
  int num_counted_experts_ = 0;  // local experts of the last notify
  uint64_t counts_stream_ = 0;
  uint32_t sequence_ = 0;
  uint64_t* low_latency_report_ = nullptr;  // host memory that kernels reach
  uint32_t report_sequence_ = 0;
  uint64_t report_stream_ = 0;
  int64_t num_launches_ = 0;
};

}  // namespace deep_comm
