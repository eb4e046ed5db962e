// Words that say of themselves whether they have come: zero means "not yet". The sender never sends
// a zero, the one reader of a word puts the zero back, and the credit for the memory comes after
// that. So no flag follows the payload and no store waits for another: on NVLink a release behind
// stores in flight costs microseconds.
//
// Relaxed is enough: a word that is seen is all that is read on account of it.
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

// Takes what comes to `address`: waits for it and leaves zeros there. *value: an earlier look at
// it, or zeros.
//   unblocked by: the peer's store of words that are not zero
template <class T>
DC_DEVICE bool take_arrival(const Context& context, T* address, const WaitFor& wait, T* value) {
  if (!has_arrived(*value)) {
    ArrivalWatch<T> watch{address, *value};
    if (!await_watch(context, watch, wait, 1)) return false;
    *value = watch.value;
  }
  if (!arch::fault(Fault::kSkipClear)) arch::st_weak(address, T{});
  return true;
}

}  // namespace deep_comm
