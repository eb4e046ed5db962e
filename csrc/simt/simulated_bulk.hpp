// Bulk copies of the simulated machine: issued now, done some time before they are waited for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fiber.hpp"
#include "random.hpp"

namespace deep_comm::simt {

class Executor;
class SimulatedMemory;

struct BulkCopy {
  Fiber* issuer = nullptr;
  BulkCopy* next = nullptr;  // of the same issuer's stores, younger
  uint8_t* dst = nullptr;
  const uint8_t* src = nullptr;
  uint64_t* barrier = nullptr;  // loads only
  uint32_t num_bytes = 0;
  uint32_t group = 0;  // stores only: how many groups the issuer had committed before
  size_t index = 0;    // in the list of those under way
  View view;           // loads only: of the issuer
  bool read = false;   // stores only: `staged` holds what was in shared memory
  std::vector<uint8_t> staged;
};

class BulkQueue {
 public:
  BulkQueue(bool delay, SimulatedMemory& memory, Random& random, Executor& executor)
      : delay_(delay), memory_(memory), random_(random), executor_(executor) {}

  void issue_load(Fiber* self, void* smem_dst, const void* src, uint32_t num_bytes,
                  uint64_t* barrier);
  void issue_store(Fiber* self, void* dst, const void* smem_src, uint32_t num_bytes);
  // All but the newest groups of this fiber have read their source, or have written as well.
  void finish_stores(Fiber* self, uint32_t newest_groups, bool read_only);

  bool has_pending() const { return !pending_.empty(); }
  void advance_one();  // a copy by chance does its next step

  // A load under way when its block ends would write into the shared memory of another; null if
  // none.
  const BulkCopy* find_load_of(const Block* block) const;
  void finish_grid(const GridRun& run);
  void drop_grid(const GridRun& run);

 private:
  BulkCopy* take();
  void retire(BulkCopy* copy);
  void unlink_store(BulkCopy* copy);
  void finish_load(BulkCopy* copy);
  void stage(BulkCopy* copy);
  void finish_store(BulkCopy* copy, bool waited_for);

  bool delay_;
  SimulatedMemory& memory_;
  Random& random_;
  Executor& executor_;
  std::vector<BulkCopy*> pending_;
  std::vector<std::unique_ptr<BulkCopy>> all_;
  std::vector<BulkCopy*> free_;
};

// For bulk.cpp, on the machine that runs.
void issue_bulk_load(Fiber* self, void* smem_dst, const void* global_src, uint32_t num_bytes,
                     uint64_t* barrier);
void issue_bulk_store(Fiber* self, void* global_dst, const void* smem_src, uint32_t num_bytes);
void finish_bulk_stores(Fiber* self, uint32_t newest_groups, bool read_only);

}  // namespace deep_comm::simt
