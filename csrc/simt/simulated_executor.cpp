#include "simulated_executor.hpp"

#include <algorithm>
#include <cstring>

#include "faults.hpp"

namespace deep_comm::simt {
namespace {

constexpr uint64_t kNsPerStep = 4;
constexpr uint64_t kStepsBetweenDeadlineChecks = 4096;

// A policy that is unfair for this long without anything happening waits for a fiber that it
// starves itself: one pick in eight is then by chance.
constexpr uint64_t kUnfairSteps = 2'000;

// How often another fiber may come first, and how often a store or a bulk copy completes by itself:
// the seed takes one of each, because different faults show at different paces.
constexpr uint32_t kPreemptMeans[] = {2, 8, 32, 256};
constexpr uint32_t kMemoryMeans[] = {2, 16, 128, 0};

constexpr uint32_t kRailPieces = 4;
constexpr uint32_t kReorderRail = kFaultNames[8].bit;

template <size_t N>
uint32_t take_one(const uint32_t (&means)[N], Random& random) {
  return means[random.below(N)];
}

uint32_t fault_bits(const std::vector<std::string>& names) {
  uint32_t bits = 0;
  for (const std::string& name : names) {
    const auto* found = std::find_if(std::begin(kFaultNames), std::end(kFaultNames),
                                     [&](const FaultName& known) { return name == known.name; });
    if (found == std::end(kFaultNames)) {
      std::string rule;
      for (const FaultName& known : kFaultNames) rule += std::string(" ") + known.name;
      throw std::invalid_argument("faults: '" + name + "' is none of" + rule);
    }
    bits |= found->bit;
  }
  return bits;
}

const SimulationOptions& check_options(const SimulationOptions& options) {
  if (options.num_ranks < 1) {
    throw std::invalid_argument("num_ranks = " + std::to_string(options.num_ranks) +
                                ", but a simulation has at least one rank");
  }
  if (options.on_stuck != "report" && options.on_stuck != "clock") {
    throw std::invalid_argument("on_stuck = '" + options.on_stuck + "', but it is report or clock");
  }
  for (const Stall& stall : options.stalls) {
    if (stall.rank >= 0 && stall.rank < options.num_ranks) continue;
    throw std::invalid_argument("stalls: rank " + std::to_string(stall.rank) +
                                " is not in [0, num_ranks = " + std::to_string(options.num_ranks) +
                                ")");
  }
  if (options.find_races && !finds_races()) {
    throw std::invalid_argument(
        "find_races: the kernels of this build do not note their plain accesses; build with "
        "DEEP_COMM_FIND_RACES=ON");
  }
  fault_bits(options.faults);
  return options;
}

}  // namespace

SimulatedExecutor::SimulatedExecutor(const SimulationOptions& options)
    : options_(check_options(options)),
      sites_(options.weaken),
      random_(options.seed),
      ready_(parse_policy(options.policy, random_), options.num_ranks, random_),
      memory_(options.weak_memory, options.allow_late_loads, options.num_ranks, random_, *this),
      bulk_(options.delay_bulk, memory_, random_, *this),
      rail_(*this, random_, kRailPieces, (fault_bits(options.faults) & kReorderRail) == 0),
      preempt_(take_one(kPreemptMeans, random_), random_),
      memory_whim_(take_one(kMemoryMeans, random_), random_),
      killed_(static_cast<size_t>(options.num_ranks), false),
      stalls_(options.stalls),
      waiters_(size_t{1} << kWaiterBucketBits, nullptr) {}

SimulatedExecutor::~SimulatedExecutor() {
  for (auto& [key, stream] : streams_) {
    for (auto& run : stream) release(*run);
  }
  for (auto& run : dead_grids_) release(*run);
}

void SimulatedExecutor::enter_thread() {
  t_state =
      ThreadState{.current = nullptr,
                  .executor = this,
                  .simulated = this,
                  .faults = fault_bits(options_.faults),
                  .sites = options_.note_sites || !options_.weaken.empty() ? &sites_ : nullptr,
                  .polls_left = 0};
}

// ---- grids ----------------------------------------------------------------------------

void SimulatedExecutor::launch(int rank, uint64_t stream, const Grid& grid, Body body,
                               std::shared_ptr<void> args) {
  std::unique_ptr<GridRun> run = create(grid, body, args.get());
  run->args_copy = std::move(args);
  run->stream = stream;
  if (is_killed(rank)) return;
  Stream& queue = streams_[{rank, stream}];
  queue.push_back(std::move(run));
  begin_those_allowed(queue);
}

// `earlier`: the launch before it, which still runs, or null. What that one has written so far need
// not be seen.
void SimulatedExecutor::begin(GridRun& run, GridRun* earlier) {
  last_progress_step_ = step_;
  ++num_changes_;
  num_fibers_ += static_cast<uint64_t>(run.num_fibers());
  run.has_begun = true;
  run.earlier = earlier;
  run.start_time = earlier != nullptr ? earlier->start_time : memory_.begin_launch();
  start(run);
}

// Two at most: a launch allows the next one when it has awaited the end of the one before it.
void SimulatedExecutor::begin_those_allowed(Stream& stream) {
  if (stream.empty()) return;
  GridRun& first = *stream.front();
  if (!first.has_begun) begin(first, nullptr);
  if (stream.size() == 1) return;
  GridRun& second = *stream[1];
  if (second.has_begun || second.grid.begin == Begin::kBehind) return;
  if (first.num_allowing_blocks == first.grid.num_blocks) begin(second, &first);
}

void SimulatedExecutor::allow_later(Block* block) {
  if (block->allows_later) return;
  block->allows_later = true;
  GridRun* run = block->grid;
  if (++run->num_allowing_blocks == run->grid.num_blocks) allowing_.push_back(run);
}

void SimulatedExecutor::await_earlier(Fiber* self) {
  GridRun* run = grid_of(self);
  while (run->earlier != nullptr) {
    self->wait = Wait::kEarlierLaunch;
    run->awaiting_earlier.push_back(self);
    suspend(self);
  }
  if (run->earlier_end != 0) memory_.see_end(self, run->earlier_end);
}

// What became visible before all running grids began, all of them see.
void SimulatedExecutor::settle_history() {
  uint32_t earliest = memory_.now();
  for (const auto& [key, stream] : streams_) {
    if (!stream.empty()) earliest = std::min(earliest, stream.front()->start_time);
  }
  memory_.settle_history(earliest);
}

bool SimulatedExecutor::is_drained(int rank, uint64_t stream) const {
  const auto found = streams_.find({rank, stream});
  return found == streams_.end() || found->second.empty();
}

void SimulatedExecutor::retire_finished() {
  std::vector<GridRun*> finished;
  finished.swap(finished_);
  for (GridRun* run : finished) {
    num_fibers_ -= static_cast<uint64_t>(run->num_fibers());
    bulk_.finish_grid(*run);
    memory_.finish_grid(*run);
    release(*run);
    Stream& stream = streams_[{run->grid.rank, run->stream}];
    stream.pop_front();
    if (!stream.empty() && stream.front()->has_begun) {
      GridRun& later = *stream.front();
      later.earlier = nullptr;
      later.earlier_end = memory_.begin_launch();
      while (Fiber* fiber = later.awaiting_earlier.pop_front()) {
        fiber->wait = Wait::kNone;
        ready_.push(fiber);
      }
    }
    begin_those_allowed(stream);
  }
  settle_history();
}

// ---- the network ----------------------------------------------------------------------

void SimulatedExecutor::post_rail(const RailOp& op) {
  if (op.num_bytes == 0) {
    memory_.post_signal(t_state.current, reinterpret_cast<const uint64_t*>(op.dst));
    rail_.post(op);
  } else {
    memory_.begin_write(t_state.current, op.dst, op.num_bytes);
    RailOp put = op;
    memory_.read_early(t_state.current, &put);
    rail_.post(std::move(put));
  }
  note_progress();
}

void SimulatedExecutor::land(const RailOp& put, uint32_t begin, uint32_t num_bytes) {
  memory_.land(put, begin, num_bytes);
  note_progress();
  for (size_t i = 0; i < num_bytes; i += kLineBytes) notify(put.dst + begin + i);
}

void SimulatedExecutor::land_signal(int rank, uint64_t* word, uint64_t value) {
  memory_.land_signal(rank, word, value);
  note_progress();
  notify(word);
}

void SimulatedExecutor::on_block_exit(Block* block) {
  allow_later(block);
  if (const BulkCopy* load = bulk_.find_load_of(block)) {
    fail(load->issuer, "the block ends while a bulk_load of " + std::to_string(load->num_bytes) +
                           " bytes still writes into its shared memory");
  }
}

void SimulatedExecutor::kill(int rank) {
  killed_[static_cast<size_t>(rank)] = true;
  rail_.drop(rank);
  for (auto& [key, stream] : streams_) {
    if (key.first != rank || stream.empty()) continue;
    for (std::unique_ptr<GridRun>& run : stream) {
      if (!run->has_begun) break;
      num_fibers_ -= static_cast<uint64_t>(run->num_fibers());
      bulk_.drop_grid(*run);
      memory_.drop_grid(*run);
      for (size_t i = 0; i < parked_.size();) {
        if (grid_of(parked_[i]) == run.get()) {
          unpark(parked_[i]);
        } else {
          ++i;
        }
      }
      // Its fibers may be in the set of those that could run, which drops them when it comes to
      // them.
      dead_grids_.push_back(std::move(run));
    }
    stream.clear();
  }
}

// ---- the choice of the next fiber -----------------------------------------------------

bool SimulatedExecutor::memory_event() {
  const bool stores = memory_.has_pending(), copies = bulk_.has_pending();
  if (rail_.has_pending() && ((!stores && !copies) || random_.below(3) == 0)) {
    rail_.advance_one();
    return true;
  }
  if (copies && (!stores || random_.coin())) {
    bulk_.advance_one();
  } else if (stores) {
    memory_.drain_one();
  }
  return stores || copies;
}

bool SimulatedExecutor::is_stalled(int rank) {
  for (const Stall& stall : stalls_) {
    if (stall.rank == rank && step_ >= stall.after_step &&
        (stall.num_steps == 0 || step_ - stall.after_step < stall.num_steps)) {
      return true;
    }
  }
  return false;
}

Fiber* SimulatedExecutor::pick_next() {
  if (failed_ || !finished_.empty() || !allowing_.empty()) return nullptr;
  if (step_ % kStepsBetweenDeadlineChecks == 0) {
    for (size_t i = 0; i < parked_.size();) {
      parked_[i]->deadline_ns <= time_ns_ ? wake(parked_[i]) : void(++i);
    }
    if (!stalled_.empty()) {
      std::vector<Fiber*> stalled;
      stalled.swap(stalled_);
      for (Fiber* fiber : stalled) ready_.push(fiber);
    }
  }
  for (;;) {
    if (is_livelock() || step_ > options_.max_steps) return nullptr;
    if (memory_whim_.strikes(random_)) memory_event();
    if ((ready_.empty() || ready_.only_starved()) && memory_event()) continue;
    const bool fair = step_ - last_progress_step_ > kUnfairSteps && (step_ & 7) == 0;
    Fiber* fiber = ready_.pop(step_, fair);
    if (!fiber) return nullptr;
    const int rank = grid_of(fiber)->grid.rank;
    if (killed_[static_cast<size_t>(rank)]) continue;
    if (!stalls_.empty() && is_stalled(rank)) {
      stalled_.push_back(fiber);
      continue;
    }
    ++step_;
    time_ns_ += kNsPerStep;
    return fiber;
  }
}

SimulatedExecutor::Outcome SimulatedExecutor::run() {
  try {
    for (;;) {
      resume();
      if (failed_) return Outcome::kFailed;
      const bool has_allowed = !allowing_.empty();
      for (const GridRun* run : allowing_) {
        begin_those_allowed(streams_[{run->grid.rank, run->stream}]);
      }
      allowing_.clear();
      if (!finished_.empty()) {
        retire_finished();
        return Outcome::kGridFinished;
      }
      if (has_allowed) continue;
      if (step_ > options_.max_steps) {
        stop_reason_ = "the simulation took " + std::to_string(step_) + " steps without an end";
        return Outcome::kStuck;
      }
      if (is_livelock()) {
        stop_reason_ = "livelock: nothing changed in " +
                       std::to_string(step_ - last_progress_step_) + " steps";
        return Outcome::kStuck;
      }
      if (!go_on_after_idling()) {
        stop_reason_ = "no fiber can make progress";
        return Outcome::kStuck;
      }
    }
  } catch (const std::exception& error) {
    failed_ = true;
    failure_ = error.what();
    return Outcome::kFailed;
  }
}

// ---- reports --------------------------------------------------------------------------

std::string SimulatedExecutor::describe_all() {
  std::string text;
  for (auto& [key, stream] : streams_) {
    for (const auto& run : stream) text += describe(*run);
  }
  for (size_t rank = 0; rank < killed_.size(); ++rank) {
    if (killed_[rank]) text += "  rank " + std::to_string(rank) + " was killed\n";
  }
  for (const Stall& stall : stalls_) {
    if (!is_stalled(stall.rank)) continue;
    text += "  rank " + std::to_string(stall.rank) + " is stalled since step " +
            std::to_string(stall.after_step) + "\n";
  }
  return text;
}

std::string SimulatedExecutor::describe_run() const {
  std::string text = stop_reason_.empty() ? "" : stop_reason_ + "; ";
  text += "seed " + std::to_string(options_.seed) + ", policy " + ready_.describe() + ", step " +
          std::to_string(step_) + ", virtual time " + std::to_string(time_ns_) + " ns\n";
  text += "replay: deep_comm simulate --seed " + std::to_string(options_.seed) + " --policy " +
          options_.policy + " --ranks " + std::to_string(options_.num_ranks);
  if (!options_.weak_memory) text += " --strong-memory";
  if (!options_.delay_bulk) text += " --prompt-bulk";
  if (options_.collectives_order_memory) text += " --ordered-collectives";
  if (options_.find_races) text += " --races";
  if (options_.on_stuck != "report") text += " --on-stuck " + options_.on_stuck;
  if (!options_.weaken.empty()) text += " --weaken " + options_.weaken;
  for (const std::string& fault : options_.faults) text += " --fault " + fault;
  for (const Stall& stall : options_.stalls) {
    text += " --stall " + std::to_string(stall.rank) + ":" + std::to_string(stall.after_step) +
            ":" + std::to_string(stall.num_steps);
  }
  return text + "\n";
}

}  // namespace deep_comm::simt
