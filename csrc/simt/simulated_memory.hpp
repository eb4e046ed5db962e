// The weak memory of the simulated machine.
//
// A store that is not a release waits in a buffer of its fiber; synchronisation carries it outward,
// fiber -> warp -> block -> rank -> memory, as far as the scope of that synchronisation reaches;
// and at any moment chance may send single lines to memory. A load looks from its fiber outward, so
// that everybody sees what the memory model of PTX promises to them, and as little more as
// possible.
#pragma once

#include <memory>
#include <vector>

#include "fiber.hpp"
#include "ops.hpp"
#include "random.hpp"
#include "store_buffer.hpp"

namespace deep_comm::simt {

// Beyond PTX, which orders memory at sync_warp alone: shuffles and votes carry stores to the warp
// too.
inline constexpr bool kCollectivesOrderMemory = true;

class SimulatedMemory {
 public:
  SimulatedMemory(bool weak, int num_ranks, Random& random, Executor& executor);

  void load(const Fiber* fiber, void* value, const void* address, unsigned num_bytes);
  void store(Fiber* fiber, void* address, const void* value, unsigned num_bytes);
  void release_store(Fiber* fiber, void* address, const void* value, unsigned num_bytes,
                     Scope scope);
  // What this fiber has stored or seen through its warp and block reaches at least that scope.
  void order(Fiber* fiber, Scope scope);
  void order_to_warp(Fiber* fiber);
  // Older stores of this fiber's own chain to these lines reach memory.
  void settle(Fiber* fiber, const void* address, size_t num_bytes);

  // Bulk copies. A write that the issuer waited for is as visible as its own stores: a few lines,
  // taken by chance, stay in its buffer. A write that completed by itself is in memory.
  void write_bulk(Fiber* fiber, void* dst, const uint8_t* src, size_t num_bytes, bool waited_for);
  void read_bulk(const Fiber* fiber, uint8_t* dst, const void* src, size_t num_bytes);

  bool has_pending() const { return num_lines_ > 0; }
  void drain_one();  // one line, or a part of it, by chance

  void finish_grid(GridRun& run);  // everything of the grid, and of its rank, reaches memory
  void drop_grid(GridRun& run);    // a killed rank: what nobody has seen is lost

 private:
  StoreBuffer* take_buffer(StoreBuffer* outer, size_t bound);
  void give_back(StoreBuffer*& buffer);
  StoreBuffer* buffer_of(Block* block);
  StoreBuffer* buffer_of(Warp* warp);
  StoreBuffer* buffer_of(Fiber* fiber);
  StoreBuffer* buffer_of_rank(const Fiber* fiber);

  void put(StoreBuffer* buffer, LineKey key, uint16_t valid, const uint8_t* bytes);
  void move(StoreBuffer* from, StoreBuffer* to);
  void drain_all(StoreBuffer* buffer);
  void drain(StoreBuffer* buffer, StoreLine* line, uint16_t part);
  void drop(StoreBuffer* buffer, StoreLine* line);
  void empty(StoreBuffer* buffer);
  void write(LineKey key, uint16_t valid, const uint8_t* bytes);

  bool weak_;
  Random& random_;
  Executor& executor_;
  size_t num_lines_ = 0;
  std::vector<StoreBuffer*> filled_;
  std::vector<StoreBuffer> ranks_;
  std::vector<std::unique_ptr<StoreBuffer>> all_;
  std::vector<StoreBuffer*> free_;
};

// For code that serves both machines.
void order_stores(Fiber* self, Scope scope);
void order_stores_to_warp(Fiber* self, WarpOp op);
// Something other than a poll happened.
void note_progress();

}  // namespace deep_comm::simt
