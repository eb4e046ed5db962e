// torch's tensors from native code, without linking torch: what a call of a few microseconds looks
// at and makes.
//
// A tensor is read through the functions that torch offers for this (DLPack's C exchange API,
// Tensor.__dlpack_c_exchange_api__), some 20 ns instead of 100 an attribute. New ones come from
// Python functions that torch's compiler calls as well, because a tensor that DLPack allocates is
// foreign memory to torch: record_stream would do nothing for its owner.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>

#include "bind/dlpack.hpp"

namespace deep_comm {

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

// What torch has put into a capsule.
inline const DlExchangeApi* exchange_api_of(const pybind11::object& exchange_api) {
  auto* api = static_cast<const DlExchangeApi*>(
      PyCapsule_GetPointer(exchange_api.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw pybind11::error_already_set();
  while (api != nullptr && api->major_version != 1) api = api->previous;
  if (api == nullptr || api->view == nullptr || api->to_python == nullptr ||
      api->current_stream == nullptr) {
    throw std::invalid_argument("exchange_api is not of DLPack 1");
  }
  return api;
}

// A plain tensor as torch describes it; valid while the tensor is.
class TensorView {
 public:
  bool is(DlDataType wanted) const {
    return view_.dtype.code == wanted.code && view_.dtype.bits == wanted.bits &&
           view_.dtype.lanes == 1;
  }
  int num_dims() const { return view_.num_dims; }
  int64_t extent(int dim) const { return view_.shape[dim]; }
  int64_t stride(int dim) const { return view_.strides[dim]; }
  int element_bytes() const { return view_.dtype.bits / 8; }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(view_.data) + view_.byte_offset; }
  bool is_empty() const {
    for (int dim = 0; dim < view_.num_dims; ++dim) {
      if (view_.shape[dim] == 0) return true;
    }
    return false;
  }
  bool is_contiguous() const {
    int64_t stride = 1;
    for (int dim = view_.num_dims - 1; dim >= 0; --dim) {
      if (view_.shape[dim] == 0) return true;
      if (view_.shape[dim] != 1 && view_.strides[dim] != stride) return false;
      stride *= view_.shape[dim];
    }
    return true;
  }

 private:
  friend class TorchTensors;
  DlTensor view_;
};

inline constexpr DlDataType kDlInt32 = {0, 32, 1};
inline constexpr DlDataType kDlInt64 = {0, 64, 1};
inline constexpr DlDataType kDlFloat32 = {2, 32, 1};
inline constexpr DlDataType kDlBfloat16 = {4, 16, 1};

// A tensor that is to be made: Python's own objects, so that no call has to build them.
struct TensorForm {
  pybind11::object shape;
  pybind11::object strides;
  pybind11::object dtype;
};

class TorchTensors {
 public:
  // empty: (shape, strides, dtype) -> an ordinary tensor on the current device.
  // part: (tensor, shape, strides, offset) -> a tensor over elements of another.
  TorchTensors(pybind11::object tensor_type, const pybind11::object& exchange_api,
               pybind11::object empty, pybind11::object part, int device_type, int device_index)
      : type_(std::move(tensor_type)),
        empty_(std::move(empty)),
        part_(std::move(part)),
        device_type_(device_type),
        device_index_(device_index) {
    api_ = exchange_api_of(exchange_api);
  }

  // False for whatever is not a plain tensor on the device; no error is left behind.
  bool view(PyObject* object, TensorView* out) const {
    if (Py_TYPE(object) != reinterpret_cast<PyTypeObject*>(type_.ptr())) return false;
    if (api_->view(object, &out->view_) != 0) {
      PyErr_Clear();
      return false;
    }
    const DlDevice& device = out->view_.device;
    return device.type == device_type_ && device.index == device_index_;
  }

  // The same for contiguous tensors of a form.
  bool matrix(PyObject* object, DlDataType dtype, int64_t num_rows, int64_t num_columns,
              TensorView* out) const {
    return view(object, out) && out->is(dtype) && out->num_dims() == 2 &&
           (num_rows < 0 || out->extent(0) == num_rows) &&
           (num_columns < 0 || out->extent(1) == num_columns) && out->is_contiguous();
  }
  bool vector(PyObject* object, DlDataType dtype, int64_t size, TensorView* out) const {
    return view(object, out) && out->is(dtype) && out->num_dims() == 1 && out->extent(0) == size &&
           out->is_contiguous();
  }

  // Raises what torch raises.
  pybind11::object empty(const TensorForm& form, uintptr_t* address) const {
    return made(form.shape.ptr(), form.strides.ptr(), form.dtype.ptr(), address);
  }
  pybind11::object empty_matrix(int64_t num_rows, int64_t num_columns,
                                const pybind11::object& dtype, uintptr_t* address) const {
    return empty(matrix_form(num_rows, num_columns, dtype), address);
  }
  static TensorForm matrix_form(int64_t num_rows, int64_t num_columns,
                                const pybind11::object& dtype) {
    return {pair(num_rows, num_columns), pair(num_columns, 1), dtype};
  }
  // Of a plain tensor.
  uintptr_t address_of(const pybind11::object& tensor) const {
    TensorView view;
    // A version of torch may not know how to describe a type that others do.
    if (this->view(tensor.ptr(), &view)) return view.address();
    return tensor.attr("data_ptr")().template cast<uintptr_t>();
  }
  pybind11::object part(const pybind11::object& tensor, const TensorForm& form,
                        PyObject* offset) const {
    PyObject* const arguments[] = {tensor.ptr(), form.shape.ptr(), form.strides.ptr(), offset};
    return checked(PyObject_Vectorcall(part_.ptr(), arguments, 4, nullptr));
  }

  // A contiguous matrix over memory of the device that `owner` keeps, as long as the last tensor
  // over it lives. record_stream does nothing for such tensors.
  pybind11::object matrix_over(uintptr_t address, int64_t num_rows, int64_t num_columns,
                               DlDataType dtype, pybind11::object owner) const {
    return handed_over(detail::make_managed_matrix<DlManagedTensorVersioned>(
                           address, num_rows, num_columns, dtype, {device_type_, device_index_}),
                       std::move(owner));
  }
  // The same of a vector.
  pybind11::object vector_over(uintptr_t address, int64_t size, DlDataType dtype,
                               pybind11::object owner) const {
    auto vector = detail::make_managed_matrix<DlManagedTensorVersioned>(
        address, size, 1, dtype, {device_type_, device_index_});
    vector->managed.tensor.num_dims = 1;
    return handed_over(std::move(vector), std::move(owner));
  }

  // Of the device.
  uint64_t current_stream() const {
    void* stream = nullptr;
    if (api_->current_stream(device_type_, device_index_, &stream) != 0) {
      throw pybind11::error_already_set();
    }
    return reinterpret_cast<uint64_t>(stream);
  }

  int device_index() const { return device_index_; }

 private:
  using Managed = detail::ManagedMatrix<DlManagedTensorVersioned>;
  pybind11::object handed_over(std::unique_ptr<Managed> matrix, pybind11::object owner) const {
    matrix->managed.major_version = api_->major_version;
    matrix->managed.minor_version = 0;
    matrix->owner = owner.release().ptr();
    void* made = nullptr;
    const int status = api_->to_python(&matrix->managed, &made);
    // Whoever failed may have freed it or not: at worst these bytes and their owner stay.
    matrix.release();
    if (status != 0) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(static_cast<PyObject*>(made));
  }

  static pybind11::object checked(PyObject* made) {
    if (made == nullptr) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(made);
  }
  static pybind11::object pair(int64_t first, int64_t second) {
    auto tuple = checked(PyTuple_New(2));
    PyTuple_SET_ITEM(tuple.ptr(), 0, checked(PyLong_FromLongLong(first)).release().ptr());
    PyTuple_SET_ITEM(tuple.ptr(), 1, checked(PyLong_FromLongLong(second)).release().ptr());
    return tuple;
  }
  pybind11::object made(PyObject* shape, PyObject* strides, PyObject* dtype,
                        uintptr_t* address) const {
    PyObject* const arguments[] = {shape, strides, dtype};
    auto tensor = checked(PyObject_Vectorcall(empty_.ptr(), arguments, 3, nullptr));
    *address = address_of(tensor);
    return tensor;
  }

  pybind11::object type_, empty_, part_;
  const DlExchangeApi* api_;
  int device_type_;
  int device_index_;
};

}  // namespace deep_comm
