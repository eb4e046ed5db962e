#include "host/software_nic_cuda.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "host/check_cuda.hpp"
#include "host/interrupt.hpp"

namespace deep_comm {
namespace {

// cuStreamWriteValue64, by its address: the module does not link the driver.
using WriteValue = int (*)(cudaStream_t stream, unsigned long long address,
                           unsigned long long value, unsigned int flags);

// cuStreamBatchMemOp, the same.
using WriteBatch = int (*)(cudaStream_t stream, unsigned int count,
                           CUstreamBatchMemOpParams* params, unsigned int flags);
constexpr size_t kMaxBatch = 64;

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// Polls before the thread gives its core away, and how long it then sleeps.
constexpr int kSpins = 20'000;
constexpr auto kSleep = std::chrono::microseconds(20);
// A caller waits for a kernel: it asks the driver, which locks the context, as rarely as this, and
// gives its core away when the kernel takes long.
constexpr auto kBetweenQueries = std::chrono::milliseconds(1);
constexpr auto kSpinTime = std::chrono::milliseconds(10);
constexpr size_t kWordBytes = 128;  // a line each

// Pinned, zeroed, and reached by kernels at the same address.
void* allocate_on_host(size_t num_bytes) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, num_bytes, cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  return memset(memory, 0, num_bytes);
}

}  // namespace

void SoftwareNic::FreeOnHost::operator()(void* memory) const { (void)cudaFreeHost(memory); }
void SoftwareNic::FreeOnDevice::operator()(void* memory) const { (void)cudaFree(memory); }
void SoftwareNic::DestroyStream::operator()(void* stream) const {
  (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}

SoftwareNic::SoftwareNic(int device, std::vector<uint8_t*> peer_bases, int num_qps,
                         uint64_t* num_bytes, uint64_t timeout_ns, const RailOptions& options)
    : device_(device),
      peer_bases_(std::move(peer_bases)),
      num_qps_(num_qps),
      num_bytes_(num_bytes),
      backlog_(static_cast<int>(peer_bases_.size()) * num_qps, options.nic_bytes_per_s, kAheadNs),
      is_paced_(options.nic_bytes_per_s > 0),
      is_alone_(options.is_alone) {
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", &write_value_, 12000,
                                         cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess || write_value_ == nullptr) {
    throw std::runtime_error("software NIC: this driver has no cuStreamWriteValue64");
  }
  // Without a speed: quicker, no more.
  if (cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &write_batch_, 12000,
                                       cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    write_batch_ = nullptr;
    if (is_paced_) throw std::runtime_error("software NIC: a speed needs cuStreamBatchMemOp");
  }
  slots_.reset(allocate_on_host(sizeof(RailDescriptor) * kDepth));
  host_words_.reset(allocate_on_host(4 * kWordBytes));
  void* counts = nullptr;
  check(cudaMalloc(&counts, 2 * kWordBytes), "cudaMalloc");
  device_words_.reset(counts);
  check(cudaMemset(counts, 0, 2 * kWordBytes), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  num_taken_ = static_cast<uint64_t*>(host_words_.get());
  num_ended_ = num_taken_ + kWordBytes / sizeof(uint64_t);
  clock_ = num_ended_ + kWordBytes / sizeof(uint64_t);
  queue_ = {.slots = static_cast<RailDescriptor*>(slots_.get()),
            .num_posted = static_cast<uint64_t*>(counts),
            .num_done = static_cast<uint32_t*>(counts) + kWordBytes / sizeof(uint32_t),
            .num_taken = num_taken_,
            .timeout_ns = timeout_ns,
            .has_given_up = reinterpret_cast<uint32_t*>(clock_ + kWordBytes / sizeof(uint64_t)),
            .launch = 0,
            .depth = kDepth};
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  const int num_queues = static_cast<int>(peer_bases_.size()) * num_qps_;
  const int num_streams =
      is_paced_ ? kPutStreams + kWordStreams : std::min(num_queues, kMaxStreams);
  for (int idx = 0; idx < num_streams; ++idx) {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
          "cudaStreamCreateWithPriority");
    streams_.emplace_back(stream);
  }
  waited_ns_.resize(streams_.size());
  thread_ = std::thread([this] { run(); });
}

SoftwareNic::~SoftwareNic() {
  // A failure here (a context already gone) has nobody to hear of it.
  int previous = 0;
  (void)cudaGetDevice(&previous);
  (void)cudaSetDevice(device_);
  // Kernels may have ended and left descriptors that a busy host's thread has not come to: this
  // rank's part is over, but peers wait for what they say.
  uint64_t num_posted = 0;
  if (cudaMemcpy(&num_posted, queue_.num_posted, sizeof(num_posted), cudaMemcpyDeviceToHost) ==
      cudaSuccess) {
    (void)has_issued(num_posted);
  }
  is_stopping_ = true;
  if (thread_.joinable()) thread_.join();
  tick(kNever);
  for (const Stream& stream : streams_) {
    (void)cudaStreamSynchronize(static_cast<cudaStream_t>(stream.get()));
  }
  (void)cudaSetDevice(previous);
}

bool SoftwareNic::take(uint64_t now) {
  const RailDescriptor& slot = queue_.slots[next_ticket_ % kDepth];
  uint64_t halves[RailDescriptor::kNumHalves];
  for (int idx = 0; idx < RailDescriptor::kNumHalves; ++idx) {
    // By detail::post_rail, in any order.
    halves[idx] = __atomic_load_n(&slot.halves[idx], __ATOMIC_ACQUIRE);
    if (halves[idx] >> 32 != RailDescriptor::number_of(next_ticket_)) return false;
    halves[idx] &= 0xffff'ffffu;
  }
  const RailRequest request{.what = halves[1] << 32 | halves[0],
                            .dst_offset = halves[3] << 32 | halves[2],
                            .num_bytes = static_cast<uint32_t>(halves[4]),
                            .peer = static_cast<int32_t>(halves[5]),
                            .qp = static_cast<int32_t>(halves[6])};
  if (request.peer == kRailDone) {
    last_done_ = std::max(last_done_, request.what);
  } else {
    const int queue_idx = request.peer * num_qps_ + request.qp;
    const bool is_put = request.num_bytes > 0;
    num_bytes_[queue_idx] += request.num_bytes;
    backlog_.push(queue_idx, {peer_bases_[static_cast<size_t>(request.peer)] + request.dst_offset,
                              is_put ? reinterpret_cast<const uint8_t*>(request.what) : nullptr,
                              request.num_bytes, is_put ? 0 : request.what, now});
  }
  ++next_ticket_;
  // pairs with: detail::post_rail, which may now fill the slot again.
  __atomic_store_n(num_taken_, next_ticket_, __ATOMIC_RELEASE);
  return true;
}

size_t SoftwareNic::stream_idx_of(int queue_idx) const {
  if (!is_paced_) return static_cast<size_t>(queue_idx) % streams_.size();
  const int qp = queue_idx % num_qps_;
  const bool has_rows =
      qp < std::max(1, num_qps_ / 2);  // as device/channel/rail.cuh shares them out
  return static_cast<size_t>(has_rows ? qp % kPutStreams : kPutStreams + qp % kWordStreams);
}

void SoftwareNic::issue(const NicOp& op, int queue_idx) {
  const auto stream = static_cast<cudaStream_t>(streams_[stream_idx_of(queue_idx)].get());
  if (stream != words_stream_ || words_.size() + 2 > kMaxBatch) flush();
  words_stream_ = stream;
  const uint64_t now = now_ns();
  tick(now);
  uint64_t& waited_ns = waited_ns_[stream_idx_of(queue_idx)];
  if (is_paced_ && op.at_ns > now && op.at_ns > waited_ns) {
    last_at_ = std::max(last_at_, op.at_ns);
    waited_ns = op.at_ns;
    words_.push_back({clock_, op.at_ns, true});
  }
  if (op.num_bytes > 0) {
    flush();
    check(cudaMemcpyAsync(op.dst, op.src, op.num_bytes, cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
    return;
  }
  words_.push_back({op.dst, op.value, false});
}

void SoftwareNic::flush() {
  if (words_.empty()) return;
  const auto stream = static_cast<cudaStream_t>(words_stream_);
  if (is_paced_ || (words_.size() > 1 && write_batch_ != nullptr)) {
    CUstreamBatchMemOpParams params[kMaxBatch] = {};
    for (size_t idx = 0; idx < words_.size(); ++idx) {
      const WordOp& op = words_[idx];
      if (op.is_wait) {
        params[idx].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
        params[idx].waitValue.address = reinterpret_cast<CUdeviceptr>(op.word);
        params[idx].waitValue.value64 = op.value;
        params[idx].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
      } else {
        params[idx].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
        params[idx].writeValue.address = reinterpret_cast<CUdeviceptr>(op.word);
        params[idx].writeValue.value64 = op.value;
        params[idx].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
      }
    }
    const int status = reinterpret_cast<WriteBatch>(write_batch_)(
        stream, static_cast<unsigned int>(words_.size()), params, 0);
    if (status == 0) words_.clear();
    if (status != 0 && is_paced_) {
      throw std::runtime_error("software NIC: cuStreamBatchMemOp failed with " +
                               std::to_string(status));
    }
    if (status != 0) write_batch_ = nullptr;  // one by one then, from now on
  }
  for (const WordOp& op : words_) write_value(stream, op.word, op.value);
  words_.clear();
}

void SoftwareNic::tick(uint64_t now) {
  // Several threads do: where it goes back a little, it soon goes on.
  if (is_paced_) __atomic_store_n(clock_, now, __ATOMIC_RELEASE);
}

void SoftwareNic::run() {
  try {
    check(cudaSetDevice(device_), "cudaSetDevice");
    int num_idle = 0;
    while (!is_stopping_) {
      bool has_moved = false;
      const uint64_t now = now_ns();
      tick(now);
      for (int count = 0; count < 512 && take(now); ++count) has_moved = true;
      // One step of each queue, then a look at what came meanwhile: it may be put together.
      has_moved |=
          backlog_.advance(now, [this](int queue_idx, const NicOp& op) { issue(op, queue_idx); });
      flush();
      if (backlog_.is_empty()) {
        num_issued_.store(next_ticket_, std::memory_order_release);
        num_done_.store(last_done_, std::memory_order_release);
      }
      if (has_moved || !backlog_.is_empty() || now < last_at_) {
        num_idle = 0;
      } else if (++num_idle > kSpins) {
        std::this_thread::sleep_for(kSleep);
      }
    }
  } catch (const std::exception& error) {
    // Nothing more is delivered: the peers' waits end with this rank's name, and quiet() says why.
    failure_ = error.what();
    has_failed_ = true;
    tick(kNever);
  }
}

void SoftwareNic::see_through(void* stream, uint64_t launch) {
  const auto as_stream = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(as_stream, &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) return;
  write_value(as_stream, num_ended_, launch);
  const auto begun = std::chrono::steady_clock::now();
  auto queried = begun;
  InterruptWatch interrupts;
  while (true) {
    check_sound();
    tick(now_ns());
    // Ranks that are threads share a driver: one's lock may keep another's NIC from its calls.
    if (is_alone_ && num_done_.load(std::memory_order_acquire) >= launch) return;
    if (__atomic_load_n(num_ended_, __ATOMIC_ACQUIRE) >= launch) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - queried >= kBetweenQueries) {  // a kernel that failed never writes its word
      queried = now;
      const cudaError_t status = cudaStreamQuery(as_stream);
      if (status != cudaErrorNotReady) return check(status, "cudaStreamQuery");
    }
    if (now - begun >= kSpinTime) {
      interrupts.look();
      std::this_thread::sleep_for(kSleep);
    } else {
      std::this_thread::yield();
    }
  }
}

void SoftwareNic::write_value(void* stream, void* word, uint64_t value) const {
  // Default flags: after all earlier work of the stream, visible to the system.
  const int status = reinterpret_cast<WriteValue>(write_value_)(
      static_cast<cudaStream_t>(stream), reinterpret_cast<unsigned long long>(word), value, 0);
  if (status != 0) {
    throw std::runtime_error("software NIC: cuStreamWriteValue64 failed with " +
                             std::to_string(status));
  }
}

bool SoftwareNic::is_sound() const {
  return !has_failed_ && __atomic_load_n(queue_.has_given_up, __ATOMIC_ACQUIRE) == 0;
}

void SoftwareNic::check_sound() const {
  if (is_sound()) return;
  if (has_failed_) throw std::runtime_error(failure_);
  throw std::runtime_error(
      "software NIC: its thread has not run for the whole timeout, and kernels have dropped what "
      "they sent; the Buffer cannot be used, nor reset");
}

bool SoftwareNic::has_issued(uint64_t num_posted) const {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::nanoseconds(queue_.timeout_ns);
  while (num_issued_.load(std::memory_order_acquire) != num_posted) {
    if (!is_sound() || std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kSleep);
  }
  return true;
}

void SoftwareNic::quiet() {
  uint64_t num_posted = 0;
  check(cudaMemcpy(&num_posted, queue_.num_posted, sizeof(num_posted), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  const bool is_idle = has_issued(num_posted);
  check_sound();
  if (!is_idle) throw std::runtime_error("software NIC: it has not caught up within the timeout");
  for (const Stream& stream : streams_) {
    check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.get())), "cudaStreamSynchronize");
  }
  // A kernel that gave up may have left it half way.
  check(cudaMemset(queue_.num_done, 0, sizeof(uint32_t)), "cudaMemset");
  check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

}  // namespace deep_comm
