#include "host/stream_cuda.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "host/interrupt.hpp"

namespace deep_comm {

namespace {

void check(cudaError_t status, const char* tried) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next launch check would report this failure a second time
  throw std::runtime_error(std::string(tried) + ": " + cudaGetErrorName(status) + " (" +
                           cudaGetErrorString(status) + ")");
}

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

// Idle events by device. Never destroyed: at exit the driver may be gone before this module.
std::vector<cudaEvent_t>& pool_of(int device) {
  static auto& pools = *new std::vector<std::vector<cudaEvent_t>>();
  if (static_cast<size_t>(device) >= pools.size()) pools.resize(device + 1);
  return pools[device];
}

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

CudaEvent::CudaEvent(int device) : device_(device), event_(nullptr) {
  if (device < 0)
    throw std::invalid_argument("device = " + std::to_string(device) + ", must be >= 0");
  std::vector<cudaEvent_t>& pool = pool_of(device);
  if (!pool.empty()) {
    event_ = pool.back();
    pool.pop_back();
    return;
  }
  CudaDeviceScope scope(device);
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

// Streams that were told to wait keep waiting for what was recorded then,
// whatever the event does next.
CudaEvent::~CudaEvent() { pool_of(device_).push_back(event_); }

void CudaEvent::record(uint64_t stream) {
  check(cudaEventRecord(event_, as_stream(stream)), "cudaEventRecord");
}

void CudaEvent::wait(uint64_t stream) const {
  check(cudaStreamWaitEvent(as_stream(stream), event_, 0), "cudaStreamWaitEvent");
}

void CudaEvent::synchronize() const {
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

bool CudaEvent::has_passed() const {
  const CudaCaptureLeave leave;
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) return false;
  check(status, "cudaEventQuery");
  return true;
}

std::unique_ptr<CudaEvent> cuda_mark(int device, uint64_t stream) {
  CudaDeviceScope scope(device);  // stream 0 is the current device's
  if (cuda_is_capturing(stream)) return nullptr;
  auto event = std::make_unique<CudaEvent>(device);
  event->record(stream);
  return event;
}

bool cuda_is_capturing(uint64_t stream) {
  static const CaptureQuery query = find_capture_query();
  CUstreamCaptureStatus known = CU_STREAM_CAPTURE_STATUS_NONE;
  if (query != nullptr && query(as_stream(stream), &known) == CUDA_SUCCESS) {
    return known != CU_STREAM_CAPTURE_STATUS_NONE;
  }
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(as_stream(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

uint64_t cuda_capture_id(uint64_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(as_stream(stream), &status, &id) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

bool cuda_is_current(int device) { return cuda_current_device() == device; }

bool cuda_is_ready(int device, uint64_t stream) {
  return cuda_current_device() == device && !cuda_is_capturing(stream);
}

int cuda_current_device() {
  int device = -1;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

}  // namespace deep_comm
