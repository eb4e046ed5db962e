// Memory of a call: blocks of the receive region, and tensors of the framework's. A Buffer that poisons
// (DEEP_COMM_POISON) fills both before kernels run, with bytes that none would write by chance.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "host/framework.hpp"
#include "host/region.hpp"
#include "host/streams.hpp"

namespace deep_comm {

class CallOrder;
class StreamOrder;

inline constexpr size_t kBlockAlignment = 128;
inline constexpr uint8_t kPoisonByte = 0xA5;

inline size_t align_block(size_t num_bytes) {
  return (num_bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
}

// The free bytes of the receive region, and the events of their last uses.
//
// A block may be given back while kernels that read it are still queued. So an event is recorded then
// on the stream that is current, and on the one that was current when the block was taken, whose work
// may use it without saying so; whoever gets the bytes next waits for both. Blocks that a CUDA graph
// was captured with are only handed out to the same or later captures: replays write to them whenever
// they like. Within a capture the same events order their users; captures have their order from
// whoever replays them.
//
// The interpreter's lock guards all state.
class Region {
 public:
  using List = FreeList<std::shared_ptr<Event>>;

  Region(size_t begin, size_t end, std::shared_ptr<StreamTarget> streams,
         std::shared_ptr<Framework> framework);

  std::optional<List::Hole> take(size_t num_bytes, bool is_captured);
  // A scratch block leaves nothing to wait for: see Block.
  void give_back(size_t offset, size_t num_bytes, bool is_captured, bool is_scratch,
                 uint64_t owner);
  void give_back_unused(size_t offset, size_t num_bytes, bool is_captured);
  StreamTarget& streams() const { return *streams_; }
  Framework& framework() const { return *framework_; }
  size_t num_free_bytes() const { return eager_.num_bytes() + captured_.num_bytes(); }

 private:
  // False: the stream cannot have used the bytes in a way that an event could tell.
  bool add_use(List::Hole& hole, uint64_t stream, bool is_captured);

  std::shared_ptr<StreamTarget> streams_;
  std::shared_ptr<Framework> framework_;
  List eager_;
  List captured_;
  uint64_t num_marks_ = 0;
};

// Bytes [offset, offset + num_bytes) of the heap, given back when the last reference goes.
class Block {
 public:
  // is_scratch: only the engine's kernels use the block. They are ordered, so the next owner need not
  // wait.
  // owner: the stream that was current.
  Block(std::shared_ptr<Region> region, size_t offset, size_t num_bytes, bool is_captured,
        bool is_scratch, uint64_t owner)
      : offset(offset),
        num_bytes(num_bytes),
        region_(std::move(region)),
        is_captured_(is_captured),
        is_scratch_(is_scratch),
        owner_(owner) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  // Gives back what lies after the first new_num_bytes. For bytes that no stream but the one the
  // block was taken for has used: whatever that one waited for, the next owner comes after as well.
  void shrink(size_t new_num_bytes);
  // From now on others than the engine's kernels use a scratch block.
  void expose() { is_scratch_ = false; }

  const size_t offset;
  size_t num_bytes;

 private:
  std::shared_ptr<Region> region_;
  bool is_captured_;
  bool is_scratch_;
  uint64_t owner_;
};

struct BlockRequest {
  size_t num_bytes;
  uint64_t caller;  // the current stream
  bool is_behind_caller, is_captured, is_scratch;
};

// A block, and `wait(event)` for each event of its last uses that the call must wait for; null: there
// is no room.
template <class Wait>
std::shared_ptr<Block> take_block(const std::shared_ptr<Region>& region,
                                  const BlockRequest& request, const Wait& wait) {
  const size_t num_bytes = align_block(request.num_bytes == 0 ? 1 : request.num_bytes);
  const bool is_captured = request.is_captured;
  std::optional<Region::List::Hole> taken = region->take(num_bytes, is_captured);
  if (!taken) return nullptr;
  auto block = std::make_shared<Block>(region, taken->offset, num_bytes, is_captured,
                                       request.is_scratch, request.caller);
  if (taken->uses.empty()) return block;
  // A capture may not wait for work outside of it, and begins with the device idle.
  const uint64_t capture = is_captured ? region->streams().capture_of(request.caller) : 0;
  if (is_captured && capture == 0) return block;
  for (const Region::List::Use& use : taken->uses) {
    const bool is_before = request.is_behind_caller && use.stream == request.caller;
    if (use.capture == capture && !is_before) wait(use.event);
  }
  return block;
}

// Of one Buffer.
class Memory {
 public:
  // heap_owner keeps this rank's part of the heap mapped.
  Memory(std::shared_ptr<StreamOrder> order, uintptr_t heap_base, std::shared_ptr<void> heap_owner,
         std::shared_ptr<Region> region, bool poisons);

  Framework& framework() const;
  const std::shared_ptr<Framework>& shared_framework() const;
  uintptr_t heap_base() const { return heap_base_; }

  // An address for the engine, where 0 stands for "not given": a tensor without elements gets one
  // that nobody follows.
  uintptr_t non_null(uintptr_t address) const { return address == 0 ? heap_base_ : address; }
  // 0 if the argument was not given.
  uintptr_t address_of(const TensorRef& given) const {
    return given.is_given() ? non_null(given.address) : 0;
  }

  // A block of the region, after whose last uses the call's stream comes; null: there is no room.
  // Not filled; see poison.
  std::shared_ptr<Block> take(size_t num_bytes, const CallOrder& order, bool is_scratch);
  // Fills bytes of the heap from `offset` on, if the Buffer poisons.
  void poison(size_t offset, size_t num_bytes, const CallOrder& order);

  // An output of the framework's memory, on the stream that owns the call's outputs.
  MadeTensor empty(const TensorSpec& spec, CallOrder& order);
  // What tensors over a block keep: it, and the heap.
  std::shared_ptr<void> keep(std::shared_ptr<Block> block) const;
  // A tensor over the heap, `offset` bytes from its base.
  Object over(size_t offset, const TensorSpec& spec, std::shared_ptr<void> keeper);

 private:
  std::shared_ptr<StreamOrder> order_;
  uintptr_t heap_base_;
  std::shared_ptr<void> heap_owner_;
  std::shared_ptr<Region> region_;
  bool poisons_;
};

}  // namespace deep_comm
