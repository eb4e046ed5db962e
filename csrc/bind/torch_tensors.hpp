// torch's tensors from native code, without linking torch: what a call of a few microseconds looks
// at and makes.
//
// A tensor is read through the functions that torch offers for this (DLPack's C exchange API,
// Tensor.__dlpack_c_exchange_api__), some 20 ns instead of 100 an attribute. New ones come from
// Python functions that torch's compiler calls as well, because a tensor that DLPack allocates is
// foreign memory to torch: record_stream would do nothing for its owner.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind/dlpack.hpp"
#include "bind/tensor_forms.hpp"
#include "bind/torch_functions.hpp"

namespace deep_comm {

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
  bool has(const TensorForm& form) const {
    const Extents extents = form.extents(), strides = form.strides();
    if (static_cast<size_t>(num_dims()) != extents.size) return false;
    for (int dim = 0; dim < num_dims(); ++dim) {
      if (extent(dim) != extents.data[dim] || stride(dim) != strides.data[dim]) return false;
    }
    return true;
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
    // Whoever has put a function of his own in the place of torch's wants it called.
    if (PyCFunction_CheckExact(empty_.ptr())) functions_ = TorchFunctions::find(device_type);
    if (functions_ != nullptr && !agrees()) functions_ = nullptr;
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
    if (functions_ != nullptr) {
      const int32_t code = code_of(form.dtype());
      const NativeTensor made =
          code < 0 ? NativeTensor()
                   : functions_->empty(form.extents(), form.strides(), code, device_index_);
      if (made) {
        *address = functions_->address_of(made);
        return checked(functions_->wrap(made));
      }
    }
    return made(form, address);
  }
  pybind11::object empty_matrix(int64_t num_rows, int64_t num_columns,
                                const pybind11::object& dtype, uintptr_t* address) const {
    return empty(matrix_form(num_rows, num_columns, dtype), address);
  }
  static TensorForm matrix_form(int64_t num_rows, int64_t num_columns,
                                const pybind11::object& dtype) {
    return {{num_rows, num_columns}, {num_columns, 1}, dtype};
  }
  // Of a plain tensor.
  uintptr_t address_of(const pybind11::object& tensor) const {
    TensorView view;
    // A version of torch may not know how to describe a type that others do.
    if (this->view(tensor.ptr(), &view)) return view.address();
    return tensor.attr("data_ptr")().template cast<uintptr_t>();
  }
  // Tensors of one allocation or, where this torch's functions are not known, of one each but for
  // parts. Raises what torch raises.
  template <size_t kCount>
  MadePieces<kCount> pieces(const TensorBlock<kCount>& block) const {
    MadePieces<kCount> made;
    if (functions_ != nullptr && pieces_of_one(block, &made)) return made;
    return apart(block,
                 [&](const TensorForm& form, uintptr_t* address) { return empty(form, address); });
  }
  // The same of one allocation each, as `empty` (form, address) makes them.
  template <size_t kCount, class Empty>
  MadePieces<kCount> apart(const TensorBlock<kCount>& block, const Empty& empty) const {
    MadePieces<kCount> made;
    for (size_t place = 0; place < kCount; ++place) {
      const auto& piece = block.pieces[place];
      if (!piece.is_there()) continue;
      if (!piece.is_part()) {
        made.tensors[place] = empty(piece.form, &made.addresses[place]);
        continue;
      }
      const size_t whole = static_cast<size_t>(piece.whole);
      made.tensors[place] = part(made.tensors[whole], piece.form, piece.offset_in_whole);
      made.addresses[place] =
          made.addresses[whole] + static_cast<uintptr_t>(piece.offset - block.pieces[whole].offset);
    }
    return made;
  }

  pybind11::object part(const pybind11::object& tensor, const TensorForm& form,
                        int64_t offset) const {
    const pybind11::tuple shape = form.shape(), strides = form.shape_strides();
    const pybind11::int_ begin(offset);
    PyObject* const arguments[] = {tensor.ptr(), shape.ptr(), strides.ptr(), begin.ptr()};
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

  // False: a function of torch's has failed.
  template <size_t kCount>
  bool pieces_of_one(const TensorBlock<kCount>& block, MadePieces<kCount>* out) const {
    const TorchFunctions& torch = *functions_;
    const int32_t word = code_of(block.word);
    if (word < 0) return false;
    const int64_t num_words = block.num_words(), step = 1;
    NativeTensor base = torch.empty({&num_words, 1}, {&step, 1}, word, device_index_);
    if (!base) return false;
    std::array<NativeTensor, kCount> parts;
    for (size_t place = 0; place < kCount; ++place) {
      const auto& piece = block.pieces[place];
      if (!piece.is_there() || static_cast<int>(place) == block.whole_piece) continue;
      const int32_t code = code_of(piece.form.dtype());
      if (code < 0) return false;
      parts[place] =
          torch.part(base, piece.form.extents(), piece.form.strides(), code, piece.offset);
      if (!parts[place]) return false;
    }
    if (block.whole_piece >= 0) parts[static_cast<size_t>(block.whole_piece)] = std::move(base);
    for (size_t place = 0; place < kCount; ++place) {
      if (!parts[place]) continue;
      out->addresses[place] = torch.address_of(parts[place]);
      out->tensors[place] = checked(torch.wrap(parts[place]));
    }
    return true;
  }

  // What torch's functions make is what is asked of them.
  bool agrees() const {
    namespace py = pybind11;
    try {
      const py::module_ torch = py::module_::import("torch");
      const py::object int32 = torch.attr("int32"), float32 = torch.attr("float32");
      TensorBlock<3> block(int32);
      block.put(0, TensorForm::vector(5, int32), sizeof(int32_t));
      block.put_part(1, 0, TensorForm::vector(2, int32), 3);
      block.put(2, {{2, 3}, {1, 2}, float32}, sizeof(float));
      MadePieces<3> made;
      if (!pieces_of_one(block, &made)) return false;
      const DlDataType dtypes[] = {kDlInt32, kDlInt32, kDlFloat32};
      for (size_t place = 0; place < 3; ++place) {
        TensorView seen;
        if (!view(made.tensors[place].ptr(), &seen) || !seen.is(dtypes[place]) ||
            !seen.has(block.pieces[place].form) || seen.address() != made.addresses[place] ||
            seen.address() != made.addresses[0] + block.pieces[place].offset) {
          return false;
        }
      }
      return made.addresses[0] != 0;
    } catch (py::error_already_set&) {
      return false;
    }
  }

  static pybind11::object checked(PyObject* made) {
    if (made == nullptr) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(made);
  }
  pybind11::object made(const TensorForm& form, uintptr_t* address) const {
    const pybind11::tuple shape = form.shape(), strides = form.shape_strides();
    PyObject* const arguments[] = {shape.ptr(), strides.ptr(), form.dtype().ptr()};
    auto tensor = checked(PyObject_Vectorcall(empty_.ptr(), arguments, 3, nullptr));
    *address = address_of(tensor);
    return tensor;
  }

  // torch's number of a type of its; -1: it has no name for it.
  int32_t code_of(const pybind11::object& dtype) const {
    for (const auto& [known, code] : codes_) {
      if (known.ptr() == dtype.ptr()) return code;
    }
    const std::string name = pybind11::str(dtype);  // torch.float32
    codes_.emplace_back(dtype, TorchFunctions::dtype(name.substr(name.find('.') + 1)));
    return codes_.back().second;
  }

  pybind11::object type_, empty_, part_;
  const DlExchangeApi* api_;
  int device_type_;
  int device_index_;
  const TorchFunctions* functions_ = nullptr;
  mutable std::vector<std::pair<pybind11::object, int32_t>> codes_;  // a handful
};

}  // namespace deep_comm
