#include "ready_set.hpp"

#include <algorithm>
#include <stdexcept>

namespace deep_comm::simt {
namespace {

constexpr const char* kPolicyNames[] = {"random", "fifo", "lifo", "starve", "priority"};
constexpr size_t kNumPolicies = std::size(kPolicyNames);

// Where priorities change: few points, early enough to fall into a short run.
constexpr int kMaxPriorityChanges = 6;
constexpr uint64_t kFirstSteps = 1 << 16;

}  // namespace

Policy parse_policy(const std::string& name, Random& random) {
  if (name == "any") return static_cast<Policy>(random.below(kNumPolicies));
  for (size_t i = 0; i < kNumPolicies; ++i) {
    if (name == kPolicyNames[i]) return static_cast<Policy>(i);
  }
  throw std::invalid_argument("policy = '" + name +
                              "', but it is random, fifo, lifo, starve, priority or any");
}

const char* name_of(Policy policy) { return kPolicyNames[static_cast<size_t>(policy)]; }

ReadySet::ReadySet(Policy policy, int num_ranks, Random& random)
    : policy_(policy), random_(random) {
  victim_ = static_cast<Victim>(random.below(3));
  victim_rank_ = static_cast<int>(random.below(static_cast<uint64_t>(num_ranks)));
  victim_number_ = random.next() >> 32;
  priority_salt_ = random.next();
  const int num_changes = static_cast<int>(random.below(kMaxPriorityChanges + 1));
  for (int i = 0; i < num_changes; ++i) {
    // Early steps are where the entry barriers are: as likely by order of magnitude as late ones.
    change_steps_.push_back(random.below(kFirstSteps >> random.below(10)) + 1);
  }
  std::sort(change_steps_.rbegin(), change_steps_.rend());
}

std::string ReadySet::describe() const {
  std::string text = name_of(policy_);
  if (policy_ != Policy::kStarve) return text;
  switch (victim_) {
    case Victim::kRank:
      return text + " (rank " + std::to_string(victim_rank_) + ")";
    case Victim::kBlock:
      return text + " (one block of rank " + std::to_string(victim_rank_) + ")";
    case Victim::kWarp:
      return text + " (one warp of rank " + std::to_string(victim_rank_) + ")";
  }
  return text;
}

bool ReadySet::is_victim(const Fiber* fiber) const {
  const GridRun* run = grid_of(fiber);
  if (run->grid.rank != victim_rank_) return false;
  const auto num_blocks = static_cast<uint64_t>(run->grid.num_blocks);
  const auto num_warps = static_cast<uint64_t>(run->num_warps_per_block);
  const bool block = victim_number_ % num_blocks == static_cast<uint64_t>(block_of(fiber)->index);
  switch (victim_) {
    case Victim::kRank:
      return true;
    case Victim::kBlock:
      return block;
    case Victim::kWarp:
      return block &&
             victim_number_ / num_blocks % num_warps == static_cast<uint64_t>(fiber->warp->index);
  }
  return false;
}

void ReadySet::adopt(Fiber* fiber) {
  // Equal for the lanes of a warp: a warp moves on when its last lane does.
  const GridRun* run = grid_of(fiber);
  Random mix(priority_salt_ ^ static_cast<uint64_t>(run->grid.rank) << 40 ^
             static_cast<uint64_t>(block_of(fiber)->index) << 20 ^
             static_cast<uint64_t>(fiber->warp->index));
  fiber->priority = (mix.next() >> 1) + kFirstSteps;
}

bool ReadySet::runs_later(const Item& a, const Item& b) {
  return a.priority != b.priority ? a.priority < b.priority : a.arrival > b.arrival;
}

void ReadySet::push(Fiber* fiber) {
  const Item item{.fiber = fiber, .priority = fiber->priority, .arrival = num_arrivals_++};
  if (policy_ == Policy::kStarve && is_victim(fiber)) {
    starved_.push_back(item);
    return;
  }
  items_.push_back(item);
  if (policy_ == Policy::kPriority) std::push_heap(items_.begin(), items_.end(), runs_later);
}

void ReadySet::push_last(Fiber* fiber) {
  if (policy_ != Policy::kLifo || items_.empty()) {
    push(fiber);
    return;
  }
  // Under the bottom of the stack, whose place only chance can see.
  items_.push_back(items_.front());
  items_.front() = Item{.fiber = fiber, .priority = fiber->priority, .arrival = num_arrivals_++};
}

Fiber* ReadySet::pop_any(std::vector<Item>& items, size_t first) {
  const size_t place = first + random_.below(items.size() - first);
  Fiber* fiber = items[place].fiber;
  items[place] = items.back();
  items.pop_back();
  return fiber;
}

Fiber* ReadySet::pop_oldest() {
  Fiber* fiber = items_[head_++].fiber;
  // Move the rest down once half of the list is spent: constant cost on average.
  if (2 * head_ > items_.size()) {
    items_.erase(items_.begin(), items_.begin() + static_cast<ptrdiff_t>(head_));
    head_ = 0;
  }
  return fiber;
}

Fiber* ReadySet::pop_highest(uint64_t step) {
  std::pop_heap(items_.begin(), items_.end(), runs_later);
  Fiber* fiber = items_.back().fiber;
  items_.pop_back();
  if (!change_steps_.empty() && step >= change_steps_.back()) {
    fiber->priority = change_steps_.size();  // below everybody who has not been changed
    change_steps_.pop_back();
    const bool others = !items_.empty();
    push(fiber);
    if (others) return pop_highest(step);
    std::pop_heap(items_.begin(), items_.end(), runs_later);
    items_.pop_back();
  }
  return fiber;
}

Fiber* ReadySet::pop(uint64_t step, bool fair) {
  if (size() == 0) return nullptr;
  if (items_.empty()) return pop_any(starved_, 0);
  if (fair && !starved_.empty() && random_.coin()) return pop_any(starved_, 0);
  switch (policy_) {
    case Policy::kRandom:
    case Policy::kStarve:
      return pop_any(items_, 0);
    case Policy::kFifo:
      return pop_oldest();
    case Policy::kLifo: {
      if (fair) return pop_any(items_, 0);
      Fiber* fiber = items_.back().fiber;
      items_.pop_back();
      return fiber;
    }
    case Policy::kPriority: {
      if (!fair) return pop_highest(step);
      Fiber* fiber = pop_any(items_, 0);
      std::make_heap(items_.begin(), items_.end(), runs_later);
      return fiber;
    }
  }
  return nullptr;
}

}  // namespace deep_comm::simt
