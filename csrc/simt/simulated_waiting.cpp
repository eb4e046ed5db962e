// Fibers of the simulated machine that wait: for words, for time, and what happens when all of them
// do.
#include <algorithm>

#include "simulated_executor.hpp"

namespace deep_comm::simt {
namespace {

constexpr uint64_t kNsPerClockRead = 20;

}  // namespace

// ---- waiting fibers -------------------------------------------------------------------

void SimulatedExecutor::on_park(Fiber* fiber) {
  if (fiber->wait == Wait::kSleep) return;
  Fiber*& chain = waiters_[bucket_of(fiber->word)];
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
  Fiber** link = &waiters_[bucket_of(fiber->word)];
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
  for (Fiber* fiber = waiters_[bucket_of(address)]; fiber;) {
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
  memory_.peek(fiber, &value, word, num_bytes);
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

// ---- when nothing can run -------------------------------------------------------------

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

}  // namespace deep_comm::simt
