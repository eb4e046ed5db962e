#include "simulated_executor.hpp"

#include <algorithm>

#include "faults.hpp"

namespace deep_comm::simt {
namespace {

constexpr uint64_t kNsPerStep = 4;
constexpr uint64_t kNsPerClockRead = 20;
constexpr uint64_t kStepsBetweenDeadlineChecks = 4096;
constexpr size_t kWaiterBuckets = 4096;

// A policy that is unfair for this long without anything happening waits for a fiber that it starves
// itself: one pick in eight is then by chance.
constexpr uint64_t kUnfairSteps = 20'000;

// How often another fiber may come first, and how often a store or a bulk copy completes by itself:
// the seed takes one of each, because different faults show at different paces.
constexpr uint32_t kPreemptMeans[] = {2, 8, 32, 256};
constexpr uint32_t kMemoryMeans[] = {2, 16, 128, 0};

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
  fault_bits(options.faults);
  return options;
}

}  // namespace

SimulatedExecutor::SimulatedExecutor(const SimulationOptions& options)
    : options_(check_options(options)),
      random_(options.seed),
      ready_(parse_policy(options.policy, random_), options.num_ranks, random_),
      memory_(options.weak_memory, options.num_ranks, random_, *this),
      bulk_(options.delay_bulk, memory_, random_, *this),
      preempt_(take_one(kPreemptMeans, random_), random_),
      memory_whim_(take_one(kMemoryMeans, random_), random_),
      killed_(static_cast<size_t>(options.num_ranks), false),
      stalls_(options.stalls),
      waiters_(kWaiterBuckets, nullptr) {}

SimulatedExecutor::~SimulatedExecutor() {
  for (auto& [key, stream] : streams_) {
    for (auto& run : stream) release(*run);
  }
  for (auto& run : dead_grids_) release(*run);
}

void SimulatedExecutor::enter_thread() {
  t_state = ThreadState{.current = nullptr,
                        .executor = this,
                        .simulated = this,
                        .faults = fault_bits(options_.faults),
                        .polls_left = 0};
}

// ---- grids ----------------------------------------------------------------------------------------

void SimulatedExecutor::launch(int rank, uint64_t stream, const Grid& grid, Body body,
                               std::shared_ptr<void> args) {
  std::unique_ptr<GridRun> run = create(grid, body, args.get());
  run->args_copy = std::move(args);
  run->stream = stream;
  if (is_killed(rank)) return;
  Stream& queue = streams_[{rank, stream}];
  queue.push_back(std::move(run));
  if (queue.size() == 1) start_next(queue);
}

void SimulatedExecutor::start_next(Stream& stream) {
  last_progress_step_ = step_;
  ++num_changes_;
  start(*stream.front());
}

bool SimulatedExecutor::is_drained(int rank, uint64_t stream) const {
  const auto found = streams_.find({rank, stream});
  return found == streams_.end() || found->second.empty();
}

void SimulatedExecutor::retire_finished() {
  std::vector<GridRun*> finished;
  finished.swap(finished_);
  for (GridRun* run : finished) {
    bulk_.finish_grid(*run);
    memory_.finish_grid(*run);
    release(*run);
    Stream& stream = streams_[{run->grid.rank, run->stream}];
    stream.pop_front();
    if (!stream.empty()) start_next(stream);
  }
}

void SimulatedExecutor::on_block_exit(Block* block) {
  if (const BulkCopy* load = bulk_.find_load_of(block)) {
    fail(load->issuer, "the block ends while a bulk_load of " + std::to_string(load->num_bytes) +
                           " bytes still writes into its shared memory");
  }
}

void SimulatedExecutor::kill(int rank) {
  killed_[static_cast<size_t>(rank)] = true;
  for (auto& [key, stream] : streams_) {
    if (key.first != rank || stream.empty()) continue;
    GridRun& run = *stream.front();
    bulk_.drop_grid(run);
    memory_.drop_grid(run);
    for (size_t i = 0; i < parked_.size();) {
      if (grid_of(parked_[i]) == &run) {
        unpark(parked_[i]);
      } else {
        ++i;
      }
    }
    // Its fibers may be in the set of those that could run, which drops them when it comes to them.
    dead_grids_.push_back(std::move(stream.front()));
    stream.clear();
  }
}

// ---- the choice of the next fiber -----------------------------------------------------------------

bool SimulatedExecutor::memory_event() {
  const bool stores = memory_.has_pending(), copies = bulk_.has_pending();
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
  if (failed_ || !finished_.empty()) return nullptr;
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
    if (step_ - last_progress_step_ > options_.max_idle_steps || step_ > options_.max_steps) {
      return nullptr;
    }
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
      if (!finished_.empty()) {
        retire_finished();
        return Outcome::kGridFinished;
      }
      if (step_ > options_.max_steps) {
        stop_reason_ = "the simulation took " + std::to_string(step_) + " steps without an end";
        return Outcome::kStuck;
      }
      if (step_ - last_progress_step_ > options_.max_idle_steps) {
        stop_reason_ = "livelock: nothing changed in " + std::to_string(options_.max_idle_steps) +
                       " steps";
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

// ---- waiting fibers -------------------------------------------------------------------------------

void SimulatedExecutor::on_park(Fiber* fiber) {
  if (fiber->wait == Wait::kSleep) return;
  Fiber*& chain = waiters_[line_hash(line_key(fiber->word)) >> 52];
  fiber->next_on_word = chain;
  chain = fiber;
  if (!fiber->abort_word) return;
  for (auto& [word, count] : abort_words_) {
    if (word == fiber->abort_word) {
      ++count;
      return;
    }
  }
  abort_words_.emplace_back(fiber->abort_word, 1);
}

void SimulatedExecutor::on_unpark(Fiber* fiber) {
  if (fiber->wait == Wait::kSleep) return;
  Fiber** link = &waiters_[line_hash(line_key(fiber->word)) >> 52];
  while (*link != fiber) link = &(*link)->next_on_word;
  *link = fiber->next_on_word;
  if (!fiber->abort_word) return;
  for (size_t i = 0; i < abort_words_.size(); ++i) {
    if (abort_words_[i].first != fiber->abort_word) continue;
    if (--abort_words_[i].second == 0) {
      abort_words_[i] = abort_words_.back();
      abort_words_.pop_back();
    }
    return;
  }
}

void SimulatedExecutor::wake(Fiber* fiber) {
  unpark(fiber);
  ready_.push(fiber);
}

void SimulatedExecutor::notify(const void* address) {
  if (parked_.empty()) return;
  const LineKey key = line_key(address);
  for (Fiber* fiber = waiters_[line_hash(key) >> 52]; fiber;) {
    Fiber* next = fiber->next_on_word;
    if (line_key(fiber->word) == key && holds(fiber)) wake(fiber);
    fiber = next;
  }
  for (const auto& [word, count] : abort_words_) {
    if (line_key(word) != key) continue;
    wake_where_condition_holds();  // changes the list
    return;
  }
}

uint64_t SimulatedExecutor::now_ns() { return time_ns_ += kNsPerClockRead; }

uint64_t SimulatedExecutor::peek(const Fiber* fiber, const void* word, unsigned num_bytes) {
  uint64_t value = 0;
  memory_.load(fiber, &value, word, num_bytes);
  return value;
}

bool SimulatedExecutor::wake_where_condition_holds() {
  bool any = false;
  for (size_t i = 0; i < parked_.size();) {
    if (holds(parked_[i])) {
      wake(parked_[i]);  // another fiber takes place i
      any = true;
    } else {
      ++i;
    }
  }
  return any;
}

// ---- when nothing can run -------------------------------------------------------------------------

bool SimulatedExecutor::go_on_after_idling() {
  // Memory can change without notice: plain stores to shared memory, the host between two launches.
  return wake_where_condition_holds() || end_stalls() || wake_try_waits() || jump_clock();
}

// A stall is slowness: it cannot outlast everything else.
bool SimulatedExecutor::end_stalls() {
  if (stalled_.empty()) return false;
  bool any = false;
  for (size_t i = 0; i < stalls_.size();) {
    const Stall& stall = stalls_[i];
    if (stall.num_steps > 0 && step_ >= stall.after_step) {
      stalls_.erase(stalls_.begin() + static_cast<ptrdiff_t>(i));
      any = true;
    } else {
      ++i;
    }
  }
  if (!any) return false;
  std::vector<Fiber*> stalled;
  stalled.swap(stalled_);
  for (Fiber* fiber : stalled) ready_.push(fiber);
  return true;
}

// A try_wait may fail for no reason, and the loop around it may then see an abort word. Once per
// change of anything: a second time would see nothing new.
bool SimulatedExecutor::wake_try_waits() {
  if (changes_at_try_waits_ == num_changes_) return false;
  changes_at_try_waits_ = num_changes_;
  bool any = false;
  for (size_t i = 0; i < parked_.size();) {
    if (parked_[i]->wait == Wait::kMbarrier) {
      wake(parked_[i]);
      any = true;
    } else {
      ++i;
    }
  }
  return any;
}

// Time passes until the first sleeper wakes; with on_stuck = "clock" also to the first deadline.
bool SimulatedExecutor::jump_clock() {
  const bool deadlines = options_.on_stuck == "clock";
  uint64_t earliest = ~uint64_t{0};
  for (const Fiber* fiber : parked_) {
    if (fiber->wait != Wait::kSleep && !deadlines) continue;
    earliest = std::min(earliest, fiber->deadline_ns);
  }
  if (earliest == ~uint64_t{0}) return false;
  time_ns_ = std::max(time_ns_, earliest);
  for (size_t i = 0; i < parked_.size();) {
    parked_[i]->deadline_ns <= time_ns_ ? wake(parked_[i]) : void(++i);
  }
  return true;
}

// ---- reports --------------------------------------------------------------------------------------

std::string SimulatedExecutor::describe_all() {
  std::string text;
  for (auto& [key, stream] : streams_) {
    if (!stream.empty()) text += describe(*stream.front());
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
  return text + "replay: python -m deep_comm.simulate --seed " + std::to_string(options_.seed) +
         " --policy " + options_.policy + "\n";
}

}  // namespace deep_comm::simt
