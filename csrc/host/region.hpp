// Which bytes of the receive region are free, and what may still read them. Knows neither Python
// nor CUDA: `Event` is whatever a caller can wait for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace deep_comm {

// First fit over holes sorted by offset; neighbours are joined as they come back. Large blocks are
// taken for as much as may come, shrink, and live a layer or two. So that they do not settle in the
// middle, where the next one would have to lie on either side of them, only the hole at the very
// beginning is filled from there, others from their end; and small blocks go to the very end.
template <class Event>
class FreeList {
 public:
  // The last use of some bytes on one stream; work queued there before the
  // event may still read them.
  struct Use {
    uint64_t stream;
    uint64_t order;  // later uses of a stream have larger numbers
    Event event;
    uint64_t capture = 0;  // of a CUDA graph, to which alone the event means something; 0: of none
  };
  struct Hole {
    size_t offset;
    size_t num_bytes;
    std::vector<Use> uses;  // at most one a stream
  };

  // The taken bytes with everything that may still read them; empty if no hole is large enough.
  std::optional<Hole> take(size_t num_bytes) {
    constexpr size_t kSmallShare = 16;
    const auto fits = [&](const Hole& candidate) { return candidate.num_bytes >= num_bytes; };
    const bool is_small = begin_ < end_ && num_bytes <= (end_ - begin_) / kSmallShare;
    auto hole = std::find_if(holes_.begin(), holes_.end(), fits);
    if (hole == holes_.end()) return std::nullopt;
    if (is_small) hole = std::find_if(holes_.rbegin(), holes_.rend(), fits).base() - 1;
    if (hole->num_bytes == num_bytes) {
      Hole taken = std::move(*hole);
      holes_.erase(hole);
      return taken;
    }
    hole->num_bytes -= num_bytes;
    if (is_small || hole->offset != begin_) {
      return Hole{hole->offset + hole->num_bytes, num_bytes, hole->uses};
    }
    Hole taken{hole->offset, num_bytes, hole->uses};
    hole->offset += num_bytes;
    return taken;
  }

  // An event's end may run code of its owner's, which may come back here. So what is replaced is
  // moved into locals, and ends when the list is at rest.
  void give_back(Hole hole) {
    begin_ = std::min(begin_, hole.offset);
    end_ = std::max(end_, hole.offset + hole.num_bytes);
    const auto after =
        std::lower_bound(holes_.begin(), holes_.end(), hole.offset,
                         [](const Hole& other, size_t offset) { return other.offset < offset; });
    const auto before = after == holes_.begin() ? holes_.end() : after - 1;
    const bool touches_after =
        after != holes_.end() && hole.offset + hole.num_bytes == after->offset;
    const bool touches_before =
        before != holes_.end() && before->offset + before->num_bytes == hole.offset;
    Hole next{};
    if (touches_after) {
      next = std::move(*after);
      hole.num_bytes += next.num_bytes;
      join(hole.uses, next.uses);
    }
    if (touches_before) {
      before->num_bytes += hole.num_bytes;
      join(before->uses, hole.uses);
      if (touches_after) holes_.erase(after);
    } else if (touches_after) {
      *after = std::move(hole);
    } else {
      holes_.insert(after, std::move(hole));
    }
  }

  size_t num_bytes() const {
    size_t sum = 0;
    for (const Hole& hole : holes_) sum += hole.num_bytes;
    return sum;
  }

 private:
  // `uses` becomes what waits for both, on each stream the later use; `others`
  // gets what is left over.
  static void join(std::vector<Use>& uses, std::vector<Use>& others) {
    for (Use& other : others) {
      const auto same = std::find_if(uses.begin(), uses.end(),
                                     [&](const Use& use) { return use.stream == other.stream; });
      if (same == uses.end()) {
        uses.push_back(other);
      } else if (same->order < other.order) {
        std::swap(*same, other);
      }
    }
  }

  std::vector<Hole> holes_;
  size_t begin_ = SIZE_MAX, end_ = 0;  // of all that was ever given
};

}  // namespace deep_comm
