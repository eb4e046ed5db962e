// The smallest protocol: rank 0 writes a payload into rank 1's memory and announces it with one
// word.
//
//   in     num_words
//   grid   one block on each of two ranks, any number of warps
//
//   word     owner   written by          read by             order                   reset
//   flag     rank 1  thread 0 of rank 0  thread 0 of rank 1  release / acquire, sys  never: one use
//   payload  rank 1  threads of rank 0   threads of rank 1   before the flag         never
//   wrong    rank 1  threads of rank 1   the host            end of the kernel       never
//
//   after  wrong: words of the payload that rank 1 did not see as they were written
//   waits  await_flag, unblocked by rank 0's release; bounded
//
// The barrier before the release hands the stores of the whole block to the thread that releases
// them. The barrier after the acquire hands what was acquired to the whole block. Without the
// release (fault: weaken_release) the payload may arrive after the flag. The example shows that the
// simulation finds such schedules.
#pragma once

#include "device/arch/arch.cuh"

namespace deep_comm::examples {

inline constexpr int kLineWords = 16;  // words per line: what does not share a line with others
inline constexpr uint64_t kPatienceNs = 10'000'000'000;

struct Args {
  uint64_t* memory;
  int rank;
  int num_words;  // of the payload, or of a row
  int num_rows;   // ring
  int num_slots;  // ring
};

DC_DEVICE uint64_t payload_word(int row, int word) {
  return static_cast<uint64_t>(row + 1) << 32 | static_cast<uint32_t>(word + 1);
}

// True if `word` reaches `wanted` in time. Real kernels use device/sync/await.cuh, which also polls
// the rank's abort word and records who waited for whom.
DC_DEVICE bool await_word(const uint64_t* word, uint64_t wanted) {
  const uint64_t deadline_ns = arch::globaltimer_ns() + kPatienceNs;
  while (true) {
    const uint64_t seen = arch::ld_acquire_sys(word);
    if (seen >= wanted) return true;
    if (arch::globaltimer_ns() >= deadline_ns) return false;
    arch::wait_hint(word, seen, static_cast<const uint32_t*>(nullptr), deadline_ns);
  }
}

DC_DEVICE void one_flag(const Args& args) {
  uint64_t* flag = args.memory;
  uint64_t* wrong = args.memory + kLineWords;
  uint64_t* payload = args.memory + 2 * kLineWords;
  if (args.rank == 0) {
    for (int word = arch::thread_idx(); word < args.num_words; word += arch::num_threads()) {
      arch::st_weak(payload + word, payload_word(0, word));
    }
    arch::sync_block();
    // pairs with: await_word of rank 1 — the payload.
    if (arch::thread_idx() == 0) arch::st_release_sys(flag, uint64_t{1});
    return;
  }
  if (arch::thread_idx() == 0 && !await_word(flag, 1)) {
    arch::atomic_add_relaxed_sys(wrong, static_cast<uint64_t>(args.num_words));
  }
  arch::sync_block();
  for (int word = arch::thread_idx(); word < args.num_words; word += arch::num_threads()) {
    if (arch::ld_weak(payload + word) != payload_word(0, word)) {
      arch::atomic_add_relaxed_sys(wrong, uint64_t{1});
    }
  }
}

}  // namespace deep_comm::examples
