// Blocks of the receive region, for native callers.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "bind/numbers.hpp"
#include "host/region.hpp"

namespace deep_comm {

inline size_t align_block(size_t num_bytes) {
  constexpr size_t kAlignment = 128;
  return (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// A block may be given back while kernels that read it are still queued: `mark` makes an event on
// the stream that is current at that moment, and on the one that was when the block was taken,
// whose work may use it without saying so; whoever gets the bytes next waits for both.
// Blocks that a CUDA graph was captured with are only handed out to the same or later captures:
// replays write to them whenever they like. Within a capture the same events order their users
// (`mark_captured`: the event and the capture's number, or None); captures have their order from
// whoever replays them.
class Region {
 public:
  using List = FreeList<pybind11::object>;

  Region(size_t begin, size_t end, pybind11::object mark, pybind11::object is_capturing,
         pybind11::object current_stream, pybind11::object mark_captured)
      : mark_(std::move(mark)),
        mark_captured_(std::move(mark_captured)),
        is_capturing_(std::move(is_capturing)),
        current_stream_(std::move(current_stream)) {
    begin = align_block(begin);
    if (end > begin) eager_.give_back({begin, end - begin, {}});
  }

  bool is_capturing() const { return is_capturing_().cast<bool>(); }
  uint64_t current_stream() const { return current_stream_({}).cast<uint64_t>(); }

  std::optional<List::Hole> take(size_t num_bytes, bool is_captured) {
    std::optional<List::Hole> taken = (is_captured ? captured_ : eager_).take(num_bytes);
    if (!taken && is_captured) taken = eager_.take(num_bytes);
    return taken;
  }

  // A scratch block leaves nothing to wait for: see allocate_scratch.
  void give_back(size_t offset, size_t num_bytes, bool is_captured, bool is_scratch,
                 std::optional<uint64_t> owner) {
    List::Hole hole{offset, num_bytes, {}};
    if (!is_scratch) {
      const uint64_t stream = current_stream();
      const bool has_owner = owner && *owner != stream;
      if (is_captured) {
        add_captured_use(hole, stream);
        if (has_owner) add_captured_use(hole, *owner);
      } else if (add_use(hole, stream) && has_owner) {
        add_use(hole, *owner);
      }
    }
    (is_captured ? captured_ : eager_).give_back(std::move(hole));
  }

  void give_back_unused(size_t offset, size_t num_bytes, bool is_captured) {
    (is_captured ? captured_ : eager_).give_back({offset, num_bytes, {}});
  }

  // The number of the capture that a stream takes part in; 0: none.
  uint64_t capture_of(uint64_t stream) const {
    const pybind11::object marked = mark_captured_({stream});
    return marked.is_none() ? 0 : marked.cast<pybind11::tuple>()[1].cast<uint64_t>();
  }

  size_t num_free_bytes() const { return eager_.num_bytes() + captured_.num_bytes(); }

 private:
  // False: nothing can be in flight.
  bool add_use(List::Hole& hole, uint64_t stream) {
    pybind11::object event = mark_({stream});
    if (event.is_none()) return false;
    hole.uses.push_back({stream, num_marks_++, std::move(event)});
    return true;
  }

  void add_captured_use(List::Hole& hole, uint64_t stream) {
    const pybind11::object marked = mark_captured_({stream});
    if (marked.is_none()) return;  // dropped behind the capture
    const auto pair = marked.cast<pybind11::tuple>();
    hole.uses.push_back({stream, num_marks_++, pair[0], pair[1].cast<uint64_t>()});
  }

  NumberCall<1> mark_, mark_captured_;
  pybind11::object is_capturing_;
  NumberCall<0> current_stream_;
  List eager_;
  List captured_;
  uint64_t num_marks_ = 0;
};

// Bytes [offset, offset + num_bytes), given back when the last reference goes.
class Block {
 public:
  Block(std::shared_ptr<Region> region, size_t offset, size_t num_bytes, bool is_captured,
        bool is_scratch, std::optional<uint64_t> owner)
      : offset(offset),
        num_bytes(num_bytes),
        region_(std::move(region)),
        is_captured_(is_captured),
        is_scratch_(is_scratch),
        owner_(owner) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (Py_IsInitialized() == 0) return;  // at exit there is no next owner, and no Python to ask
    try {
      region_->give_back(offset, num_bytes, is_captured_, is_scratch_, owner_);
    } catch (pybind11::error_already_set& error) {
      // Nobody knows who still reads the bytes: nobody gets them.
      error.discard_as_unraisable("giving back a block of the receive region");
    }
  }

  // Gives back what lies behind the first num_bytes. For bytes that no stream but the one the block
  // was allocated for has used: whatever that one waited for, the next owner is behind as well.
  void shrink(size_t new_num_bytes) {
    new_num_bytes = align_block(new_num_bytes == 0 ? 1 : new_num_bytes);
    if (new_num_bytes > num_bytes) throw std::invalid_argument("a block can only become smaller");
    if (new_num_bytes == num_bytes) return;
    region_->give_back_unused(offset + new_num_bytes, num_bytes - new_num_bytes, is_captured_);
    num_bytes = new_num_bytes;
  }

  // From now on others than the engine's kernels use a scratch block.
  void expose() { is_scratch_ = false; }

  const size_t offset;
  size_t num_bytes;

 private:
  std::shared_ptr<Region> region_;
  bool is_captured_;
  bool is_scratch_;
  std::optional<uint64_t> owner_;  // the stream that was current
};

}  // namespace deep_comm
