// Litmus tests of the memory model, written against the primitives: the simulated machine and a GPU
// run the same code. Flags and data lie in different 16-byte lines. What each may show is listed in
// tests/support/litmus.py.
#pragma once

#include "kernel_args.hpp"

namespace deep_comm::test {

using namespace deep_comm::arch;

// Until `load` gives something else than `seen`.
template <class T, class Load>
DC_DEVICE T await_change(const T* word, T seen, Load load) {
  const uint64_t end = globaltimer_ns() + 10'000'000'000;
  while (true) {
    const T now = load();
    if (now != seen) return now;
    if (globaltimer_ns() > end) trap("a litmus test waits in vain");
    wait_hint<T>(word, seen, nullptr, ~uint64_t{0});
  }
}

enum class Publish : int64_t {
  kRelaxedStore,
  kReleaseCta,
  kReleaseGpu,
  kReleaseSys,
  kFenceGpuThenRelaxed,
  kFenceSysThenRelaxed,
  kRelaxedAdd,
  kAcqRelAddGpu,
  kAcqRelAddSys,
};

DC_DEVICE void publish(uint64_t* flag, Publish how) {
  switch (how) {
    case Publish::kRelaxedStore:
      st_relaxed_sys(flag, uint64_t{1});
      break;
    case Publish::kReleaseCta:
      st_release_cta(flag, uint64_t{1});
      break;
    case Publish::kReleaseGpu:
      st_release_gpu(flag, uint64_t{1});
      break;
    case Publish::kReleaseSys:
      st_release_sys(flag, uint64_t{1});
      break;
    case Publish::kFenceGpuThenRelaxed:
      fence_acq_rel_gpu();
      st_relaxed_sys(flag, uint64_t{1});
      break;
    case Publish::kFenceSysThenRelaxed:
      fence_acq_rel_sys();
      st_relaxed_sys(flag, uint64_t{1});
      break;
    case Publish::kRelaxedAdd:
      atomic_add_relaxed_sys(flag, uint64_t{1});
      break;
    case Publish::kAcqRelAddGpu:
      atomic_add_acq_rel_gpu(flag, uint64_t{1});
      break;
    case Publish::kAcqRelAddSys:
      atomic_add_acq_rel_sys(flag, uint64_t{1});
      break;
  }
}

DC_DEVICE void await(const uint64_t* flag) {
  await_change(flag, uint64_t{0}, [&] { return ld_acquire_sys(flag); });
}

inline constexpr int kDataWords = 16;

DC_DEVICE void write_data(uint64_t* data) {
  for (int i = 0; i < kDataWords; ++i) st_weak(data + 2 * i, uint64_t{1});
}

DC_DEVICE void count_stale(const Args& args, const uint64_t* data, int num_words) {
  uint64_t stale = 0;
  for (int i = 0; i < num_words; ++i) stale += ld_weak(data + 2 * i) != 1;
  st_weak(args.memory + 8, stale);
}

enum class Observe : int64_t {
  kAcquireSys,
  kAcquireGpu,
  kAcquireCta,
  kRelaxed,
  kRelaxedThenFenceSys,
  kRelaxedThenFenceGpu,
  kAcqRelAdd,
  kRelaxedAdd,
  kWeakThenFenceSys,
  kAcquireThenSyncWarp,  // and another lane reads
  kAcquireThenShuffle,
  kRelaxedThenSyncWarp,
};

// Waits for the flag; the lane that is to read the data then goes on.
DC_DEVICE void observe(uint64_t* flag, Observe how) {
  const auto poll = [&] {
    switch (how) {
      case Observe::kAcquireSys:
      case Observe::kAcquireThenSyncWarp:
      case Observe::kAcquireThenShuffle:
        return ld_acquire_sys(flag);
      case Observe::kAcquireGpu:
        return ld_acquire_gpu(flag);
      case Observe::kAcquireCta:
        return ld_acquire_cta(flag);
      case Observe::kAcqRelAdd:
        return atomic_add_acq_rel_sys(flag, uint64_t{0});
      case Observe::kRelaxedAdd:
        return atomic_add_relaxed_sys(flag, uint64_t{0});
      case Observe::kWeakThenFenceSys:
        return ld_weak(flag);
      default:
        return ld_relaxed_sys(flag);
    }
  };
  if (lane_idx() == 0) await_change(flag, uint64_t{0}, poll);
  if (how == Observe::kRelaxedThenFenceSys || how == Observe::kWeakThenFenceSys)
    fence_acq_rel_sys();
  if (how == Observe::kRelaxedThenFenceGpu) fence_acq_rel_gpu();
  if (how == Observe::kAcquireThenSyncWarp || how == Observe::kRelaxedThenSyncWarp) sync_warp();
  if (how == Observe::kAcquireThenShuffle) shfl(kFullMask, 0, 0);
}

// One thread writes and publishes, a warp reads. params: how, where the reader is: 0 another rank,
// 1 another block of rank 0, 2 another warp of the same block; how it observes the flag; which of
// its lanes reads the data; how many releases of the writer, to another word, come between; 1: and
// then an atomic on the flag, which continues its release.
DC_DEVICE void message_passing(const Args& args) {
  uint64_t* flag = args.memory;
  uint64_t* data = args.memory + 64;
  uint64_t* later = args.memory + 128;
  const auto num_later = static_cast<uint64_t>(args.params[4]);
  const auto reader = args.params[1];
  const bool first = args.rank == 0 && block_idx() == 0 && thread_idx() == 0;
  const bool reads = (reader == 0 && args.rank == 1 && block_idx() == 0 && warp_idx() == 0) ||
                     (args.rank == 0 && reader == 1 && block_idx() == 1 && warp_idx() == 0) ||
                     (args.rank == 0 && reader == 2 && block_idx() == 0 && warp_idx() == 1);
  if (first) {
    write_data(data);
    publish(flag, static_cast<Publish>(args.params[0]));
    for (uint64_t i = 1; i < num_later; ++i) st_release_cta(later, i);
    if (args.params[5] == 1) atomic_add_relaxed_sys(flag, uint64_t{0});
    if (num_later != 0) st_release_cta(later, num_later);
  } else if (reads) {
    // What this reads may be what a load gives later.
    for (int i = 0; i < kDataWords; ++i) ld_weak(data + 2 * i);
    for (uint64_t seen = 0; lane_idx() == 0 && seen != num_later;) {
      seen = await_change(later, seen, [&] { return ld_relaxed_sys(later); });
    }
    observe(flag, static_cast<Observe>(args.params[2]));
    if (lane_idx() == args.params[3]) count_stale(args, data, kDataWords);
  }
}

// The other way round: one thread reads and returns a credit, a warp stores over what was read. The
// same params, of the credit and of the lane that stores.
DC_DEVICE void credit(const Args& args) {
  uint64_t* data = args.memory + 64;
  const auto writer = args.params[1];
  const bool first = args.rank == 0 && block_idx() == 0 && thread_idx() == 0;
  const bool writes = (writer == 0 && args.rank == 1 && block_idx() == 0 && warp_idx() == 0) ||
                      (args.rank == 0 && writer == 1 && block_idx() == 1 && warp_idx() == 0) ||
                      (args.rank == 0 && writer == 2 && block_idx() == 0 && warp_idx() == 1);
  if (first) {
    uint64_t sum = 0;
    for (int i = 0; i < kDataWords; ++i) sum += ld_weak(data + 2 * i);
    st_weak(args.memory + 8, sum);
    publish(args.memory, static_cast<Publish>(args.params[0]));
  } else if (writes) {
    observe(args.memory, static_cast<Observe>(args.params[2]));
    if (lane_idx() == args.params[3]) write_data(data);
  }
}

// Another lane of the writer's warp reads. params: how it is published.
DC_DEVICE void message_in_warp(const Args& args) {
  if (args.rank != 0 || block_idx() != 0 || warp_idx() != 0) return;
  if (thread_idx() == 0) {
    write_data(args.memory + 64);
    publish(args.memory, static_cast<Publish>(args.params[0]));
  } else if (thread_idx() == 1) {
    await(args.memory);
    count_stale(args, args.memory + 64, kDataWords);
  }
}

// Thread 0 of each rank only. Rank 0 stores x and reads y, rank 1 the other way round: memory + 8 + 2
// * rank gets 1 + what was read. params: 1: a fence between.
DC_DEVICE void store_buffering(const Args& args) {
  if (thread_idx() != 0 || block_idx() != 0) return;
  uint64_t* word[2] = {args.memory, args.memory + 4};
  st_relaxed_sys(word[args.rank], uint64_t{1});
  if (args.params[0] == 1) fence_acq_rel_sys();
  st_weak(args.memory + 8 + 2 * args.rank, 1 + ld_relaxed_sys(word[1 - args.rank]));
}

// The same, but each reads before it stores.
DC_DEVICE void load_buffering(const Args& args) {
  if (thread_idx() != 0 || block_idx() != 0) return;
  uint64_t* word[2] = {args.memory, args.memory + 4};
  const uint64_t seen = ld_relaxed_sys(word[1 - args.rank]);
  st_relaxed_sys(word[args.rank], uint64_t{1});
  st_weak(args.memory + 8 + 2 * args.rank, 1 + seen);
}

// Ranks 0 and 1 store a word each, ranks 2 and 3 read both, in opposite orders: memory + 8 + 2 *
// rank gets 1 + 2 * first + second. params: 1: with acquires.
DC_DEVICE void independent_reads(const Args& args) {
  if (thread_idx() != 0 || block_idx() != 0) return;
  uint64_t* word[2] = {args.memory, args.memory + 4};
  if (args.rank < 2) {
    st_release_sys(word[args.rank], uint64_t{1});
    return;
  }
  const auto read = [&](const uint64_t* from) {
    return args.params[0] == 1 ? ld_acquire_sys(from) : ld_relaxed_sys(from);
  };
  const uint64_t first = read(word[args.rank - 2]);
  const uint64_t second = read(word[3 - args.rank]);
  st_weak(args.memory + 8 + 2 * args.rank, 1 + 2 * first + second);
}

// Rank 0 releases a flag, rank 1 changes it without an order, rank 2 acquires that. params: 0 by an
// atomic, which continues the release; 1 by a store, which does not; 2 by a store after an acquire
// and a fence.
DC_DEVICE void release_sequence(const Args& args) {
  if (thread_idx() != 0 || block_idx() != 0) return;
  uint64_t* flag = args.memory;
  uint64_t* data = args.memory + 64;
  if (args.rank == 0) {
    write_data(data);
    st_release_sys(flag, uint64_t{1});
  } else if (args.rank == 1) {
    await_change(flag, uint64_t{0}, [&] { return ld_relaxed_sys(flag); });
    if (args.params[0] == 0) {
      atomic_add_relaxed_sys(flag, uint64_t{1});
    } else {
      if (args.params[0] == 2) fence_acq_rel_sys();
      st_relaxed_sys(flag, uint64_t{2});
    }
  } else {
    uint64_t seen = 0;
    while (seen != 2) seen = await_change(flag, seen, [&] { return ld_acquire_sys(flag); });
    count_stale(args, data, kDataWords);
  }
}

// One warp writes to global memory, another reads after a hand-over in shared memory. params: 0 an
// mbarrier, 1 a released word that is acquired, 2 that is read relaxed, 3 a named barrier.
DC_DEVICE void hand_over_in_block(const Args& args) {
  if (args.rank != 0 || block_idx() != 0) return;
  auto* barrier = reinterpret_cast<Mbarrier*>(dynamic_smem());
  auto* word = reinterpret_cast<uint32_t*>(dynamic_smem() + 64);
  uint64_t* data = args.memory + 64;
  if (thread_idx() == 0) {
    mbarrier_init(barrier, 1);
    *word = 0;
  }
  sync_block();
  if (warp_idx() == 0) {
    if (lane_idx() == 0) {
      write_data(data);
      if (args.params[0] == 0) mbarrier_arrive(barrier);
      if (args.params[0] == 1 || args.params[0] == 2) st_release_cta(word, 1u);
    }
    if (args.params[0] == 3) {
      sync_warp();
      arrive_named(3, 64);
    }
    return;
  }
  if (args.params[0] == 3) sync_named(3, 64);
  if (lane_idx() != 0) return;
  switch (args.params[0]) {
    case 0:
      while (!mbarrier_try_wait_parity(barrier, 0)) {
      }
      break;
    case 1:
      await_change(word, 0u, [&] { return ld_acquire_cta(word); });
      break;
    case 2:
      await_change(word, 0u, [&] { return ld_relaxed_cta(word); });
      break;
    default:
      break;
  }
  count_stale(args, data, kDataWords);
}

// Rank 0 writes and releases, rank 1 observes the flag and loads the data by a bulk copy. params:
// how it observes.
DC_DEVICE void message_by_bulk_load(const Args& args) {
  if (block_idx() != 0 || warp_idx() != 0) return;
  uint64_t* flag = args.memory;
  uint64_t* data = args.memory + 64;
  constexpr int kNumBytes = 2 * kDataWords * sizeof(uint64_t);
  if (args.rank == 0) {
    if (thread_idx() != 0) return;
    write_data(data);
    st_release_sys(flag, uint64_t{1});
    return;
  }
  auto* barrier = reinterpret_cast<Mbarrier*>(dynamic_smem());
  auto* copy = reinterpret_cast<uint64_t*>(dynamic_smem() + 128);
  observe(flag, static_cast<Observe>(args.params[0]));
  if (lane_idx() != 0) return;
  mbarrier_init(barrier, 1);
  fence_mbarrier_init();
  fence_proxy_async();
  bulk_load(copy, data, kNumBytes, barrier);
  while (!mbarrier_try_wait_parity(barrier, 0)) {
  }
  uint64_t stale = 0;
  for (int i = 0; i < kDataWords; ++i) stale += copy[2 * i] != 1;
  st_weak(args.memory + 8, stale);
}

enum class Meet : int64_t { kNothing, kSyncWarp, kPartialSyncWarp, kSyncBlock, kNamed };

// Other threads write, meet thread 0, and thread 0 releases to the other rank. params: how they
// meet.
DC_DEVICE void cumulativity(const Args& args) {
  uint64_t* flag = args.memory;
  uint64_t* data = args.memory + 64;
  if (args.rank == 1) {
    if (block_idx() == 0 && thread_idx() == 0) {
      await(flag);
      count_stale(args, data, kDataWords);
    }
    return;
  }
  if (block_idx() != 0) return;
  const auto meet = static_cast<Meet>(args.params[0]);
  const bool inside_warp = meet == Meet::kSyncWarp || meet == Meet::kPartialSyncWarp;
  const int first_writer = inside_warp || meet == Meet::kNothing ? 1 : 32;
  const int writer = thread_idx() - first_writer;
  if (writer >= 0 && writer < kDataWords) st_weak(data + 2 * writer, uint64_t{1});
  switch (meet) {
    case Meet::kNothing:
      break;
    case Meet::kSyncWarp:
      sync_warp();
      break;
    case Meet::kPartialSyncWarp:
      if (thread_idx() <= kDataWords) sync_warp((2u << kDataWords) - 1);
      break;
    case Meet::kSyncBlock:
      sync_block();
      break;
    case Meet::kNamed:
      if (warp_idx() == 1) arrive_named(3, 64);
      if (warp_idx() == 0) sync_named(3, 64);
      break;
  }
  if (thread_idx() == 0) st_release_sys(flag, uint64_t{1});
}

// Three hands: block 1 writes and releases to the rank, block 0 acquires that and releases to the
// other rank.
DC_DEVICE void relay(const Args& args) {
  uint64_t* near_flag = args.memory;
  uint64_t* far_flag = args.memory + 2;
  uint64_t* data = args.memory + 64;
  if (thread_idx() != 0) return;
  if (args.rank == 1) {
    if (block_idx() != 0) return;
    await(far_flag);
    count_stale(args, data, kDataWords);
  } else if (block_idx() == 1) {
    write_data(data);
    st_release_gpu(near_flag, uint64_t{1});
  } else {
    await_change(near_flag, uint64_t{0}, [&] { return ld_acquire_gpu(near_flag); });
    st_release_sys(far_flag, uint64_t{1});
  }
}

// One thread counts a word up; nobody may ever see it go down. params: stores.
DC_DEVICE void coherence(const Args& args) {
  uint64_t* word = args.memory;
  const auto last = static_cast<uint64_t>(args.params[0]);
  if (thread_idx() == 0 && args.rank == 0 && block_idx() == 0) {
    for (uint64_t i = 1; i <= last; ++i) {
      if (i % 3 == 0) {
        st_weak(word, i);
      } else if (i % 3 == 1) {
        st_relaxed_sys(word, i);
      } else {
        st_release_gpu(word, i);
      }
      if (i % 5 == 0) sync_warp(1);
      if (i % 11 == 0) fence_acq_rel_cta();
      if (ld_relaxed_sys(word) != i) st_weak(args.memory + 16, uint64_t{1});
    }
    return;
  }
  uint64_t seen = 0;
  while (seen != last) {
    const uint64_t now = await_change(word, seen, [&] { return ld_relaxed_sys(word); });
    if (now < seen) atomic_add_relaxed_sys(args.memory + 16, uint64_t{1});
    seen = now;
  }
}

// Rank 1 reads relaxed what rank 0 has stored, and tells rank 2. memory[16]: rank 2 sees less.
DC_DEVICE void reads_passed_on(const Args& args) {
  if (thread_idx() != 0 || block_idx() != 0) return;
  uint64_t *word = args.memory, *told = args.memory + 2;
  if (args.rank == 0) st_relaxed_sys(word, uint64_t{1});
  if (args.rank == 1) {
    await_change(word, uint64_t{0}, [&] { return ld_relaxed_sys(word); });
    if (args.params[0] == 0) {
      st_release_sys(told, uint64_t{1});
    } else {
      st_relaxed_sys(told, uint64_t{1});
    }
  }
  if (args.rank != 2) return;
  await(told);
  if (ld_relaxed_sys(word) == 0) st_weak(args.memory + 16, uint64_t{1});
}

// Ranks 0 and 1 store to one word at the same time, rank 1 after data and a fence. memory[16]:
// rank 1 sees neither store; [18]: rank 2 sees neither, though rank 1 has told it; [20]: rank 2 sees
// rank 1's store and not the data.
DC_DEVICE void racing_stores(const Args& args) {
  if (thread_idx() != 0 || block_idx() != 0) return;
  uint64_t *word = args.memory, *told = args.memory + 2, *data = args.memory + 4;
  if (args.rank == 2) {
    const uint64_t early = ld_acquire_sys(word);
    const bool has_data = ld_weak(data) == 1;
    if (early == 2 && !has_data) st_weak(args.memory + 20, uint64_t{1});
    await(told);
    if (ld_weak(word) == 0) st_weak(args.memory + 18, uint64_t{1});
    return;
  }
  if (args.rank == 1) {
    st_weak(data, uint64_t{1});
    fence_acq_rel_sys();
  }
  st_relaxed_sys(word, static_cast<uint64_t>(1 + args.rank));
  if (args.rank == 0) return;
  if (ld_relaxed_sys(word) == 0) st_weak(args.memory + 16, uint64_t{1});
  st_release_sys(told, uint64_t{1});
}

}  // namespace deep_comm::test
