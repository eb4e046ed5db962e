#include "test_kernel.hpp"

namespace deep_comm::test {
namespace {

using namespace deep_comm::arch;

uint32_t* smem_words() { return reinterpret_cast<uint32_t*>(dynamic_smem()); }

// params: rounds. Counts the neighbours that were not where the barrier says they are.
void block_rounds(const Args& args) {
  uint32_t* words = smem_words();
  uint64_t errors = 0;
  for (uint32_t round = 0; round < static_cast<uint32_t>(args.params[0]); ++round) {
    words[thread_idx()] = round;
    sync_block();
    errors += words[(thread_idx() + 33) % num_threads()] != round;
    sync_block();
  }
  atomic_add_relaxed_gpu(args.memory, errors);
}

// params: how many threads stay. The others exit before or in the middle.
void sync_after_exit(const Args& args) {
  if (thread_idx() >= args.params[0] && thread_idx() % 2 == 0) return;
  sync_block();
  if (thread_idx() >= args.params[0]) return;
  for (int round = 0; round < 3; ++round) {
    atomic_add_relaxed_cta(&args.memory[round], uint64_t{1});
    sync_block();
    if (args.memory[round] != static_cast<uint64_t>(args.params[0])) args.memory[9] = 1;
    sync_block();
  }
}

// params: rounds. In some rounds one thread says yes, a different one each time, in some several,
// in some none; threads leave one after the other. Counts the threads that heard anything else.
void any_rounds(const Args& args) {
  uint64_t errors = 0;
  for (int64_t round = 0; round < args.params[0]; ++round) {
    const bool is_any = round % 3 != 0;
    const int leader = static_cast<int>(round * 7) % (num_threads() / 2);
    const bool says =
        is_any && (thread_idx() == leader || (round % 3 == 2 && thread_idx() % 5 == 0));
    errors += sync_block_any(says) != is_any;
    if (thread_idx() == num_threads() - 1 - round) break;
  }
  atomic_add_relaxed_gpu(args.memory, errors);
}

// Warp 0 fills two slots of shared memory in turn, the other warps read them: barriers 1, 2 say
// that a slot is full, 3, 4 that it is empty. params: number of items.
void producer_consumer(const Args& args) {
  volatile uint32_t* slots = smem_words();
  uint64_t errors = 0;
  for (int item = 0; item < args.params[0]; ++item) {
    const int slot = item % 2;
    volatile uint32_t* slot_words = slots + slot * kWarpSize;
    const auto expected = static_cast<uint32_t>(item * 1000 + lane_idx());
    if (warp_idx() == 0) {
      if (item >= 2) sync_named(3 + slot, num_threads());
      slot_words[lane_idx()] = expected;
      arrive_named(1 + slot, num_threads());
    } else {
      sync_named(1 + slot, num_threads());
      errors += slot_words[lane_idx()] != expected;
      arrive_named(3 + slot, num_threads());
    }
  }
  atomic_add_relaxed_gpu(args.memory, errors);
}

// Warps 0-1 and warps 2-3 meet in pairs at barriers of their own while the block does something
// else.
void named_pairs(const Args& args) {
  const int pair = warp_idx() / 2;
  uint64_t errors = 0;
  for (uint32_t round = 0; round < 5u + static_cast<uint32_t>(pair) * 3; ++round) {
    smem_words()[thread_idx()] = round;
    sync_named(5 + pair, 64);
    errors += smem_words()[thread_idx() ^ 32] != round;
    sync_named(5 + pair, 64);
  }
  sync_block();
  atomic_add_relaxed_gpu(args.memory, errors);
}

// Blocks count in, and wait for all: cooperative residency.
void grid_barrier(const Args& args) {
  if (thread_idx() == 0) {
    atomic_add_acq_rel_gpu(args.memory, uint64_t{1});
    for (uint64_t seen;
         (seen = ld_acquire_gpu(args.memory)) < static_cast<uint64_t>(num_blocks());) {
      wait_hint<uint64_t>(args.memory, seen, nullptr, ~uint64_t{0});
    }
  }
  sync_block();
  atomic_add_relaxed_gpu(args.memory + 1, uint64_t{1});
}

constexpr Kernel kKernels[] = {
    kernel<block_rounds>("block_rounds"),           kernel<sync_after_exit>("sync_after_exit"),
    kernel<producer_consumer>("producer_consumer"), kernel<named_pairs>("named_pairs"),
    kernel<grid_barrier>("grid_barrier"),           kernel<any_rounds>("any_rounds"),
};

}  // namespace

std::span<const Kernel> block_kernels() { return kKernels; }

}  // namespace deep_comm::test
