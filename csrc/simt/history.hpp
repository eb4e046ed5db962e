// What the lines of memory held before: the newest changes of the simulated memory, in the order in
// which they became visible somewhere.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fiber.hpp"
#include "late_loads.hpp"
#include "ops.hpp"
#include "store_buffer.hpp"
#include "view.hpp"

namespace deep_comm::simt {

// Bytes of a line became visible in a block, a rank or in memory.
struct Change {
  LineKey key = 0;
  // The buffer of the block or rank; null: memory itself, also the shared memory of a block.
  const void* place = nullptr;
  const void* source = nullptr;  // the buffer or fiber from which they came; never null
  uint32_t release = 0;          // of what was stored; 0: none
  uint16_t written = 0;          // bit i: byte i
  uint16_t old_valid = 0;        // which of the bytes the place held before
  uint16_t rank = 0;             // of the thread that stored
  Scope scope = Scope::kSys;     // kCta: visible in one block; kGpu: in one rank
  uint8_t old[kLineBytes] = {};
  bool is_atomic = false;      // no store comes between what it has read and what it stored
  bool has_past = false;       // `old` was stored later, but comes before this change
  uint32_t past_release = 0;   // of that store
  uint32_t read_time = 0;      // when a strong load first saw it that need not have; 0: none has
  uint32_t loads = 0;          // the time of loads (late_loads.hpp) when it was added
  uint32_t previous = 0;       // time of the change before in the same list of lines
  uint32_t previous_near = 0;  // and of neighbouring lines
};

// What whoever acquires a released value sees.
struct Release {
  View view;
  Scope scope = Scope::kSys;
  int rank = 0;
  const Block* block = nullptr;
  bool is_forgotten = false;  // nobody knows by whom it was: it reaches whoever acquires it
  // Not 0: an earlier release of a wider scope, for readers whom this one does not reach.
  uint32_t wider = 0;
};

// Old changes are forgotten: then everybody sees them, which is stronger than the model demands.
class History {
 public:
  explicit History(const LateLoads& loads);

  uint32_t now() const { return now_; }
  // Everybody sees what is not younger than that.
  void settle(uint32_t time) { settled_ = time; }

  uint32_t add(const Change& change);
  // 0: none. Not 0: the time of a change, perhaps of another line; go on with next().
  uint32_t first(LineKey key) const { return live(heads_[bucket_of(key)]); }
  uint32_t next(const Change& change) const { return live(change.previous); }
  uint32_t first_near(LineKey key) const { return live(near_heads_[near_bucket_of(key)]); }
  uint32_t next_near(const Change& change) const { return live(change.previous_near); }
  const Change& at(uint32_t time) const { return changes_[time & (kNumChanges - 1)]; }
  Change& at(uint32_t time) { return changes_[time & (kNumChanges - 1)]; }

  // Lines of one neighbourhood have the same number.
  static LineKey neighbourhood(LineKey key) { return key >> kNearBits; }
  static constexpr int kNearBits = 6;

  uint32_t add_release(const Release& release);
  // Of a store that carries nothing but what was visible at that time.
  static uint32_t release_of_time(uint32_t time) { return kOfTime | time; }
  // `time`: of a change that carries it. A forgotten release was of all that was visible then.
  Release release(uint32_t number, uint32_t time) const {
    if ((number & kOfTime) != 0) return {.view = all_until(number & ~kOfTime), .rank = -1};
    if (num_releases_ - number < kNumReleases) return releases_[number & (kNumReleases - 1)];
    return {.view = all_until(time), .rank = -1, .is_forgotten = true};
  }
  // Everything that was stored and loaded until then.
  View all_until(uint32_t time) const {
    View view = View::all(time);
    view.loads.fill(loads_until(time));
    view.nic_loads = view.loads;
    return view;
  }
  // Loads before the changes that are forgotten: the words that ordered them may be forgotten, too.
  uint32_t forgotten_loads() const {
    const uint32_t forgotten = now_ > kNumChanges ? now_ - kNumChanges : 0;
    return loads_until(std::max(settled_, forgotten));
  }

 private:
  static constexpr uint32_t kNumChanges = 1 << 15;
  static constexpr uint32_t kNumReleases = 1 << 13;
  static constexpr uint32_t kOfTime = 1u << 31;
  static constexpr int kBucketBits = 14;

  uint32_t loads_until(uint32_t time) const {
    const bool is_known = time < now_ && now_ - time <= kNumChanges;
    return is_known ? at(time + 1).loads : loads_.now();
  }
  static size_t bucket_of(LineKey key) { return line_hash(key) >> (64 - kBucketBits); }
  static size_t near_bucket_of(LineKey key) { return bucket_of(neighbourhood(key)); }
  uint32_t live(uint32_t time) const {
    return time > settled_ && now_ - time < kNumChanges ? time : 0;
  }

  const LateLoads& loads_;
  uint32_t now_ = 1;
  uint32_t settled_ = 0;
  uint32_t num_releases_ = 0;
  std::vector<Change> changes_;
  std::vector<Release> releases_;
  std::vector<uint32_t> heads_;
  std::vector<uint32_t> near_heads_;
};

}  // namespace deep_comm::simt
