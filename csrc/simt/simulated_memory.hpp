// The weak memory of the simulated machine.
//
// A store that is not a release waits in a buffer of its fiber; synchronisation carries it outward,
// fiber -> warp -> block -> rank -> memory, as far as the scope of that synchronisation reaches;
// and at any moment chance may send single lines to memory. A load looks from its fiber outward,
// and may then take back, by chance, what became visible there without its fiber having to see it:
// see history.hpp. So everybody sees what the memory model of PTX promises to them, and as little
// more as possible.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "fiber.hpp"
#include "history.hpp"
#include "late_loads.hpp"
#include "ops.hpp"
#include "rail.hpp"
#include "random.hpp"
#include "store_buffer.hpp"

namespace deep_comm::simt {

// Beyond PTX, which orders launches of a stream on their own GPU alone: what was visible when a
// launch began is visible to whoever acquires a word that the launch has stored, as if it began
// with a fence of scope sys.
inline constexpr bool kLaunchesRelease = true;

// What a fiber has read and fenced; only of those that did either.
struct ReadState {
  // By whose release was read: of the own block, of the own rank, of another rank. A fence of that
  // scope makes it part of the fiber's view.
  View relaxed[3];
  bool has_relaxed[3] = {};
  // Of the last fence: what later stores with an order carry.
  Release fence;
  bool has_fence = false;

  // Lines of which this fiber has read a change that it need not see: later reads are not older.
  struct Floor {
    LineKey key;
    uint32_t time;
    uint32_t num_stale;  // reads since a newer one
  };
  static constexpr uint32_t kNumFloors = 16;
  Floor floors[kNumFloors] = {};
  uint32_t next_floor = 0;

  Floor* find(LineKey key) {
    for (Floor& floor : floors) {
      if (floor.key == key) return &floor;
    }
    return nullptr;
  }
};

class SimulatedMemory {
 public:
  SimulatedMemory(bool weak, bool allow_late_loads, int num_ranks, Random& random,
                  Executor& executor);

  // After its grid has got a start_time.
  void start_fiber(Fiber* fiber) {
    fiber->view = history_.all_until(grid_of(fiber)->start_time);
    fiber->last_read = 0;
  }
  // It has awaited the end of another launch.
  void see_end(Fiber* fiber, uint32_t time) { fiber->view.join(history_.all_until(time)); }
  uint32_t now() const { return history_.now(); }
  // The time of a launch that begins now. No load belongs to both: a change of nothing follows.
  uint32_t begin_launch() { return history_.add({}) - 1; }
  // No fiber runs that began before.
  void settle_history(uint32_t time) { history_.settle(time); }

  // The newest value on the way from the fiber to memory.
  void peek(const Fiber* fiber, void* value, const void* address, unsigned num_bytes);
  void load(Fiber* fiber, void* value, const void* address, unsigned num_bytes);
  void ordered_load(Fiber* fiber, void* value, const void* address, unsigned num_bytes,
                    bool acquires, Scope scope);
  void store(Fiber* fiber, void* address, const void* value, unsigned num_bytes);
  void relaxed_store(Fiber* fiber, void* address, const void* value, unsigned num_bytes,
                     Scope scope);
  void release_store(Fiber* fiber, void* address, const void* value, unsigned num_bytes,
                     Scope scope);
  // A load of what nobody writes while the grid runs: true if somebody has.
  bool was_written(const Fiber* fiber, const void* address) const;
  // Before and after an atomic acts on memory itself.
  void begin_atomic(Fiber* fiber, const void* address, unsigned num_bytes, AtomicOrder order,
                    Scope scope);
  void end_atomic(Fiber* fiber, const void* address, unsigned num_bytes, AtomicOrder order,
                  Scope scope);
  void fence(Fiber* fiber, Scope scope);
  // What this fiber has stored or seen through its warp and block reaches at least that scope.
  void order(Fiber* fiber, Scope scope);
  void order_to_warp(Fiber* fiber);
  // What this fiber tells whoever meets it at a barrier of its block, or of its warp.
  View view_for_block(Fiber* fiber);
  View view_for_warp(const Fiber* fiber) const;

  // Bulk copies. A write that the issuer waited for is as visible as its own stores: a few lines,
  // taken by chance, stay in its buffer. A write that completed by itself is in memory.
  void write_bulk(Fiber* fiber, void* dst, const uint8_t* src, size_t num_bytes, bool waited_for);
  // A bulk store is issued, or a put is posted: it must be behind what was loaded there.
  void begin_write(const Fiber* fiber, const void* dst, size_t num_bytes) {
    require_loaded(fiber, dst, num_bytes);
  }
  // `view`: of the issuer when it issued the copy. The time of its loads (late_loads.hpp).
  uint32_t read_bulk(Fiber* fiber, const View& view, uint8_t* dst, const void* src,
                     size_t num_bytes);

  // A thread hands a signal to its NIC: like a relaxed store, it carries what was fenced before.
  void post_signal(Fiber* fiber, const uint64_t* word) {
    if (weak_) signals_[word].push_back(relaxed_release(fiber, Scope::kSys));
  }
  // What the NIC of `rank` writes.
  void land(const RailOp& put, uint32_t begin, uint32_t num_bytes);
  // By chance the NIC reads what a thread puts as soon as it is posted, and as old as that thread
  // may see it.
  void read_early(const Fiber* fiber, RailOp* put);
  void land_signal(int rank, uint64_t* word, uint64_t value);

  bool has_pending() const { return num_lines_ > 0; }
  void drain_one();  // one line, or a part of it, by chance

  void finish_grid(GridRun& run);  // everything of the grid, and of its rank, reaches memory
  void drop_grid(GridRun& run);    // a killed rank: what nobody has seen is lost

 private:
  // Lines that a buffer holds before it must let one go.
  static constexpr size_t kFiberLines = 64;
  static constexpr size_t kWarpLines = 256;
  static constexpr size_t kBlockLines = 1024;
  static constexpr size_t kRankLines = 4096;

  // How a line looks to a fiber, place by place.
  struct Layers {
    uint8_t memory[kLineBytes];
    StoreLine rank, block;  // valid 0: none

    void take_back(const Change& change);
  };

  StoreBuffer* take_buffer(StoreBuffer* outer, size_t bound, LastPushes* pushes);
  void give_back(StoreBuffer*& buffer);
  void give_back(Fiber* fiber);
  StoreBuffer* buffer_of(Block* block);
  StoreBuffer* buffer_of(Warp* warp);
  StoreBuffer* buffer_of(Fiber* fiber);
  StoreBuffer* buffer_of_rank(const Fiber* fiber);

  ReadState& reads_of(Fiber* fiber);
  void require_loaded(const Fiber* fiber, const void* address, size_t num_bytes);

  uint32_t note_change(LineKey key, uint16_t written, const StoreBuffer* place,
                       const uint8_t* old_bytes, uint16_t old_valid, const void* source, int rank,
                       LastPushes* pushes, uint32_t release);
  void note_change_of_block(Fiber* fiber, const void* address, unsigned num_bytes,
                            uint32_t release);
  void note_lines(uint8_t* dst, size_t num_lines, const void* source, int rank, LastPushes* pushes);
  Release release_of(const Fiber* fiber, Scope scope) const;
  uint32_t add_release(const Fiber* fiber, Scope scope) {
    return history_.add_release(release_of(fiber, scope));
  }
  uint32_t join_releases(uint32_t earlier, uint32_t later);
  static uint32_t release_of_launch(const Fiber* fiber);
  uint32_t relaxed_release(Fiber* fiber, Scope scope);
  void observe(Fiber* fiber, uint32_t release, uint32_t time, bool acquires, Scope scope);
  bool store_in_the_past(Fiber* fiber, void* address, const void* value, unsigned num_bytes,
                         uint32_t release);
  static void see_all_until(Fiber* fiber, uint32_t time);
  bool can_see(const Change& change, const Fiber* fiber) const;
  bool must_see(const Change& change, uint32_t time, const Fiber* fiber, const View& view) const;
  // The value that is left when changes are taken back.
  struct Left {
    uint32_t time = 0;  // of the newest change that is left; 0: none is known
    uint32_t release = 0;
    bool is_seen_anyway = true;  // its fiber must see it
  };
  // Takes changes back that the fiber need not see, the newest ones first and by chance as many as
  // it likes. `floor`: of changes that it has read.
  Left take_back(const Fiber* fiber, const View& view, LineKey key, uint16_t wanted, uint32_t floor,
                 bool goes_back, Layers& layers);
  Layers layers_of(const Fiber* fiber, LineKey key, uint16_t wanted, bool only_of_rank);
  // Puts lines back, in a copy of memory, that the fiber need not see. past_buffers: only what has
  // reached memory is in it.
  void take_back_lines(const Fiber* fiber, const View& view, uint8_t* dst, const void* src,
                       size_t num_bytes, bool past_buffers);
  static void finish_load(const Fiber* fiber, void* value, const void* address, unsigned num_bytes,
                          Layers& layers);
  void store(Fiber* fiber, void* address, const void* value, unsigned num_bytes, uint32_t release);

  void put(StoreBuffer* buffer, LineKey key, uint16_t valid, const uint8_t* bytes, uint32_t release,
           const void* source, LastPushes* pushes);
  void move(StoreBuffer* from, StoreBuffer* to);
  void drain_all(StoreBuffer* buffer);
  void drain(StoreBuffer* buffer, StoreLine* line, uint16_t part);
  void drop(StoreBuffer* buffer, StoreLine* line);
  void empty(StoreBuffer* buffer);
  void write(LineKey key, uint16_t valid, const uint8_t* bytes, uint32_t release,
             const void* source, int rank, LastPushes* pushes);
  void settle(Fiber* fiber, const void* address, size_t num_bytes);

  bool weak_;
  bool finds_late_loads_;
  Random& random_;
  Executor& executor_;
  Whim stale_load_;
  Whim stale_bulk_;
  Whim past_store_;
  LateLoads late_loads_;
  History history_{late_loads_};
  size_t num_lines_ = 0;
  std::vector<StoreBuffer*> filled_;
  std::vector<StoreBuffer> ranks_;
  std::vector<std::unique_ptr<StoreBuffer>> all_;
  std::vector<StoreBuffer*> free_;
  std::vector<std::unique_ptr<ReadState>> all_reads_;
  std::vector<ReadState*> free_reads_;
  uint8_t before_atomic_[kLineBytes];
  // Under way, by word: what they carry, the oldest first. They land in that order.
  std::map<const uint64_t*, std::deque<uint32_t>> signals_;
};

// Before any access of a fiber to global memory.
void require_begun(Fiber* self, const void* address);

// For code that serves both machines.
// An arrival at a barrier of the block: `meeting` gets what the others then see. And its end.
void arrive_at_block(Fiber* self, Meeting& meeting);
void leave_barrier(Fiber* self, const Meeting& meeting);
void leave_mbarrier(Fiber* self, const Meeting& meeting);
// The same in a warp.
void arrive_at_warp(Fiber* self, WarpOp op, Meeting& meeting);
void leave_warp(Fiber* self, WarpOp op, const Meeting& meeting);
// An access to an mbarrier.
void touch_shared(Fiber* self, const uint64_t* barrier, Races::Access access);
// Something other than a poll happened.
void note_progress();

}  // namespace deep_comm::simt
