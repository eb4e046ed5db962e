// The simulated machine: the grids of all ranks under one seeded scheduler.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "executor.hpp"
#include "ops.hpp"
#include "random.hpp"
#include "ready_set.hpp"
#include "simulated_bulk.hpp"
#include "simulated_memory.hpp"

namespace deep_comm::simt {

class SimulatedExecutor final : public Executor, private RailMemory {
 public:
  explicit SimulatedExecutor(const SimulationOptions& options);
  ~SimulatedExecutor() override;

  enum class Outcome { kGridFinished, kStuck, kFailed };

  // ---- called by the scheduler's thread -----------------------------------------------
  void enter_thread();  // this OS thread runs the fibers from now on
  void launch(int rank, uint64_t stream, const Grid& grid, Body body, std::shared_ptr<void> args);
  bool is_drained(int rank, uint64_t stream) const;
  Outcome run();  // until a grid has ended or nothing can go on
  const std::string& failure() const { return failure_; }

  // ---- called while no fiber runs -----------------------------------------------------
  void kill(int rank);
  // The rank's NIC delivers nothing any more.
  void stall_rail(int rank) { rail_.stall(rank); }
  // All that it has posted lands.
  void flush_rail(int rank) { rail_.flush(rank); }
  std::vector<RailTraffic> rail_traffic() const { return rail_.traffic(); }
  bool is_killed(int rank) const { return killed_[static_cast<size_t>(rank)]; }
  std::string describe_all();
  std::string describe_run() const;  // seed, policy, and how to do it again
  std::vector<std::string> visited_sites() const { return sites_.visited(); }
  uint64_t num_steps() const { return step_; }
  uint64_t time_ns() const { return time_ns_; }

  // ---- called by fibers ---------------------------------------------------------------
  SimulatedMemory& memory() { return memory_; }
  BulkQueue& bulk() { return bulk_; }
  bool collectives_order_memory() const { return options_.collectives_order_memory; }
  // Where the order of accesses shows: perhaps another fiber comes first.
  void maybe_preempt(Fiber* self) {
    if (memory_whim_.strikes(random_)) [[unlikely]]
      memory_event();
    if (preempt_.strikes(random_)) [[unlikely]]
      yield(self);
  }
  void allow_later(Block* block);
  void await_earlier(Fiber* self);
  void note_progress() { last_progress_step_ = step_, ++num_changes_; }

  void make_ready(Fiber* fiber) override { ready_.push(fiber); }
  void make_ready_hot(Fiber* fiber) override { ready_.push(fiber); }
  void make_ready_last(Fiber* fiber) override { ready_.push_last(fiber); }
  void notify(const void* address) override;
  void post_rail(const RailOp& op) override;
  uint64_t now_ns() override;
  uint64_t peek(const Fiber* fiber, const void* word, unsigned num_bytes) override;

 protected:
  Fiber* pick_next() override;
  void on_fiber_start(Fiber* fiber) override {
    const Begin begin = grid_of(fiber)->grid.begin;
    fiber->owes_wait = begin != Begin::kBehind;
    fiber->is_early = begin == Begin::kEarly;
    if (options_.find_races && !block_of(fiber)->races) {
      block_of(fiber)->races = std::make_unique<Races>(*block_of(fiber));
    }
    memory_.start_fiber(fiber);
    ready_.adopt(fiber);
  }
  void on_block_exit(Block* block) override;
  void on_grid_exit(GridRun* run) override { finished_.push_back(run); }
  void on_park(Fiber* fiber) override;
  void on_unpark(Fiber* fiber) override;

 private:
  using StreamKey = std::pair<int, uint64_t>;
  using Stream = std::deque<std::unique_ptr<GridRun>>;

  static constexpr int kWaiterBucketBits = 12;
  static size_t bucket_of(const void* word) {
    return line_hash(line_key(word)) >> (64 - kWaiterBucketBits);
  }

  void land(const RailOp& put, uint32_t begin, uint32_t num_bytes) override;
  void land_signal(int rank, uint64_t* word, uint64_t value) override;

  bool memory_event();
  bool is_livelock() const {
    return step_ - last_progress_step_ >
           options_.max_idle_steps + num_fibers_ * options_.max_idle_steps_per_fiber;
  }
  bool is_stalled(int rank);
  void retire_finished();
  void begin(GridRun& run, GridRun* earlier);
  void begin_those_allowed(Stream& stream);
  void settle_history();
  bool go_on_after_idling();
  bool wake_where_condition_holds();
  bool end_stalls();
  bool wake_try_waits();
  bool jump_clock();
  void wake(Fiber* fiber);

  const SimulationOptions options_;
  Sites sites_;
  Random random_;
  ReadySet ready_;
  SimulatedMemory memory_;
  BulkQueue bulk_;
  RailNetwork rail_;
  Whim preempt_;
  Whim memory_whim_;

  uint64_t step_ = 0;
  uint64_t num_fibers_ = 0;  // of the grids that run
  uint64_t time_ns_ = 0;
  uint64_t last_progress_step_ = 0;
  uint64_t num_changes_ = 0;
  uint64_t changes_at_try_waits_ = ~uint64_t{0};
  std::string stop_reason_;

  std::map<StreamKey, Stream> streams_;
  std::vector<GridRun*> allowing_;  // the next one in their stream, since a switch
  std::vector<GridRun*> finished_;
  std::vector<bool> killed_;
  // of killed ranks: their fibers may be in lists
  std::vector<std::unique_ptr<GridRun>> dead_grids_;
  std::vector<Stall> stalls_;
  std::vector<Fiber*> stalled_;

  std::vector<Fiber*> waiters_;  // hash of line -> chain of fibers that wait for a word there
  std::vector<std::pair<const uint32_t*, int>> abort_words_;  // and how many fibers look at each
};

}  // namespace deep_comm::simt
