// A stand-in for CUDA (tests/fake_cuda.py): streams whose rules are in Python, and an engine that
// writes down what it is asked to launch. Both are handed over through the doors that the real ones use.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/doors.hpp"
#include "bind/interpreter.hpp"

namespace py = pybind11;

namespace deep_comm::test {

namespace {

// Calls may come without the interpreter's lock.
class Told {
 public:
  explicit Told(py::object object) : object_(std::move(object)) {}
  ~Told() {
    const py::gil_scoped_acquire lock;
    object_ = py::object();
  }
  Told(const Told&) = delete;
  Told& operator=(const Told&) = delete;

  template <class... Arguments>
  void tell(const char* method, Arguments... arguments) const {
    const py::gil_scoped_acquire lock;
    object_.attr(method)(arguments...);
  }
  template <class Result, class... Arguments>
  Result ask(const char* method, Arguments... arguments) const {
    const py::gil_scoped_acquire lock;
    return object_.attr(method)(arguments...).template cast<Result>();
  }

 private:
  py::object object_;
};

// `point`: fake_cuda.PooledEvent.
class FakeEvent final : public Event {
 public:
  explicit FakeEvent(py::object point) : point_(std::move(point)) {}
  void record(uint64_t stream) override { point_.tell("record", stream); }
  void wait(uint64_t stream) const override { point_.tell("wait", stream); }
  void synchronize() const override { point_.tell("synchronize"); }
  bool has_passed() const override { return point_.ask<bool>("has_passed"); }
  void order(uint64_t first, uint64_t then) override { point_.tell("order", first, then); }

 private:
  Told point_;
};

// `log`: fake_cuda.Log.
class FakeStreams final : public StreamTarget {
 public:
  explicit FakeStreams(py::object log) : log_(std::move(log)) {}
  bool has_streams() const override { return true; }
  bool is_device_current() const override { return true; }
  int make_device_current() override { return 0; }
  void restore_device(int /*previous*/) override {}
  bool is_capturing(uint64_t stream) const override {
    return log_.ask<bool>("is_capturing", stream);
  }
  uint64_t capture_of(uint64_t stream) const override {
    return log_.ask<uint64_t>("capture_of", stream);
  }
  std::shared_ptr<Event> make_event() override {
    return std::make_shared<FakeEvent>(log_.ask<py::object>("make_event"));
  }
  std::shared_ptr<Event> mark(uint64_t stream) override {
    return std::make_shared<FakeEvent>(log_.ask<py::object>("mark", stream));
  }
  void fill(uintptr_t address, uint8_t byte, size_t num_bytes, uint64_t /*stream*/) override {
    std::memset(reinterpret_cast<void*>(address), byte, num_bytes);
  }
  void synchronize() override { log_.tell("synchronize_device"); }

 private:
  Told log_;
};

// Without the lock, where this thread has it: kernels of the host wait for other threads' ones.
class Unlocked {
 public:
  Unlocked() {
    if (PyGILState_Check() != 0) release_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> release_;
};

// Does one thing after the other, on a thread of its own.
class Worker {
 public:
  Worker() : thread_([this] { run(); }) {}
  ~Worker() {
    submit(nullptr);
    thread_.join();
  }
  void submit(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    has_changed_.notify_all();
  }
  void finish() {
    std::unique_lock lock(mutex_);
    has_changed_.wait(lock, [this] { return tasks_.empty(); });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      has_changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = tasks_.front();
      if (task == nullptr) return;
      lock.unlock();
      task();
      lock.lock();
      tasks_.pop_front();
      has_changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable has_changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

// `log`: as above. Everything that is launched goes into it by its name there, and to `door`'s engine.
class LoggedEngine final : public EngineCalls {
 public:
  LoggedEngine(py::object door, py::object log)
      : engine_(*behind<EngineCalls>(door)), door_(std::move(door)), log_(std::move(log)) {}

  bool is_synchronous() const override { return false; }
  bool launches_block() const override { return engine_.launches_block(); }
  bool is_open() const override { return engine_.is_open(); }
  bool is_sound() const override { return engine_.is_sound(); }
  std::optional<ErrorRecord> poll_error() const override { return engine_.poll_error(); }
  void note_interrupt() override { engine_.note_interrupt(); }
  size_t low_latency_bytes() const override { return engine_.low_latency_bytes(); }

  void get_dispatch_layout(LayoutArgs args, uint64_t stream) override {
    launch("layout", stream, [=, this] { engine_.get_dispatch_layout(args, stream); });
  }
  NotifyPlan plan_notify(const NotifyOptions& options) const override {
    return engine_.plan_notify(options);
  }
  void notify_dispatch(const NotifyPlan& plan, NotifyArgs args, uint64_t stream) override {
    launch("notify", stream, [=, this] { engine_.notify_dispatch(plan, args, stream); });
  }
  std::optional<Counts> wait_counts() override {
    drain();
    using Stub = std::tuple<int, int, bool, std::vector<int>>;
    if (const auto stub = log_.ask<std::optional<Stub>>("wait_counts")) {
      const auto& [num_recv, most, is_direct, per_expert] = *stub;
      return Counts{num_recv, most, is_direct, per_expert};
    }
    const Unlocked unlocked;
    return engine_.wait_counts();
  }
  DispatchPlan plan_dispatch(const DispatchOptions& options) const override {
    return engine_.plan_dispatch(options);
  }
  void dispatch(const DispatchPlan& plan, const DispatchArgs& args, uint64_t stream) override {
    launch("dispatch", stream, [=, this] { engine_.dispatch(plan, args, stream); });
  }
  void notify_and_dispatch(const NotifyPlan& notify_plan, NotifyArgs notify,
                           const DispatchPlan& plan, const DispatchArgs& args,
                           uint64_t stream) override {
    launch("notify", stream,
           [=, this] { engine_.notify_and_dispatch(notify_plan, notify, plan, args, stream); });
    launch("dispatch", stream, [] {});
  }
  void dispatch_expanded(const DispatchPlan& plan, const DispatchArgs& args,
                         const ExpandRowsArgs& expand, int num_blocks, bool may_run_beside,
                         uint64_t stream) override {
    log_.tell("plan", "expand_rows", num_blocks);
    log_.tell("plan", "may_run_beside", may_run_beside);
    launch("dispatch", stream, [=, this] {
      engine_.dispatch_expanded(plan, args, expand, num_blocks, may_run_beside, stream);
    });
    launch("expand_rows", stream, [] {});
  }
  CombinePlan plan_combine(const ChannelConfig& config, Dtype dtype, int num_topk, int row_bytes,
                           const CombineSms& sms) const override {
    log_.tell("plan", "combine",
              py::make_tuple(sms.most_few_rows, sms.of_few_rows, sms.of_more_sums));
    return engine_.plan_combine(config, dtype, num_topk, row_bytes, sms);
  }
  void combine(const CombinePlan& plan, CombineArgs args, uint64_t stream) override {
    launch("combine", stream, [=, this] { engine_.combine(plan, args, stream); });
  }
  void combine_expanded(const CombinePlan& plan, CombineArgs args, ReduceExpertsArgs sums,
                        int num_local_blocks, bool may_run_beside, uint64_t stream) override {
    log_.tell("plan", "combine_expanded", num_local_blocks);
    log_.tell("plan", "may_run_beside", may_run_beside);
    launch("combine_expanded", stream, [=, this] {
      engine_.combine_expanded(plan, args, sums, num_local_blocks, may_run_beside, stream);
    });
  }

  void barrier(int digest, uint64_t stream) override {
    launch("barrier", stream, [=, this] { engine_.barrier(digest, stream); });
  }

  void number_rows(NumberRowsArgs args, const ChannelConfig& config, uint64_t stream) override {
    log_.tell("plan", "number_rows", config.num_channels);
    launch("number_rows", stream, [=, this] { engine_.number_rows(args, config, stream); });
  }
  void reduce_experts(const ReduceExpertsArgs& args, Dtype dtype, const ChannelConfig& config,
                      uint64_t stream) override {
    log_.tell("plan", "reduce_experts", config.num_channels);
    launch("reduce_experts", stream,
           [=, this] { engine_.reduce_experts(args, dtype, config, stream); });
  }
  void number_received(NumberReceivedArgs args, const ChannelConfig& config,
                       uint64_t stream) override {
    log_.tell("plan", "number_received", config.num_channels);
    launch("number_received", stream, [=, this] { engine_.number_received(args, config, stream); });
  }
  void expand_received(const ExpandReceivedArgs& args, const ChannelConfig& config,
                       uint64_t stream) override {
    log_.tell("plan", "expand_received", config.num_channels);
    launch("expand_received", stream, [=, this] { engine_.expand_received(args, config, stream); });
  }
  void transpose_scales(const TransposeScalesArgs& args, const ChannelConfig& config,
                        uint64_t stream) override {
    log_.tell("plan", "transpose_scales", config.num_channels);
    launch("transpose_scales", stream,
           [=, this] { engine_.transpose_scales(args, config, stream); });
  }

  void collective(CollectiveArgs args, Dtype dtype, int digest, int max_blocks,
                  uint64_t stream) override {
    launch("collective", stream,
           [=, this] { engine_.collective(args, dtype, digest, max_blocks, stream); });
  }
  void signal_word(const WordArgs& args, uint64_t stream) override {
    launch("signal_word", stream, [=, this] { engine_.signal_word(args, stream); });
  }
  void await_word(const WordArgs& args, uint64_t stream) override {
    launch("await_word", stream, [=, this] { engine_.await_word(args, stream); });
  }
  void begin_matmul(MatmulArgs args, int digest, uint64_t stream) override {
    launch("begin_matmul", stream, [=, this] { engine_.begin_matmul(args, digest, stream); });
  }
  void push(const PushArgs& args, uint64_t stream) override {
    launch("push", stream, [=, this] { engine_.push(args, stream); });
  }
  void await_push(const MatmulArgs& args, uint64_t stream) override {
    launch("await_push", stream, [=, this] { engine_.await_push(args, stream); });
  }
  void add_slots(const AddSlotsArgs& args, Dtype dtype, uint64_t stream) override {
    launch("add_slots", stream, [=, this] { engine_.add_slots(args, dtype, stream); });
  }
  void end_matmul(const MatmulArgs& args, uint64_t stream) override {
    launch("end_matmul", stream, [=, this] { engine_.end_matmul(args, stream); });
  }

  LowLatencyPlan plan_low_latency(const LowLatencyOptions& options) const override {
    return engine_.plan_low_latency(options);
  }
  int low_latency_max_experts(int num_topk) const override {
    return engine_.low_latency_max_experts(num_topk);
  }
  void low_latency_dispatch(const LowLatencyPlan& plan, const LowLatencyDispatchCall& call,
                            uint64_t stream) override {
    launch("low_latency_dispatch", stream,
           [=, this] { engine_.low_latency_dispatch(plan, call, stream); });
  }
  std::optional<int> wait_low_latency_num_tokens() override {
    const Unlocked unlocked;
    return engine_.wait_low_latency_num_tokens();
  }
  void low_latency_combine(const LowLatencyPlan& plan, const LowLatencyCombineCall& call,
                           uint64_t stream) override {
    launch("low_latency_combine", stream,
           [=, this] { engine_.low_latency_combine(plan, call, stream); });
  }

  void internode_layout(InternodeLayoutArgs args, uint64_t stream) override {
    launch("internode_layout", stream, [=, this] { engine_.internode_layout(args, stream); });
  }
  void internode_notify(InternodeNotifyArgs args, const uint8_t* is_token_in_rank, int num_tokens,
                        int32_t* send_node_head, int32_t* send_slots, const ChannelConfig& config,
                        const RailConfig& rail, uint64_t stream) override {
    launch("internode_notify", stream, [=, this] {
      engine_.internode_notify(args, is_token_in_rank, num_tokens, send_node_head, send_slots,
                               config, rail, stream);
    });
  }
  void internode_send_slots(const uint8_t* is_token_in_rank, int num_tokens, int num_channels,
                            int32_t* send_slots, uint64_t stream) override {
    launch("internode_send_slots", stream, [=, this] {
      engine_.internode_send_slots(is_token_in_rank, num_tokens, num_channels, send_slots, stream);
    });
  }
  std::optional<TwoTierCounts> wait_internode_counts(bool is_early) override {
    drain();
    const Unlocked unlocked;
    return engine_.wait_internode_counts(is_early);
  }
  void internode_dispatch(InternodeDispatchArgs args, const ChannelConfig& config,
                          const RailConfig& rail, int num_topk, int dtypes, int row_bytes,
                          uint64_t stream) override {
    launch("internode_dispatch", stream, [=, this] {
      engine_.internode_dispatch(args, config, rail, num_topk, dtypes, row_bytes, stream);
    });
  }
  void internode_combine(InternodeCombineArgs args, Dtype dtype, const ChannelConfig& config,
                         const RailConfig& rail, int num_topk, int row_bytes,
                         uint64_t stream) override {
    launch("internode_combine", stream, [=, this] {
      engine_.internode_combine(args, dtype, config, rail, num_topk, row_bytes, stream);
    });
  }

  // Waits for what goes to the thread, and launches without it again.
  void drain() {
    if (worker_ == nullptr) return;
    const Unlocked unlocked;
    worker_->finish();
    is_deferring_ = false;
  }

 private:
  template <class Body>
  void launch(const char* name, uint64_t stream, const Body& body) {
    log_.tell("launch", name, stream);
    if (worker_ == nullptr && log_.ask<bool>("defers_launches")) {
      worker_ = std::make_unique<Worker>();
    }
    const Unlocked unlocked;
    if (worker_ == nullptr) return body();
    is_deferring_ |= std::string_view(name).ends_with("notify");
    worker_->submit(body);
    if (!is_deferring_) worker_->finish();
  }

  EngineCalls& engine_;
  Told door_;  // keeps the engine
  Told log_;
  // Where launches are deferred: from a notify on, until the host waits for its counts.
  std::unique_ptr<Worker> worker_;
  bool is_deferring_ = false;
};

}  // namespace

void bind_fake_streams(py::module_& m) {
  py::class_<LoggedEngine>(m, "LoggedEngine", py::module_local())
      .def(py::init<py::object, py::object>(), py::arg("door"), py::arg("log"))
      .def("drain", &LoggedEngine::drain)
      .def_property_readonly("door", [](const py::object& self) {
        return door_of(std::shared_ptr<EngineCalls>(owner_of(self), &self.cast<LoggedEngine&>()));
      });
  m.def(
      "plan_low_latency",
      [](const py::object& door, int num_max_tokens, int hidden, int num_topk, int num_experts) {
        behind<EngineCalls>(door)->plan_low_latency({.num_max_tokens = num_max_tokens,
                                                     .hidden = hidden,
                                                     .num_topk = num_topk,
                                                     .num_experts = num_experts,
                                                     .num_blocks = 1,
                                                     .format = PayloadFormat::kBfloat16});
      },
      "The engine's own check of a shape.", py::arg("door"), py::arg("num_max_tokens"),
      py::arg("hidden"), py::arg("num_topk"), py::arg("num_experts"));
  m.def(
      "fake_streams",
      [](py::object log) {
        return door_of<StreamTarget>(std::make_shared<FakeStreams>(std::move(log)));
      },
      py::arg("log"));
}

}  // namespace deep_comm::test
