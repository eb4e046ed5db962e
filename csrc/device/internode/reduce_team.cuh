// Warps of a block that process items (rows, tokens) in turn, and a warp that follows the finished
// items in order.
#pragma once

#include "device/internode/tiers.cuh"

namespace deep_comm {

struct ReduceProgress {
  uint32_t unused;        // completes 128 bytes
  uint32_t num_done[31];  // items that each warp has finished, over all runs

  static constexpr int kMaxWarps = 31;

  DC_DEVICE static ReduceProgress* of_block() {
    return reinterpret_cast<ReduceProgress*>(arch::dynamic_smem());
  }
  // The block, before a barrier.
  DC_DEVICE void reset() {
    if (arch::thread_idx() < kMaxWarps) num_done[arch::thread_idx()] = 0;
  }
  // A whole reducing warp: its next item is finished.
  DC_DEVICE void finish_item(int warp, uint32_t total) {
    arch::sync_warp();  // every lane's reads and writes
    // pairs with: ProgressFollower::await_next — what this warp read and wrote
    if (arch::lane_idx() == 0) arch::st_release_cta(&num_done[warp], total);
  }
};

// One warp; lane w follows reducing warp w. A run is a sequence of items that are dealt to the
// warps, beginning with warp 0.
class ProgressFollower {
 public:
  DC_DEVICE ProgressFollower(const Context& context, ReduceProgress* progress, int num_warps,
                             int channel)
      : context_(context), progress_(progress), num_warps_(num_warps), channel_(channel) {}

  // Waits until item `item` of the current run is finished. Returns how many items, counted from
  // the first, are finished: more than `item`, at most `num_items`. 0: the wait failed.
  DC_DEVICE uint32_t await_next(uint32_t item, uint32_t num_items) {
    const int lane = arch::lane_idx();
    const uint32_t wanted = before_ + item / num_warps_ + 1;
    bool ok = true;
    uint32_t num_done = 0;
    if (lane == static_cast<int>(item % num_warps_)) {
      ok = await<Scope::kCta>(
          context_, &progress_->num_done[lane],
          {Stage::kRetire, Word::kProgress, context_.world.rank, channel_}, wanted,
          [=](uint32_t value) { return value >= wanted; }, &num_done);
    }
    if (!arch::all(kFullMask, ok)) return 0;
    uint32_t reached = num_items;
    if (lane < num_warps_) {
      // pairs with: finish_item — items after the awaited one
      // order-proof: a release of the simulation carries all that its block has released before
      num_done = arch::ld_acquire_cta(&progress_->num_done[lane]) - before_;
      reached = min_of(num_items, static_cast<uint32_t>(lane) + num_done * num_warps_);
    }
    for (int delta = 1; delta < kWarpSize; delta *= 2) {
      reached = min_of(reached, arch::shfl_xor(kFullMask, reached, delta));
    }
    arch::sync_warp();  // hands each lane's acquire to all lanes
    return reached;
  }
  DC_DEVICE void end_run(uint32_t num_items) {
    const auto lane = static_cast<uint32_t>(arch::lane_idx());
    if (num_items > lane) before_ += (num_items - lane + num_warps_ - 1) / num_warps_;
  }

 private:
  const Context& context_;
  ReduceProgress* progress_;
  int num_warps_;
  int channel_;
  uint32_t before_ = 0;  // items of this lane's warp in earlier runs
};

}  // namespace deep_comm
