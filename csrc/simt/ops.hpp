// What a running fiber asks of its machine. device/arch/host*.cuh gives these the names of the
// primitives; nothing else includes this file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fiber.hpp"
#include "sites.hpp"

namespace deep_comm::simt {

// How far a store, release or fence reaches: the order is that of the buffers a store passes.
enum class Scope : uint8_t { kCta, kGpu, kSys };
enum class AtomicOrder : uint8_t { kRelaxed, kAcqRel };

class Executor;
class SimulatedExecutor;

struct ThreadState {
  Fiber* current;
  Executor* executor;
  SimulatedExecutor* simulated;  // null in direct mode
  uint32_t faults;               // bits of Fault; only a simulated machine has any
  Sites* sites;                  // null unless a simulation notes or weakens sites
  uint32_t polls_left;           // direct mode: loads with an order until the fiber yields
};

// One word of static thread-local storage per field: read on every primitive.
extern constinit thread_local ThreadState t_state __attribute__((tls_model("initial-exec")));

// ---- warp -----------------------------------------------------------------------------
uint64_t warp_collective(WarpOp op, uint32_t mask, uint64_t value, uint32_t argument);

// ---- block ----------------------------------------------------------------------------
// A GPU defines the block barrier only where all threads meet at one call: so it is checked here.
void sync_block(CallSite site = {});
bool sync_block_any(bool predicate, CallSite site = {});
void sync_named(int barrier, int num_threads);
void arrive_named(int barrier, int num_threads);

// ---- mbarrier and bulk copies ---------------------------------------------------------
void mbarrier_init(uint64_t* barrier, int num_arrivals);
void mbarrier_arrive(uint64_t* barrier, uint32_t expected_bytes);
bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity);
void bulk_load(void* smem_dst, const void* global_src, uint32_t num_bytes, uint64_t* barrier);
void bulk_store(void* global_dst, const void* smem_src, uint32_t num_bytes);
void bulk_commit();
void bulk_wait(int newest_groups, bool read_only);

// ---- rail (rail.hpp) ------------------------------------------------------------------
void rail_put(int peer, int qp, void* dst, const void* src, uint32_t num_bytes);
void rail_signal(int peer, int qp, uint64_t* word, uint64_t value);
void rail_done();  // of this block; a post behind it is an error

// ---- waiting, time --------------------------------------------------------------------
void wait_word(const void* word, unsigned num_bytes, uint64_t seen, const uint32_t* abort_word,
               uint64_t deadline_ns);
uint64_t clock_ns();
void sleep_ns(uint32_t duration_ns);
[[noreturn]] void trap(const char* why);

inline constexpr uint32_t kPollsPerYield = 128;

// Direct mode, every so many loads with an order: others of this thread may have to act before the
// value can change.
void poll_yield();

// ---- launches -------------------------------------------------------------------------
void await_earlier_launch();
void allow_later_launch();
// Simulated machine: an access that passes by its memory.
void simulated_touch(const void* address);

// ---- memory of the simulated machine (size: 1, 2, 4, 8 or 16) -------------------------
void simulated_load(void* value, const void* address, unsigned num_bytes);
void simulated_ordered_load(void* value, const void* address, unsigned num_bytes, bool acquires,
                            Scope scope);
void simulated_store(void* address, const void* value, unsigned num_bytes);
void simulated_relaxed_store(void* address, const void* value, unsigned num_bytes, Scope scope);
void simulated_release_store(void* address, const void* value, unsigned num_bytes, Scope scope);
void simulated_fence(Scope scope);
// Before and after an atomic that acts on `address` itself.
void simulated_atomic_begin(void* address, unsigned num_bytes, AtomicOrder order, Scope scope);
void simulated_atomic_end(void* address, unsigned num_bytes, AtomicOrder order, Scope scope);
// Bulk copies that this thread issues afterwards see its stores, to its block's shared memory, to
// global memory or to both.
void simulated_proxy_fence(bool of_shared, bool of_global);

}  // namespace deep_comm::simt
