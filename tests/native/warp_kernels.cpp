#include "test_kernel.hpp"

namespace deep_comm::test {
namespace {

using namespace deep_comm::arch;

constexpr int kColumns = 16;

void identity(const Args& args) {
  const int thread = block_idx() * num_threads() + thread_idx();
  uint64_t* row = args.memory + thread * kColumns;
  const int values[] = {thread_idx(), num_threads(), block_idx(), num_blocks(),
                        lane_idx(),   warp_idx(),    num_warps()};
  for (int i = 0; i < 7; ++i) row[i] = static_cast<uint64_t>(values[i]);
  row[7] = reinterpret_cast<uintptr_t>(dynamic_smem()) % 128;
}

// params: mask, argument of the shuffles. One row of results per lane; lanes outside of the mask
// leave.
void warp_ops(const Args& args) {
  const auto mask = static_cast<uint32_t>(args.params[0]);
  const auto argument = static_cast<int>(args.params[1]);
  if (!(mask >> lane_idx() & 1)) return;
  const auto small = static_cast<uint32_t>(lane_idx() * 3 + 1);
  const uint64_t large = uint64_t{small} << 40 | small;
  const bool odd = lane_idx() % 2 == 1;
  uint64_t* row = args.memory + thread_idx() * kColumns;
  row[0] = shfl(mask, small, argument);
  row[1] = shfl_xor(mask, small, argument);
  row[2] = shfl_up(mask, small, argument);
  row[3] = shfl_down(mask, small, argument);
  row[4] = shfl(mask, large, argument);
  row[5] = shfl_xor(mask, large, argument);
  row[6] = bit_cast<uint32_t>(shfl(mask, static_cast<float>(lane_idx()), argument));
  row[7] = ballot(mask, odd);
  row[8] = any(mask, lane_idx() == argument);
  row[9] = all(mask, lane_idx() >= argument);
  row[10] = match_any(mask, small % 5);
  row[11] = match_any(mask, large % 7);
  sync_warp(mask);
}

// Two halves of a warp in different loops, then together: masks that nest in time.
void split_warp(const Args& args) {
  const bool upper = lane_idx() >= 16;
  const uint32_t half = upper ? 0xffff0000u : 0x0000ffffu;
  uint64_t sum = 0;
  const int rounds = upper ? 7 : 3;
  for (int i = 0; i < rounds; ++i) {
    sum += shfl(half, static_cast<uint64_t>(lane_idx() + i), upper ? 31 : 15);
  }
  sum += shfl_xor(kFullMask, sum, 16);
  args.memory[thread_idx()] = sum;
}

void elect(const Args& args) {
  for (int round = 0; round < 4; ++round) {
    if (elect_one()) atomic_add_relaxed_gpu(&args.memory[warp_idx()], uint64_t{1});
    if (elect_one()) args.memory[num_warps() + warp_idx()] = static_cast<uint64_t>(lane_idx());
  }
}

// params: rounds. Every lane must see what the lane before it wrote in the round before.
void warp_rounds(const Args& args) {
  auto* words = reinterpret_cast<uint32_t*>(dynamic_smem()) + warp_idx() * kWarpSize;
  uint64_t errors = 0;
  for (uint32_t round = 0; round < static_cast<uint32_t>(args.params[0]); ++round) {
    words[lane_idx()] = round * 100 + static_cast<uint32_t>(lane_idx());
    sync_warp();
    const auto other = static_cast<uint32_t>((lane_idx() + 1) % kWarpSize);
    errors += words[other] != round * 100 + other;
    sync_warp();
  }
  atomic_add_relaxed_gpu(args.memory, errors);
}

void bit_ops(const Args& args) {
  const auto bits = static_cast<uint32_t>(args.params[0]);
  args.memory[0] = static_cast<uint64_t>(popc(bits));
  args.memory[1] = static_cast<uint64_t>(ffs(bits));
  args.memory[2] = static_cast<uint64_t>(clz(bits));
}

constexpr Kernel kKernels[] = {
    kernel<identity>("identity"),       kernel<warp_ops>("warp_ops"),
    kernel<split_warp>("split_warp"),   kernel<elect>("elect"),
    kernel<warp_rounds>("warp_rounds"), kernel<bit_ops>("bit_ops"),
};

}  // namespace

std::span<const Kernel> warp_kernels() { return kKernels; }

}  // namespace deep_comm::test
