// DLPack capsules over memory that something else owns: the cheapest way to hand torch a tensor.
//
// The structures are the exchange format's own, written down from its specification: DLPack 0.x,
// which every version of torch takes, in a capsule; DLPack 1.x where it is handed over as it is.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

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

namespace detail {

template <class Managed>
struct ManagedMatrix {
  Managed managed;
  int64_t shape[2];
  int64_t strides[2];
  PyObject* owner;

  // Called by whoever drops the last tensor: any thread, with or without the GIL.
  static void destroy(Managed* managed) {
    auto* self = static_cast<ManagedMatrix*>(managed->context);
    if (Py_IsInitialized() != 0) {  // at exit the memory goes with the process
      const PyGILState_STATE state = PyGILState_Ensure();
      PyObject *type, *value, *traceback;
      PyErr_Fetch(&type, &value, &traceback);  // the owner's end must not eat an error on its way
      Py_DECREF(self->owner);
      PyErr_Restore(type, value, traceback);
      PyGILState_Release(state);
    }
    delete self;
  }
};

inline constexpr char kDlpackName[] = "dltensor";

// [num_rows, num_columns], contiguous, at `address`; the owner is not set yet.
template <class Managed>
std::unique_ptr<ManagedMatrix<Managed>> make_managed_matrix(uintptr_t address, int64_t num_rows,
                                                            int64_t num_columns, DlDataType dtype,
                                                            DlDevice device) {
  auto matrix = std::make_unique<ManagedMatrix<Managed>>();
  matrix->shape[0] = num_rows;
  matrix->shape[1] = num_columns;
  matrix->strides[0] = num_columns;
  matrix->strides[1] = 1;
  matrix->managed.tensor = {.data = reinterpret_cast<void*>(address),
                            .device = device,
                            .num_dims = 2,
                            .dtype = dtype,
                            .shape = matrix->shape,
                            .strides = matrix->strides,
                            .byte_offset = 0};
  matrix->managed.context = matrix.get();
  matrix->managed.deleter = &ManagedMatrix<Managed>::destroy;
  return matrix;
}

}  // namespace detail

// A capsule of such a matrix; `owner` lives as long as the last tensor over it.
inline pybind11::object make_dlpack_matrix(uintptr_t address, int64_t num_rows, int64_t num_columns,
                                           DlDataType dtype, DlDevice device,
                                           pybind11::object owner) {
  auto matrix =
      detail::make_managed_matrix<DlManagedTensor>(address, num_rows, num_columns, dtype, device);
  PyObject* capsule = PyCapsule_New(&matrix->managed, detail::kDlpackName, [](PyObject* unused) {
    // A consumer renames the capsule; one that still has its name was never consumed.
    if (PyCapsule_IsValid(unused, detail::kDlpackName) == 0) return;
    auto* managed =
        static_cast<DlManagedTensor*>(PyCapsule_GetPointer(unused, detail::kDlpackName));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw pybind11::error_already_set();
  matrix->owner = owner.release().ptr();
  matrix.release();
  return pybind11::reinterpret_steal<pybind11::object>(capsule);
}

}  // namespace deep_comm
