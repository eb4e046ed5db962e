#include "test_kernel.hpp"

namespace deep_comm::test {
namespace {

using namespace deep_comm::arch;

// Waits for memory[0] to become params[0], at most params[1] ns. memory[1]: an abort word.
// memory[8 + rank]: 1 arrived, 2 deadline, 3 aborted; memory[16 + rank]: ns waited.
void await_word(const Args& args) {
  auto* abort_word = reinterpret_cast<uint32_t*>(args.memory + 2);
  if (thread_idx() == 0) {
    const auto expected = static_cast<uint64_t>(args.params[0]);
    const uint64_t start = globaltimer_ns();
    const uint64_t deadline = start + static_cast<uint64_t>(args.params[1]);
    wait_note({.kernel = "await_word",
               .stage = "ring_tail",
               .word = "tail",
               .rank = static_cast<int>(args.rank),
               .peer = 5,
               .channel = 3,
               .expected = expected});
    uint64_t result = 1;
    for (uint64_t seen; (seen = ld_acquire_sys(args.memory)) != expected;) {
      if (ld_relaxed_sys(abort_word) != 0) {
        result = 3;
        break;
      }
      if (globaltimer_ns() >= deadline) {
        result = 2;
        break;
      }
      wait_hint(args.memory, seen, abort_word, deadline);
    }
    st_weak(args.memory + 8 + args.rank, result);
    st_weak(args.memory + 16 + args.rank, globaltimer_ns() - start);
  }
  sync_block();
}

// params: value for memory[0], value for the abort word, ns to sleep before.
void set_word(const Args& args) {
  if (thread_idx() != 0) return;
  if (args.params[2] > 0) nanosleep(static_cast<uint32_t>(args.params[2]));
  if (args.params[1]) {
    st_release_sys(reinterpret_cast<uint32_t*>(args.memory + 2),
                   static_cast<uint32_t>(args.params[1]));
  }
  st_release_sys(args.memory, static_cast<uint64_t>(args.params[0]));
}

// Without a hint, with a plain loop.
void spin_on_word(const Args& args) {
  while (ld_acquire_sys(args.memory) != static_cast<uint64_t>(args.params[0])) {
  }
}

// The last thread sets what all the others of its own grid spin on.
void spin_on_each_other(const Args& args) {
  const int thread = block_idx() * num_threads() + thread_idx();
  const auto turn = static_cast<uint64_t>(num_blocks() * num_threads() - 1 - thread);
  while (ld_acquire_gpu(args.memory) != turn) {
  }
  st_release_gpu(args.memory, turn + 1);
}

void sleep_well(const Args& args) {
  const uint64_t start = globaltimer_ns();
  nanosleep(static_cast<uint32_t>(args.params[0]));
  args.memory[block_idx() * num_threads() + thread_idx()] = globaltimer_ns() - start;
}

void wait_for_clock(const Args& args) {
  const uint64_t end = globaltimer_ns() + static_cast<uint64_t>(args.params[0]);
  while (globaltimer_ns() < end) {
  }
  args.memory[0] = 1;
}

// A barrier nobody completes: the wait can only end by its own deadline.
void await_mbarrier(const Args& args) {
  auto* barrier = reinterpret_cast<Mbarrier*>(dynamic_smem());
  if (thread_idx() == 0) mbarrier_init(barrier, 1);
  sync_block();
  const uint64_t deadline = globaltimer_ns() + static_cast<uint64_t>(args.params[0]);
  uint64_t result = 1;
  while (!mbarrier_try_wait_parity(barrier, 0)) {
    if (globaltimer_ns() < deadline) continue;
    result = 2;
    break;
  }
  args.memory[8 + thread_idx()] = result;
}

// Rounds of tokens around the ranks: each waits for its word and sets the next rank's.
// params: number of ranks, rounds.
void token_ring(const Args& args) {
  if (thread_idx() == 0) {
    const auto num_ranks = args.params[0];
    uint64_t* own = args.memory + 64 + 16 * (args.rank * num_blocks() + block_idx());
    uint64_t* next =
        args.memory + 64 + 16 * ((args.rank + 1) % num_ranks * num_blocks() + block_idx());
    for (uint64_t round = 1; round <= static_cast<uint64_t>(args.params[1]); ++round) {
      if (args.rank == 0) st_release_sys(next, round);
      for (uint64_t seen; (seen = ld_acquire_sys(own)) != round;) {
        wait_hint(own, seen, nullptr, ~uint64_t{0});
      }
      if (args.rank != 0) st_release_sys(next, round);
    }
  }
  sync_block();
  atomic_add_relaxed_sys(args.memory, uint64_t{1});
}

uint64_t fault_bits() {
  uint64_t bits = 0;
  for (uint32_t bit = 1; bit < 64; bit <<= 1) bits |= fault(static_cast<Fault>(bit)) ? bit : 0;
  return bits;
}
void faults(const Args& args) { args.memory[0] = fault_bits(); }

void count_in(const Args& args) {
  args.memory[thread_idx() == 0 ? 0 : 1] += static_cast<uint64_t>(args.params[0]);
}

// Nothing but switches. params: rounds of sync_warp (0) or sync_block (1).
void switches(const Args& args) {
  for (int64_t i = 0; i < args.params[0]; ++i) args.params[1] ? sync_block() : sync_warp();
}

constexpr Kernel kKernels[] = {
    kernel<await_word>("await_word"),
    kernel<set_word>("set_word"),
    kernel<spin_on_word>("spin_on_word"),
    kernel<spin_on_each_other>("spin_on_each_other"),
    kernel<sleep_well>("sleep_well"),
    kernel<wait_for_clock>("wait_for_clock"),
    kernel<await_mbarrier>("await_mbarrier"),
    kernel<token_ring>("token_ring"),
    kernel<faults>("faults"),
    kernel<count_in>("count_in"),
    kernel<switches>("switches"),
};

}  // namespace

std::span<const Kernel> waiting_kernels() { return kKernels; }

}  // namespace deep_comm::test
