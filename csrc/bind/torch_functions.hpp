// torch's own functions that make tensors, called without Python between: half of what a small
// tensor takes the host is Python's part of it.
//
// This package links no torch. The functions are looked up by name in the libraries that are there
// already: the C functions that torch offers to libraries built apart from it (aoti_torch_*), and
// two of C++, which those lack, by their whole signature. A torch that lacks one, or whose function
// gives something else than asked for, is served by Python's (torch_tensors.hpp).
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "bind/tensor_forms.hpp"

namespace deep_comm {

class TorchFunctions;

// A tensor of torch's that Python need not know of yet.
class NativeTensor {
 public:
  NativeTensor() = default;
  NativeTensor(NativeTensor&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)), end_(other.end_) {}
  NativeTensor& operator=(NativeTensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(end_, other.end_);
    return *this;
  }
  ~NativeTensor() {
    if (handle_ != nullptr) end_(handle_);
  }
  explicit operator bool() const { return handle_ != nullptr; }

 private:
  friend class TorchFunctions;
  using End = int32_t (*)(void* handle);
  NativeTensor(void* handle, End end) : handle_(handle), end_(end) {}
  void* handle_ = nullptr;  // at::Tensor*
  End end_ = nullptr;
};

// Functions return an empty tensor, or null, where torch has failed; no Python error is set.
class TorchFunctions {
 public:
  // Null: something is not there.
  static const TorchFunctions* find(int device_type) {
    static const TorchFunctions of_host(1), of_cuda(2);
    const TorchFunctions& found = device_type == 1 ? of_host : of_cuda;
    return found.is_complete() ? &found : nullptr;
  }

  // By the name that torch has for it in Python; -1: it has none here.
  static int32_t dtype(const std::string& name) {
    const auto code = look<int32_t (*)()>("libtorch_cpu.so", ("aoti_torch_dtype_" + name).c_str());
    return code == nullptr ? -1 : code();
  }

  NativeTensor empty(Extents extents, Extents strides, int32_t dtype, int device_index) const {
    void* place = ::operator new(sizeof(Made));
    try {
      const auto type = static_cast<int8_t>(dtype);
      if (empty_cuda_ != nullptr) {
        new (place)
            Made(empty_cuda_(extents, strides, type, Device{1, static_cast<int8_t>(device_index)}));
      } else {
        new (place) Made(empty_host_(extents, strides, type, false));
      }
    } catch (...) {
      ::operator delete(place);
      return {};
    }
    return {place, end_};
  }
  // Over bytes of another, which begins where its memory does, as elements of any type.
  NativeTensor part(const NativeTensor& pool, Extents extents, Extents strides, int32_t dtype,
                    int64_t offset_bytes) const {
    void* made = nullptr;
    if (pool_(pool.handle_, offset_bytes, dtype, static_cast<int64_t>(extents.size), extents.data,
              strides.data, &made) != 0) {
      return {};
    }
    return {made, end_};
  }
  uintptr_t address_of(const NativeTensor& tensor) const {
    void* address = nullptr;
    address_(tensor.handle_, &address);
    return reinterpret_cast<uintptr_t>(address);
  }
  PyObject* wrap(const NativeTensor& tensor) const { return wrap_(tensor.handle_); }

 private:
  // at::TensorBase, which is returned as classes are that have a destructor.
  struct Made {
    void* impl;
    explicit Made(void* made) : impl(made) {}
    Made(const Made&) = delete;
    ~Made() {}  // NOLINT: who has deleted the handle has ended the tensor
  };
  // c10::Device
  struct Device {
    int8_t type, index;
  };
  using EmptyHost = Made (*)(Extents, Extents, int8_t, bool);
  using EmptyCuda = Made (*)(Extents, Extents, int8_t, std::optional<Device>);
  using Pool = int32_t (*)(void*, int64_t, int32_t, int64_t, const int64_t*, const int64_t*,
                           void**);
  using Address = int32_t (*)(void*, void**);
  using Wrap = PyObject* (*)(const void*);  // THPVariable_Wrap

  explicit TorchFunctions(int device_type) {
    constexpr const char* kCpu = "libtorch_cpu.so";
    if (device_type == 1) {
      empty_host_ = look<EmptyHost>(
          kCpu, "_ZN2at6detail17empty_strided_cpuEN3c108ArrayRefIlEES3_NS1_10ScalarTypeEb");
    } else {
      empty_cuda_ = look<EmptyCuda>("libtorch_cuda.so",
                                    "_ZN2at6detail18empty_strided_cudaEN3c108ArrayRefIlEES3_NS1_"
                                    "10ScalarTypeESt8optionalINS1_6DeviceEE");
    }
    pool_ = look<Pool>(kCpu, "aoti_torch__alloc_from_pool");
    address_ = look<Address>(kCpu, "aoti_torch_get_data_ptr");
    end_ = look<NativeTensor::End>(kCpu, "aoti_torch_delete_tensor_object");
    wrap_ = look<Wrap>("libtorch_python.so", "_Z16THPVariable_WrapRKN2at10TensorBaseE");
  }
  bool is_complete() const {
    return (empty_host_ != nullptr || empty_cuda_ != nullptr) && pool_ != nullptr &&
           address_ != nullptr && end_ != nullptr && wrap_ != nullptr;
  }
  // In a library that this process has loaded; null: there is none.
  template <class Function>
  static Function look(const char* library, const char* name) {
    void* opened = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (opened == nullptr) return nullptr;
    void* found = dlsym(opened, name);
    dlclose(opened);
    return reinterpret_cast<Function>(found);
  }

  EmptyHost empty_host_ = nullptr;
  EmptyCuda empty_cuda_ = nullptr;
  Pool pool_ = nullptr;
  Address address_ = nullptr;
  NativeTensor::End end_ = nullptr;
  Wrap wrap_ = nullptr;
};

}  // namespace deep_comm
