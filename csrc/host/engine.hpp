// The native half of a Buffer on one target: one rank's workspace, its launches and its error record.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/internode/args.cuh"
#include "device/intranode/args.cuh"
#include "device/low_latency/rail_args.cuh"
#include "host/early_launches.hpp"
#include "host/engine_calls.hpp"
#include "host/interrupt.hpp"
#include "host/low_latency_plan.hpp"
#include "host/plans.hpp"
#include "host/rail_kernels.hpp"
#include "host/ring_sizes.hpp"
#include "host/target.hpp"

namespace deep_comm {

// The engine's own ranks are then those of one node; node n's rank of the same
// local index is rail peer n.
struct InternodeOptions {
  int node;
  int num_nodes;
  // Segments of the rail peers, as the rail's executor addresses them; for low-latency mode then
  // those of all ranks of the group, by rank.
  std::vector<uintptr_t> rail_bases;
  int num_qps;
  size_t num_bytes;   // of the heap's end: words, then rings between nodes
  bool are_all_near;  // see RailTier
  RailOptions rail;
};

struct EngineOptions {
  int rank;
  int num_ranks;
  int device;
  std::vector<uintptr_t> peer_bases;
  size_t heap_bytes;
  int num_max_experts;
  uint64_t timeout_ns;
  bool begins_early;  // launches may hold SMs while the one before them ends
};

// What calls use is described at EngineCalls.
template <class Target>
class Engine final : public EngineCalls {
 public:
  Engine(const EngineOptions& options, Target target);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void get_dispatch_layout(LayoutArgs args, uint64_t stream) override;
  NotifyPlan plan_notify(const NotifyOptions& options) const override;
  void notify_dispatch(const NotifyPlan& plan, NotifyArgs args, uint64_t stream) override;
  std::optional<Counts> wait_counts() override;
  DispatchPlan plan_dispatch(const DispatchOptions& options) const override;
  void dispatch(const DispatchPlan& plan, const DispatchArgs& args, uint64_t stream) override;
  void notify_and_dispatch(const NotifyPlan& notify_plan, NotifyArgs notify,
                           const DispatchPlan& plan, const DispatchArgs& args,
                           uint64_t stream) override;
  void dispatch_expanded(const DispatchPlan& plan, const DispatchArgs& args,
                         const ExpandRowsArgs& expand, int num_blocks, bool may_run_beside,
                         uint64_t stream) override;
  CombinePlan plan_combine(const ChannelConfig& config, Dtype dtype, int num_topk, int row_bytes,
                           const CombineSms& sms) const override;
  void combine(const CombinePlan& plan, CombineArgs args, uint64_t stream) override;
  void combine_expanded(const CombinePlan& plan, CombineArgs args, ReduceExpertsArgs sums,
                        int num_local_blocks, bool may_run_beside, uint64_t stream) override;

  void barrier(int digest, uint64_t stream) override;

  // Expanded outputs; defined in expand_impl.hpp.
  void number_rows(NumberRowsArgs args, const ChannelConfig& config, uint64_t stream) override;
  void reduce_experts(const ReduceExpertsArgs& args, Dtype dtype, const ChannelConfig& config,
                      uint64_t stream) override;
  void number_received(NumberReceivedArgs args, const ChannelConfig& config,
                       uint64_t stream) override;
  void expand_received(const ExpandReceivedArgs& args, const ChannelConfig& config,
                       uint64_t stream) override;
  void transpose_scales(const TransposeScalesArgs& args, const ChannelConfig& config,
                        uint64_t stream) override;

  // Tensor parallelism; defined in tp_impl.hpp.
  void collective(CollectiveArgs args, Dtype dtype, int digest, int max_blocks,
                  uint64_t stream) override;
  void signal_word(const WordArgs& args, uint64_t stream) override;
  void await_word(const WordArgs& args, uint64_t stream) override;
  void begin_matmul(MatmulArgs args, int digest, uint64_t stream) override;
  void push(const PushArgs& args, uint64_t stream) override;
  void await_push(const MatmulArgs& args, uint64_t stream) override;
  void add_slots(const AddSlotsArgs& args, Dtype dtype, uint64_t stream) override;
  void end_matmul(const MatmulArgs& args, uint64_t stream) override;

  // Low-latency mode; defined in low_latency_impl.hpp.
  // Gives the last num_bytes of the heap to it, or of what enable_internode has left, and what lies
  // before them to the words of groups of several nodes. Once, before anything is launched.
  // can_shrink: its kernels do without ranks that stay silent.
  void enable_low_latency(size_t num_bytes, bool can_shrink);
  // From the segment's start: int32 [kMaxRanks] and [kMaxRanks, kMaxRanks], see sync/mask.cuh.
  size_t masked_offset() const { return world_.layout.low_latency.masked; }
  size_t votes_offset() const { return world_.layout.low_latency.votes; }
  // Of a group of several nodes: uint64 [R], see low_latency/rail_mask.cuh.
  size_t rail_masked_offset() const { return low_latency_reach_.words.masked; }
  // For tests of the wrap-around: the number of the last operation of each kind, at least 4, as if
  // so many had run. On all ranks, between two barriers of the hosts, when no kernel runs.
  void set_low_latency_sequence(uint32_t sequence);
  // Numbers start anew and nobody is masked. Callers put a barrier before and after it.
  void reset_low_latency();
  size_t low_latency_bytes() const override { return low_latency_bytes_; }
  LowLatencyPlan plan_low_latency(const LowLatencyOptions& options) const override;
  int low_latency_max_experts(int num_topk) const override;
  void low_latency_dispatch(const LowLatencyPlan& plan, const LowLatencyDispatchCall& call,
                            uint64_t stream) override;
  std::optional<int> wait_low_latency_num_tokens() override;
  void low_latency_combine(const LowLatencyPlan& plan, const LowLatencyCombineCall& call,
                           uint64_t stream) override;

  // Groups of several nodes; defined in internode_impl.hpp.
  // Once, before anything is launched.
  void enable_internode(const InternodeOptions& options);
  void internode_layout(InternodeLayoutArgs args, uint64_t stream) override;
  void internode_notify(InternodeNotifyArgs args, const uint8_t* is_token_in_rank, int num_tokens,
                        int32_t* send_node_head, int32_t* send_slots, const ChannelConfig& config,
                        const RailConfig& rail, uint64_t stream) override;
  void internode_send_slots(const uint8_t* is_token_in_rank, int num_tokens, int num_channels,
                            int32_t* send_slots, uint64_t stream) override;
  std::optional<TwoTierCounts> wait_internode_counts(bool is_early) override;
  void internode_dispatch(InternodeDispatchArgs args, const ChannelConfig& config,
                          const RailConfig& rail, int num_topk, int dtypes, int row_bytes,
                          uint64_t stream) override;
  void internode_combine(InternodeCombineArgs args, Dtype dtype, const ChannelConfig& config,
                         const RailConfig& rail, int num_topk, int row_bytes,
                         uint64_t stream) override;
  // Bytes that this rank has put, [num_nodes, num_qps].
  std::vector<uint64_t> rail_put_bytes() const;
  // Waits for what this rank has put on the rail; before a reset.
  void quiet_rail();

  std::optional<ErrorRecord> poll_error() const override;
  // Of a recorded timeout: a rank that has begun an operation which this rank has not, while it has
  // not begun this rank's, and that operation's kernel; else "". Their calls differ then. It is the
  // rank waited for; of a low-latency operation, which waits for all, any rank.
  std::pair<int, std::string> begun_by_peer();
  void note_interrupt() override;
  bool is_open() const override { return world_.error != nullptr; }
  bool is_sound() const override {
    return is_open() && __atomic_load_n(&world_.error->is_written, __ATOMIC_RELAXED) == 0;
  }
  // Forgets a failure that left all ranks in step (everything but a timeout).
  void clear_error();
  // All words as they were at the beginning; no rank is absent. Callers put a barrier of all ranks
  // before and after it.
  void reset();
  // Goes on without the ranks in `absent`, a bit each, inside a node: see
  // device/intranode/shrink_barrier.cuh.
  // shrink_barrier() launches a barrier of the other ranks. shrink_barrier_result() is valid when it has
  // ended; do_without() is the reset between the first and the second one.
  void shrink_barrier(uint32_t absent, uint32_t number, uint64_t stream);
  ShrinkBarrierResult shrink_barrier_result() const { return *shrink_barrier_result_; }
  void do_without(uint32_t absent);
  // Blocks note their steps from now on, in zeroed device memory of Trace::num_bytes(num_calls),
  // num_calls being a power of two. Before anything is launched.
  void set_trace(uintptr_t slots, uint32_t num_calls);
  // For tests of the wrap-around: the number of the last kernel, as if so many had run. On all
  // ranks, between two barriers of the hosts, when no kernel runs.
  void set_generation(uint32_t generation);
  void close();

  // Bytes from the segment's start to the data region, and the region's size.
  size_t data_offset() const { return world_.layout.data; }
  size_t data_bytes() const { return data_bytes_; }
  int64_t num_launches() const { return num_launches_; }
  bool is_synchronous() const override { return Target::kIsSynchronous; }
  bool launches_block() const override { return target_.launches_block(); }
  // Whether a launch of now may hold SMs while the one before it ends.
  bool begins_early() const { return early_launches_.are_safe(); }
  // Shared memory a block may use: smaller values cut rows into more pieces.
  int smem_bytes_limit;
  // Between nodes: with at least so many tokens of this rank a low-latency dispatch
  // sends each once to a node.
  int low_latency_hand_on_tokens = 8;
  // For measuring the host's part of a call: all is done but the launch.
  bool skips_launches = false;

 private:
  struct Shape {
    RingWarps ring_warps;  // dispatch
    StageLayout stage;
    RingLayout ring;
  };
  // warp_bytes: of shared memory, for the stages of a warp. Rows are cut so that it holds
  // good_stages, if possible.
  Shape shape_of(const ChannelConfig& config, const MessageLayout& message, int warp_bytes,
                 int good_stages) const;
  Shape shape_of_dispatch(const ChannelConfig& config, const MessageLayout& message,
                          bool may_be_direct) const;
  int stages_limit() const;  // shared memory that the stages of a block may have
  bool is_internode() const { return rail_bases_ != nullptr; }
  void launch_count(InternodeCountArgs args, uint64_t stream);
  // Stages and shared memory of direct mode; without room for them, args.output_line becomes 0.
  size_t plan_tier_direct(InternodeDispatchArgs& args) const;
  void make_rings(const ChannelConfig& config, const RailConfig& rail, int slot_bytes,
                  RingLayout* ring, RailRings* rail_rings) const;
  LaunchConfig shape_combine(InternodeCombineArgs& args, const ChannelConfig& config) const;
  // Polls until has_come(); false: a kernel failed. Throws `what` if the stream ends without.
  template <class HasCome>
  bool wait_for_kernel(const HasCome& has_come, uint64_t stream, const char* what);
  // The same for the sequence number of the last notify.
  bool wait_sequence(const uint32_t* sequence);
  // Stages and warps of direct mode.
  void plan_direct(DispatchArgs& args, const DispatchOptions& options) const;
  DispatchPlan::Variant plan_dispatch(const DispatchOptions& options, const Shape& shape,
                                      bool may_be_direct) const;
  void check_block(const char* what, uint32_t line, size_t num_bytes) const;
  void check_open() const;
  void check_num_experts(int num_experts) const;
  void check_counters(int num_experts, size_t smem_bytes) const;
  // Shared memory of a block that counts tokens between nodes. Throws if there is not so much.
  size_t count_bytes(int num_tokens, int num_channels) const;
  LaunchConfig low_latency_launch(const LowLatencyShape& shape) const;
  size_t low_latency_smem_bytes(const LowLatencyShape& shape) const;
  int group_rank() const { return is_internode() ? tiers_.rank : world_.rank; }
  int num_group_ranks() const { return is_internode() ? tiers_.num_ranks() : world_.num_ranks; }
  // Of the failed call: kCount if `peer` has begun it, or nothing else that is to be seen here.
  Kernel begun_instead(int peer);
  // The word by which a rank of the group tells this node, or this rank, that it has entered a
  // kernel of normal mode. It tells its rail first.
  const uint64_t* arrival_of(int peer) const;
  Tagged announcement_of(int peer, LowLatencyKind kind, int buffer_idx);
  LowLatencyRailBuffer rail_words(LowLatencyKind kind, int buffer_idx) const {
    static constexpr LowLatencyShape kNoShape{};
    const RailReach& reach = low_latency_reach_;
    return {world_, reach.group, reach.words, reach.region, kNoShape, kind, buffer_idx};
  }
  size_t low_latency_bytes_for(const LowLatencyShape& shape, bool one_rounding) const;
  void zero_low_latency();
  // Defined in low_latency_rail_impl.hpp.
  void enable_low_latency_rail(size_t num_bytes);
  void set_low_latency_rail_sequence(uint32_t sequence);
  void low_latency_rail_dispatch(const LowLatencyPlan& plan, const LowLatencyDispatchCall& call,
                                 const LowLatencyDispatchArgs& args, uint64_t stream);
  void low_latency_rail_combine(const LowLatencyPlan& plan, const LowLatencyCombineCall& call,
                                const LowLatencyCombineArgs& args, uint64_t stream);
  void check_output(const DispatchArgs& args, const DispatchOptions& options) const;
  template <class KernelType>
  void launch(const LaunchConfig& config, const typename KernelType::Args& args, uint64_t stream) {
    launch_in<KernelType>(world_, config, args, stream);
  }
  template <class KernelType>
  void launch_in(const World& world, const LaunchConfig& config, typename KernelType::Args args,
                 uint64_t stream);
  // Second begins while First runs.
  template <class First, class Second>
  void launch_pair(const LaunchConfig& first_config, typename First::Args first,
                   const LaunchConfig& second_config, typename Second::Args second,
                   uint64_t stream);
  // Where kernels run in the launch, it may be interrupted.
  template <class Launch>
  void count_launches(int count, const Launch& launch);
  // Fills in what follows from the rows of a call.
  LaunchConfig complete_notify(const NotifyPlan& plan, NotifyArgs* args, uint64_t stream);
  LaunchConfig complete_combine(const CombinePlan& plan, CombineArgs* args) const;
  template <class... KernelTypes>
  void prepare() {
    (target_.template prepare<KernelTypes>(), ...);
  }
  template <template <Dtype> class... KernelOf>
  void prepare_each_dtype() {
    prepare<KernelOf<Dtype::kBfloat16>..., KernelOf<Dtype::kFloat16>...,
            KernelOf<Dtype::kFloat32>...>();
  }
  // Of both forms.
  template <template <Dtype, bool> class... KernelOf>
  void prepare_each_dtype() {
    prepare<KernelOf<Dtype::kBfloat16, false>..., KernelOf<Dtype::kBfloat16, true>...,
            KernelOf<Dtype::kFloat16, false>..., KernelOf<Dtype::kFloat16, true>...,
            KernelOf<Dtype::kFloat32, false>..., KernelOf<Dtype::kFloat32, true>...>();
  }
  template <Collective kOp>
  void prepare_collective();
  int deal_parts(CollectiveArgs& args, int max_blocks) const;
  // Whether the second launch of a pair may hold SMs beside the first (early_launches.hpp).
  bool begins_beside(bool may_run_beside);
  // Of this rank alone, for local kernels over rows that came from several nodes.
  World world_alone() const;

  struct FreeMapped {
    void operator()(void* memory) const { Target::free_mapped(memory); }
  };
  // Host memory that kernels reach.
  template <class T>
  using Mapped = std::unique_ptr<T, FreeMapped>;
  template <class T>
  Mapped<T> allocate_mapped(size_t num_bytes = sizeof(T)) {
    return Mapped<T>(static_cast<T*>(target_.allocate_mapped(num_bytes)));
  }

  World world_{};
  Target target_;
  Mapped<ErrorBlock> error_;  // null: the engine is closed
  size_t data_bytes_ = 0;
  size_t low_latency_bytes_ = 0;
  bool can_shrink_ = false;
  LowLatencyRegion low_latency_region_{};
  EarlyLaunches early_launches_;
  bool may_begin_early_ = false;
  RailReach low_latency_reach_{};  // of a group of several nodes
  int num_max_experts_ = 0;
  Mapped<CountsBlock> counts_;
  int num_counted_experts_ = 0;  // local experts of the last notify
  uint64_t counts_stream_ = 0;
  uint32_t sequence_ = 0;
  Mapped<ShrinkBarrierResult> shrink_barrier_result_;
  Mapped<uint64_t> low_latency_report_;
  uint32_t report_sequence_ = 0;
  uint64_t report_stream_ = 0;
  int64_t num_launches_ = 0;
  TwoTier tiers_{};
  size_t rail_ring_bytes_ = 0;
  int num_rail_peers_ = 0;
  Mapped<uint8_t*> rail_bases_;          // [num_rail_peers]
  Mapped<uint64_t> rail_byte_counters_;  // [num_rail_peers, num_qps]
  Mapped<InternodeCounts> internode_counts_;
};

}  // namespace deep_comm
