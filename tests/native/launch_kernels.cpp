// Launches that begin beside the one before them.
#include "test_kernel.hpp"

namespace deep_comm::test {
namespace {

using namespace deep_comm::arch;

// The memory of a pair: [0] the words of the first launch's blocks, [64] its data, [128] what it
// stores last, with no word, [192] what the second one tells the first, [256] results of the second.
constexpr int kData = 64, kLast = 128, kTold = 192, kSeen = 256;

// Spins: a wait without end is what the machine must find.
void await_value(const uint64_t* word, uint64_t value) {
  for (uint64_t seen; (seen = ld_acquire_gpu(word)) != value;) {
    wait_hint(word, seen, nullptr, ~uint64_t{0});
  }
}

// params: [0] whether it allows the next launch; [1] whether it then waits for it
void first_of_pair(const Args& args) {
  if (args.params[0] != 0) allow_later_launch();
  const int block = block_idx();
  if (thread_idx() != 0) return;
  if (args.params[1] != 0) await_value(args.memory + kTold + block, 1);
  st_weak(args.memory + kData + block, uint64_t{1});
  st_release_gpu(args.memory + block, uint64_t{1});
  st_weak(args.memory + kLast + block, uint64_t{1});
}

// params: [0] whether it waits for the first launch's words; [1] whether for its end; [2] whether it
// reads what that stores last before it has
void second_of_pair(const Args& args) {
  const int block = block_idx();
  if (thread_idx() == 0) {
    st_release_gpu(args.memory + kTold + block, uint64_t{1});
    if (args.params[0] != 0) await_value(args.memory + block, 1);
    st_weak(args.memory + kSeen + block, ld_weak(args.memory + kData + block));
  }
  if (args.params[1] != 0 && args.params[2] == 0) await_earlier_launch();
  if (thread_idx() == 0) {
    st_weak(args.memory + kSeen + 32 + block, ld_weak(args.memory + kLast + block));
  }
  if (args.params[1] != 0 && args.params[2] != 0) await_earlier_launch();
}

// Reads through the path of constants what the launch before it stores. params: [0] whether it tells
// that one that it has begun
void second_reads_constants(const Args& args) {
  if (thread_idx() == 0) {
    if (args.params[0] != 0) st_release_gpu(args.memory + kTold + block_idx(), uint64_t{1});
    await_value(args.memory + block_idx(), 1);
    st_weak(args.memory + kSeen + block_idx(), ld_nc(args.memory + kData + block_idx()));
  }
  await_earlier_launch();
}

// Lets the next launch begin before the one before it has ended.
void second_allows_too_soon(const Args&) {
  allow_later_launch();
  await_earlier_launch();
}

// Behind both: sees all that they have stored.
void third_of_pair(const Args& args) {
  if (thread_idx() != 0) return;
  const int block = block_idx();
  st_weak(args.memory + kSeen + 64 + block,
          ld_nc(args.memory + kLast + block) + ld_nc(args.memory + kSeen + 32 + block));
}

constexpr Kernel kKernels[] = {
    kernel<first_of_pair>("first_of_pair"),
    kernel<second_of_pair>("second_of_pair"),
    kernel<second_reads_constants>("second_reads_constants"),
    kernel<second_allows_too_soon>("second_allows_too_soon"),
    kernel<third_of_pair>("third_of_pair"),
};

}  // namespace

std::span<const Kernel> launch_kernels() { return kKernels; }

}  // namespace deep_comm::test
