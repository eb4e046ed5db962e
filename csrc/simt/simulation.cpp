// The rank threads of a simulation and the baton between them and the scheduler.
//
// The scheduler acts only while every rank's thread is blocked here or has left, and holds the
// mutex meanwhile; the threads that it lets go act among themselves, each on its own rank, until
// all are blocked again. So what happens depends on the seed alone, however the OS schedules the
// threads.
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>

#include "machine.hpp"
#include "simulated_executor.hpp"

namespace deep_comm::simt {
namespace {

enum class Place : uint8_t { kRunning, kSynchronize, kExchange, kLeft };

struct Launch {
  uint64_t stream;
  Grid grid;
  Body body;
  std::shared_ptr<void> args;
};

enum class Failure : uint8_t { kNone, kMachineError, kStuck };

struct RankState {
  Place place = Place::kRunning;
  uint64_t stream = 0;  // of synchronize
  std::string payload;  // of exchange
  std::vector<std::string> gathered;
  std::vector<Launch> launches;      // not yet taken by the scheduler
  Failure failure = Failure::kNone;  // what ended this wait
  std::string message;
};

[[noreturn]] void raise(Failure failure, const std::string& message) {
  if (failure == Failure::kStuck) throw SimulationStuck(message);
  throw MachineError(message);
}

std::shared_ptr<void> copy_args(const void* args, size_t num_bytes) {
  constexpr std::align_val_t kAlignment{64};
  void* copy = ::operator new(num_bytes > 0 ? num_bytes : 1, kAlignment);
  if (num_bytes > 0) memcpy(copy, args, num_bytes);
  return std::shared_ptr<void>(copy, [](void* p) { ::operator delete(p, kAlignment); });
}

}  // namespace

class SimulationState {
 public:
  explicit SimulationState(const SimulationOptions& options)
      : machine_(options),
        ranks_(static_cast<size_t>(options.num_ranks)),
        num_running_(options.num_ranks),
        scheduler_([this] { schedule(); }) {}

  ~SimulationState() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    scheduler_wakes_.notify_all();
    scheduler_.join();
  }

  void launch(int rank, Launch launch) {
    check_grid(launch.grid);
    std::lock_guard lock(mutex_);
    RankState& state = check_rank(rank, "launch");
    raise_if_failed(rank);
    if (launch.grid.rank != rank) {
      throw std::invalid_argument("launch: grid.rank = " + std::to_string(launch.grid.rank) +
                                  ", but the launching rank is " + std::to_string(rank));
    }
    state.launches.push_back(std::move(launch));
  }

  void synchronize(int rank, uint64_t stream) {
    std::unique_lock lock(mutex_);
    RankState& state = check_rank(rank, "synchronize");
    raise_if_failed(rank);
    // Streams only change while this rank waits: no need to hand over the baton for an empty one.
    if (is_empty(rank, stream)) return;
    state.stream = stream;
    wait(lock, state, Place::kSynchronize);
  }

  std::vector<std::string> exchange(int rank, std::string payload) {
    std::unique_lock lock(mutex_);
    RankState& state = check_rank(rank, "exchange");
    raise_if_failed(rank);
    state.payload = std::move(payload);
    wait(lock, state, Place::kExchange);
    return std::move(state.gathered);
  }

  void leave(int rank) {
    std::lock_guard lock(mutex_);
    RankState& state = check_rank(rank, nullptr);
    if (state.place == Place::kLeft) return;
    if (state.place == Place::kRunning) --num_running_;
    state.place = Place::kLeft;
    scheduler_wakes_.notify_all();
  }

  void kill(int rank) {
    std::lock_guard lock(mutex_);
    check_rank(rank, nullptr).launches.clear();
    machine_.kill(rank);
    scheduler_wakes_.notify_all();
  }

  void stall_rail(int rank) {
    std::lock_guard lock(mutex_);
    check_rank(rank, nullptr);
    machine_.stall_rail(rank);
  }

  void flush_rail(int rank) {
    std::lock_guard lock(mutex_);
    check_rank(rank, nullptr);
    machine_.flush_rail(rank);
  }

  std::vector<RailTraffic> rail_traffic() {
    std::lock_guard lock(mutex_);
    return machine_.rail_traffic();
  }

  std::string describe() {
    std::lock_guard lock(mutex_);
    return machine_.describe_all();
  }
  uint64_t num_steps() {
    std::lock_guard lock(mutex_);
    return machine_.num_steps();
  }
  std::vector<std::string> visited_sites() {
    std::lock_guard lock(mutex_);
    return machine_.visited_sites();
  }
  uint64_t time_ns() {
    std::lock_guard lock(mutex_);
    return machine_.time_ns();
  }
  int num_ranks() const { return static_cast<int>(ranks_.size()); }

 private:
  RankState& check_rank(int rank, const char* call) {
    if (rank < 0 || static_cast<size_t>(rank) >= ranks_.size()) {
      throw std::invalid_argument("rank = " + std::to_string(rank) + ", but it is in [0, " +
                                  std::to_string(ranks_.size()) + ")");
    }
    RankState& state = ranks_[static_cast<size_t>(rank)];
    if (call && state.place != Place::kRunning) {
      throw std::invalid_argument(
          std::string(call) + ": rank " + std::to_string(rank) +
          (state.place == Place::kLeft ? " has left the simulation" : " already waits in it"));
    }
    return state;
  }

  void raise_if_failed(int rank) {
    if (failure_ != Failure::kNone) raise(failure_, message_);
    if (machine_.is_killed(rank)) {
      throw MachineError("rank " + std::to_string(rank) + " was killed");
    }
  }

  bool is_empty(int rank, uint64_t stream) const {
    for (const Launch& launch : ranks_[static_cast<size_t>(rank)].launches) {
      if (launch.stream == stream) return false;
    }
    return machine_.is_drained(rank, stream);
  }

  void wait(std::unique_lock<std::mutex>& lock, RankState& state, Place place) {
    state.place = place;
    state.failure = Failure::kNone;
    if (--num_running_ == 0) scheduler_wakes_.notify_all();
    ranks_wake_.wait(lock, [&] { return state.place != place; });
    if (state.failure != Failure::kNone) raise(state.failure, state.message);
    if (state.place == Place::kLeft) throw MachineError("the rank left while it waited");
  }

  // ---- the scheduler's thread ---------------------------------------------------------
  void schedule();
  bool anyone_waits() const;
  void take_launches();
  bool release_ranks();
  bool release_exchange();
  void let_go(RankState& state, Failure failure, const std::string& message);
  void fail_all(Failure failure);

  std::mutex mutex_;
  std::condition_variable scheduler_wakes_;
  std::condition_variable ranks_wake_;
  SimulatedExecutor machine_;
  std::vector<RankState> ranks_;
  int num_running_;
  bool stop_ = false;
  Failure failure_ = Failure::kNone;  // of the whole machine: nothing runs on it any more
  std::string message_;
  std::thread scheduler_;  // last: it uses all the others
};

bool SimulationState::anyone_waits() const {
  for (const RankState& state : ranks_) {
    if (state.place == Place::kSynchronize || state.place == Place::kExchange) return true;
  }
  return false;
}

void SimulationState::let_go(RankState& state, Failure failure, const std::string& message) {
  state.failure = failure;
  state.message = message;
  state.place = Place::kRunning;
  ++num_running_;
  ranks_wake_.notify_all();
}

void SimulationState::fail_all(Failure failure) {
  failure_ = failure;
  message_ = failure == Failure::kMachineError ? machine_.failure() + "\n" + machine_.describe_run()
                                               : machine_.describe_run() + machine_.describe_all();
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (failure == Failure::kStuck && ranks_[rank].place == Place::kExchange) {
      message_ += "  the thread of rank " + std::to_string(rank) + " waits in exchange\n";
    }
  }
  for (RankState& state : ranks_) {
    if (state.place == Place::kSynchronize || state.place == Place::kExchange) {
      let_go(state, failure, message_);
    }
  }
}

void SimulationState::take_launches() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (Launch& launch : ranks_[rank].launches) {
      machine_.launch(static_cast<int>(rank), launch.stream, launch.grid, launch.body,
                      std::move(launch.args));
    }
    ranks_[rank].launches.clear();
  }
}

// Returns whether any thread was let go.
bool SimulationState::release_exchange() {
  int num_waiting = 0;
  std::string missing;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const bool waits = ranks_[rank].place == Place::kExchange;
    num_waiting += waits;
    if (ranks_[rank].place == Place::kLeft) {
      missing += " rank " + std::to_string(rank) + " has left;";
    } else if (machine_.is_killed(static_cast<int>(rank))) {
      missing += " rank " + std::to_string(rank) + " was killed;";
    }
  }
  if (num_waiting == 0) return false;
  if (!missing.empty()) {
    const std::string message = "exchange can never complete:" + missing + "\n" +
                                machine_.describe_run() + machine_.describe_all();
    for (RankState& state : ranks_) {
      if (state.place == Place::kExchange) let_go(state, Failure::kStuck, message);
    }
    return true;
  }
  if (num_waiting < static_cast<int>(ranks_.size())) return false;
  std::vector<std::string> gathered;
  for (RankState& state : ranks_) gathered.push_back(std::move(state.payload));
  for (RankState& state : ranks_) {
    state.gathered = gathered;
    let_go(state, Failure::kNone, "");
  }
  return true;
}

bool SimulationState::release_ranks() {
  bool any = false;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    RankState& state = ranks_[rank];
    const bool waits = state.place == Place::kSynchronize || state.place == Place::kExchange;
    if (!waits) continue;
    if (machine_.is_killed(static_cast<int>(rank))) {
      let_go(state, Failure::kMachineError, "rank " + std::to_string(rank) + " was killed");
      any = true;
    } else if (state.place == Place::kSynchronize &&
               machine_.is_drained(static_cast<int>(rank), state.stream)) {
      let_go(state, Failure::kNone, "");
      any = true;
    }
  }
  return release_exchange() || any;
}

void SimulationState::schedule() {
  std::unique_lock lock(mutex_);
  machine_.enter_thread();
  for (;;) {
    scheduler_wakes_.wait(lock, [&] { return stop_ || (num_running_ == 0 && anyone_waits()); });
    if (stop_) return;
    try {
      take_launches();
    } catch (const std::exception& error) {
      message_ = error.what();  // no memory for the grid
      failure_ = Failure::kMachineError;
      for (RankState& state : ranks_) {
        if (state.place != Place::kLeft) let_go(state, failure_, message_);
      }
      continue;
    }
    while (!release_ranks()) {
      const SimulatedExecutor::Outcome outcome = machine_.run();
      if (outcome == SimulatedExecutor::Outcome::kGridFinished) continue;
      fail_all(outcome == SimulatedExecutor::Outcome::kStuck ? Failure::kStuck
                                                             : Failure::kMachineError);
      break;
    }
  }
}

// ---- the face -------------------------------------------------------------------------

Simulation::Simulation(const SimulationOptions& options)
    : state_(std::make_unique<SimulationState>(options)) {}
Simulation::~Simulation() = default;

void Simulation::launch(int rank, uint64_t stream, const Grid& grid, Body body, const void* args,
                        size_t args_bytes) {
  state_->launch(
      rank,
      Launch{.stream = stream, .grid = grid, .body = body, .args = copy_args(args, args_bytes)});
}
void Simulation::synchronize(int rank, uint64_t stream) { state_->synchronize(rank, stream); }
std::vector<std::string> Simulation::exchange(int rank, std::string payload) {
  return state_->exchange(rank, std::move(payload));
}
void Simulation::leave(int rank) { state_->leave(rank); }
void Simulation::kill(int rank) { state_->kill(rank); }
void Simulation::stall_rail(int rank) { state_->stall_rail(rank); }
void Simulation::flush_rail(int rank) { state_->flush_rail(rank); }
std::vector<RailTraffic> Simulation::rail_traffic() const { return state_->rail_traffic(); }
std::vector<std::string> Simulation::visited_sites() const { return state_->visited_sites(); }
std::string Simulation::describe() const { return state_->describe(); }
uint64_t Simulation::num_steps() const { return state_->num_steps(); }
uint64_t Simulation::time_ns() const { return state_->time_ns(); }
int Simulation::num_ranks() const { return state_->num_ranks(); }

}  // namespace deep_comm::simt
