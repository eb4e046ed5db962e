// The mbarrier object: eight bytes of shared memory.
//
//   bit 63      parity of the current phase
//   bits 40-62  bytes still to come
//   bits 20-39  arrivals of every phase
//   bits 0-19   arrivals still to come in this phase
#include "barrier.hpp"
#include "executor.hpp"
#include "ops.hpp"
#include "simulated_memory.hpp"

namespace deep_comm::simt {
namespace {

constexpr uint32_t kMaxArrivals = (1u << 20) - 1;
constexpr uint32_t kMaxBytes = (1 << 20) - 1;

// A try_wait returns after a while even if nothing has happened, as the hardware's does, so that
// the loop around it can look at its deadline.
constexpr uint64_t kTryWaitNs = 20'000;
constexpr uint32_t kMaxTryWaitDoublings = 12;

struct State {
  uint32_t pending;
  uint32_t arrivals;
  uint32_t bytes;
  uint32_t parity;
};

State unpack(uint64_t word) {
  return State{.pending = static_cast<uint32_t>(word) & kMaxArrivals,
               .arrivals = static_cast<uint32_t>(word >> 20) & kMaxArrivals,
               .bytes = static_cast<uint32_t>(word >> 40) & ((1u << 23) - 1),
               .parity = static_cast<uint32_t>(word >> 63)};
}

uint64_t pack(const State& state) {
  return state.pending | uint64_t{state.arrivals} << 20 | uint64_t{state.bytes} << 40 |
         uint64_t{state.parity} << 63;
}

bool is_initialised(uint64_t word) {
  constexpr uint64_t kPoison = 0x0101010101010101u * kSmemPoison;
  const State state = unpack(word);
  return word != kPoison && state.arrivals > 0 && state.pending <= state.arrivals;
}

bool complete_phase_if_done(State& state) {
  if (state.pending > 0 || state.bytes != 0) return false;
  state.pending = state.arrivals;
  state.parity ^= 1;
  return true;
}

void check_address(Fiber* self, const uint64_t* barrier) {
  if (!block_of(self)->owns(barrier) || reinterpret_cast<uintptr_t>(barrier) % 8 != 0) {
    t_state.executor->fail(self, "an mbarrier is 8 aligned bytes of the block's shared memory");
  }
}

}  // namespace

MbarrierState& mbarrier_state(Block* block, const uint64_t* barrier) {
  for (MbarrierState& state : block->mbarriers) {
    if (state.address == barrier) return state;
  }
  return block->mbarriers.emplace_back(MbarrierState{.address = barrier});
}

void complete_mbarrier_phase(Block* block, const uint64_t* barrier) {
  MbarrierState& state = mbarrier_state(block, barrier);
  ++state.num_phases;
  if (state.load_agent != 0) state.arrived.seen.set(state.load_agent, state.num_phases);
  state.completed = state.arrived;
}

bool mbarrier_phase_done(uint64_t barrier, uint32_t parity) {
  return unpack(barrier).parity != (parity & 1);
}

bool mbarrier_complete_bytes(uint64_t* barrier, uint32_t num_bytes, const char** error) {
  if (!is_initialised(*barrier)) *error = "the mbarrier was not initialised";
  State state = unpack(*barrier);
  state.bytes -= num_bytes;
  const bool done = complete_phase_if_done(state);
  *barrier = pack(state);
  return done;
}

void mbarrier_init(uint64_t* barrier, int num_arrivals) {
  Fiber* self = t_state.current;
  check_address(self, barrier);
  if (num_arrivals < 1 || static_cast<uint32_t>(num_arrivals) > kMaxArrivals) {
    t_state.executor->fail(self, "mbarrier_init with " + std::to_string(num_arrivals) +
                                     " arrivals: the rule is 1 to 1048575");
  }
  touch_shared(self, barrier, Races::Access::kWrite);
  const auto count = static_cast<uint32_t>(num_arrivals);
  *barrier = pack(State{.pending = count, .arrivals = count, .bytes = 0, .parity = 0});
}

void mbarrier_arrive(uint64_t* barrier, uint32_t expected_bytes) {
  Fiber* self = t_state.current;
  check_address(self, barrier);
  touch_shared(self, barrier, Races::Access::kStrongWrite);
  if (t_state.simulated) arrive_at_block(self, mbarrier_state(block_of(self), barrier).arrived);
  State state = unpack(*barrier);
  if (!is_initialised(*barrier)) {
    t_state.executor->fail(self, "arrives at an mbarrier that was not initialised");
  }
  if (state.pending == 0) {
    t_state.executor->fail(self, "arrives at an mbarrier more often than a phase has arrivals (" +
                                     std::to_string(state.arrivals) + ")");
  }
  state.bytes += expected_bytes;
  if (state.bytes > kMaxBytes) {
    t_state.executor->fail(self, "an mbarrier can wait for at most 1048575 bytes, asked for " +
                                     std::to_string(state.bytes));
  }
  --state.pending;
  const bool done = complete_phase_if_done(state);
  *barrier = pack(state);
  note_progress();
  if (done && t_state.simulated) complete_mbarrier_phase(block_of(self), barrier);
  if (done) t_state.executor->notify(barrier);
}

bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  Fiber* self = t_state.current;
  check_address(self, barrier);
  if (!is_initialised(*barrier)) {
    t_state.executor->fail(self, "waits for an mbarrier that was not initialised");
  }
  touch_shared(self, barrier, Races::Access::kStrongRead);
  if (!mbarrier_phase_done(*barrier, parity)) {
    // The same wait again and again: look less and less often, so that a jumping clock makes way.
    const bool again = self->word == barrier && self->seen == parity;
    self->spurious_wakes = again ? self->spurious_wakes + 1 : 0;
    const uint32_t doublings =
        self->spurious_wakes < kMaxTryWaitDoublings ? self->spurious_wakes : kMaxTryWaitDoublings;
    self->wait = Wait::kMbarrier;
    self->word = barrier;
    self->abort_word = nullptr;
    self->seen = parity;
    self->deadline_ns = clock_ns() + (t_state.simulated ? kTryWaitNs << doublings : kTryWaitNs);
    t_state.executor->park(self);
  }
  const bool done = mbarrier_phase_done(*barrier, parity);
  if (!done) return false;
  self->word = nullptr;
  if (t_state.simulated) leave_mbarrier(self, mbarrier_state(block_of(self), barrier).completed);
  return true;
}

}  // namespace deep_comm::simt
