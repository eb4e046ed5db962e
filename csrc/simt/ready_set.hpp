// The fibers that could run, and which of them does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fiber.hpp"
#include "random.hpp"

namespace deep_comm::simt {

enum class Policy : uint8_t {
  kRandom,    // any of them
  kFifo,      // in turn
  kLifo,      // the last to become ready
  kStarve,    // one rank, block or warp only when nothing else can
  kPriority,  // the highest of random priorities, which change at a few points
};

// "any" lets the seed choose. Throws std::invalid_argument for an unknown name.
Policy parse_policy(const std::string& name, Random& random);
const char* name_of(Policy policy);

class ReadySet {
 public:
  ReadySet(Policy policy, int num_ranks, Random& random);

  void adopt(Fiber* fiber);  // a new fiber: its priority
  void push(Fiber* fiber);
  void push_last(Fiber* fiber);
  // Null when empty. `fair`: by chance among all, whatever the policy.
  Fiber* pop(uint64_t step, bool fair);
  bool empty() const { return size() == 0; }
  // Everyone here is to be starved: the machine should try all else first.
  bool only_starved() const { return policy_ == Policy::kStarve && items_.empty(); }
  Policy policy() const { return policy_; }
  std::string describe() const;

 private:
  struct Item {
    Fiber* fiber;
    uint64_t priority;  // then the order of arrival
    uint64_t arrival;
  };
  enum class Victim : uint8_t { kRank, kBlock, kWarp };

  static bool runs_later(const Item& a, const Item& b);
  size_t size() const { return items_.size() - head_ + starved_.size(); }
  bool is_victim(const Fiber* fiber) const;
  Fiber* pop_any(std::vector<Item>& items, size_t first);
  Fiber* pop_oldest();
  Fiber* pop_highest(uint64_t step);

  Policy policy_;
  Random& random_;
  std::vector<Item> items_;  // fifo: from head_ on; priority: a heap
  size_t head_ = 0;
  uint64_t num_arrivals_ = 0;
  std::vector<Item> starved_;
  Victim victim_ = Victim::kRank;
  int victim_rank_ = 0;
  uint64_t victim_number_ = 0;
  uint64_t priority_salt_ = 0;
  std::vector<uint64_t> change_steps_;  // descending
};

}  // namespace deep_comm::simt
