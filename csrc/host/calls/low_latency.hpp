// Low-latency dispatch and combine, inside a node and between nodes.
//
// L local experts, R ranks, M tokens that a rank may have, T that it has, H hidden, K top-k,
// N = R * M rows of an expert, or in all if compact.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "host/calls/call_context.hpp"

namespace deep_comm {

// A part of a handle's metadata block.
struct LowLatencyHandlePart {
  const char* name;
  TensorSpec spec;
  size_t offset;  // bytes
};

// Calls of one shape with the same options: what follows from these, worked out once.
struct LowLatencyForm {
  LowLatencyPlan plan;
  std::shared_ptr<Framework> framework;
  int num_local_experts = 0;  // L
  int64_t num_rows = 0;       // N
  TensorSpec rows;            // bfloat16, what combine takes: [L, N, H] or [N, H]
  TensorSpec recv_x;          // what dispatch returns
  TensorSpec recv_scales;     // of no dimension: there are none
  TensorSpec metadata;        // int32, flat
  std::vector<LowLatencyHandlePart> parts;

  const LowLatencyOptions& options() const { return plan.options; }
  bool has_scales() const { return recv_scales.num_dims > 0; }
  // Null: calls of this form have no such part.
  const LowLatencyHandlePart* find_part(std::string_view name) const;
};

// What a dispatch learned. LowLatencyHandle is a view of it (deep_comm/handle.py).
struct LowLatencyDispatchRecord {
  enum class State : uint8_t {
    kReceived,
    kWaits,      // for its hook
    kForgotten,  // by a reset: its hook will never run
    kFailed      // its hook raised
  };

  std::shared_ptr<const LowLatencyForm> form;
  std::shared_ptr<const BufferToken> owner;
  int rank = 0;
  int num_tokens = 0;
  MadeTensor metadata;
  State state = State::kReceived;
  std::vector<Object> parts{};  // made so far, as the form lists them

  // A tensor of a part, the same each time; null: there is no such part.
  Object part(std::string_view name);
};

// A call whose receive phase waits for its hook, and what both phases work on.
struct LowLatencyPending {
  LowLatencyKind kind;
  std::shared_ptr<const LowLatencyForm> form;
  std::shared_ptr<LowLatencyDispatchRecord> record;
  std::variant<LowLatencyDispatchCall, LowLatencyCombineCall> call;
  uint64_t stream = 0;
  std::vector<Object> kept{};
  bool is_overtaken = false;  // another call of its kind has been sent since
  bool is_waiting = true;
};

struct LowLatencyDispatchRequest {
  TensorRef x{}, topk_idx{}, topk_weights{};
  TensorRef cumulative_stats{}, wait_stats{}, global_scale{};
  IntegerRef num_max_tokens{}, num_experts{};
  bool use_fp8 = false, round_scale = false, use_ue8m0 = false, use_nvfp4 = false;
  bool is_compact = false;
  bool has_global_idx = false;
  bool is_reporting = false;  // wait_num_tokens will be called
  bool is_async = false, has_hook = false;
  bool is_flat = false;  // recv_x is to be [L * N, H]
};

struct LowLatencyCombineRequest {
  TensorRef x{}, topk_idx{}, topk_weights{}, out{}, wait_stats{};
  std::shared_ptr<LowLatencyDispatchRecord> handle{};  // null: `handle_object` is something else
  const void* handle_object = nullptr;
  bool use_logfmt = false, zero_copy = false, one_rounding = false;
  bool is_async = false, has_hook = false;
  bool is_flat = false;  // x is [L * N, H]
};

// What a launch leaves: how the call runs among streams, and what its results need.
struct LowLatencyCompletion {
  std::shared_ptr<Event> event;  // of an asynchronous call
  // What that call reads and writes, of memory that goes back to `owner_stream`: the framework's
  // allocator does not know that the communication stream uses it. The owner of the event keeps them
  // until that stream waits for it, or tells the allocator. Empty: it has been told.
  std::vector<Object> tensors;
  uint64_t owner_stream = 0;
};

// Results are there before the launch, so that all that is made of them can be as well.
struct LowLatencyDispatchResult {
  Object recv_x, recv_scales;  // scales: null without
  Object recv_count;           // int32 [L]
  std::shared_ptr<LowLatencyDispatchRecord> record;
  std::shared_ptr<LowLatencyPending> pending;  // of a call with a hook
};

struct LowLatencyCombineResult {
  Object combined_x;                           // bfloat16 [T, H]
  std::shared_ptr<LowLatencyPending> pending;  // of a call with a hook
};

struct LowLatencySettings {
  std::shared_ptr<Framework> framework;
  bool can_shrink = false;               // the Buffer has rank masks
  std::optional<int> num_wanted_blocks;  // DEEP_COMM_NUM_SMS
};

// Blocks that a call may have on num_sms SMs; `wanted` is taken as it is.
//
// Numbers of tokens are mostly powers of two: of 132 blocks four would have no tokens, and cost pairs
// of 16 tokens and more 0.3 to 0.9 us by being there (4 x H200).
int low_latency_available_blocks(int num_sms, std::optional<int> wanted);

class LowLatencyCalls;

// A dispatch that nothing is wrong with.
class CheckedLowLatencyDispatch {
 private:
  friend class LowLatencyCalls;
  friend class ReservedLowLatencyDispatch;
  CheckedLowLatencyDispatch() = default;

  std::shared_ptr<const LowLatencyForm> form_;
  LowLatencyDispatchCall call_{};        // all but what is to be reserved
  std::array<const void*, 6> inputs_{};  // the caller's tensors
  bool is_async_ = false, has_hook_ = false, is_flat_ = false;
};

// It has its memory, and its place among the streams.
class ReservedLowLatencyDispatch {
 public:
  LowLatencyDispatchResult result;

 private:
  friend class LowLatencyCalls;
  ReservedLowLatencyDispatch(CallContext& context, CheckedLowLatencyDispatch checked);

  CheckedLowLatencyDispatch checked_;
  CallOrder order_;
  std::shared_ptr<LowLatencyPending> pending_;  // of a call with a hook
};

class CheckedLowLatencyCombine {
 private:
  friend class LowLatencyCalls;
  friend class ReservedLowLatencyCombine;
  CheckedLowLatencyCombine() = default;

  std::shared_ptr<const LowLatencyForm> form_;
  std::shared_ptr<LowLatencyDispatchRecord> record_;
  LowLatencyCombineCall call_{};
  std::array<const void*, 6> inputs_{};
  const void* out_ = nullptr;  // null: not given
  bool is_async_ = false, has_hook_ = false;
};

class ReservedLowLatencyCombine {
 public:
  LowLatencyCombineResult result;

 private:
  friend class LowLatencyCalls;
  ReservedLowLatencyCombine(CallContext& context, CheckedLowLatencyCombine checked);

  CheckedLowLatencyCombine checked_;
  CallOrder order_;
  std::shared_ptr<LowLatencyPending> pending_;  // of a call with a hook
};

// Of one Buffer. Calls are not ordered among those of normal mode, unless they are asynchronous.
class LowLatencyCalls {
 public:
  LowLatencyCalls(CallContext& context, LowLatencySettings settings)
      : context_(context), settings_(std::move(settings)) {}
  LowLatencyCalls(const LowLatencyCalls&) = delete;
  LowLatencyCalls& operator=(const LowLatencyCalls&) = delete;

  // Throw CallError: kArgument, kBufferTooSmall, kHandleMismatch, kUnsupported; kRecorded if a
  // kernel has failed before.
  CheckedLowLatencyDispatch check(const LowLatencyDispatchRequest& request);
  CheckedLowLatencyCombine check(const LowLatencyCombineRequest& request);
  // Throw what the framework throws.
  ReservedLowLatencyDispatch reserve(CheckedLowLatencyDispatch checked) {
    return {context_, std::move(checked)};
  }
  ReservedLowLatencyCombine reserve(CheckedLowLatencyCombine checked) {
    return {context_, std::move(checked)};
  }
  // Throw kRecorded where kernels have ended by now and failed; of a call with a hook, the hook does
  // that: peers count on its receive phase.
  LowLatencyCompletion launch(ReservedLowLatencyDispatch&& reserved);
  LowLatencyCompletion launch(ReservedLowLatencyCombine&& reserved);

  // What a hook does. Throws CallError kArgument if it has run, or a reset has forgotten it.
  void receive(LowLatencyPending& pending);
  // The most tokens that any rank had in the last reporting dispatch.
  int wait_num_tokens();

  // Blocks of a BF16 call, equal on all ranks. Throws CallError unless the region has room for it.
  int num_blocks(const IntegerRef& num_max_tokens, const IntegerRef& hidden,
                 const IntegerRef& num_topk, const IntegerRef& num_experts) const;

  // Throws CallError: kArgument if it is no handle, kHandleMismatch if it is not of this rank of this
  // group.
  void require_handle(const LowLatencyDispatchRecord* handle, const void* handle_object) const;
  // Where callers may write the rows of the next combine: null until one is kept.
  const MadeTensor* combine_buffer(const LowLatencyForm& form) const;
  void keep_combine_buffer(const LowLatencyForm& form, MadeTensor buffer);

  size_t num_forms() const { return forms_.size(); }
  bool has_pending() const { return !pending_[0].empty() || !pending_[1].empty(); }
  // After a reset: hooks from before have nothing left to receive. was_destroyed: nor has anybody
  // rows to combine.
  void forget_pending(bool was_destroyed);

 private:
  using Pending = std::vector<std::shared_ptr<LowLatencyPending>>;

  Pending& pending_of(LowLatencyKind kind) { return pending_[static_cast<size_t>(kind)]; }
  void begin(LowLatencyKind kind);
  std::shared_ptr<const LowLatencyForm> form_of(const LowLatencyOptions& options);
  LowLatencyForm make_form(LowLatencyOptions options) const;
  int checked_num_blocks(const LowLatencyOptions& options) const;
  void require_room(const LowLatencyOptions& options, bool one_rounding) const;
  void require_received(const LowLatencyDispatchRecord& handle) const;
  void run(const LowLatencyForm& form, const LowLatencyDispatchCall& call, uint64_t stream);
  void run(const LowLatencyForm& form, const LowLatencyCombineCall& call, uint64_t stream);
  template <class Reserved>
  LowLatencyCompletion launch_phases(Reserved& reserved, LowLatencyKind kind);

  CallContext& context_;
  const LowLatencySettings settings_;
  std::vector<std::shared_ptr<const LowLatencyForm>> forms_;        // a handful
  std::array<Pending, 2> pending_;                                  // by kind
  bool has_report_ = false;                                         // a receive phase reports
  std::vector<std::pair<TensorSpec, MadeTensor>> combine_buffers_;  // by the shape of rows
};

}  // namespace deep_comm
