// Accesses to shared memory that something orders, or nothing. params[0] says what.
#include "test_kernel.hpp"

namespace deep_comm::test {
namespace {

using namespace deep_comm::arch;

// What the block shares; bulk copies take `stage`.
struct Shared {
  alignas(16) uint64_t stage[8];
  uint64_t value;
  uint64_t word;
  Mbarrier barrier;
  uint8_t bytes[32];
};
Shared* shared() { return reinterpret_cast<Shared*>(dynamic_smem()); }

void wait_parity(Mbarrier* barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

enum class HandOver : int64_t {
  kNothing,
  kSyncBlock,
  kNamedBarrier,
  kArriveAndSync,
  kMbarrier,
  kMbarrierPhaseLate,  // the giver has arrived at the phase after the one that is waited for
  kWord,
  kWordOfGlobalMemory,
  kWordAndFences,
  kAtomics,
  kRelaxedWord,
  kRelaxedRead,
};

// The giver's side, or the taker's.
void hand_over(const Args& args, HandOver how, bool gives) {
  uint64_t* word = how == HandOver::kWordOfGlobalMemory ? args.memory : &shared()->word;
  const bool stores = gives && lane_idx() == 0;
  const auto seen = [word](auto load) {
    while (load(word) == 0) wait_hint<uint64_t>(word, 0, nullptr, ~uint64_t{0});
  };
  const auto relaxed = [](uint64_t* from) { return ld_relaxed_sys(from); };
  const auto acquire = [](uint64_t* from) { return ld_acquire_gpu(from); };
  switch (how) {
    case HandOver::kNothing:
      break;
    case HandOver::kSyncBlock:
      sync_block_apart();
      break;
    case HandOver::kNamedBarrier:
      sync_named(1, 64);
      break;
    case HandOver::kArriveAndSync:
      gives ? arrive_named(1, 64) : sync_named(1, 64);
      break;
    case HandOver::kMbarrier:
    case HandOver::kMbarrierPhaseLate:
      if (stores) mbarrier_arrive(&shared()->barrier);
      if (!gives) wait_parity(&shared()->barrier, 0);
      break;
    case HandOver::kWord:
    case HandOver::kWordOfGlobalMemory:
      if (stores) st_release_gpu(word, uint64_t{1});
      if (!gives) seen(acquire);
      break;
    case HandOver::kRelaxedRead:
      if (stores) st_release_gpu(word, uint64_t{1});
      if (!gives) seen(relaxed);
      break;
    case HandOver::kRelaxedWord:
      if (stores) st_relaxed_sys(word, uint64_t{1});
      if (!gives) seen(acquire);
      break;
    case HandOver::kWordAndFences:
      if (!gives) seen(relaxed);
      fence_acq_rel_cta();
      if (stores) st_relaxed_sys(word, uint64_t{1});
      break;
    case HandOver::kAtomics:
      if (stores) atomic_add_acq_rel_cta(word, uint64_t{1});
      while (!gives && atomic_add_acq_rel_cta(word, uint64_t{0}) == 0) nanosleep(100);
      break;
  }
}

// Warp 0 gives, warp 1 takes. params[1]: the taker writes what the giver has read.
void race_of_warps(const Args& args) {
  const auto how = static_cast<HandOver>(args.params[0]);
  const bool reads_first = args.params[1] != 0;
  if (thread_idx() == 0) {
    shared()->word = 0;
    mbarrier_init(&shared()->barrier, how == HandOver::kMbarrierPhaseLate ? 2 : 1);
  }
  sync_block();
  if (how == HandOver::kMbarrierPhaseLate && thread_idx() < 2) mbarrier_arrive(&shared()->barrier);
  sync_block();
  if (warp_idx() == 0) {
    if (lane_idx() == 0) {
      if (reads_first) {
        args.memory[8] = shared()->value;
      } else {
        shared()->value = 7;
      }
    }
    hand_over(args, how, true);
  } else {
    hand_over(args, how, false);
    if (lane_idx() == 5) {
      if (reads_first) {
        shared()->value = 7;
      } else {
        args.memory[8] = shared()->value;
      }
    }
  }
}

enum class Meet : int64_t { kNothing, kSyncWarp, kSyncSome, kSyncOthers, kShuffle, kVote };

// Lane 0 writes, lane 3 reads.
void race_of_lanes(const Args& args) {
  if (lane_idx() == 0) shared()->value = 7;
  switch (static_cast<Meet>(args.params[0])) {
    case Meet::kNothing:
      break;
    case Meet::kSyncWarp:
      sync_warp();
      break;
    case Meet::kSyncSome:
      if (lane_idx() < 4) sync_warp(0xf);
      break;
    case Meet::kSyncOthers:
      if (lane_idx() < 2) sync_warp(0x3);
      break;
    case Meet::kShuffle:
      shfl(kFullMask, 1u, 0);
      break;
    case Meet::kVote:
      any(kFullMask, true);
      break;
  }
  if (lane_idx() == 3) args.memory[8] = shared()->value;
}

// Neighbouring bytes are apart. params[0]: all lanes write the same one.
void race_of_bytes(const Args& args) { shared()->bytes[args.params[0] ? 0 : lane_idx()] = 7; }

enum class ProxyFence : int64_t { kNothing, kWriter, kIssuer, kGlobalOnly, kBeforeWrite };

// Lane 3 writes the stage, lane 0 stores it by a bulk copy.
void race_of_bulk_store(const Args& args) {
  const auto how = static_cast<ProxyFence>(args.params[0]);
  if (lane_idx() == 3) {
    if (how == ProxyFence::kBeforeWrite) fence_proxy_async_shared();
    shared()->stage[1] = 7;
    if (how == ProxyFence::kWriter) fence_proxy_async_shared();
    if (how == ProxyFence::kGlobalOnly) fence_proxy_async_global();
  }
  sync_warp();
  if (lane_idx() == 0) {
    if (how == ProxyFence::kIssuer) fence_proxy_async_shared();
    bulk_store(args.memory + 8, shared()->stage, 64);
    bulk_commit();
    bulk_wait<0>();
  }
}

enum class Reuse : int64_t { kNothing, kWaitRead, kWaitReadOfOlder, kWaitOnly };

// Lane 3 writes the stage again that lane 0 has stored.
void race_of_reuse(const Args& args) {
  const auto how = static_cast<Reuse>(args.params[0]);
  if (lane_idx() == 0) {
    bulk_store(args.memory + 8, shared()->stage, 64);
    bulk_commit();
    if (how == Reuse::kWaitRead || how == Reuse::kWaitOnly) bulk_wait_read<0>();
    if (how == Reuse::kWaitReadOfOlder) bulk_wait_read<1>();
  }
  if (how != Reuse::kWaitOnly) sync_warp();
  if (lane_idx() == 3) shared()->stage[0] = 7;
  sync_warp();
  if (lane_idx() == 0) bulk_wait<0>();
}

enum class Landing : int64_t { kWait, kNothing, kOtherWaits, kOtherWaitsAndMeets };

// Lane 0 loads by a bulk copy, lane 3 reads.
void race_of_bulk_load(const Args& args) {
  const auto how = static_cast<Landing>(args.params[0]);
  if (lane_idx() == 0) mbarrier_init(&shared()->barrier, 1);
  sync_warp();
  if (lane_idx() == 0) {
    bulk_load(shared()->stage, args.memory + 8, 64, &shared()->barrier);
    if (how != Landing::kWait) wait_parity(&shared()->barrier, 0);
  }
  if (how == Landing::kWait && lane_idx() == 3) wait_parity(&shared()->barrier, 0);
  if (how == Landing::kOtherWaitsAndMeets) sync_warp();
  if (lane_idx() == 3) args.memory[0] = shared()->stage[2];
  sync_warp();
  if (lane_idx() == 0) wait_parity(&shared()->barrier, 0);
}

// Lane 3 has read the stage that lane 0 loads anew. params[0]: proxy fence; params[1]: barrier.
void race_of_next_load(const Args& args) {
  if (lane_idx() == 0) mbarrier_init(&shared()->barrier, 1);
  sync_warp();
  if (lane_idx() == 3) args.memory[0] = shared()->stage[2];
  if (args.params[0]) fence_proxy_async_shared();
  if (args.params[1]) sync_warp();
  if (lane_idx() != 0) return;
  bulk_load(shared()->stage, args.memory + 8, 64, &shared()->barrier);
  wait_parity(&shared()->barrier, 0);
}

// params[0]: whether the block meets behind the barrier's initialisation.
void race_of_mbarrier(const Args& args) {
  if (thread_idx() == 0) mbarrier_init(&shared()->barrier, 64);
  if (thread_idx() == 0) st_relaxed_sys(args.memory, uint64_t{1});
  while (ld_relaxed_sys(args.memory) == 0)
    wait_hint<uint64_t>(args.memory, 0, nullptr, ~uint64_t{0});
  if (args.params[0]) sync_block();
  mbarrier_arrive(&shared()->barrier);
}

constexpr Kernel kKernels[] = {
    kernel<race_of_warps>("race_of_warps"),
    kernel<race_of_lanes>("race_of_lanes"),
    kernel<race_of_bytes>("race_of_bytes"),
    kernel<race_of_bulk_store>("race_of_bulk_store"),
    kernel<race_of_reuse>("race_of_reuse"),
    kernel<race_of_bulk_load>("race_of_bulk_load"),
    kernel<race_of_next_load>("race_of_next_load"),
    kernel<race_of_mbarrier>("race_of_mbarrier"),
};

}  // namespace

std::span<const Kernel> race_kernels() { return kKernels; }

}  // namespace deep_comm::test
