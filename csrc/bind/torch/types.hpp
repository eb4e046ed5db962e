// The types of torch's tensors: their numbers here, torch.dtype objects, and what DLPack calls them.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

#include "bind/dlpack.hpp"
#include "host/tensor.hpp"

namespace deep_comm {

class TorchTypes {
 public:
  // Imports torch on the first use.
  static const TorchTypes& get();

  // torch.Tensor
  PyTypeObject* tensor_type() const { return tensor_type_; }
  // Empty: the object is no torch.dtype that the module torch has.
  std::optional<ElementType> of_dtype(PyObject* dtype) const;
  // torch.dtype, borrowed. Throws UnsupportedError for a fixed type that this torch lacks.
  PyObject* dtype_of(ElementType type) const;

  struct FromDlpack {
    ElementType type;
    bool is_known = false;
    // torch says the same of other types: of torch.int4, which DLPack lacks, that of torch.int8.
    bool is_ambiguous = false;
  };
  FromDlpack of_dlpack(DlDataType type) const {
    const size_t place = place_of(type);
    return place < kNumPlaces && by_dlpack_[place].lanes == type.lanes ? by_dlpack_[place].found
                                                                       : FromDlpack{};
  }
  // Empty: DLPack has no name for it. That it has one does not mean that this torch knows it.
  std::optional<DlDataType> dlpack_of(ElementType type) const {
    return entries_[static_cast<size_t>(type.id)].dlpack;
  }

 private:
  TorchTypes();
  void add(ElementType type, PyObject* dtype);

  struct Entry {
    PyObject* dtype = nullptr;  // kept for ever; null: this torch lacks it
    ElementType type;
    std::optional<DlDataType> dlpack;
  };
  struct DlpackEntry {
    uint16_t lanes = 0;
    FromDlpack found;
  };
  // By the code and the logarithm of the bits.
  static constexpr size_t kNumCodes = 18, kNumWidths = 8, kNumPlaces = kNumCodes * kNumWidths;
  static size_t place_of(DlDataType type) {
    if (type.code >= kNumCodes || !std::has_single_bit(type.bits)) return kNumPlaces;
    return type.code * kNumWidths + static_cast<size_t>(std::countr_zero(type.bits));
  }

  PyTypeObject* tensor_type_;
  std::vector<Entry> entries_;  // by ScalarType
  std::array<DlpackEntry, kNumPlaces> by_dlpack_;
};

}  // namespace deep_comm
