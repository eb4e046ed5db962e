// The software NIC over a stand-in of the CUDA runtime, on the host's memory: what kernels have
// posted when it is destroyed is carried out. Prints what has come, in words that a test compares.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>
#include <vector>

#include "host/software_nic_cuda.hpp"

namespace {

std::atomic<bool> fails_copies{false};

int write_value(cudaStream_t, unsigned long long address, unsigned long long value, unsigned) {
  __atomic_store_n(reinterpret_cast<uint64_t*>(address), value, __ATOMIC_RELEASE);
  return 0;
}

cudaError_t allocate(void** made, size_t num_bytes) {
  *made = std::aligned_alloc(128, (num_bytes + 127) / 128 * 128);
  return *made == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

}  // namespace

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool is_known = strcmp(name, "cuStreamWriteValue64") == 0;
  *found = is_known ? reinterpret_cast<void*>(&write_value) : nullptr;
  *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "of the stand-in"; }
cudaError_t cudaHostAlloc(void** made, size_t size, unsigned) { return allocate(made, size); }
cudaError_t cudaMalloc(void** made, size_t size) { return allocate(made, size); }
cudaError_t cudaFree(void* memory) { return free(memory), cudaSuccess; }
cudaError_t cudaFreeHost(void* memory) { return free(memory), cudaSuccess; }
cudaError_t cudaMemset(void* to, int byte, size_t size) {
  return memset(to, byte, size), cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return memcpy(to, from, size), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  if (fails_copies) return cudaErrorUnknown;
  // As long as a call into CUDA takes: the thread falls behind whoever posts.
  std::this_thread::sleep_for(std::chrono::microseconds(20));
  return memcpy(to, from, size), cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = *greatest = 0, cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned, int) {
  return *made = nullptr, cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
}

namespace {

using deep_comm::RailDescriptor;
using deep_comm::RailQueue;
using deep_comm::RailRequest;

// As detail::post_rail.
void post(const RailQueue& queue, const RailRequest& request) {
  const uint64_t ticket = (*queue.num_posted)++;
  const uint64_t words[] = {
      request.what & 0xffff'ffffu,      request.what >> 32, request.dst_offset & 0xffff'ffffu,
      request.dst_offset >> 32,         request.num_bytes,  static_cast<uint32_t>(request.peer),
      static_cast<uint32_t>(request.qp)};
  uint64_t* halves = queue.slots[ticket % queue.depth].halves;
  for (int idx = 0; idx < RailDescriptor::kNumHalves; ++idx) {
    const uint64_t number = static_cast<uint64_t>(RailDescriptor::number_of(ticket)) << 32;
    __atomic_store_n(halves + idx, number | words[idx], __ATOMIC_RELEASE);
  }
}

constexpr int kRows = 5003;
constexpr size_t kRowBytes = 24;  // every other place: no two puts are neighbours

}  // namespace

// given_up: a ticket that no kernel has filled in. failing: copies fail.
int main(int, char** arguments) {
  const std::string_view how = arguments[1];
  fails_copies = how == "failing";
  std::vector<uint8_t> memory(2 * kRows * kRowBytes + 64), rows(kRows * kRowBytes);
  for (size_t idx = 0; idx < rows.size(); ++idx) rows[idx] = static_cast<uint8_t>(idx * 7 + 1);
  const size_t word_offset = 2 * kRows * kRowBytes;
  uint64_t num_bytes[2] = {};
  const uint64_t timeout_ns = how == "posted" ? 60'000'000'000ull : 1'500'000'000ull;
  const auto begun = std::chrono::steady_clock::now();
  {
    deep_comm::SoftwareNic nic(0, {memory.data()}, 2, num_bytes, timeout_ns, {});
    const RailQueue queue = nic.queue();
    for (int row = 0; row < kRows; ++row) {
      const size_t offset = static_cast<size_t>(row) * kRowBytes;
      post(queue, {reinterpret_cast<uint64_t>(rows.data() + offset), 2 * offset, kRowBytes, 0, 0});
    }
    post(queue, {77, word_offset, 0, 0, 0});
    if (how == "given_up") ++*queue.num_posted;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  int num_rows = 0;
  for (size_t row = 0; row < kRows; ++row) {
    const uint8_t* place = memory.data() + 2 * row * kRowBytes;
    num_rows += memcmp(place, rows.data() + row * kRowBytes, kRowBytes) == 0;
  }
  uint64_t word = 0;
  memcpy(&word, memory.data() + word_offset, sizeof(word));
  printf("rows %d of %d, word %d, %.3f s\n", num_rows, kRows, static_cast<int>(word), took.count());
  return 0;
}
