// Runs the litmus tests of tests/native/litmus.hpp on one GPU: ranks are blocks of it.
//
// Reads lines "kernel ranks blocks threads smem_bytes params...", and answers each with JSON:
// [[words 8, 10, ... 22 of the memory, and how many runs have left these], ...]. The argument is the
// number of launches a line; each launch runs kNumInstances of the test beside one another.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "../native/litmus.hpp"

namespace deep_comm::test {
namespace {

constexpr int kNumInstances = 64, kWords = 256, kNumResults = 8;

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s\n", cudaGetErrorString(error));
  exit(1);
}

// Otherwise blocks begin in order, and readers find everything written: the blocks of a run meet, and
// then begin within a few hundred cycles. Before that each has read all of the memory, so that its
// L1 cache holds old values.
__device__ void begin_together(const uint64_t* memory, uint32_t* num_met, uint32_t seed) {
  uint64_t sum = 0;
  for (int idx = 0; idx < kWords; ++idx) sum += arch::ld_weak(memory + idx);
  __syncthreads();
  if (threadIdx.x == 0 && sum == 0) {
    atomicAdd(num_met, 1u);
    while (arch::ld_relaxed_gpu(num_met) < gridDim.x * gridDim.y) {
    }
  }
  __syncthreads();
  uint32_t state = seed * 747796405u + blockIdx.x * 277803737u + blockIdx.y * 2891336453u +
                   blockIdx.z * 1181783497u;
  state = (state ^ state >> 15) * 2246822519u;
  state ^= state >> 13;
  const int64_t begin = clock64();
  const int64_t most = int64_t{1} << (seed % 12);  // cycles
  while (clock64() - begin < static_cast<int64_t>(state) % most) {
  }
}

// Blocks of one rank lie along x, ranks along y, independent runs along z.
template <void (*kKernel)(const Args&)>
__global__ void run(uint64_t* memory, uint32_t* num_met, Args args, uint32_t seed) {
  args.memory = memory + blockIdx.z * kWords;
  args.rank = blockIdx.y;
  begin_together(args.memory, num_met + blockIdx.z, seed);
  kKernel(args);
}

struct Litmus {
  const char* name;
  void (*launch)(uint64_t*, uint32_t*, Args, uint32_t);
};

const Litmus kAll[] = {
    {"message_passing", run<message_passing>},
    {"credit", run<credit>},
    {"message_in_warp", run<message_in_warp>},
    {"store_buffering", run<store_buffering>},
    {"load_buffering", run<load_buffering>},
    {"independent_reads", run<independent_reads>},
    {"release_sequence", run<release_sequence>},
    {"hand_over_in_block", run<hand_over_in_block>},
    {"message_by_bulk_load", run<message_by_bulk_load>},
    {"cumulativity", run<cumulativity>},
    {"relay", run<relay>},
    {"coherence", run<coherence>},
    {"reads_passed_on", run<reads_passed_on>},
    {"racing_stores", run<racing_stores>},
};

using Results = std::array<uint64_t, kNumResults>;

std::map<Results, int> outcomes(const std::string& line, int num_launches, uint64_t* device) {
  std::istringstream text(line);
  std::string name;
  int num_ranks, num_blocks, num_threads, smem_bytes;
  text >> name >> num_ranks >> num_blocks >> num_threads >> smem_bytes;
  Args args{};
  for (int idx = 0; idx < 8 && text >> args.params[idx]; ++idx) {
  }
  std::map<Results, int> seen;
  std::vector<uint64_t> host(kNumInstances * kWords);
  const size_t num_bytes = host.size() * sizeof(uint64_t);
  auto* num_met = reinterpret_cast<uint32_t*>(device + host.size());
  for (const Litmus& litmus : kAll) {
    if (name != litmus.name) continue;
    for (int launch = 0; launch < num_launches; ++launch) {
      require(cudaMemset(device, 0, num_bytes + kNumInstances * sizeof *num_met));
      litmus.launch<<<dim3(num_blocks, num_ranks, kNumInstances), num_threads, smem_bytes>>>(
          device, num_met, args, static_cast<uint32_t>(launch));
      require(cudaGetLastError());
      require(cudaMemcpy(host.data(), device, num_bytes, cudaMemcpyDeviceToHost));
      for (int instance = 0; instance < kNumInstances; ++instance) {
        Results results;
        for (int idx = 0; idx < kNumResults; ++idx)
          results[idx] = host[instance * kWords + 8 + 2 * idx];
        ++seen[results];
      }
    }
  }
  return seen;
}

int answer_all(int num_launches) {
  uint64_t* device = nullptr;
  require(cudaMalloc(&device, kNumInstances * (kWords * sizeof(uint64_t) + sizeof(uint32_t))));
  for (std::string line; std::getline(std::cin, line);) {
    const char* separator = "[";
    for (const auto& [results, count] : outcomes(line, num_launches, device)) {
      printf("%s[", separator);
      for (const uint64_t result : results)
        printf("%llu, ", static_cast<unsigned long long>(result));
      printf("%d]", count);
      separator = ", ";
    }
    printf("]\n");
    fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace deep_comm::test

int main(int num_arguments, char** arguments) {
  return deep_comm::test::answer_all(num_arguments > 1 ? atoi(arguments[1]) : 1);
}
