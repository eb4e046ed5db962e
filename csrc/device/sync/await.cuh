// The one bounded wait. Nothing outside this folder polls a word that another thread writes.
#pragma once

#include "device/sync/mask.cuh"
#include "device/sync/trace.cuh"

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
                   context.own_name(), context.names.of(wait.peer), wait.channel, expected});
#else
  (void)context, (void)wait, (void)expected;
#endif
}

// When a wait began, when it fails, and when a parked thread wakes at the latest.
struct WaitClock {
  uint64_t start_ns = 0;  // 0: not started; the other fields have no value yet
  uint64_t deadline_ns;
  uint64_t wake_ns;
  uint64_t last_alive;  // only with can_shrink: the peer's alive word at the start or last renewal
  int num_renewals;
};

DC_DEVICE void note_gave_up(const Context& context, const WaitFor& wait) {
  note(context, TraceStep::kGaveUp,
       TraceWait::pack(wait.stage, wait.word, context.names.of(wait.peer)));
}

// ---- may_go_on and its parts --------------------------------------------------------------------
//
// AnyContext: Context, or a type derived from it with masks of its own: see own_rank and what follows
// it in mask.cuh.

// How long a wait may last before it fails or is renewed. A wait for this rank's own threads lasts
// longer: those threads may be about to mask several ranks, each after a deadline of its own.
template <class AnyContext>
DC_DEVICE uint64_t wait_limit_ns(const AnyContext& context, const WaitFor& wait,
                                 uint64_t patience) {
  const bool is_own = context.can_shrink && wait.peer == own_rank(context);
  const uint64_t more = is_own ? 2 * (1 + kMaxRenewals) : 1;
  return more * patience * context.patience * context.world.timeout_ns;
}

// The first call of a wait: starts its clock.
template <class AnyContext>
DC_DEVICE void start_clock(const AnyContext& context, const WaitFor& wait, uint64_t expected,
                           uint64_t now_ns, uint64_t limit_ns, bool can_do_without,
                           WaitClock* clock) {
  clock->start_ns = now_ns;
  clock->deadline_ns = now_ns + limit_ns;
  clock->num_renewals = 0;
  if (can_do_without) clock->last_alive = arch::ld_relaxed_sys(alive_word(context, wait.peer));
  note_wait(context, wait, expected);
}

// True if the wait must end because another thread of this rank has failed, or because the other
// ranks have masked this one. The latter is reported.
DC_DEVICE bool is_stopped(const Context& context, const WaitFor& wait, uint64_t now_ns,
                          const WaitClock& clock) {
  const World& world = context.world;
  // Other kernels see the abort word that comes with masked_out. A shrink barrier may not: its
  // reset has cleared that word.
  const bool is_left_out = context.kernel == Kernel::kShrinkBarrier && is_masked_out(world);
  if (!is_left_out && !is_aborted(world)) return false;
  arch::fence_acq_rel_sys();  // pairs with: mask_out — masked_out, if it is the reason
  if (is_left_out || is_masked_out(world)) {
    report_error(context, {ErrorKind::kMaskedOut, wait, 0, 0, now_ns - clock.start_ns, -1});
  }
  note_gave_up(context, wait);
  return true;
}

// Only with can_shrink: true if the wait must end because the peer is masked, or because this rank is.
// The latter is reported.
template <class AnyContext>
DC_DEVICE bool must_stop_for_mask(const AnyContext& context, const WaitFor& wait, uint64_t now_ns,
                                  const WaitClock& clock) {
  const Verdict verdict = verdict_on(context, wait.peer);
  if (verdict == Verdict::kOut) {
    report_error(context, {ErrorKind::kMaskedOut, wait, 0, 0, now_ns - clock.start_ns, -1});
    abort_rank(context);
  }
  return verdict != Verdict::kGoOn;
}

// Only with can_shrink, after the deadline: a peer whose alive word changed gets another deadline, at
// most kMaxRenewals times. False: the peer is masked.
template <class AnyContext>
DC_DEVICE bool renew_or_mask(const AnyContext& context, const WaitFor& wait, uint64_t now_ns,
                             uint64_t limit_ns, WaitClock* clock) {
  const uint64_t last_alive = arch::ld_relaxed_sys(alive_word(context, wait.peer));
  if (last_alive == clock->last_alive || clock->num_renewals == kMaxRenewals) {
    mask_rank(context, wait.peer);
    return false;
  }
  ++clock->num_renewals;
  clock->last_alive = last_alive;
  clock->deadline_ns = now_ns + limit_ns;
  return true;
}

// After the deadline: writes the error record and ends all waits of this rank.
DC_DEVICE void fail_wait(const Context& context, const WaitFor& wait, uint64_t seen,
                         uint64_t expected, uint64_t now_ns, const WaitClock& clock) {
  const ErrorKind kind =
      is_masked_out(context.world) ? ErrorKind::kMaskedOut : ErrorKind::kPeerTimeout;
  report_error(context, {kind, wait, seen, expected, now_ns - clock.start_ns, -1});
  abort_rank(context);
  note_gave_up(context, wait);
}

// What may_go_on does.
template <class AnyContext>
DC_DEVICE bool goes_on(const AnyContext& context, const WaitFor& wait, uint64_t seen,
                       uint64_t expected, uint64_t patience, WaitClock* clock) {
  const uint64_t now_ns = arch::globaltimer_ns();
  const bool can_do_without = context.can_shrink && wait.peer != own_rank(context);
  const uint64_t limit_ns = wait_limit_ns(context, wait, patience);
  if (clock->start_ns == 0) {
    start_clock(context, wait, expected, now_ns, limit_ns, can_do_without, clock);
  }
  if (can_do_without) say_alive(context, now_ns);
  if (is_stopped(context, wait, now_ns, *clock)) return false;
  if (can_do_without && must_stop_for_mask(context, wait, now_ns, *clock)) return false;
  if (now_ns >= clock->deadline_ns && can_do_without) {
    if (!renew_or_mask(context, wait, now_ns, limit_ns, clock)) return false;
  }
  if (now_ns >= clock->deadline_ns) {
    fail_wait(context, wait, seen, expected, now_ns, *clock);
    return false;
  }
  // No store wakes a parked thread when a peer is masked: with masks it wakes often by itself.
  clock->wake_ns = can_do_without
                       ? min_of(clock->deadline_ns, now_ns + context.world.timeout_ns / 16 + 1)
                       : clock->deadline_ns;
  return true;
}

// Called between two polls: true if the wait may continue. False if
//   - another thread of this rank has failed, or the other ranks have masked this one;
//   - only with can_shrink: the peer is masked, by this thread if its deadline has passed;
//   - the deadline has passed. This thread has then written the error record.
// All waits of a Context share this one function.
DC_DEVICE_COLD bool may_go_on(Context context, WaitFor wait, uint64_t seen, uint64_t expected,
                              uint64_t patience, WaitClock* clock) {
  return goes_on(context, wait, seen, expected, patience, clock);
}

// ---- waits --------------------------------------------------------------------------------------

// Polls until watch.look() is true. Returns false if the wait may not go on: see may_go_on. If the
// peer is masked, is_given_up(context, wait.peer) is true afterwards.
//   unblocked by: what the watch looks at, the rank's abort word, masks, the deadline
//   Watch: bool look(), uint64_t seen(), void rest(abort_word, deadline_ns)
//   AnyContext: Context, or a type with a may_go_on of its own
template <class AnyContext, class Watch>
DC_DEVICE bool await_watch(const AnyContext& context, Watch& watch, const WaitFor& wait,
                           uint64_t expected, uint64_t patience = 1) {
  constexpr int kPollsPerClock =
      DEEP_COMM_TARGET_CUDA ? 64 : 1;  // reading the clock costs more than a poll
  if (watch.look()) return true;
  WaitClock clock;
  while (true) {
    DC_NO_UNROLL
    for (int poll = 0; poll < kPollsPerClock; ++poll) {
      if (watch.look()) return true;
    }
    if (!may_go_on(context, wait, watch.seen(), expected, patience, &clock)) return false;
    watch.rest(&context.world.state()->abort, clock.wake_ns);
  }
}

template <Scope kScope, class T, class IsReady>
struct AcquireWatch {
  const T* word;
  IsReady is_ready;
  T value;

  DC_DEVICE bool look() {
    value = ld_acquire<kScope>(word);
    return is_ready(value);
  }
  DC_DEVICE uint64_t seen() const { return static_cast<uint64_t>(value); }
  DC_DEVICE void rest(const uint32_t* abort_word, uint64_t deadline_ns) const {
    arch::wait_hint(word, value, abort_word, deadline_ns);
  }
};

// Polls `word` with acquire order until is_ready(value). See await_watch.
template <Scope kScope, class AnyContext, class T, class IsReady>
DC_DEVICE bool await(const AnyContext& context, const T* word, const WaitFor& wait,
                     uint64_t expected, IsReady is_ready, T* value,
                     uint64_t patience = kScope == Scope::kCta ? 4 : 1) {
  // Four deadlines for words of this block: the warps that write them have waits of their own,
  // which began later and know the silent rank.
  AcquireWatch<kScope, T, IsReady> watch{word, is_ready, T{}};
  const bool ok = await_watch(context, watch, wait, expected, patience);
  *value = watch.value;
  return ok;
}

DC_DEVICE bool is_of_generation(const Tagged& tagged, uint32_t generation) {
  return tagged.generation == generation || arch::fault(Fault::kIgnoreGeneration);
}

// Waits until a Tagged word of this kernel's generation holds at least `wanted`.
DC_DEVICE bool await_tagged(const Context& context, const uint64_t* word, const WaitFor& wait,
                            uint32_t wanted, uint32_t* value, uint64_t patience = 1) {
  const uint32_t generation = context.generation;
  uint64_t raw = 0;
  const bool ok = await<Scope::kSys>(
      context, word, wait, Tagged::pack(generation, wanted),
      [=](uint64_t candidate) {
        const Tagged tagged = Tagged::unpack(candidate);
        return is_of_generation(tagged, generation) && tagged.value >= wanted;
      },
      &raw, patience);
  *value = Tagged::unpack(raw).value;
  return ok;
}

// A Tagged word that orders nothing but itself.
struct RelaxedTaggedWatch {
  const uint64_t* word;
  uint32_t generation;
  uint64_t value;

  DC_DEVICE bool look() {
    value = arch::ld_relaxed_sys(word);
    return is_of_generation(Tagged::unpack(value), generation);
  }
  DC_DEVICE uint64_t seen() const { return value; }
  DC_DEVICE void rest(const uint32_t* abort_word, uint64_t deadline_ns) const {
    arch::wait_hint(word, value, abort_word, deadline_ns);
  }
};

// Waits for a Tagged word of this kernel's generation and returns its value. Orders nothing else.
template <class AnyContext>
DC_DEVICE bool await_tagged_alone(const AnyContext& context, const uint64_t* word,
                                  const WaitFor& wait, uint32_t* value, uint64_t patience = 1) {
  RelaxedTaggedWatch watch{word, context.generation, 0};
  const bool ok = await_watch(context, watch, wait, Tagged::pack(context.generation, 0), patience);
  *value = Tagged::unpack(watch.value).value;
  return ok;
}

// Waits for a bulk load of this warp. It needs no deadline: the load ends by itself.
DC_DEVICE void await_bulk(arch::Mbarrier* barrier, uint32_t parity) {
  while (!arch::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

}  // namespace deep_comm
