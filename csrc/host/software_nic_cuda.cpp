#include "host/software_nic_cuda.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace deep_comm {
namespace {

// cuStreamWriteValue64, by its address: the module does not link the driver.
using WriteValue = int (*)(cudaStream_t stream, unsigned long long address,
                           unsigned long long value, unsigned int flags);

void check(cudaError_t status, const char* tried) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string("software NIC: ") + tried + ": " + cudaGetErrorName(status) +
                           " (" + cudaGetErrorString(status) + ")");
}

// Polls before the thread gives its core away, and how long it then sleeps.
constexpr int kSpins = 20'000;
constexpr auto kSleep = std::chrono::microseconds(20);

}  // namespace

SoftwareNic::SoftwareNic(int device, std::vector<uint8_t*> peer_bases, int num_qps,
                         uint64_t* num_bytes, uint64_t timeout_ns)
    : device_(device),
      peer_bases_(std::move(peer_bases)),
      num_qps_(num_qps),
      num_bytes_(num_bytes) {
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", &write_value_, 12000,
                                         cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess || write_value_ == nullptr) {
    throw std::runtime_error("software NIC: this driver has no cuStreamWriteValue64");
  }
  void* slots = nullptr;
  void* taken = nullptr;
  void* posted = nullptr;
  constexpr unsigned kMapped = cudaHostAllocMapped | cudaHostAllocPortable;
  check(cudaHostAlloc(&slots, sizeof(RailDescriptor) * kDepth, kMapped), "cudaHostAlloc");
  check(cudaHostAlloc(&taken, sizeof(uint64_t), kMapped), "cudaHostAlloc");
  check(cudaMalloc(&posted, sizeof(uint64_t)), "cudaMalloc");
  memset(slots, 0, sizeof(RailDescriptor) * kDepth);
  memset(taken, 0, sizeof(uint64_t));
  check(cudaMemset(posted, 0, sizeof(uint64_t)), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  num_taken_ = static_cast<uint64_t*>(taken);
  queue_ = {static_cast<RailDescriptor*>(slots), static_cast<uint64_t*>(posted), num_taken_,
            timeout_ns, kDepth};
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  const int num_queues = static_cast<int>(peer_bases_.size()) * num_qps_;
  for (int idx = 0; idx < std::min(num_queues, kMaxStreams); ++idx) {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
          "cudaStreamCreateWithPriority");
    streams_.push_back(stream);
  }
  thread_ = std::thread([this] { run(); });
}

SoftwareNic::~SoftwareNic() {
  is_stopping_ = true;
  if (thread_.joinable()) thread_.join();
  // A failure here (a context already gone) has nobody to hear of it.
  int previous = 0;
  (void)cudaGetDevice(&previous);
  (void)cudaSetDevice(device_);
  for (void* stream : streams_) {
    (void)cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream));
  }
  (void)cudaFree(queue_.num_posted);
  (void)cudaFreeHost(queue_.slots);
  (void)cudaFreeHost(num_taken_);
  (void)cudaSetDevice(previous);
}

bool SoftwareNic::take() {
  const RailDescriptor& slot = queue_.slots[next_ticket_ % kDepth];
  // pairs with: detail::post_rail — the descriptor, and the bytes that it names.
  if (__atomic_load_n(&slot.sequence, __ATOMIC_ACQUIRE) != next_ticket_ + 1) return false;
  const RailDescriptor op = slot;
  carry_out(op);
  ++next_ticket_;
  // pairs with: detail::post_rail, which may now fill the slot again; and quiet — the work is on its stream.
  __atomic_store_n(num_taken_, next_ticket_, __ATOMIC_RELEASE);
  return true;
}

void SoftwareNic::carry_out(const RailDescriptor& op) {
  const int queue = op.peer * num_qps_ + op.qp;
  const auto stream =
      static_cast<cudaStream_t>(streams_[static_cast<size_t>(queue) % streams_.size()]);
  uint8_t* dst = peer_bases_[static_cast<size_t>(op.peer)] + op.dst_offset;
  if (op.num_bytes > 0) {
    num_bytes_[queue] += op.num_bytes;
    check(cudaMemcpyAsync(dst, reinterpret_cast<const void*>(op.src), op.num_bytes,
                          cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
    return;
  }
  // Default flags: after all earlier work of the stream, visible to the system.
  const int status = reinterpret_cast<WriteValue>(write_value_)(
      stream, reinterpret_cast<unsigned long long>(dst), op.value, 0);
  if (status != 0) {
    throw std::runtime_error("software NIC: cuStreamWriteValue64 failed with " +
                             std::to_string(status));
  }
}

void SoftwareNic::run() {
  try {
    check(cudaSetDevice(device_), "cudaSetDevice");
    int num_idle = 0;
    while (!is_stopping_) {
      if (take()) {
        num_idle = 0;
      } else if (++num_idle > kSpins) {
        std::this_thread::sleep_for(kSleep);
      }
    }
  } catch (const std::exception& error) {
    // Nothing more is delivered: the peers' waits end with this rank's name, and quiet() says why.
    failure_ = error.what();
    has_failed_ = true;
  }
}

void SoftwareNic::quiet() {
  uint64_t num_posted = 0;
  check(cudaMemcpy(&num_posted, queue_.num_posted, sizeof(num_posted), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::nanoseconds(queue_.timeout_ns);
  while (__atomic_load_n(num_taken_, __ATOMIC_ACQUIRE) != num_posted) {
    if (has_failed_) throw std::runtime_error(failure_);
    if (std::chrono::steady_clock::now() > deadline) {
      throw std::runtime_error(
          "software NIC: descriptors were given up; the Buffer cannot be reset");
    }
    std::this_thread::sleep_for(kSleep);
  }
  for (void* stream : streams_) {
    check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
  }
}

}  // namespace deep_comm
