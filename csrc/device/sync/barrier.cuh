// The barrier over all ranks at the entry of a kernel. After it, no rank uses the rings and words
// of earlier kernels any more: those have ended, or await the end of what still uses them. It also
// checks that all ranks run the same operation.
#pragma once

#include "device/sync/await.cuh"

namespace deep_comm {

// What a rank is about to run, in 32 bits: 4 bits for the kernel, 28 bits of a hash over its
// arguments.
struct Operation {
  static Kernel kernel_of(uint64_t signature) {
    return static_cast<Kernel>(static_cast<uint32_t>(signature) >> 28);
  }

  // The signature of no kernel. A rank sends it when its peers on the rail run something else.
  static constexpr uint32_t kDisputed = 0;

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

// True if nobody waits for `peer`: it is absent.
DC_DEVICE bool is_skipped(const World& world, int peer) {
  return world.is_absent(peer) && !arch::fault(Fault::kAwaitAbsent);
}

// Tells every rank that this one has entered. Called by threads [0, num_ranks) of one block, after
// a barrier that orders what the block wrote for its peers.
DC_DEVICE void announce_arrival(const Context& context, uint32_t signature) {
  const World& world = context.world;
  const int peer = arch::thread_idx();
  if (!world.takes_part(peer)) return;
  // pairs with: await_all_entered at every peer — everything this rank wrote before, counts included
  arch::st_release_sys(world.arrived(peer, world.rank),
                       Tagged::pack(context.generation, signature));
}

// The same with further words. Each carries the generation itself, so the words need no order among
// each other, and no release waits for them to arrive.
template <int kNumWords>
DC_DEVICE void announce_arrival(const Context& context, uint32_t signature,
                                uint64_t* const (&words)[kNumWords],
                                const uint32_t (&values)[kNumWords]) {
  // With the stores below, a release; pairs with: the acquire of EntryWatch at every peer — this
  // rank no longer uses what earlier kernels use
  // order-proof: a simulated launch begins with such a release. PTX has none there.
  arch::fence_acq_rel_sys();
  DC_UNROLL
  for (int idx = 0; idx < kNumWords; ++idx) {
    arch::st_relaxed_sys(words[idx], Tagged::pack(context.generation, values[idx]));
  }
  arch::st_relaxed_sys(context.world.arrived(arch::thread_idx(), context.world.rank),
                       Tagged::pack(context.generation, signature));
}

// A peer's arrival and the words announced with it: complete when all are of this generation, or
// when the peer has entered another operation, which announces other words.
template <int kNumWords>
struct EntryWatch {
  const uint64_t* arrived;
  const uint64_t* words[kNumWords];
  uint32_t generation;
  uint32_t signature;
  uint64_t arrival;
  uint64_t seen_words[kNumWords];

  DC_DEVICE bool look() {
    DC_UNROLL
    for (int idx = 0; idx < kNumWords; ++idx) seen_words[idx] = arch::ld_relaxed_sys(words[idx]);
    arrival = arch::ld_acquire_sys(arrived);
    const Tagged seen = Tagged::unpack(arrival);
    if (!seen.has_reached(generation)) return false;
    return first_missing() == kNumWords ||
           (seen.generation == generation && seen.value != signature);
  }
  DC_DEVICE uint32_t value(int idx) const { return Tagged::unpack(seen_words[idx]).value; }
  DC_DEVICE uint64_t seen() const { return arrival; }
  DC_DEVICE void rest(const uint32_t* abort_word, uint64_t deadline_ns) const {
    if (!Tagged::unpack(arrival).has_reached(generation)) {
      arch::wait_hint(arrived, arrival, abort_word, deadline_ns);
    } else {
      const int idx = min_of(first_missing(), kNumWords - 1);
      arch::wait_hint(words[idx], seen_words[idx], abort_word, deadline_ns);
    }
  }

 private:
  DC_DEVICE int first_missing() const {
    int missing = kNumWords;
    DC_UNROLL
    for (int idx = kNumWords - 1; idx >= 0; --idx) {
      if (Tagged::unpack(seen_words[idx]).generation != generation) missing = idx;
    }
    return missing;
  }
};

// A peer that is one kernel further has passed this check itself.
DC_DEVICE bool agrees_on_operation(const Context& context, Stage stage, int peer, uint64_t arrived,
                                   uint32_t signature) {
  const Tagged seen = Tagged::unpack(arrived);
  if (seen.generation != context.generation || seen.value == signature) return true;
  report_error(context, {ErrorKind::kConfigMismatch,
                         {stage, Word::kOperation, peer, -1},
                         seen.value,
                         signature,
                         0,
                         -1});
  abort_rank(context);
  return false;
}

// Lane p of a warp: waits until rank p has entered this generation and all of its words are there.
// Does not wait for an absent rank, whose words are zeros.
template <int kNumWords>
DC_DEVICE bool await_entry(const Context& context, EntryWatch<kNumWords>& watch, Stage stage,
                           int peer) {
  if (arch::fault(Fault::kSkipEntryBarrier)) {
    watch.look();
    return true;
  }
  if (is_skipped(context.world, peer)) return true;
  const WaitFor wait{stage, Word::kArrived, peer, -1};
  const bool is_out = is_masked_out(context.world);  // loaded together with the peer's words
  const uint64_t expected = Tagged::pack(context.generation, watch.signature);
  if (!await_watch(context, watch, wait, expected)) return false;
  if (is_out) {
    report_masked_out(context, wait, 0);
    return false;
  }
  return agrees_on_operation(context, stage, peer, watch.arrival, watch.signature);
}

// Waits until every rank that is not absent has entered this generation. The whole warp calls it.
// The result is uniform.
DC_DEVICE bool await_all_entered(const Context& context, Stage stage, uint32_t signature) {
  const World& world = context.world;
  const int peer = arch::lane_idx();
  bool ok = true;
  if (peer < world.num_ranks && !is_skipped(world, peer) &&
      !arch::fault(Fault::kSkipEntryBarrier)) {
    const uint64_t expected = Tagged::pack(context.generation, signature);
    const WaitFor wait{stage, Word::kArrived, peer, -1};
    const bool is_out = is_masked_out(world);
    uint64_t raw = 0;
    ok = await<Scope::kSys>(
        context, world.arrived(world.rank, peer), wait, expected,
        [&](uint64_t word) { return Tagged::unpack(word).has_reached(context.generation); }, &raw);
    if (ok && is_out) {
      report_masked_out(context, wait, 0);
      ok = false;
    }
    ok = ok && agrees_on_operation(context, stage, peer, raw, signature);
  }
  // The barrier hands each lane's acquire to the whole warp.
  arch::sync_warp();
  return arch::all(kFullMask, ok);
}

}  // namespace deep_comm
