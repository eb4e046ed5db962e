// What the moving warps of a block have sent, for the warp that publishes it: chunks of rows, or
// tokens. One fence serves all movers: see publisher.cuh.
#pragma once

#include "device/sync/publisher.cuh"

namespace deep_comm {

// In shared memory.
template <int kMaxWarps>
struct LandedItems {
  static constexpr uint32_t kDepth = 32;

  int items[kMaxWarps][kDepth];  // by a warp's own count
  uint32_t num_published[kMaxWarps];

  // The whole block, before a barrier.
  DC_DEVICE void reset() {
    if (arch::thread_idx() < kMaxWarps) num_published[arch::thread_idx()] = 0;
  }
  // The whole warp: notes its index-th item, as soon as there is a free entry. False: the wait has
  // failed.
  DC_DEVICE bool post(const Context& context, int warp, uint32_t index, int item) {
    bool ok = true;
    if (arch::lane_idx() == 0) {
      if (index >= kDepth) {
        const uint32_t wanted = index + 1 - kDepth;
        uint32_t seen = 0;
        ok = await<Scope::kCta>(
            context, &num_published[warp],
            {Stage::kRetire, Word::kProgress, context.world.rank, -1}, wanted,
            [=](uint32_t value) { return value >= wanted; }, &seen);
      }
      items[warp][index % kDepth] = item;
    }
    return arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
  }
};

// One warp; lane w passes on what mover w has reported, in its order. The whole warp calls
// publish(item) after a fence; an item of -1: this lane has none. Returns when all movers have
// finished.
template <int kMaxWarps, class Publish>
DC_DEVICE void publish_landed(const Context& context, Progress& progress,
                              LandedItems<kMaxWarps>& landed, int num_movers,
                              const Publish& publish) {
  const int lane = arch::lane_idx(), mover = min_of(lane, num_movers - 1);
  uint32_t num_published = 0;
  while (true) {
    const uint32_t rung = arch::ld_acquire_cta(&progress.bell);
    arch::sync_warp();
    // Relaxed: with the fence below an acquire.
    const uint32_t word = arch::ld_relaxed_cta(&progress.words[mover]);
    const uint32_t num_landed = word & ~Progress::kFinished;
    if (arch::any(kFullMask, num_landed != num_published)) {
      // pairs with: Progress::report — the movers' stores, and their items.
      // With the stores of publish a release; these say whom they pair with — the rows
      arch::fence_acq_rel_sys();
      while (arch::any(kFullMask, num_landed != num_published)) {
        const bool has_item = lane == mover && num_landed != num_published;
        publish(has_item ? landed.items[mover][num_published % LandedItems<kMaxWarps>::kDepth]
                         : -1);
        if (num_landed != num_published) ++num_published;
      }
      // pairs with: LandedItems::post — the items have been read
      if (lane == mover) arch::st_release_cta(&landed.num_published[mover], num_published);
    }
    if (arch::all(kFullMask, (word & Progress::kFinished) != 0)) return;
    if (!await_bell(context, &progress.bell, rung)) return;
  }
}

}  // namespace deep_comm
