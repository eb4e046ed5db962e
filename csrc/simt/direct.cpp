// Direct mode: one grid on one OS thread, over memory that other processes write.
#include <sched.h>

#include <cstring>
#include <ctime>

#include "executor.hpp"
#include "ops.hpp"

namespace deep_comm::simt {
namespace {

// Switches among fibers that are ready before those parked on a word get a look.
constexpr uint32_t kPicksBetweenPolls = 64;
// Switches inside one warp after another before the others' turn.
constexpr uint32_t kMaxHotStreak = 1024;

// Into how many parts a put falls.
constexpr uint32_t kRailPieces = 2;

// Cores are often fewer than ranks: the peer that has to act may wait for this very core.
constexpr int kIdleSpins = 4;
constexpr int kIdleYields = 64;
constexpr long kMinSleepNs = 2'000;
constexpr long kMaxSleepNs = 100'000;

uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

template <class Word>
size_t copy_words_of(uint8_t* dst, const uint8_t* src, size_t begin, size_t num_bytes) {
  for (; begin + sizeof(Word) <= num_bytes; begin += sizeof(Word)) {
    __atomic_store_n(reinterpret_cast<Word*>(dst + begin),
                     __atomic_load_n(reinterpret_cast<const Word*>(src + begin), __ATOMIC_RELAXED),
                     __ATOMIC_RELAXED);
  }
  return begin;
}

void copy_words(uint8_t* dst, const uint8_t* src, size_t num_bytes) {
  const auto misalignment = reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src);
  size_t begin = 0;
  if (misalignment % sizeof(uint64_t) == 0)
    begin = copy_words_of<uint64_t>(dst, src, begin, num_bytes);
  if (misalignment % sizeof(uint32_t) == 0)
    begin = copy_words_of<uint32_t>(dst, src, begin, num_bytes);
  copy_words_of<uint8_t>(dst, src, begin, num_bytes);
}

class DirectExecutor final : public Executor, private RailMemory {
 public:
  DirectExecutor() : random_(monotonic_ns()), rail_(*this, random_, kRailPieces, true) {}
  void run(const Grid& grid, Body body, const void* args, void (*on_idle)(void*), void* idle_state);

  void make_ready(Fiber* fiber) override { ready_.push_back(fiber); }
  void make_ready_hot(Fiber* fiber) override { hot_.push_front(fiber); }
  void make_ready_last(Fiber* fiber) override {
    // A loop around a plain load, and nobody else to run: the value can only change from outside.
    if (ready_.empty() && hot_.empty()) sched_yield();
    ready_.push_back(fiber);
  }

  void notify(const void* address) override {
    for (size_t i = 0; i < parked_.size();) {
      Fiber* fiber = parked_[i];
      if (fiber->wait == Wait::kMbarrier && fiber->word == address && holds(fiber)) {
        unpark(fiber);
        make_ready(fiber);
      } else {
        ++i;
      }
    }
  }

  void post_rail(const RailOp& op) override { rail_.post(op); }
  void land(const RailOp& put, uint32_t begin, uint32_t num_bytes) override {
    // Each word once, and whole: a reader may take it away at once and leave a zero, which must
    // stay. A copy of many bytes at a time may write some of them twice.
    copy_words(put.dst + begin, put.src + begin, num_bytes);
  }
  void land_signal(int, uint64_t* word, uint64_t value) override {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);  // after all that has landed before it
  }

  uint64_t now_ns() override { return monotonic_ns(); }

  uint64_t peek(const Fiber*, const void* word, unsigned num_bytes) override {
    return num_bytes == 8 ? __atomic_load_n(static_cast<const uint64_t*>(word), __ATOMIC_ACQUIRE)
                          : __atomic_load_n(static_cast<const uint32_t*>(word), __ATOMIC_ACQUIRE);
  }

 protected:
  Fiber* pick_next() override {
    if (++picks_ >= kPicksBetweenPolls + parked_.size()) {
      picks_ = 0;
      if (!parked_.empty()) poll_parked();
      if (rail_.has_pending()) rail_.advance_one();
    }
    if (!hot_.empty() && (++hot_streak_ < kMaxHotStreak || ready_.empty())) return hot_.pop_front();
    hot_streak_ = 0;
    return ready_.pop_front();
  }

 private:
  bool poll_parked();
  void wait_for_others();

  Random random_;
  RailNetwork rail_;
  FiberList hot_;    // last in, first out by warps
  FiberList ready_;  // first in, first out
  uint32_t picks_ = 0;
  uint32_t hot_streak_ = 0;
  int idle_rounds_ = 0;
};

bool DirectExecutor::poll_parked() {
  const uint64_t now = now_ns();
  bool any = false;
  for (size_t i = 0; i < parked_.size();) {
    Fiber* fiber = parked_[i];
    if (now < fiber->deadline_ns && !holds(fiber)) {
      ++i;
      continue;
    }
    unpark(fiber);  // moves another fiber to place i
    make_ready(fiber);
    any = true;
  }
  return any;
}

// Nothing of this grid can run: gives the core to whoever can change that.
void DirectExecutor::wait_for_others() {
  if (poll_parked()) {
    idle_rounds_ = 0;
    return;
  }
  if (rail_.has_pending()) {
    rail_.advance_one();
    return;
  }
  const int round = idle_rounds_++;
  if (round < kIdleSpins) return;
  if (round < kIdleSpins + kIdleYields) {
    sched_yield();
    return;
  }
  const int doublings = round - kIdleSpins - kIdleYields;
  const long sleep_ns = doublings < 6 ? kMinSleepNs << doublings : kMaxSleepNs;
  const timespec duration{.tv_sec = 0, .tv_nsec = sleep_ns < kMaxSleepNs ? sleep_ns : kMaxSleepNs};
  nanosleep(&duration, nullptr);
}

void DirectExecutor::run(const Grid& grid, Body body, const void* args, void (*on_idle)(void*),
                         void* idle_state) {
  if (t_state.executor) throw MachineError("a grid cannot be run from inside a grid");
  std::unique_ptr<GridRun> run = create(grid, body, args);
  failed_ = false;
  picks_ = hot_streak_ = 0;
  idle_rounds_ = 0;
  t_state = ThreadState{.current = nullptr,
                        .executor = this,
                        .simulated = nullptr,
                        .faults = 0,
                        .sites = nullptr,
                        .polls_left = kPollsPerYield};
  struct AtRestAgain {
    DirectExecutor& executor;
    GridRun& run;
    ~AtRestAgain() {
      t_state = ThreadState{};
      executor.hot_ = executor.ready_ = FiberList{};
      executor.parked_.clear();
      executor.release(run);
    }
  } at_rest_again{*this, *run};

  start(*run);
  while (!run->finished && !failed_) {
    resume();
    if (run->finished || failed_) break;
    if (parked_.empty()) {
      throw MachineError(
          std::string("kernel '") + grid.kernel + "' rank " + std::to_string(grid.rank) +
          ": no thread can go on, and nothing outside can change that\n" + describe(*run));
    }
    wait_for_others();
    if (on_idle != nullptr) on_idle(idle_state);
  }
  // The network outlives a grid, but nobody would drive it: what is under way lands now.
  while (rail_.has_pending()) rail_.advance_one();
  if (failed_) throw MachineError(failure_);
}

}  // namespace

void run(const Grid& grid, Body body, const void* args, void (*on_idle)(void*), void* idle_state) {
  // By pointer: what a module keeps in static thread-local storage must be small to be loadable.
  thread_local std::unique_ptr<DirectExecutor> executor;
  if (!executor) executor = std::make_unique<DirectExecutor>();
  executor->run(grid, body, args, on_idle, idle_state);
}

}  // namespace deep_comm::simt
