// Streams and events of CUDA, for the host's hot path: no call here waits or allocates in the steady
// state. Streams are cudaStream_t as integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "host/streams.hpp"

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

class CudaStreams final : public StreamTarget {
 public:
  explicit CudaStreams(int device);

  bool has_streams() const override { return true; }
  bool is_device_current() const override;
  int make_device_current() override;
  void restore_device(int previous) override;
  bool is_capturing(uint64_t stream) const override;
  uint64_t capture_of(uint64_t stream) const override;
  std::shared_ptr<Event> make_event() override;
  void fill(uintptr_t address, uint8_t byte, size_t num_bytes, uint64_t stream) override;
  void synchronize() override;

 private:
  int device_;
};

int cuda_current_device();

}  // namespace deep_comm
