// signal_word, await_word: words of symmetric memory, which only grow.
//
// grid   one warp, whose first lane works
// words  word    its owner's; signals of one rank add to it, and one stream of its owner awaits it
//        count   its owner's alone: signals that awaits have taken
// before signal: what this rank's stream has done before
// after  await: on this rank's stream, what the signalling streams had done before their signals
#pragma once

#include "device/sync/await.cuh"
#include "device/tp/args.cuh"

namespace deep_comm {

DC_DEVICE void signal_word(const WordArgs& args) {
  if (arch::thread_idx() != 0) return;
  // pairs with: the acquire of await_word — what earlier launches of this stream have written
  // order-proof: a simulated launch begins with such a release. PTX has none there.
  arch::atomic_add_acq_rel_sys(args.word, uint64_t{1});
}

//   unblocked by: signal_word of the peer, or one from Triton
DC_DEVICE void await_word(const WordArgs& args) {
  if (arch::thread_idx() != 0) return;
  const Context context{args.world, Kernel::kAwaitWord, 0};
  const uint64_t wanted = arch::ld_weak(args.count) + 1;
  uint64_t seen = 0;
  // order-proof: later launches read what was signalled, and a simulated launch sees all that has
  // reached memory. PTX asks for the acquire.
  const bool ok = await<Scope::kSys>(
      context, args.word, {Stage::kSignal, Word::kSignal, args.peer, -1}, wanted,
      [=](uint64_t value) { return value >= wanted; }, &seen);
  if (ok) arch::st_weak(args.count, wanted);
}

}  // namespace deep_comm
