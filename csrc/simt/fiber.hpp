// The state of one launched grid: fibers (CUDA threads), warps, blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "context.hpp"
#include "machine.hpp"
#include "races.hpp"
#include "stack_pool.hpp"
#include "view.hpp"

namespace deep_comm::simt {

inline constexpr int kLanes = 32;
inline constexpr int kNumBarriers = 16;  // 0 is sync_block

enum class WarpOp : uint8_t {
  kSync,
  kShfl,
  kShflXor,
  kShflUp,
  kShflDown,
  kBallot,
  kAny,
  kAll,
  kMatchAny,
  kElect,
};
const char* name_of(WarpOp op);

// Why a fiber does not run.
enum class Wait : uint8_t {
  kNone,  // it runs or could
  kCollective,
  kBlockBarrier,
  kNamedBarrier,
  kMbarrier,
  kWord,
  kSleep,
  kEarlierLaunch,
  kExited,
};

struct Warp;
struct Block;
struct GridRun;
class StoreBuffer;
struct ReadState;
struct BulkCopy;

// The same fields as deep_comm::WaitNote; this layer does not know the kernels' headers.
struct Note {
  const char* kernel;
  const char* stage;
  const char* word;
  int rank;
  int peer;
  int channel;
  uint64_t expected;
};

// A fiber lies at the high end of its own stack: what a switch touches shares a page.
struct Fiber {
  Context context;
  Fiber* next = nullptr;  // in the one list that holds it
  Warp* warp = nullptr;
  int thread_idx = 0;
  uint8_t lane = 0;
  Wait wait = Wait::kNone;
  bool has_note = false;
  // Simulated machine: must await the launch before this one, and may touch no memory until then.
  bool owes_wait = false;
  bool is_early = false;
  // The condition of Wait::kWord, kMbarrier (address in `word`, parity in `seen`) and kSleep.
  uint8_t word_bytes = 0;
  uint32_t parked_index = 0;  // in the executor's list of those
  const void* word = nullptr;
  const uint32_t* abort_word = nullptr;
  uint64_t seen = 0;
  uint64_t deadline_ns = 0;
  int barrier = 0;  // Wait::kNamedBarrier
  uint32_t spurious_wakes = 0;

  // Bulk stores of this thread: of the open group, and groups not yet waited for.
  uint32_t num_open_stores = 0;
  uint32_t num_committed_groups = 0;
  uint32_t num_unread_groups = 0;
  uint32_t num_unwritten_groups = 0;

  uint64_t* canary = nullptr;  // of a stack without a guard page

  // Simulated machine only.
  View view;
  StoreBuffer* stores = nullptr;
  ReadState* reads = nullptr;
  uint32_t last_read = 0;          // time of its newest plain load (late_loads.hpp)
  BulkCopy* first_bulk = nullptr;  // oldest first
  BulkCopy* last_bulk = nullptr;
  uint64_t priority = 0;
  Fiber* next_on_word = nullptr;  // hash chain of the fibers that wait for words

  Note note;
};

struct FiberList {
  Fiber* first = nullptr;
  Fiber* last = nullptr;

  bool empty() const { return first == nullptr; }
  void push_back(Fiber* fiber) {
    fiber->next = nullptr;
    (last ? last->next : first) = fiber;
    last = fiber;
  }
  void push_front(Fiber* fiber) {
    fiber->next = first;
    first = fiber;
    if (!last) last = fiber;
  }
  Fiber* pop_front() {
    Fiber* fiber = first;
    if (fiber) {
      first = fiber->next;
      if (!first) last = nullptr;
    }
    return fiber;
  }
};

// A collective that some, not all, lanes of its mask have reached.
struct PendingCollective {
  uint32_t mask;
  uint32_t arrived;
  WarpOp op;
  Meeting meeting;  // simulated machine: of those that have arrived
};

// Simulated machine: when stores that came from a warp's or block's own buffers last became visible
// further out.
struct LastPushes {
  uint32_t block = 0;
  uint32_t gpu = 0;
  uint32_t sys = 0;
};

struct Warp {
  Block* block = nullptr;
  int index = 0;
  int num_pending = 0;
  uint32_t gone = 0;  // lanes that have exited or never existed
  PendingCollective pending[kLanes];
  uint64_t values[kLanes];
  uint32_t arguments[kLanes];
  uint64_t results[kLanes];
  Fiber* lanes[kLanes] = {};
  StoreBuffer* stores = nullptr;
  LastPushes pushes;  // of the lanes' buffers and of its own
};

struct NamedBarrier {
  const char* file = "";  // the block barrier: the call at which those who have arrived stand
  int line = 0;
  int expected = 0;  // 0: nobody has arrived since it last completed
  int arrived = 0;
  bool any = false;     // of those that have arrived; sync_block_any
  bool result = false;  // of the last time that it completed
  Meeting meeting;      // simulated machine: of those that have arrived
  FiberList waiting;
};

// Simulated machine.
struct MbarrierState {
  const uint64_t* address;
  Meeting arrived{};
  Meeting completed{};      // what `arrived` was when the last phase completed
  uint32_t num_phases = 0;  // that have completed
  size_t load_agent = 0;    // of Races; 0: none yet
};

// What a kernel finds in shared memory that it has not written.
inline constexpr uint8_t kSmemPoison = 0xd5;

// Memory of one block, with a canary behind it. Kept between launches.
struct SharedMemory {
  uint8_t* base = nullptr;
  size_t num_bytes = 0;
  size_t capacity = 0;
};

struct Block {
  GridRun* grid = nullptr;
  int index = 0;
  int num_live = 0;            // threads that have not exited
  bool posts_no_more = false;  // has called rail_done
  bool allows_later = false;   // has called allow_later_launch, or ended
  SharedMemory smem;
  NamedBarrier barriers[kNumBarriers];
  StoreBuffer* stores = nullptr;
  LastPushes pushes;  // of its own buffer
  // Simulated machine only.
  std::vector<MbarrierState> mbarriers;
  std::unique_ptr<Races> races;  // null: nobody looks for them

  bool owns(const void* address) const {
    return static_cast<size_t>(static_cast<const uint8_t*>(address) - smem.base) < smem.num_bytes;
  }
};

struct GridRun {
  Grid grid;
  Body body = nullptr;
  const void* args = nullptr;
  uint64_t stream = 0;
  int num_live_blocks = 0;
  bool finished = false;
  // Simulated machine. start_time: of the history, what all its fibers see; of a launch beside
  // another one, that one's.
  uint32_t start_time = 0;
  bool has_begun = false;
  int num_allowing_blocks = 0;  // that let the next launch begin
  GridRun* earlier = nullptr;   // the launch before it in its stream, while that one runs
  uint32_t earlier_end = 0;     // when it ended
  FiberList awaiting_earlier;
  int num_warps_per_block = 0;
  std::vector<Stack> stacks;
  std::unique_ptr<Fiber*[]> fibers;  // [num_blocks * num_threads]
  std::unique_ptr<Warp[]> warps;     // [num_blocks * num_warps_per_block]
  std::unique_ptr<Block[]> blocks;   // [num_blocks]
  std::shared_ptr<void> args_copy;   // a launch that outlives its caller

  int num_fibers() const { return grid.num_blocks * grid.num_threads; }
  int num_warps() const { return grid.num_blocks * num_warps_per_block; }
};

inline Block* block_of(const Fiber* fiber) { return fiber->warp->block; }
inline GridRun* grid_of(const Fiber* fiber) { return fiber->warp->block->grid; }

// "kernel 'dispatch' rank 1 block 0 warp 2 lane 5"
std::string location_of(const Fiber* fiber);

// What a fiber that cannot run waits for, without its location.
std::string describe_wait(const Fiber* fiber, uint64_t seen_now);

}  // namespace deep_comm::simt
