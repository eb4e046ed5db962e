#include "history.hpp"

namespace deep_comm::simt {

History::History(const LateLoads& loads)
    : loads_(loads),
      changes_(kNumChanges),
      releases_(kNumReleases),
      heads_(size_t{1} << kBucketBits),
      near_heads_(size_t{1} << kBucketBits) {}

uint32_t History::add(const Change& change) {
  Change& added = changes_[++now_ & (kNumChanges - 1)];
  added = change;
  added.loads = loads_.now();
  uint32_t& head = heads_[bucket_of(change.key)];
  added.previous = head;
  head = now_;
  uint32_t& near_head = near_heads_[near_bucket_of(change.key)];
  added.previous_near = near_head;
  near_head = now_;
  return now_;
}

uint32_t History::add_release(const Release& release) {
  releases_[++num_releases_ & (kNumReleases - 1)] = release;
  return num_releases_;
}

}  // namespace deep_comm::simt
