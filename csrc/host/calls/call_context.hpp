// What every call of one Buffer uses.
//
// A call goes through four states, each a type that is made of the one before it:
//
//   Request   what the caller passed, read but not judged
//   Checked   everything that can be refused has been: nothing has happened yet
//   Reserved  all memory that peers write or read is there; local kernels may have run
//   Launched  peers count on this rank: what they need from here on runs in keep_step
//
// The last one returns the results. docs/design/0044 says what can still raise after the first launch.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/layout/expert_map.cuh"
#include "host/calls/plans_in_node.hpp"
#include "host/dispatch_record.hpp"
#include "host/engine_calls.hpp"
#include "host/interpreter.hpp"
#include "host/memory.hpp"
#include "host/region_use.hpp"
#include "host/require.hpp"
#include "host/ring_plan.hpp"
#include "host/row_forecast.hpp"
#include "host/stream_order.hpp"

namespace deep_comm {

// The ranks of one Buffer.
struct GroupShape {
  int rank = 0, num_ranks = 1;
  int num_nodes = 1, ranks_per_node = 1;
  int num_max_experts = 1;

  bool is_internode() const { return num_nodes > 1; }
  ExpertMap experts(int num_experts) const { return ExpertMap::make(num_experts, num_ranks); }
  int num_local_experts(int num_experts) const {
    return experts(num_experts).num_local_experts(rank);
  }
};

// A dispatch that has been sent and whose counts the host has not waited for. It does so when it is
// asked for its result, or in the Buffer's next call of normal mode.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  // Waits and ends the call. What is wrong with it is for its result to say.
  virtual void settle() = 0;
  // The Buffer goes on without it; its kernels have ended.
  virtual void forget(const CallError& error) = 0;
};

// Between nodes: staging bytes that the NIC may still read after combine's kernel (docs/design/0022).
// They are safe again once the rail peers have entered a later call.
struct RailReads {
  bool are_late = false;      // rows are put, not stored
  size_t begin = 0, end = 0;  // of the last combine's staging, from the heap's base

  bool overlaps(const Block& block) const {
    return block.offset < end && begin < block.offset + block.num_bytes;
  }
};

// Of collectives: two parts at the same place of every rank's heap.
struct Staging {
  size_t offset = 0, num_bytes = 0;  // from the heap's base; of one part
  uint8_t* multicast = nullptr;      // window over all heaps (see device/arch); null: there is none
};

class CallContext {
 public:
  // While a thread is in a call. A call lets go of the interpreter's lock where it waits, so that
  // another thread, or a signal handler, could begin one in its middle: that is refused. Calls of
  // one thread may lie in one another otherwise, as a layer's do.
  class InCall {
   public:
    explicit InCall(CallContext& context) : context_(context), before_(context.caller_) {
      if (context.is_closed_) context.require_open();
      context.require_no_call();
      context.caller_ = std::this_thread::get_id();
    }
    ~InCall() { context_.caller_ = before_; }
    InCall(const InCall&) = delete;
    InCall& operator=(const InCall&) = delete;

   private:
    CallContext& context_;
    const std::thread::id before_;
  };

  CallContext(GroupShape group, EngineCalls& engine, std::shared_ptr<StreamOrder> order,
              Memory memory, RingResources rings, std::string device_name)
      : group(group),
        engine(engine),
        rings(rings),
        device_name(std::move(device_name)),
        memory(std::move(memory)),
        order(*order),
        forecast(group.num_ranks, group.num_nodes),
        shared_order_(std::move(order)) {
    set_members({});
  }
  CallContext(const CallContext&) = delete;
  CallContext& operator=(const CallContext&) = delete;

  const GroupShape group;
  EngineCalls& engine;
  const RingResources rings;
  const std::string device_name;
  Memory memory;
  StreamOrder& order;
  RowForecast forecast;
  EarlyDispatches early_dispatches;
  PlanCache<TwoTierKey, RingPlan> two_tier_plans;
  RailReads rail_reads;
  Staging staging;
  RegionUse region_use;
  std::shared_ptr<PendingCall> pending;
  std::shared_ptr<const BufferToken> token;
  PlansInNode plans_in_node;
  // Takes what the engine has recorded, as the bindings can throw it. Set by them.
  std::function<std::exception_ptr()> recorded_error;

  // Ranks that the Buffer does without, ascending: Buffer.reset(without=...).
  std::vector<int> absent;

  // Handles are from now on those of these ranks; see BufferToken.
  void set_members(std::vector<std::string> members) {
    token = std::make_shared<BufferToken>(
        BufferToken{group.num_ranks, group.num_nodes, device_name, std::move(members)});
  }

  // Peers can write rows in place.
  bool has_region() const { return rings.num_ring_bytes < rings.num_nvl_bytes; }

  // Before every call of normal mode: the Buffer lives and no kernel has failed. Calls run one after
  // the other, so that one whose counts are still awaited ends now.
  void begin() {
    if (pending != nullptr) {
      const std::shared_ptr<PendingCall> settled = std::exchange(pending, nullptr);
      settled->settle();
    }
    begin_unordered();
  }
  // Checks that the Buffer is open and no kernel failed. Does not settle a pending dispatch: low-latency
  // calls leave it alone, since peers without counts to wait for may be in this call already. A bad
  // expert index found by get_dispatch_layout is left to notify_dispatch, which tells the peers as well:
  // raising it here, or not, would depend on when the kernel ran.
  void begin_unordered() const {
    if (engine.is_sound()) return;
    require_open();
    const std::optional<ErrorRecord> record = engine.poll_error();
    const bool is_of_layout = record && record->kind == "expert_index" &&
                              record->kernel == kKernelNames[static_cast<int>(Kernel::kLayout)];
    if (record && !is_of_layout) fail(CallError::Class::kRecorded, {});
  }
  // After a call: where kernels have ended by now, raises what they recorded.
  void end() const {
    if (engine.is_synchronous()) check();
  }
  void check() const {
    if (engine.is_sound()) return;
    require_open();
    fail(CallError::Class::kRecorded, {});
  }
  // From here to end_reset no other call begins, of another thread or of a signal handler.
  void begin_reset() {
    require_no_call();
    caller_before_reset_ = std::exchange(caller_, std::this_thread::get_id());
    is_waiting_ = true;
  }
  void end_reset() {
    caller_ = caller_before_reset_;
    is_waiting_ = false;
  }
  // No call begins any more: what it would use is about to be freed.
  void close() { is_closed_ = true; }
  bool is_in_use() const { return caller_ != std::thread::id(); }
  void require_no_call() const {
    if (!is_in_use()) return;
    if (caller_ == std::this_thread::get_id()) {
      if (!is_waiting_) return;
      fail(CallError::Class::kBufferInUse,
           "a signal handler runs while a call of this Buffer waits: raise from it, or use the "
           "Buffer after the call");
    }
    fail(CallError::Class::kBufferInUse,
         "another thread is in a call of this Buffer: let one thread at a time make its calls, in "
         "the same order on all ranks, or give each thread a Buffer of its own");
  }
  void require_open() const {
    if (engine.is_open() && !is_closed_) return;
    fail(CallError::Class::kBufferDestroyed, "the Buffer was used after destroy()");
  }

  // Runs what peers count on, after the first launch of a call. If it raises, this rank is out of step:
  // later calls raise CallInterrupted until reset(), and the peers time out.
  template <class Body>
  void keep_step(const Body& body) {
    try {
      body();
    } catch (...) {
      engine.note_interrupt();
      throw;
    }
  }
  // Runs a launch. The interpreter's lock is let go of where a launch lasts: on a synchronous target,
  // and where it waits for its kernel, which may need what other threads are about to launch.
  template <class Body>
  void launch(const Body& body) {
    const Waiting waiting(is_waiting_);
    const InterpreterUnlocked unlocked(engine.is_synchronous() || engine.launches_block());
    body();
  }
  // Runs a wait of the host.
  template <class Body>
  auto wait(const Body& body) {
    const Waiting waiting(is_waiting_);
    const InterpreterUnlocked unlocked;
    return body();
  }
  // Waits for the counts of a dispatch, which the kernels of all ranks exchange.
  template <class Body>
  auto wait_counts(const Body& body) {
    auto counts = wait(body);
    if (!counts) {
      check();
      fail(CallError::Class::kGeneral,
           "the kernel that exchanges counts failed and left no error record");
    }
    return *std::move(counts);
  }

 private:
  class Waiting {
   public:
    explicit Waiting(bool& flag) : flag_(flag), before_(flag) { flag = true; }
    ~Waiting() { flag_ = before_; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    bool& flag_;
    const bool before_;
  };

  std::shared_ptr<StreamOrder> shared_order_;
  // All are guarded by the interpreter's lock.
  std::thread::id caller_;  // the thread that is in a call
  std::thread::id caller_before_reset_;
  bool is_waiting_ = false;  // signal handlers may run in the middle of that call
  bool is_closed_ = false;
};

// Runs a call through its states.
template <class Checked, class Reserved, class Launched, class Request>
auto run_call(CallContext& context, const Request& request) {
  Checked checked(context, request);
  CallOrder order(context.order, request.streams);
  auto result = Launched(Reserved(std::move(checked), order)).receive();
  context.end();
  return result;
}

}  // namespace deep_comm
