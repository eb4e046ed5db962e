// Words that tell by themselves whether they have arrived. Zero means "not arrived". The sender
// never sends a zero. The one reader of a word zeroes it again. Credit for the memory is returned
// after that.
//
// So no flag follows the payload, and no store waits for another. On NVLink a release costs
// microseconds while stores are in flight.
//
// Relaxed order is enough: the reader uses nothing but the word that it has seen.
#pragma once

#include "device/sync/await.cuh"

namespace deep_comm {

DC_DEVICE bool has_arrived(uint32_t word) { return word != 0; }
DC_DEVICE bool has_arrived(const Vec16& vec) {
  // Word by word: a vector need not arrive at once.
  return vec.words[0] != 0 && vec.words[1] != 0 && vec.words[2] != 0 && vec.words[3] != 0;
}

template <class T>
struct ArrivalWatch {
  const T* address;
  T value;

  DC_DEVICE bool look() {
    value = arch::ld_relaxed_sys(address);
    return has_arrived(value) || arch::fault(Fault::kSkipArrival);
  }
  DC_DEVICE uint64_t seen() const { return 0; }
  DC_DEVICE void rest(const uint32_t* abort_word, uint64_t deadline_ns) const {
    const uint32_t* word = reinterpret_cast<const uint32_t*>(address);
    if constexpr (sizeof(T) == sizeof(Vec16)) {
      for (int idx = 0; idx < 3 && value.words[idx] != 0; ++idx) ++word;
    }
    arch::wait_hint(word, uint32_t{0}, abort_word, deadline_ns);
  }
};

// Waits for what arrives at `address`, reads it, and leaves zeros there. *value: an earlier look at
// the address, or zeros.
//   unblocked by: the peer's store of words that are not zero
template <class AnyContext, class T>
DC_DEVICE bool take_arrival(const AnyContext& context, T* address, const WaitFor& wait, T* value) {
  if (!has_arrived(*value)) {
    ArrivalWatch<T> watch{address, *value};
    if (!await_watch(context, watch, wait, 1)) return false;
    *value = watch.value;
  }
  if (!arch::fault(Fault::kSkipClear)) arch::st_weak(address, T{});
  return true;
}

// Several addresses at once. Their loads are in flight together, and one wait serves them all. The
// indices are constants of unrolled loops, which keeps the arrays in registers.
template <int kCount>
struct Arrivals {
  Vec16* from[kCount];
  Vec16 vecs[kCount];
  uint32_t wanted = 0;   // a bit each
  uint32_t missing = 0;  // those of them that have not been seen yet

  DC_DEVICE void want(uint32_t bits) { wanted = missing = bits; }
  DC_DEVICE void forget(int idx) {
    wanted &= ~(1u << idx);
    missing &= ~(1u << idx);
  }
  DC_DEVICE bool is_wanted(int idx) const { return (wanted >> idx & 1u) != 0; }
  // Loads what is missing. Using a value would wait for it, so that each address would cost a trip
  // to memory: settle follows when all loads have been issued.
  DC_DEVICE void look() {
    DC_UNROLL
    for (int idx = 0; idx < kCount; ++idx) {
      if ((missing >> idx & 1u) != 0) vecs[idx] = arch::ld_relaxed_sys(from[idx]);
    }
  }
  DC_DEVICE void settle() {
    DC_UNROLL
    for (int idx = 0; idx < kCount; ++idx) {
      const uint32_t bit = 1u << idx;
      if ((missing & bit) != 0 && (has_arrived(vecs[idx]) || arch::fault(Fault::kSkipArrival)))
        missing ^= bit;
    }
  }
  // Drops the first.
  DC_DEVICE void shift() {
    DC_UNROLL
    for (int idx = 1; idx < kCount; ++idx) {
      from[idx - 1] = from[idx];
      vecs[idx - 1] = vecs[idx];
    }
    wanted >>= 1;
    missing >>= 1;
  }
  // Leaves zeros where `idx` was read.
  DC_DEVICE void clear(int idx) const {
    if (!arch::fault(Fault::kSkipClear)) arch::st_weak(from[idx], Vec16{});
  }
};

// Waits for all of `arrivals`, which have been looked at once. wait_of(idx) names the peer. What a
// masked rank does not send is forgotten.
//   unblocked by: the peers' stores of words that are not zero
template <int kCount, class WaitOf>
DC_DEVICE bool await_arrivals(const Context& context, Arrivals<kCount>& arrivals, WaitOf wait_of) {
  constexpr int kPollsPerClock = DEEP_COMM_TARGET_CUDA ? 64 : 1;
  WaitClock clock;
  while (true) {
    DC_NO_UNROLL
    for (int poll = 0; poll < kPollsPerClock; ++poll) {
      arrivals.settle();
      if (arrivals.missing == 0) return true;
      arrivals.look();
    }
    const int missing = arch::ffs(arrivals.missing) - 1;
    WaitFor wait{};
    ArrivalWatch<Vec16> watch{};
    DC_UNROLL
    for (int idx = 0; idx < kCount; ++idx) {
      if (idx != missing) continue;
      wait = wait_of(idx);
      watch = {arrivals.from[idx], arrivals.vecs[idx]};
    }
    if (may_go_on(context, wait, 0, 1, 1, &clock)) {
      watch.rest(&context.world.state()->abort, clock.wake_ns);
      continue;
    }
    if (!is_given_up(context, wait.peer)) return false;
    arrivals.forget(missing);
    clock = {};
  }
}

}  // namespace deep_comm
