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

// Several addresses at once. Their loads are in flight together, and one wait serves them all.
template <int kCount>
struct Arrivals {
  Vec16* from[kCount];  // null: none, or not awaited any more
  Vec16 vecs[kCount];

  DC_DEVICE void look() {
    DC_UNROLL
    for (int idx = 0; idx < kCount; ++idx) {
      if (from[idx] != nullptr) vecs[idx] = arch::ld_relaxed_sys(from[idx]);
    }
  }
  DC_DEVICE bool is_missing(int idx) const {
    return from[idx] != nullptr && !has_arrived(vecs[idx]) && !arch::fault(Fault::kSkipArrival);
  }
  // Loads again what is missing. All loads are issued before the first value is used: using a value
  // waits for it, and then each address would cost a trip to memory.
  DC_DEVICE void look_at_missing() {
    bool is_wanted[kCount];
    DC_UNROLL
    for (int idx = 0; idx < kCount; ++idx) is_wanted[idx] = is_missing(idx);
    DC_UNROLL
    for (int idx = 0; idx < kCount; ++idx) {
      if (is_wanted[idx]) vecs[idx] = arch::ld_relaxed_sys(from[idx]);
    }
  }
  // As look_at_missing. Returns an index that is still missing (the last one), or -1.
  DC_DEVICE int look_again() {
    look_at_missing();
    int missing = -1;
    DC_UNROLL
    for (int idx = 0; idx < kCount; ++idx) {
      if (is_missing(idx)) missing = idx;
    }
    return missing;
  }
  // Leaves zeros where `idx` was read.
  DC_DEVICE void clear(int idx) const {
    if (!arch::fault(Fault::kSkipClear)) arch::st_weak(from[idx], Vec16{});
  }
};

// Waits for all of `arrivals`, which have been looked at once. wait_of(idx) names the peer. An
// entry of a masked rank becomes null. The indices are constants of unrolled loops, which keeps the
// arrays in registers.
//   unblocked by: the peers' stores of words that are not zero
template <int kCount, class WaitOf>
DC_DEVICE bool await_arrivals(const Context& context, Arrivals<kCount>& arrivals, WaitOf wait_of) {
  constexpr int kPollsPerClock = DEEP_COMM_TARGET_CUDA ? 64 : 1;
  bool is_complete = true;
  DC_UNROLL
  for (int idx = 0; idx < kCount; ++idx) is_complete = is_complete && !arrivals.is_missing(idx);
  if (is_complete) return true;
  WaitClock clock;
  while (true) {
    int missing = -1;
    DC_NO_UNROLL
    for (int poll = 0; poll < kPollsPerClock; ++poll) {
      missing = arrivals.look_again();
      if (missing < 0) return true;
    }
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
    DC_UNROLL
    for (int idx = 0; idx < kCount; ++idx) {
      if (idx == missing) arrivals.from[idx] = nullptr;
    }
    clock = {};
  }
}

}  // namespace deep_comm
