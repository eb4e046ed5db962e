#include "executor.hpp"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

#include "barrier.hpp"
#include "ops.hpp"

namespace deep_comm::simt {

constinit thread_local ThreadState t_state __attribute__((tls_model("initial-exec"))) = {};

namespace {

constexpr size_t kSmemAlignment = 128;
constexpr size_t kSmemCanaryBytes = 64;
constexpr uint8_t kSmemCanary = 0xcb;

// Stacks of the lanes of a warp begin at different places of a page, so that their hot ends do not
// compete for the same sets of the first cache.
constexpr size_t kStackColors = 16;
constexpr size_t kStackColorBytes = 192;

}  // namespace

void check_grid(const Grid& grid) {
  auto require = [&](bool ok, const char* field, long long value, const char* rule) {
    if (ok) return;
    throw std::invalid_argument(std::string("launch of '") + grid.kernel + "': " + field + " = " +
                                std::to_string(value) + ", but " + rule);
  };
  require(grid.num_blocks >= 1, "num_blocks", grid.num_blocks, "a grid has at least one block");
  require(grid.num_threads >= 1 && grid.num_threads <= 1024, "num_threads", grid.num_threads,
          "a block has 1 to 1024 threads");
  require(grid.smem_bytes <= 227 * 1024, "smem_bytes", static_cast<long long>(grid.smem_bytes),
          "a block has at most 232448 bytes of shared memory");
  require(grid.rank >= 0, "rank", grid.rank, "ranks count from 0");
}

Executor::~Executor() {
  for (SharedMemory& smem : smem_pool_) std::free(smem.base);
}

SharedMemory Executor::take_smem(size_t num_bytes) {
  const size_t capacity =
      (num_bytes + kSmemCanaryBytes + kSmemAlignment - 1) / kSmemAlignment * kSmemAlignment;
  SharedMemory smem;
  for (size_t i = smem_pool_.size(); i-- > 0 && !smem.base;) {
    if (smem_pool_[i].capacity < capacity) continue;
    smem = smem_pool_[i];
    smem_pool_[i] = smem_pool_.back();
    smem_pool_.pop_back();
  }
  if (!smem.base) {
    smem.base = static_cast<uint8_t*>(std::aligned_alloc(kSmemAlignment, capacity));
    if (!smem.base) throw std::bad_alloc();
    smem.capacity = capacity;
  }
  smem.num_bytes = num_bytes;
  memset(smem.base, kSmemPoison, num_bytes);
  memset(smem.base + num_bytes, kSmemCanary, kSmemCanaryBytes);
  return smem;
}

void Executor::check_smem_canary(const Fiber* self, const Block& block) {
  const uint8_t* canary = block.smem.base + block.smem.num_bytes;
  for (size_t i = 0; i < kSmemCanaryBytes; ++i) {
    if (canary[i] == kSmemCanary) continue;
    fail(self, "the block has written behind its " + std::to_string(block.smem.num_bytes) +
                   " bytes of shared memory (offset " + std::to_string(block.smem.num_bytes + i) +
                   ")");
  }
}

std::unique_ptr<GridRun> Executor::create(const Grid& grid, Body body, const void* args) {
  check_grid(grid);
  auto run = std::make_unique<GridRun>();
  run->grid = grid;
  run->body = body;
  run->args = args;
  run->num_warps_per_block = (grid.num_threads + kLanes - 1) / kLanes;
  return run;
}

void Executor::start(GridRun& run) {
  const Grid& grid = run.grid;
  const int num_fibers = run.num_fibers();
  StackPool::instance().acquire(static_cast<size_t>(num_fibers), run.stacks);
  run.fibers = std::make_unique_for_overwrite<Fiber*[]>(static_cast<size_t>(num_fibers));
  run.warps = std::make_unique_for_overwrite<Warp[]>(static_cast<size_t>(run.num_warps()));
  run.blocks = std::make_unique<Block[]>(static_cast<size_t>(grid.num_blocks));
  run.num_live_blocks = grid.num_blocks;
  parked_.reserve(parked_.size() + static_cast<size_t>(num_fibers));

  int fiber_idx = 0;
  for (int block_idx = 0; block_idx < grid.num_blocks; ++block_idx) {
    Block& block = run.blocks[block_idx];
    block.grid = &run;
    block.index = block_idx;
    block.num_live = grid.num_threads;
    block.smem = take_smem(grid.smem_bytes);
    for (int thread_idx = 0; thread_idx < grid.num_threads; ++thread_idx, ++fiber_idx) {
      const int lane = thread_idx % kLanes, warp_idx = thread_idx / kLanes;
      Warp& warp = run.warps[block_idx * run.num_warps_per_block + warp_idx];
      if (lane == 0) {
        warp.block = &block;
        warp.index = warp_idx;
        const int num_lanes = grid.num_threads - thread_idx;
        warp.gone = num_lanes >= kLanes ? 0 : ~0u << num_lanes;
      }
      const Stack& stack = run.stacks[fiber_idx];
      const size_t color = static_cast<size_t>(thread_idx) % kStackColors * kStackColorBytes;
      const size_t fiber_offset = (kStackBytes - sizeof(Fiber) - color) /
                                  alignof(std::max_align_t) * alignof(std::max_align_t);
      auto* fiber = new (stack.low + fiber_offset) Fiber;
      prepare_context(fiber->context, stack.low, fiber_offset, &Executor::fiber_main);
      fiber->canary = stack.canary();
      if (fiber->canary) *fiber->canary = kStackCanary;
      fiber->warp = &warp;
      fiber->thread_idx = thread_idx;
      fiber->lane = static_cast<uint8_t>(lane);
      warp.lanes[lane] = fiber;
      run.fibers[fiber_idx] = fiber;
      on_fiber_start(fiber);
      make_ready(fiber);
    }
  }
}

void Executor::release(GridRun& run) {
  StackPool::instance().release(run.stacks);
  if (run.blocks) {
    for (int i = 0; i < run.grid.num_blocks; ++i) {
      if (run.blocks[i].smem.base) smem_pool_.push_back(run.blocks[i].smem);
    }
  }
  run.fibers.reset();
  run.warps.reset();
  run.blocks.reset();
}

void Executor::resume() {
  Fiber* next = failed_ ? nullptr : pick_next();
  if (!next) return;
  t_state.current = next;
  switch_context(scheduler_, next->context);
  t_state.current = nullptr;
}

void Executor::suspend(Fiber* self) {
  if (self->canary && *self->canary != kStackCanary) [[unlikely]] {
    fail(self, "stack overflow: a thread has " + std::to_string(kStackBytes) + " bytes of stack");
  }
  Fiber* next = pick_next();
  if (next == self) return;
  t_state.current = next;
  switch_context(self->context, next ? next->context : scheduler_);
}

void Executor::yield(Fiber* self) {
  make_ready_last(self);
  suspend(self);
}

void Executor::leave_for_ever() {
  Fiber* next = failed_ ? nullptr : pick_next();
  t_state.current = next;
  switch_context(abandoned_, next ? next->context : scheduler_);
  std::abort();  // nobody ever switches to `abandoned_`
}

void Executor::fail(const Fiber* self, const std::string& message) {
  failure_ = location_of(self) + ": " + message;
  failed_ = true;
  if (!t_state.current) throw MachineError(failure_);  // on the scheduler's own stack
  leave_for_ever();
}

void Executor::park(Fiber* self) {
  self->parked_index = static_cast<uint32_t>(parked_.size());
  parked_.push_back(self);
  on_park(self);
  suspend(self);
}

void Executor::unpark(Fiber* fiber) {
  on_unpark(fiber);
  Fiber* last = parked_.back();
  parked_[fiber->parked_index] = last;
  last->parked_index = fiber->parked_index;
  parked_.pop_back();
  fiber->wait = Wait::kNone;
}

bool Executor::holds(const Fiber* fiber) {
  switch (fiber->wait) {
    case Wait::kWord:
      return peek(fiber, fiber->word, fiber->word_bytes) != fiber->seen ||
             (fiber->abort_word && peek(fiber, fiber->abort_word, 4) != 0);
    case Wait::kMbarrier:
      return mbarrier_phase_done(*static_cast<const uint64_t*>(fiber->word),
                                 static_cast<uint32_t>(fiber->seen));
    default:
      return false;
  }
}

void Executor::fiber_main() {
  Fiber* self = t_state.current;
  Executor* executor = t_state.executor;
  GridRun* run = grid_of(self);
  std::string thrown;
  try {
    run->body(run->args);
  } catch (const std::exception& error) {
    thrown = error.what();
    if (thrown.empty()) thrown = "unknown";
  } catch (...) {
    thrown = "unknown";
  }
  // Reported from here because a switch inside a handler would mix up the thread's exceptions.
  if (!thrown.empty()) executor->fail(self, "exception in a kernel: " + thrown);
  executor->exit_fiber(self);
}

void Executor::exit_fiber(Fiber* self) {
  Warp* warp = self->warp;
  Block* block = warp->block;
  GridRun* run = block->grid;
  if (self->canary && *self->canary != kStackCanary) {
    fail(self, "stack overflow: a thread has " + std::to_string(kStackBytes) + " bytes of stack");
  }
  if (self->num_open_stores > 0 || self->num_unread_groups > 0) {
    fail(self, "exits with bulk stores that may still read shared memory (" +
                   std::to_string(self->num_open_stores) + " not committed, " +
                   std::to_string(self->num_unread_groups) +
                   " groups without bulk_wait_read or bulk_wait)");
  }
  if (self->owes_wait) {
    fail(self,
         "exits without await_earlier_launch: a later launch would not wait for earlier ones");
  }
  const uint32_t bit = 1u << self->lane;
  for (int i = 0; i < warp->num_pending; ++i) {
    if (!(warp->pending[i].mask & bit)) continue;
    fail(self, std::string("exits while lanes of its warp wait for it at ") +
                   name_of(warp->pending[i].op));
  }
  self->wait = Wait::kExited;
  warp->gone |= bit;
  --block->num_live;
  if (block->num_live > 0) {
    complete_block_barrier_after_exit(block);
  } else {
    check_smem_canary(self, *block);
    on_block_exit(block);
    if (--run->num_live_blocks == 0) {
      on_grid_exit(run);
      run->finished = true;
    }
  }
  leave_for_ever();
}

}  // namespace deep_comm::simt
