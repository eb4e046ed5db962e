// Litmus tests of the memory model. Flags and data lie in different 16-byte lines.
#include "test_kernel.hpp"

namespace deep_comm::test {
namespace {

using namespace deep_comm::arch;

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
  kCas,
};

void publish(uint64_t* flag, Publish how) {
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
    case Publish::kCas:
      atomic_cas_acq_rel_sys(flag, uint64_t{0}, uint64_t{1});
      break;
  }
}

void await(const uint64_t* flag) {
  while (ld_acquire_sys(flag) == 0) wait_hint<uint64_t>(flag, 0, nullptr, ~uint64_t{0});
}

constexpr int kDataWords = 16;

void write_data(uint64_t* data) {
  for (int i = 0; i < kDataWords; ++i) st_weak(data + 2 * i, uint64_t{1});
}

void count_stale(const Args& args, const uint64_t* data, int num_words) {
  uint64_t stale = 0;
  for (int i = 0; i < num_words; ++i) stale += ld_weak(data + 2 * i) != 1;
  st_weak(args.memory + 8, stale);
}

// One thread writes and publishes, another reads. params: how, where the reader is: 0 another rank,
// 1 another block of rank 0, 2 another warp of the same block, 3 another lane of the same warp.
void message_passing(const Args& args) {
  uint64_t* flag = args.memory;
  uint64_t* data = args.memory + 64;
  const auto reader = args.params[1];
  const bool first = args.rank == 0 && block_idx() == 0 && thread_idx() == 0;
  const bool reads = (reader == 0 && args.rank == 1 && block_idx() == 0 && thread_idx() == 0) ||
                     (args.rank == 0 && reader == 1 && block_idx() == 1 && thread_idx() == 0) ||
                     (args.rank == 0 && reader == 2 && block_idx() == 0 && thread_idx() == 32) ||
                     (args.rank == 0 && reader == 3 && block_idx() == 0 && thread_idx() == 1);
  if (first) {
    write_data(data);
    publish(flag, static_cast<Publish>(args.params[0]));
  } else if (reads) {
    await(flag);
    count_stale(args, data, kDataWords);
  }
}

enum class Meet : int64_t { kNothing, kSyncWarp, kPartialSyncWarp, kSyncBlock, kNamed };

// Other threads write, meet thread 0, and thread 0 releases to the other rank. params: how they
// meet.
void cumulativity(const Args& args) {
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
void relay(const Args& args) {
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
    while (ld_acquire_gpu(near_flag) == 0) {
      wait_hint<uint64_t>(near_flag, 0, nullptr, ~uint64_t{0});
    }
    st_release_sys(far_flag, uint64_t{1});
  }
}

// One thread counts a word up; nobody may ever see it go down. params: stores.
void coherence(const Args& args) {
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
  for (;;) {
    const uint64_t now = ld_relaxed_sys(word);
    if (now < seen) atomic_add_relaxed_sys(args.memory + 16, uint64_t{1});
    seen = now;
    if (seen == last) break;
    wait_hint<uint64_t>(word, seen, nullptr, ~uint64_t{0});
  }
}

// What a thread has stored it reads back, byte by byte, wherever the bytes are held.
void own_stores(const Args& args) {
  if (thread_idx() != 0 || block_idx() != 0) return;
  auto* line = reinterpret_cast<uint8_t*>(args.memory + 64);
  uint8_t expected[16];
  memcpy(expected, line, 16);
  uint64_t errors = 0;
  uint32_t state = 12345;
  for (int round = 0; round < 200; ++round) {
    state = state * 1664525u + 1013904223u;
    const uint32_t size = 1u << (state >> 28 & 3);
    const uint32_t offset = (state >> 20 & 15) / size * size;
    const uint64_t value = uint64_t{state} << 32 | ~state;
    memcpy(expected + offset, &value, size);
    switch (size) {
      case 1:
        st_weak(line + offset, static_cast<uint8_t>(value));
        break;
      case 2:
        st_streaming(reinterpret_cast<uint16_t*>(line + offset), static_cast<uint16_t>(value));
        break;
      case 4:
        st_relaxed_gpu(reinterpret_cast<uint32_t*>(line + offset), static_cast<uint32_t>(value));
        break;
      default:
        st_weak(reinterpret_cast<uint64_t*>(line + offset), value);
        break;
    }
    if (round % 17 == 0) fence_acq_rel_cta();
    if (round % 29 == 0) {
      const auto old = atomic_add_relaxed_gpu(reinterpret_cast<uint32_t*>(line + 4), 5u);
      uint32_t word;
      memcpy(&word, expected + 4, 4);
      errors += old != word;
      word += 5;
      memcpy(expected + 4, &word, 4);
    }
    const Vec16 seen = ld_weak(reinterpret_cast<const Vec16*>(line));
    errors += memcmp(&seen, expected, 16) != 0;
  }
  args.memory[0] = errors;
}

// Every form of atomic, by all threads of all blocks and ranks.
void atomics(const Args& args) {
  uint64_t* memory = args.memory;
  atomic_add_relaxed_sys(memory, uint64_t{1});
  atomic_add_acq_rel_gpu(reinterpret_cast<uint32_t*>(memory + 1), 2u);
  atomic_add_relaxed_cta(reinterpret_cast<int32_t*>(memory + 2), -1);
  atomic_or_relaxed_gpu(reinterpret_cast<uint32_t*>(memory + 3), 1u << lane_idx());
  for (uint64_t seen = ld_relaxed_sys(memory + 4);;) {
    const uint64_t old = atomic_cas_acq_rel_sys(memory + 4, seen, seen + 3);
    if (old == seen) break;
    seen = old;
  }
  auto* small = reinterpret_cast<uint32_t*>(memory + 5);
  for (uint32_t seen = 0;;) {
    const uint32_t old = atomic_cas_acq_rel_gpu(small, seen, seen + 1);
    if (old == seen) break;
    seen = old;
  }
}

// The order in which threads come: a fingerprint of the schedule. Rows of memory + 64.
void arrival_order(const Args& args) {
  for (int round = 0; round < args.params[0]; ++round) {
    const uint64_t ticket = atomic_add_relaxed_sys(args.memory, uint64_t{1});
    const auto who = static_cast<uint64_t>(
        (args.rank * num_blocks() + block_idx()) * num_threads() + thread_idx());
    st_weak(args.memory + 64 + ticket, who);
    sync_warp();
  }
}

// A store held back at the end of a grid is there for the next one. params: 0 write, 1 read.
void across_grids(const Args& args) {
  uint64_t* word = args.memory + 64 + 2 * (block_idx() * num_threads() + thread_idx());
  if (args.params[0] == 0) {
    st_weak(word, uint64_t{7});
  } else if (ld_nc(word) != 7) {
    atomic_add_relaxed_gpu(args.memory, uint64_t{1});
  }
}

constexpr Kernel kKernels[] = {
    kernel<message_passing>("message_passing"),
    kernel<cumulativity>("cumulativity"),
    kernel<relay>("relay"),
    kernel<coherence>("coherence"),
    kernel<own_stores>("own_stores"),
    kernel<atomics>("atomics"),
    kernel<arrival_order>("arrival_order"),
    kernel<across_grids>("across_grids"),
};

}  // namespace

std::span<const Kernel> memory_kernels() { return kKernels; }

}  // namespace deep_comm::test
