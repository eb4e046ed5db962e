// Work that is dealt while the kernel runs. SMs differ in speed (two of them may share a port to
// the crossbar), and with equal shares the slowest one would end the kernel.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

// The items that one warp has taken, in order; -1 after the last. The first item may be fixed in
// advance, without a trip to memory. For the others lane 0 calls `Take`, one item ahead, so that
// nobody waits for it; it returns the next item or -1. Whole warps call the methods.
template <class Take>
class WorkQueue {
 public:
  DC_DEVICE WorkQueue(const Take& take, int first) : take_(take), ahead_(first) {}
  DC_DEVICE explicit WorkQueue(const Take& take) : take_(take), ahead_(0) { take_ahead(); }

  // The index-th item of this warp: the next one, or one of the last 32.
  DC_DEVICE int at(uint32_t index) {
    while (num_taken_ <= index) {
      const int item = arch::shfl(kFullMask, ahead_, 0);
      if (static_cast<uint32_t>(arch::lane_idx()) == num_taken_ % kWarpSize) items_ = item;
      ++num_taken_;
      take_ahead();
    }
    return taken(index);
  }
  // The same for an item that `at` has returned before.
  DC_DEVICE int taken(uint32_t index) const {
    return arch::shfl(kFullMask, items_, index % kWarpSize);
  }

 private:
  DC_DEVICE void take_ahead() {
    if (arch::lane_idx() == 0 && ahead_ >= 0) ahead_ = take_();
  }

  Take take_;
  int items_ = -1;  // lane i: the last item whose index is i modulo 32
  int ahead_;       // lane 0: the next item
  uint32_t num_taken_ = 0;
};

// Numbers from a counter that the warps of a rank share, mapped to items, in the order in which one
// warp took them. The first number may be the warp's own, below `num_firsts`. Nobody waits for the
// counter: its answer is read when the next item is needed. `Items::at` returns an item, kNone if
// the number stands for none, or kEnd. Whole warps call the methods.
template <class Items>
class AskedQueue {
 public:
  DC_DEVICE AskedQueue(const Items& items, uint32_t* counter, uint32_t first, uint32_t num_firsts)
      : items_(items),
        counter_(counter),
        num_firsts_(num_firsts),
        answer_(first),
        has_ended_(first >= num_firsts) {}
  // All numbers from the counter, so that no item waits for a warp that is late.
  DC_DEVICE AskedQueue(const Items& items, uint32_t* counter)
      : items_(items), counter_(counter), num_firsts_(0), answer_(0), has_ended_(false) {
    if (arch::lane_idx() == 0) answer_ = arch::atomic_increment_relaxed_gpu(counter_);
  }

  // The index-th item of this warp: the next one, or one of the last 32; -1 after the last.
  DC_DEVICE int at(uint32_t index) {
    while (num_taken_ <= index) {
      const int item = next();
      if (static_cast<uint32_t>(arch::lane_idx()) == num_taken_ % kWarpSize) taken_ = item;
      ++num_taken_;
    }
    return taken(index);
  }
  // The same for an item that `at` has returned before.
  DC_DEVICE int taken(uint32_t index) const {
    return arch::shfl(kFullMask, taken_, index % kWarpSize);
  }
  DC_DEVICE const Items& items() const { return items_; }

 private:
  DC_DEVICE int next() {
    while (!has_ended_) {
      const uint32_t number = arch::shfl(kFullMask, answer_, 0) + behind_;
      const int item = items_.at(number);
      has_ended_ = item == Items::kEnd;
      if (has_ended_) break;
      if (arch::lane_idx() == 0) answer_ = arch::atomic_increment_relaxed_gpu(counter_);
      behind_ = num_firsts_;
      if (item != Items::kNone) return item;
    }
    return -1;
  }

  Items items_;
  uint32_t* counter_;
  uint32_t num_firsts_;
  uint32_t answer_;  // lane 0: the counter's answer, or the first number
  uint32_t behind_ = 0;
  bool has_ended_;
  int taken_ = -1;  // lane i: the last item whose index is i modulo 32
  uint32_t num_taken_ = 0;
};

// Items 0, 1, … num_items - 1 for an AskedQueue.
struct Numbered {
  static constexpr int kEnd = -1, kNone = -2;

  uint32_t num_items;

  DC_DEVICE int at(uint32_t number) const {
    return number < num_items ? static_cast<int>(number) : kEnd;
  }
};

// For `num_warps` warps of every block; this is number `warp`.
DC_DEVICE AskedQueue<Numbered> ask_for_items(uint32_t* counter, int num_items, int warp,
                                             int num_warps) {
  const uint32_t first = warp * arch::num_blocks() + arch::block_idx();
  return {{static_cast<uint32_t>(num_items)},
          counter,
          first,
          static_cast<uint32_t>(num_warps * arch::num_blocks())};
}

// Items 0, 1, … num_items - 1 for num_warps warps of a rank: one each, the others from a shared
// counter.
struct TakeNext {
  uint32_t* counter;
  int num_items;
  int num_warps;

  DC_DEVICE int operator()() const {
    const uint32_t item = num_warps + arch::atomic_add_relaxed_gpu(counter, 1u);
    return item < static_cast<uint32_t>(num_items) ? static_cast<int>(item) : -1;
  }
};

// For `num_warps` warps of every block; this is number `warp`.
DC_DEVICE WorkQueue<TakeNext> deal_items(uint32_t* counter, int num_items, int warp,
                                         int num_warps) {
  const int first = warp * arch::num_blocks() + arch::block_idx();
  return {{counter, num_items, num_warps * arch::num_blocks()}, first < num_items ? first : -1};
}

}  // namespace deep_comm
