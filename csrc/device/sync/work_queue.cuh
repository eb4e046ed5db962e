// Work that is dealt while it is done: SMs differ in what they get through (two of them may share a
// port to the crossbar), and with equal shares the slowest one ends the kernel.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm {

// Items that one warp has taken, in the order in which it took them, -1 behind the last. The
// first may be its own, known without a trip to memory. `Take` is called for the others by lane
// 0 alone, one item ahead, so that nobody waits for it; it returns the next item or -1. Whole
// warps call the methods.
template <class Take>
class WorkQueue {
 public:
  DC_DEVICE WorkQueue(const Take& take, int first) : take_(take), ahead_(first) {}
  DC_DEVICE explicit WorkQueue(const Take& take) : take_(take), ahead_(0) { take_ahead(); }

  // The index-th item of this warp, one of the last 32 that it has asked for, or the next.
  DC_DEVICE int at(uint32_t index) {
    while (num_taken_ <= index) {
      const int item = arch::shfl(kFullMask, ahead_, 0);
      if (static_cast<uint32_t>(arch::lane_idx()) == num_taken_ % kWarpSize) items_ = item;
      ++num_taken_;
      take_ahead();
    }
    return arch::shfl(kFullMask, items_, index % kWarpSize);
  }

 private:
  DC_DEVICE void take_ahead() {
    if (arch::lane_idx() == 0 && ahead_ >= 0) ahead_ = take_();
  }

  Take take_;
  int items_ = -1;  // lane i: the last item whose index is i modulo 32
  int ahead_;       // lane 0: the item behind those
  uint32_t num_taken_ = 0;
};

// Items 0, 1, … num_items - 1 for num_warps warps of a rank: one each, the others from a
// counter that they share.
struct TakeNext {
  uint32_t* counter;
  int num_items;
  int num_warps = 0;

  DC_DEVICE int operator()() const {
    const uint32_t item = num_warps + arch::atomic_add_relaxed_gpu(counter, 1u);
    return item < static_cast<uint32_t>(num_items) ? static_cast<int>(item) : -1;
  }
};

// For `num_warps` warps of every block, of which this is number `warp`.
DC_DEVICE WorkQueue<TakeNext> deal_items(uint32_t* counter, int num_items, int warp,
                                         int num_warps) {
  const int first = warp * arch::num_blocks() + arch::block_idx();
  return {{counter, num_items, num_warps * arch::num_blocks()}, first < num_items ? first : -1};
}

}  // namespace deep_comm
