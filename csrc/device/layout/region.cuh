// A cursor that hands out aligned regions one after another. Every layout is one ordered list of
// `take` calls, so its size and its addresses cannot disagree.
#pragma once

#include "device/arch/types.cuh"

namespace deep_comm {

// Two ranks never write into the same line, and a polled word has its line to itself.
inline constexpr size_t kLineBytes = 128;

class RegionCursor {
 public:
  // The offset of the next region of `num_bytes` bytes.
  DC_HOST_DEVICE constexpr size_t take(size_t num_bytes, size_t alignment = kLineBytes) {
    offset_ = align_up(offset_, alignment);
    const size_t region = offset_;
    offset_ += num_bytes;
    return region;
  }
  DC_HOST_DEVICE constexpr size_t num_bytes() const { return align_up(offset_, kLineBytes); }

 private:
  size_t offset_ = 0;
};

}  // namespace deep_comm
