// begin_matmul, push, await_push, add_slots, end_matmul: what surrounds matrix products whose rows come
// from peers or go to them. The products are libraries' or Triton's.
//
// grid   begin, await, end: one warp. push: one block. add_slots: the warps of all blocks deal out
//        parts of 128 vectors
// words  arrived    operation entered, as at the entry of every kernel
//        word       the peer's, of symmetric memory: the sequence of the last push to it
//        sequence   of this rank: products begun. A push copies it, so that a CUDA graph can be
//                   replayed
//        fault      of this rank: see MatmulArgs
// before begin: nothing. After it all ranks have ended their earlier operations, and what peers push
//        to is free
// after  await_push, add_slots: what the peers have pushed is there
//
// On CUDA devices copy engines push: a product may hold every SM until the rows are there. A copy of the
// word begins when the copy of the rows has ended, which the order of a stream says.
#pragma once

#include "device/move/parts.cuh"
#include "device/sync/barrier.cuh"
#include "device/sync/generation.cuh"
#include "device/tp/args.cuh"

namespace deep_comm {

DC_DEVICE void begin_matmul(const MatmulArgs& args) {
  const Context context{args.world, Kernel::kMatmul, current_generation(args.world)};
  note_in_block(context, TraceStep::kBegun);
  announce_arrival(context, args.signature);
  const bool ok = await_all_entered(context, Stage::kEntryBarrier, args.signature);
  if (ok) note_in_warp(context, TraceStep::kEntered);
  if (arch::lane_idx() == 0) {
    arch::st_weak(args.sequence, arch::ld_weak(args.sequence) + 1);
    arch::st_weak(args.fault, ok ? int64_t{0} : kMustNotWait);
  }
  // Every lane has read the generation.
  // order-proof: orders loads of a word, which the simulation does not report if they could be late
  arch::sync_warp();
  close_generation(context);
}

// Lane p of a warp, or one thread: waits until rank p's push to `word` is the one of this product.
//   unblocked by: push of that rank
DC_DEVICE bool await_pushed(const Context& context, const uint64_t* word, const uint64_t* sequence,
                            int peer) {
  const uint64_t wanted = arch::ld_weak(sequence);
  uint64_t seen = 0;
  return await<Scope::kSys>(
      context, word, {Stage::kStaged, Word::kStaged, peer, -1}, wanted,
      [=](uint64_t value) { return value >= wanted; }, &seen);
}

DC_DEVICE void await_push(const MatmulArgs& args) {
  if (arch::thread_idx() != 0) return;
  // order-proof: later launches read what was pushed, and a simulated launch sees all that has
  // reached memory. PTX asks for the acquire.
  await_pushed({args.world, Kernel::kMatmul, 0}, args.word, args.sequence, args.peer);
}

DC_DEVICE void push(const PushArgs& args) {
  if (is_aborted(args.world)) return;
  const Team team{arch::warp_idx(), arch::num_threads() / kWarpSize};
  copy_range(
      team, {0, ceil_div<int64_t>(args.num_bytes, sizeof(Vec16))},
      [&](int64_t v) { return load_input(args.src, args.num_bytes, v); },
      [&](int64_t v, const Vec16& vec) { store_output(args.dst, args.num_bytes, v, vec); });
  arch::sync_block();
  // pairs with: await_pushed at the peer — the rows
  if (arch::thread_idx() == 0) arch::st_release_sys(args.word, arch::ld_weak(args.sequence));
}

template <Dtype kDtype>
DC_DEVICE void add_slots(const AddSlotsArgs& args) {
  const World& world = args.world;
  const Context context{world, Kernel::kAddSlots, 0};
  const int peer = arch::lane_idx();
  bool ok = true;
  if (peer < world.num_ranks && peer != world.rank) {
    ok = await_pushed(context, args.words + peer * args.words_per_rank, args.sequence, peer);
  }
  // The barrier hands each lane's acquire to the whole warp.
  arch::sync_warp();
  if (!arch::all(kFullMask, ok)) return;
  const Vec16* slots = reinterpret_cast<const Vec16*>(args.slots);
  const int num_warps = arch::num_threads() / kWarpSize;
  const Team team{arch::block_idx() * num_warps + arch::warp_idx(), arch::num_blocks() * num_warps};
  add_range<kDtype>(
      team, {0, ceil_div<int64_t>(args.num_bytes, sizeof(Vec16))}, world.num_ranks,
      [&](int rank, int64_t v) { return arch::ld_weak(slots + rank * args.slot_vecs + v); },
      [&](int64_t v, const Vec16& sum) { store_output(args.out, args.num_bytes, v, sum); });
}

// After a product that waits by itself: records a timeout, which names the rank.
DC_DEVICE void end_matmul(const MatmulArgs& args) {
  if (arch::thread_idx() != 0) return;
  const int64_t fault = arch::ld_weak(args.fault);
  if (fault <= 0) return;
  const Context context{args.world, Kernel::kMatmul, 0};
  const WaitFor wait{Stage::kStaged, Word::kStaged, static_cast<int>(fault) - 1, -1};
  report_error(context, {ErrorKind::kPeerTimeout, wait, 0, 0, args.world.timeout_ns, -1});
  abort_rank(context);
}

}  // namespace deep_comm
