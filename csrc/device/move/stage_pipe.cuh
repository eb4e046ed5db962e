// A warp's pipeline of shared-memory stages between bulk loads and bulk stores:
//
//   load → (bytes land) → store → (bytes read) → load …        stage = index % num_stages
//
// The leader lane (lane 0) loads. One or several lanes store, each in bulk groups of its own. Every
// lane counts the stores, so all agree on the current stage; only the leader's count of loads
// matters. This file sees no flag of a peer.
#pragma once

#include "device/layout/message.cuh"
#include "device/sync/await.cuh"

namespace deep_comm {

// How many of a warp's newest stores remain in flight when it waits for older ones to land. Many
// keep the pipeline full. But the next hop, above all a rail, waits for the first ones.
struct StoresLeft {
  static constexpr uint32_t kMost = 6;

  uint32_t count;

  // After the warp's num_items-th item, where the next hop waits for puts.
  DC_DEVICE static StoresLeft behind(uint32_t num_items) {
    return {num_items == 1 ? 0u : num_items <= 4 ? 2u : kMost};
  }
  // Where stores reach the next hop. With more of them, what the warps report at their end would be
  // so much that the receiver of the last rows is behind.
  DC_DEVICE static StoresLeft of_stored(bool are_cast) { return {are_cast ? 1u : 3u}; }
  // A storing lane.
  DC_DEVICE void wait() const {
    switch (count) {
      case 0:
        return arch::bulk_wait<0>();
      case 1:
        return arch::bulk_wait<1>();
      case 2:
        return arch::bulk_wait<2>();
      case 3:
        return arch::bulk_wait<3>();
      default:
        return arch::bulk_wait<kMost>();
    }
  }
};

class StagePipe {
 public:
  static constexpr int kMinStages = 3;
  static constexpr int kGoodStages = 5;  // with fewer, rows are cut into smaller pieces if possible
  static constexpr int kMaxStages = 8;

  DC_HOST_DEVICE static constexpr int barrier_bytes(int num_stages) {
    return num_stages * static_cast<int>(sizeof(uint64_t));
  }

  // The whole warp.
  DC_DEVICE StagePipe(uint8_t* stages, arch::Mbarrier* barriers, const StageLayout& layout)
      : stages_(stages),
        barriers_(barriers),
        stage_bytes_(layout.stage_bytes),
        num_stages_(layout.num_stages),
        num_reading_(layout.num_stages < 5 ? 1 : 2) {
    if (arch::lane_idx() < num_stages_) {
      arch::mbarrier_init(barriers_ + arch::lane_idx(), 1);
      arch::fence_mbarrier_init();
    }
    // The leader's loads use all of them.
    arch::sync_warp();
  }

  // Loads that may run ahead of the stores: all stages except those that the newest stores still
  // read.
  DC_DEVICE int look_ahead() const { return num_stages_ - num_reading_; }
  DC_DEVICE uint32_t num_loads() const { return num_loads_; }
  DC_DEVICE uint32_t num_stores() const { return num_stores_; }
  DC_DEVICE bool can_load() const { return num_loads_ < num_stores_ + look_ahead(); }
  // The stage whose load is stored next.
  DC_DEVICE uint8_t* current() const { return stages_ + store_slot_.stage * stage_bytes_; }

  // Every storing lane, before the next load: waits until all but the newest stores have read their
  // stages.
  DC_DEVICE void make_room() const {
    if (num_reading_ == 1) {
      arch::bulk_wait_read<1>();
    } else {
      arch::bulk_wait_read<2>();
    }
  }

  // Leader, after make_room of all storing lanes.
  DC_DEVICE void load(const uint8_t* src, int num_bytes) {
    arch::Mbarrier* barrier = barriers_ + load_slot_.stage;
    arch::bulk_load(stages_ + load_slot_.stage * stage_bytes_, src, num_bytes, barrier);
  }
  DC_DEVICE void advance_load() {
    ++num_loads_;
    load_slot_.advance(num_stages_);
  }

  // Waits until the bytes of the current stage have landed.
  DC_DEVICE void await_load() const {
    await_bulk(barriers_ + store_slot_.stage, store_slot_.phase);
  }

  // A storing lane: stores the current stage. num_bytes 0 stores nothing but keeps the lanes'
  // groups in step.
  DC_DEVICE void store(uint8_t* dst, int num_bytes) {
    if (num_bytes > 0) arch::bulk_store(dst, current(), num_bytes);
    arch::bulk_commit();
  }
  DC_DEVICE void advance_store() {
    ++num_stores_;
    store_slot_.advance(num_stages_);
  }

  // Leader: waits until every load has ended. Storing lanes: until every store has landed.
  DC_DEVICE void drain() {
    if (arch::lane_idx() == 0) {
      for (; num_stores_ != num_loads_; advance_store()) await_load();
    }
    arch::bulk_wait<0>();
  }

 private:
  // Position of an index in the cycle of stages, kept without divisions.
  struct Slot {
    int stage = 0;
    uint32_t phase = 0;  // of its mbarrier

    DC_DEVICE void advance(int num_stages) {
      if (++stage == num_stages) {
        stage = 0;
        phase ^= 1;
      }
    }
  };

  uint8_t* stages_;
  arch::Mbarrier* barriers_;
  int stage_bytes_;
  int num_stages_;
  int num_reading_;  // newest stores that may still be reading
  uint32_t num_loads_ = 0;
  uint32_t num_stores_ = 0;
  Slot load_slot_;
  Slot store_slot_;
};

}  // namespace deep_comm
