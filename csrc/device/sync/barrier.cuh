// The barrier over all ranks at the entry of a kernel: after it, every rank has finished its
// earlier kernels, so that their rings and words are free. It also compares what the ranks think
// they are doing.
#pragma once

#include "device/sync/await.cuh"

namespace deep_comm {

// What a rank is about to run, in 32 bits: 4 bits of kernel, 28 bits of a hash over its arguments.
struct Operation {
  DC_HOST_DEVICE static uint32_t signature(Kernel kernel, const int* values, int num_values) {
    uint32_t hash = 2166136261u;  // FNV-1a over the values' bytes
    for (int value_idx = 0; value_idx < num_values; ++value_idx) {
      for (int byte = 0; byte < 4; ++byte) {
        hash =
            (hash ^ (static_cast<uint32_t>(values[value_idx]) >> (8 * byte) & 0xffu)) * 16777619u;
      }
    }
    return static_cast<uint32_t>(kernel) << 28 | (hash & 0x0fffffffu);
  }
};

// Tells every rank that this one has entered. Threads [0, num_ranks) of one block call it, after a
// barrier that orders whatever the block wrote for its peers before.
DC_DEVICE void announce_arrival(const Context& context, uint32_t signature) {
  const World& world = context.world;
  const int peer = arch::thread_idx();
  if (peer >= world.num_ranks) return;
  // pairs with: await_arrivals at every peer — everything this rank wrote before, counts included.
  arch::st_release_sys(world.arrived(peer, world.rank),
                       Tagged::pack(context.generation, signature));
}

// Waits until every rank has entered this generation. A whole warp calls it; the result is uniform.
DC_DEVICE bool await_arrivals(const Context& context, Stage stage, uint32_t signature) {
  const World& world = context.world;
  const int peer = arch::lane_idx();
  bool ok = true;
  if (peer < world.num_ranks && !arch::fault(Fault::kSkipEntryBarrier)) {
    const uint64_t expected = Tagged::pack(context.generation, signature);
    uint64_t raw = 0;
    ok = await<Scope::kSys>(
        context, world.arrived(world.rank, peer), {stage, Word::kArrived, peer, -1}, expected,
        [&](uint64_t word) { return Tagged::unpack(word).has_reached(context.generation); }, &raw);
    // A peer that is already one kernel further has passed this comparison itself.
    const Tagged seen = Tagged::unpack(raw);
    if (ok && seen.generation == context.generation && seen.value != signature) {
      report_error(context, {ErrorKind::kConfigMismatch,
                             {stage, Word::kOperation, peer, -1},
                             seen.value,
                             signature,
                             0,
                             -1});
      abort_rank(context);
      ok = false;
    }
  }
  // The barrier hands each lane's acquire to the whole warp.
  arch::sync_warp();
  return arch::all(kFullMask, ok);
}

}  // namespace deep_comm
