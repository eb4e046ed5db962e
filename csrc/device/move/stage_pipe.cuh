// A warp's pipeline of shared-memory stages between bulk loads and bulk stores:
//
//   load → (bytes land) → store → (bytes read) → load …        stage = index % kNumStages
//
// The leader lane (lane 0) loads; one lane or several store, each in bulk groups of its own. The count of
// stores advances in every lane, so that all agree on the current stage; the count of loads matters to the
// leader alone. No flag of a peer is seen here.
#pragma once

#include "device/sync/await.cuh"

namespace deep_comm {

template <int kNumStages>
class StagePipe {
  static_assert(kNumStages >= 2);

 public:
  static constexpr int kLookAhead = kNumStages - 1;  // loads that may run ahead of the stores

  DC_HOST_DEVICE static constexpr size_t barrier_bytes() { return kNumStages * sizeof(uint64_t); }

  DC_DEVICE StagePipe(uint8_t* stages, arch::Mbarrier* barriers, int stage_bytes)
      : stages_(stages), barriers_(barriers), stage_bytes_(stage_bytes) {}

  // A whole warp calls it once, before anything else.
  DC_DEVICE void init() {
    if (arch::lane_idx() == 0) {
      for (int stage = 0; stage < kNumStages; ++stage) arch::mbarrier_init(barriers_ + stage, 1);
      arch::fence_mbarrier_init();
    }
    arch::sync_warp();
  }

  DC_DEVICE uint32_t num_loads() const { return num_loads_; }
  DC_DEVICE uint32_t num_stores() const { return num_stores_; }
  // The stage whose load is the next to be stored.
  DC_DEVICE uint8_t* current() const { return stages_ + (num_stores_ % kNumStages) * stage_bytes_; }
  DC_DEVICE bool can_load() const { return num_loads_ < num_stores_ + kLookAhead; }

  // Every lane that stores, before the next load. That stage was stored from two groups ago at the latest, so
  // one group may still be reading.
  DC_DEVICE void make_room() const { arch::bulk_wait_read<1>(); }

  // Leader, after make_room of all storing lanes.
  DC_DEVICE void load(const uint8_t* src, int num_bytes) {
    arch::Mbarrier* barrier = barriers_ + num_loads_ % kNumStages;
    arch::mbarrier_arrive_expect_tx(barrier, num_bytes);
    arch::bulk_load(stages_ + (num_loads_ % kNumStages) * stage_bytes_, src, num_bytes, barrier);
  }
  DC_DEVICE void advance_load() { ++num_loads_; }

  // Leader: the bytes of the current stage have landed.
  DC_DEVICE void await_load() const { await_index(num_stores_); }

  // A storing lane: sends the current stage; num_bytes 0 sends nothing but keeps the lanes' groups in step.
  DC_DEVICE void store(uint8_t* dst, int num_bytes) {
    if (num_bytes > 0) arch::bulk_store(dst, current(), num_bytes);
    arch::bulk_commit();
  }
  DC_DEVICE void advance_store() { ++num_stores_; }

  // Leader: every load that was issued has ended. Storing lanes: every store has landed.
  DC_DEVICE void drain() const {
    if (arch::lane_idx() == 0) {
      for (uint32_t index = num_stores_; index != num_loads_; ++index) await_index(index);
    }
    arch::bulk_wait<0>();
  }

 private:
  DC_DEVICE void await_index(uint32_t index) const {
    await_bulk(barriers_ + index % kNumStages, index / kNumStages & 1);
  }

  uint8_t* stages_;
  arch::Mbarrier* barriers_;
  int stage_bytes_;
  uint32_t num_loads_ = 0;
  uint32_t num_stores_ = 0;
};

}  // namespace deep_comm
