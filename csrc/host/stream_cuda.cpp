#include "host/stream_cuda.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "host/check_cuda.hpp"
#include "host/interrupt.hpp"

namespace deep_comm {

namespace {

cudaStream_t as_stream(uint64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// The driver's answer takes less than half of the runtime's time, and is asked for in most calls.
using CaptureQuery = CUresult (*)(CUstream, CUstreamCaptureStatus*);

// Null: the runtime is asked.
CaptureQuery find_capture_query() {
  void* found = nullptr;
#if CUDART_VERSION >= 12050
  cudaDriverEntryPointQueryResult result;
  const bool is_there =
      cudaGetDriverEntryPointByVersion("cuStreamIsCapturing", &found, 12000, cudaEnableDefault,
                                       &result) == cudaSuccess &&
      result == cudaDriverEntryPointSuccess;
  if (!is_there) {
    cudaGetLastError();
    found = nullptr;
  }
#endif
  return reinterpret_cast<CaptureQuery>(found);
}

// False: the runtime must be asked.
bool ask_driver(uint64_t stream, CUstreamCaptureStatus* status) {
  static const CaptureQuery query = find_capture_query();
  return query != nullptr && query(as_stream(stream), status) == CUDA_SUCCESS;
}

// Idle events by device. Never destroyed: at exit the driver may be gone before this module.
std::vector<cudaEvent_t>& pool_of(int device) {
  static auto& pools = *new std::vector<std::vector<cudaEvent_t>>();
  if (static_cast<size_t>(device) >= pools.size()) pools.resize(device + 1);
  return pools[device];
}

// Without timing. Its end returns it to its device's pool instead of destroying it: CUDA events cost
// more to make than to record. The pool is not locked; the interpreter's lock guards it.
class CudaEvent final : public Event {
 public:
  explicit CudaEvent(int device) : device_(device) {
    std::vector<cudaEvent_t>& pool = pool_of(device);
    if (!pool.empty()) {
      event_ = pool.back();
      pool.pop_back();
      return;
    }
    const CudaDeviceScope scope(device);
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  // Streams that were told to wait keep waiting for what was recorded then, whatever the event does
  // next.
  ~CudaEvent() override { pool_of(device_).push_back(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(uint64_t stream) override {
    check(cudaEventRecord(event_, as_stream(stream)), "cudaEventRecord");
  }
  void wait(uint64_t stream) const override {
    check(cudaStreamWaitEvent(as_stream(stream), event_, 0), "cudaStreamWaitEvent");
  }
  void synchronize() const override {
    const CudaCaptureLeave leave;
    InterruptWatch interrupts;
    cudaError_t status = cudaEventQuery(event_);
    while (status == cudaErrorNotReady) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      interrupts.look();
      status = cudaEventQuery(event_);
    }
    check(status, "cudaEventQuery");
  }
  bool has_passed() const override {
    const CudaCaptureLeave leave;
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) return false;
    check(status, "cudaEventQuery");
    return true;
  }

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
};

}  // namespace

CudaDeviceScope::CudaDeviceScope(int device) : previous_(cuda_current_device()), device_(device) {
  if (previous_ != device_) check(cudaSetDevice(device_), "cudaSetDevice");
}

CudaDeviceScope::~CudaDeviceScope() {
  if (previous_ != device_) cudaSetDevice(previous_);
}

CudaCaptureLeave::CudaCaptureLeave() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  mode_ = static_cast<int>(mode);
}

CudaCaptureLeave::~CudaCaptureLeave() {
  auto mode = static_cast<cudaStreamCaptureMode>(mode_);
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

CudaStreams::CudaStreams(int device) : device_(device) {
  if (device >= 0) return;
  throw std::invalid_argument("device = " + std::to_string(device) + ", must be >= 0");
}

bool CudaStreams::is_device_current() const { return cuda_current_device() == device_; }

int CudaStreams::make_device_current() {
  const int previous = cuda_current_device();
  check(cudaSetDevice(device_), "cudaSetDevice");
  return previous;
}

void CudaStreams::restore_device(int previous) { (void)cudaSetDevice(previous); }

bool CudaStreams::is_capturing(uint64_t stream) const {
  CUstreamCaptureStatus known = CU_STREAM_CAPTURE_STATUS_NONE;
  if (ask_driver(stream, &known)) return known != CU_STREAM_CAPTURE_STATUS_NONE;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(as_stream(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// The default stream cannot be asked while another one of the device captures; it takes part in none.
uint64_t CudaStreams::capture_of(uint64_t stream) const {
  CUstreamCaptureStatus known = CU_STREAM_CAPTURE_STATUS_NONE;
  if (ask_driver(stream, &known) && known == CU_STREAM_CAPTURE_STATUS_NONE) return 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(as_stream(stream), &status, &id) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

std::shared_ptr<Event> CudaStreams::make_event() { return std::make_shared<CudaEvent>(device_); }

void CudaStreams::fill(uintptr_t address, uint8_t byte, size_t num_bytes, uint64_t stream) {
  check(cudaMemsetAsync(reinterpret_cast<void*>(address), byte, num_bytes, as_stream(stream)),
        "cudaMemsetAsync");
}

void CudaStreams::synchronize() {
  const CudaDeviceScope scope(device_);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

int cuda_current_device() {
  int device = -1;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

}  // namespace deep_comm
