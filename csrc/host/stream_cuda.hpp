// Order among CUDA streams, for the host's hot path: no call here waits or allocates in the steady
// state. Streams are cudaStream_t as integers.
#pragma once

#include <cstdint>
#include <memory>

struct CUevent_st;

namespace deep_comm {

// Makes `device` current; costs one cheap query when it is already.
class CudaDeviceScope {
 public:
  explicit CudaDeviceScope(int device);
  ~CudaDeviceScope();
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;

 private:
  int previous_;
  int device_;
};

// While one lives this thread may ask how far work is, although a thread records a graph: in torch's
// usual mode of capture the question would fail, and end the capture.
class CudaCaptureLeave {
 public:
  CudaCaptureLeave();
  ~CudaCaptureLeave();
  CudaCaptureLeave(const CudaCaptureLeave&) = delete;
  CudaCaptureLeave& operator=(const CudaCaptureLeave&) = delete;

 private:
  int mode_;  // of this thread before
};

// An event without timing. Its end returns it to its device's pool instead of destroying it: CUDA
// events cost more to make than to record. Not for use by several threads at once; the pool is not
// locked, the GIL guards it.
class CudaEvent {
 public:
  explicit CudaEvent(int device);
  ~CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(uint64_t stream);
  // Work that `stream` gets from now on waits for what was recorded.
  void wait(uint64_t stream) const;
  // The calling thread waits for what was recorded; a signal's handler may end that (Interrupted).
  void synchronize() const;
  // Whether what was recorded has happened.
  bool has_passed() const;
  // Work that `then` gets from now on waits for all that `first` has. The device must be current.
  void order(uint64_t first, uint64_t then) {
    record(first);
    wait(then);
  }

 private:
  int device_;
  CUevent_st* event_;
};

// An event at this point of a stream of `device`, whichever device is current. Empty while the
// stream is capturing: an event of a capture means nothing outside of it.
std::unique_ptr<CudaEvent> cuda_mark(int device, uint64_t stream);
bool cuda_is_capturing(uint64_t stream);
// Which of the process's captures the stream takes part in; 0: none.
uint64_t cuda_capture_id(uint64_t stream);
int cuda_current_device();
bool cuda_is_current(int device);
// Whether `device` is current and `stream`, of it, is not capturing.
bool cuda_is_ready(int device, uint64_t stream);

}  // namespace deep_comm
