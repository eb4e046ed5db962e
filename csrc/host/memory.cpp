#include "host/memory.hpp"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "host/interpreter.hpp"
#include "host/stream_order.hpp"

namespace deep_comm {

void NoStreams::fill(uintptr_t address, uint8_t byte, size_t num_bytes, uint64_t /*stream*/) {
  std::memset(reinterpret_cast<void*>(address), byte, num_bytes);
}

Region::Region(size_t begin, size_t end, std::shared_ptr<StreamTarget> streams,
               std::shared_ptr<Framework> framework)
    : streams_(std::move(streams)), framework_(std::move(framework)) {
  begin = align_block(begin);
  if (end > begin) eager_.give_back({begin, end - begin, {}});
}

std::optional<Region::List::Hole> Region::take(size_t num_bytes, bool is_captured) {
  std::optional<List::Hole> taken = (is_captured ? captured_ : eager_).take(num_bytes);
  if (!taken && is_captured) taken = eager_.take(num_bytes);
  return taken;
}

void Region::give_back(size_t offset, size_t num_bytes, bool is_captured, bool is_scratch,
                       uint64_t owner) {
  List::Hole hole{offset, num_bytes, {}};
  if (!is_scratch && streams_->has_streams()) {
    const uint64_t stream = framework_->current_stream();
    const DeviceScope scope(*streams_);
    const bool may_have_used = add_use(hole, stream, is_captured);
    if ((may_have_used || is_captured) && owner != stream) add_use(hole, owner, is_captured);
  }
  (is_captured ? captured_ : eager_).give_back(std::move(hole));
}

void Region::give_back_unused(size_t offset, size_t num_bytes, bool is_captured) {
  (is_captured ? captured_ : eager_).give_back({offset, num_bytes, {}});
}

bool Region::add_use(List::Hole& hole, uint64_t stream, bool is_captured) {
  // An event of a capture means nothing outside of it. An eager block that is dropped in a capture
  // leaves none: replays are ordered by who asks for them. Nor does a captured one that is dropped
  // after its capture.
  const uint64_t capture = is_captured ? streams_->capture_of(stream) : 0;
  if (is_captured ? capture == 0 : streams_->is_capturing(stream)) return false;
  hole.uses.push_back({stream, num_marks_++, streams_->mark(stream), capture});
  return true;
}

Block::~Block() {
  if (has_interpreter != nullptr && !has_interpreter()) return;  // there is no next owner
  try {
    region_->give_back(offset, num_bytes, is_captured_, is_scratch_, owner_);
  } catch (...) {
    // Nobody knows who still reads the bytes: nobody gets them.
    if (report_unraisable != nullptr) {
      report_unraisable("giving back a block of the receive region");
    }
  }
}

void Block::shrink(size_t new_num_bytes) {
  new_num_bytes = align_block(new_num_bytes == 0 ? 1 : new_num_bytes);
  if (new_num_bytes > num_bytes) throw std::invalid_argument("a block can only become smaller");
  if (new_num_bytes == num_bytes) return;
  region_->give_back_unused(offset + new_num_bytes, num_bytes - new_num_bytes, is_captured_);
  num_bytes = new_num_bytes;
}

Memory::Memory(std::shared_ptr<StreamOrder> order, uintptr_t heap_base,
               std::shared_ptr<void> heap_owner, std::shared_ptr<Region> region, bool poisons)
    : order_(std::move(order)),
      heap_base_(heap_base),
      heap_owner_(std::move(heap_owner)),
      region_(std::move(region)),
      poisons_(poisons) {}

Framework& Memory::framework() const { return order_->framework(); }

const std::shared_ptr<Framework>& Memory::shared_framework() const {
  return order_->shared_framework();
}

std::shared_ptr<Block> Memory::take(size_t num_bytes, const CallOrder& order, bool is_scratch) {
  const BlockRequest request{num_bytes, order.caller(), order.is_behind_caller(),
                             order.is_captured(), is_scratch};
  return take_block(region_, request,
                    [&](const std::shared_ptr<Event>& event) { event->wait(order.stream()); });
}

void Memory::poison(size_t offset, size_t num_bytes, const CallOrder& order) {
  if (!poisons_ || num_bytes == 0) return;
  order_->target().fill(heap_base_ + offset, kPoisonByte, num_bytes, order.stream());
}

MadeTensor Memory::empty(const TensorSpec& spec, CallOrder& order) {
  MadeTensor made =
      order.outputs_are_comms() ? framework().empty_on_comm(spec) : framework().empty(spec);
  order.note_output(made.tensor);
  if (poisons_ && spec.num_elements() > 0) {
    order_->target().fill(made.address, kPoisonByte, spec.num_bytes(), order.stream());
  }
  return made;
}

std::shared_ptr<void> Memory::keep(std::shared_ptr<Block> block) const {
  struct Keeper {
    std::shared_ptr<Block> block;
    std::shared_ptr<void> heap;
  };
  return std::make_shared<Keeper>(Keeper{std::move(block), heap_owner_});
}

Object Memory::over(size_t offset, const TensorSpec& spec, std::shared_ptr<void> keeper) {
  return framework().over(heap_base_ + offset, spec, std::move(keeper));
}

}  // namespace deep_comm
