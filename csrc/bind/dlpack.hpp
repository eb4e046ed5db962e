// DLPack capsules over memory that something else owns: the cheapest way to hand torch a tensor.
//
// The structures are the exchange format's own, written down from its specification: DLPack 0.x,
// which every version of torch takes, in a capsule; DLPack 1.x where it is handed over as it is.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "host/tensor.hpp"

namespace deep_comm {

struct DlDevice {
  int32_t type;  // 1: host, 2: CUDA
  int32_t index;
};

struct DlDataType {
  uint8_t code;  // 0: int, 1: uint, 2: float, 4: bfloat16, 5: complex, 6: bool; 7 and up: narrow
  uint8_t bits;
  uint16_t lanes;
};

struct DlTensor {
  void* data;
  DlDevice device;
  int32_t num_dims;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};

struct DlManagedTensorVersioned {
  uint32_t major_version;
  uint32_t minor_version;
  void* context;
  void (*deleter)(DlManagedTensorVersioned*);
  uint64_t flags;  // 0: may be written
  DlTensor tensor;
};

static_assert(sizeof(DlTensor) == 48 && sizeof(DlManagedTensor) == 64 &&
              sizeof(DlManagedTensorVersioned) == 80);

// DLPackExchangeAPI of DLPack 1.x.
struct DlExchangeApi {
  uint32_t major_version;
  uint32_t minor_version;
  const DlExchangeApi* previous;
  void* allocate;
  void* from_python;
  int (*to_python)(DlManagedTensorVersioned* tensor, void** made);  // not ordered on any stream
  int (*view)(void* tensor, DlTensor* view);  // borrowed; -1: a Python error is set
  int (*current_stream)(int32_t device_type, int32_t device_index, void** stream);
};

// DLPack's description of a tensor over memory, in either form of the format.
template <class Managed>
struct ManagedTensor {
  Managed managed{};
  std::array<int64_t, kMaxTensorDims> shape, strides;
  std::shared_ptr<void> owner;

  static std::unique_ptr<ManagedTensor> of(uintptr_t address, const TensorSpec& spec,
                                           DlDataType type, DlDevice device,
                                           std::shared_ptr<void> owner) {
    auto made = std::make_unique<ManagedTensor>();
    made->shape = spec.shape;
    made->strides = spec.strides;
    made->owner = std::move(owner);
    made->managed.tensor = {.data = reinterpret_cast<void*>(address),
                            .device = device,
                            .num_dims = spec.num_dims,
                            .dtype = type,
                            .shape = made->shape.data(),
                            .strides = made->strides.data(),
                            .byte_offset = 0};
    made->managed.context = made.get();
    made->managed.deleter = &destroy;
    return made;
  }

 private:
  // Called by whoever drops the last tensor: any thread, with or without the interpreter's lock.
  static void destroy(Managed* managed) {
    if (Py_IsInitialized() == 0) return;  // at exit the memory goes with the process
    const PyGILState_STATE state = PyGILState_Ensure();
    {
      const pybind11::error_scope kept;  // the owner's end must not eat an error on its way
      delete static_cast<ManagedTensor*>(managed->context);
    }
    PyGILState_Release(state);
  }
};

// `owner` lives as long as the last tensor over the memory.
inline pybind11::object make_dlpack_capsule(uintptr_t address, const TensorSpec& spec,
                                            DlDataType type, DlDevice device,
                                            std::shared_ptr<void> owner) {
  static constexpr char kName[] = "dltensor";
  auto described =
      ManagedTensor<DlManagedTensor>::of(address, spec, type, device, std::move(owner));
  pybind11::capsule capsule(&described->managed, kName, [](PyObject* ended) {
    // A consumer renames the capsule; one that still has its name was never consumed.
    if (PyCapsule_IsValid(ended, kName) == 0) return;
    auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(ended, kName));
    managed->deleter(managed);
  });
  described.release();
  return capsule;
}

}  // namespace deep_comm
