// The warp that tells the peers how far a block's moving warps have come.
//
// A release at system scope waits for the writes that other warps of the SM have in flight: 3 to 10
// µs on H200 with bulk stores. So the movers only report to their block, at block scope. One warp
// turns all reports into one fence and one relaxed store per peer, again and again, off the movers'
// path.
#pragma once

#include "device/sync/await.cuh"

namespace deep_comm {

// Reports of a block's moving warps, in shared memory: a number of rows each, as Published takes it.
struct Progress {
  static constexpr uint32_t kFinished = 1u << 31;
  static constexpr int kMaxWords = 32;

  uint32_t bell;  // counts reports
  uint32_t words[kMaxWords];

  // The whole block, before a barrier.
  DC_DEVICE void reset() {
    if (arch::thread_idx() < kMaxWords) words[arch::thread_idx()] = 0;
    if (arch::thread_idx() == 0) bell = 0;
  }
  // One lane: the first `num_rows` rows have landed, or have been read, as far as they are its warp's.
  DC_DEVICE void report(int word, uint32_t num_rows) {
    // pairs with: publish_progress, which may read the word before the bell rings — the rows
    arch::st_release_cta(&words[word], num_rows);
    // pairs with: publish_progress — the word
    arch::atomic_add_acq_rel_cta(&bell, 1u);
  }
  // The last report, also of a warp that fails.
  DC_DEVICE void finish(int word, uint32_t num_rows) { report(word, num_rows | kFinished); }
};

// The whole warp: waits until a report rings the bell, which was read as `rung` before. False: the
// wait has failed.
DC_DEVICE bool await_bell(const Context& context, const uint32_t* bell, uint32_t rung) {
  bool ok = true;
  if (arch::lane_idx() == 0) {
    uint32_t seen = 0;
    ok = await<Scope::kCta>(
        context, bell, {Stage::kRetire, Word::kProgress, context.world.rank, -1}, rung + 1,
        [=](uint32_t value) { return value != rung; }, &seen);
  }
  return arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
}

// What one lane of the publishing warp turns into a Tagged word at a peer: the least of `num_words`
// reports, which is how far all of these warps have come. Default: nothing.
struct Published {
  uint64_t* target = nullptr;
  int first_word = 0;
  int num_words = 0;
};

// One warp; every lane has a word of its own to publish. Returns when all reports are finished.
DC_DEVICE void publish_progress(const Context& context, Progress& progress,
                                const Published& published) {
  uint32_t num_published = 0;
  while (true) {
    // Reads the bell before any lane reads its words: a later report rings again.
    const uint32_t rung = arch::ld_acquire_cta(&progress.bell);
    arch::sync_warp();
    bool is_finished = true;
    uint32_t num_rows = published.num_words == 0 ? 0 : Progress::kFinished - 1;
    for (int idx = 0; idx < published.num_words; ++idx) {
      // Relaxed: with the fence below an acquire.
      const uint32_t word = arch::ld_relaxed_cta(&progress.words[published.first_word + idx]);
      is_finished = is_finished && (word & Progress::kFinished) != 0;
      num_rows = min_of(num_rows, word & ~Progress::kFinished);
    }
    const bool is_new = num_rows != num_published;
    if (arch::any(kFullMask, is_new)) {
      // With the store below, a release; pairs with: RingReceiver::await_filled and ::poll_filled
      // (tails: slots of rows [0, num_rows) are filled), RingSender::await_slot and ::poll_slot
      // (heads: they have been read), await_part (parts of collectives have been pushed)
      arch::fence_acq_rel_sys();
      if (is_new)
        arch::st_relaxed_sys(published.target, Tagged::pack(context.generation, num_rows));
      num_published = num_rows;
    }
    if (arch::all(kFullMask, is_finished)) return;
    if (!await_bell(context, &progress.bell, rung)) return;
  }
}

}  // namespace deep_comm
