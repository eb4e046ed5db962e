// The one bounded wait. Nothing outside this folder spins on a word that another thread writes.
#pragma once

#include "device/sync/context.cuh"

namespace deep_comm {

enum class Scope { kCta, kSys };

template <Scope kScope, class T>
DC_DEVICE T ld_acquire(const T* word) {
  if constexpr (kScope == Scope::kCta) {
    return arch::ld_acquire_cta(word);
  } else {
    return arch::ld_acquire_sys(word);
  }
}

DC_DEVICE void note_wait(const Context& context, const WaitFor& wait, uint64_t expected) {
#if !DEEP_COMM_TARGET_CUDA
  arch::wait_note({name_of(context.kernel), name_of(wait.stage), name_of(wait.word),
                   context.world.rank, wait.peer, wait.channel, expected});
#else
  (void)context, (void)wait, (void)expected;
#endif
}

// Polls `word` with acquire until is_ready(value). Returns false when the deadline passed (then this thread
// has written the error record) or when another thread of this rank has given up.
//   unblocked by: the store that is_ready accepts, the rank's abort word, the deadline.
template <Scope kScope, class T, class IsReady>
DC_DEVICE bool await(const Context& context, const T* word, const WaitFor& wait, uint64_t expected,
                     IsReady is_ready, T* value) {
  constexpr int kPollsPerClock =
      DEEP_COMM_TARGET_CUDA ? 64 : 1;  // reading the clock costs more than a poll
  *value = ld_acquire<kScope>(word);
  if (is_ready(*value)) return true;
  const World& world = context.world;
  const uint64_t start_ns = arch::globaltimer_ns();
  // Warps of this block are bounded by their own waits, which began later and know the silent rank's name.
  constexpr uint64_t kPatience = kScope == Scope::kCta ? 4 : 1;
  const uint64_t deadline_ns = start_ns + kPatience * world.timeout_ns;
  note_wait(context, wait, expected);
  while (true) {
    for (int poll = 0; poll < kPollsPerClock; ++poll) {
      *value = ld_acquire<kScope>(word);
      if (is_ready(*value)) return true;
    }
    if (is_aborted(world)) return false;
    const uint64_t now_ns = arch::globaltimer_ns();
    if (now_ns >= deadline_ns) {
      report_error(context, {ErrorKind::kPeerTimeout, wait, static_cast<uint64_t>(*value), expected,
                             now_ns - start_ns, -1});
      abort_rank(context);
      return false;
    }
    arch::wait_hint(word, *value, &world.state()->abort, deadline_ns);
  }
}

// Waits until a Tagged word of this kernel's generation holds at least `wanted`.
DC_DEVICE bool await_tagged(const Context& context, const uint64_t* word, const WaitFor& wait,
                            uint32_t wanted, uint32_t* value) {
  const uint32_t generation = context.generation;
  uint64_t raw = 0;
  const bool ok = await<Scope::kSys>(
      context, word, wait, Tagged::pack(generation, wanted),
      [=](uint64_t candidate) {
        const Tagged tagged = Tagged::unpack(candidate);
        return tagged.generation == generation && tagged.value >= wanted;
      },
      &raw);
  *value = Tagged::unpack(raw).value;
  return ok;
}

// Waits for a bulk load of this warp's own: it ends by itself, so no deadline is needed.
DC_DEVICE void await_bulk(arch::Mbarrier* barrier, uint32_t parity) {
  while (!arch::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

}  // namespace deep_comm
