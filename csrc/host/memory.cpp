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
    add_use(hole, stream, is_captured);
    if (owner != stream) add_use(hole, owner, is_captured);
  }
  (is_captured ? captured_ : eager_).give_back(std::move(hole));
}

void Region::give_back_unused(size_t offset, size_t num_bytes, bool is_captured) {
  (is_captured ? captured_ : eager_).give_back({offset, num_bytes, {}});
}

void Region::add_use(List::Hole& hole, uint64_t stream, bool is_captured) {
  // An event of a capture means nothing outside of it. A block of a capture that is dropped after it
  // leaves none: replays are ordered by who asks for them.
  const uint64_t capture = streams_->capture_of(stream);
  if (is_captured != (capture != 0)) return;
  hole.uses.push_back({stream, num_marks_++, streams_->mark(stream), capture});
}

Block::~Block() {
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

Memory::Memory(std::shared_ptr<StreamTarget> streams, std::shared_ptr<Framework> framework,
               uintptr_t heap_base, std::shared_ptr<void> heap_owner,
               std::shared_ptr<Region> region, bool poisons)
    : streams_(std::move(streams)),
      framework_(std::move(framework)),
      heap_base_(heap_base),
      heap_owner_(std::move(heap_owner)),
      region_(std::move(region)),
      poisons_(poisons) {}

std::shared_ptr<Block> Memory::take(size_t num_bytes, const CallOrder& order, bool is_scratch) {
  num_bytes = align_block(num_bytes == 0 ? 1 : num_bytes);
  std::optional<Region::List::Hole> taken = region_->take(num_bytes, order.is_captured());
  if (!taken) return nullptr;
  auto block = std::make_shared<Block>(region_, taken->offset, num_bytes, order.is_captured(),
                                       is_scratch, order.caller());
  if (taken->uses.empty()) return block;
  // A capture may not wait for work outside of it, and begins with the device idle.
  const uint64_t capture = order.is_captured() ? streams_->capture_of(order.caller()) : 0;
  if (order.is_captured() && capture == 0) return block;
  for (const Region::List::Use& use : taken->uses) {
    const bool is_before = order.is_behind_caller() && use.stream == order.caller();
    if (use.capture == capture && !is_before) use.event->wait(order.stream());
  }
  return block;
}

void Memory::poison(size_t offset, size_t num_bytes, const CallOrder& order) {
  if (!poisons_ || num_bytes == 0) return;
  streams_->fill(heap_base_ + offset, kPoisonByte, num_bytes, order.stream());
}

MadeTensor Memory::empty(const TensorSpec& spec, CallOrder& order) {
  MadeTensor made =
      order.outputs_are_comms() ? framework_->empty_on_comm(spec) : framework_->empty(spec);
  order.note_output(made.tensor);
  if (poisons_ && spec.num_elements() > 0) {
    streams_->fill(made.address, kPoisonByte, spec.num_bytes(), order.stream());
  }
  return made;
}

Object Memory::over(size_t offset, const TensorSpec& spec, std::shared_ptr<Block> block) {
  struct Keep {
    std::shared_ptr<Block> block;
    std::shared_ptr<void> heap;
  };
  auto keep = std::make_shared<Keep>(Keep{std::move(block), heap_owner_});
  return framework_->over(heap_base_ + offset, spec, std::move(keep));
}

}  // namespace deep_comm
