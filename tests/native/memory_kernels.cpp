// The litmus tests, and what a thread sees of its own accesses.
#include "litmus.hpp"
#include "test_kernel.hpp"

namespace deep_comm::test {
namespace {

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
  for (uint64_t seen = ld_relaxed_gpu(memory + 4);;) {
    const uint64_t old = atomic_cas_relaxed_gpu(memory + 4, seen, seen + 3);
    if (old == seen) break;
    seen = old;
  }
  auto* small = reinterpret_cast<uint32_t*>(memory + 5);
  for (uint32_t seen = 0;;) {
    const uint32_t old = atomic_cas_relaxed_cta(small, seen, seen + 1);
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
    kernel<credit>("credit"),
    kernel<message_in_warp>("message_in_warp"),
    kernel<store_buffering>("store_buffering"),
    kernel<load_buffering>("load_buffering"),
    kernel<independent_reads>("independent_reads"),
    kernel<release_sequence>("release_sequence"),
    kernel<hand_over_in_block>("hand_over_in_block"),
    kernel<message_by_bulk_load>("message_by_bulk_load"),
    kernel<cumulativity>("cumulativity"),
    kernel<relay>("relay"),
    kernel<coherence>("coherence"),
    kernel<racing_stores>("racing_stores"),
    kernel<reads_passed_on>("reads_passed_on"),
    kernel<own_stores>("own_stores"),
    kernel<atomics>("atomics"),
    kernel<arrival_order>("arrival_order"),
    kernel<across_grids>("across_grids"),
};

}  // namespace

std::span<const Kernel> memory_kernels() { return kKernels; }

}  // namespace deep_comm::test
