// Tensors that are to be made.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

namespace deep_comm {

// Sizes or strides; c10::ArrayRef<int64_t>, as functions of torch's take them.
struct Extents {
  const int64_t* data;
  size_t size;
};

// A tensor that is to be made.
class TensorForm {
 public:
  TensorForm() = default;
  TensorForm(std::initializer_list<int64_t> extents, std::initializer_list<int64_t> strides,
             pybind11::object dtype)
      : dtype_(std::move(dtype)), num_dims_(extents.size()) {
    std::copy(extents.begin(), extents.end(), extents_.begin());
    std::copy(strides.begin(), strides.end(), strides_.begin());
  }
  // Two tuples of Python's.
  TensorForm(const pybind11::tuple& extents, const pybind11::tuple& strides, pybind11::object dtype)
      : dtype_(std::move(dtype)), num_dims_(extents.size()) {
    if (num_dims_ > kMostDims || strides.size() != num_dims_) {
      throw std::invalid_argument("a tensor of " + std::to_string(num_dims_) + " dimensions");
    }
    for (size_t dim = 0; dim < num_dims_; ++dim) {
      extents_[dim] = extents[dim].cast<int64_t>();
      strides_[dim] = strides[dim].cast<int64_t>();
    }
  }
  static TensorForm vector(int64_t size, pybind11::object dtype) {
    return {{size}, {1}, std::move(dtype)};
  }

  Extents extents() const { return {extents_.data(), num_dims_}; }
  Extents strides() const { return {strides_.data(), num_dims_}; }
  const pybind11::object& dtype() const { return dtype_; }
  int64_t num_elements() const {
    int64_t found = 1;
    for (size_t dim = 0; dim < num_dims_; ++dim) found *= extents_[dim];
    return found;
  }
  bool is_vector_of(const pybind11::object& dtype) const {
    return num_dims_ == 1 && strides_[0] == 1 && dtype_.is(dtype);
  }
  pybind11::tuple shape() const { return tuple_of(extents_); }
  pybind11::tuple shape_strides() const { return tuple_of(strides_); }

 private:
  static constexpr size_t kMostDims = 6;
  using Numbers = std::array<int64_t, kMostDims>;
  pybind11::tuple tuple_of(const Numbers& numbers) const {
    pybind11::tuple made(num_dims_);
    for (size_t dim = 0; dim < num_dims_; ++dim) made[dim] = numbers[dim];
    return made;
  }

  pybind11::object dtype_;
  size_t num_dims_ = 0;
  Numbers extents_, strides_;
};

// Tensors in one allocation, which lives as long as the last of them. What torch's allocator is told
// of one, which stream uses it, holds for all.
template <size_t kCount>
struct TensorBlock {
  static constexpr int64_t kAlignment = 128;  // bytes

  struct Piece {
    TensorForm form;
    int64_t offset = 0;  // bytes, in the block
    int element_bytes = 0;
    int whole = -1;               // of which piece this is a part
    int64_t offset_in_whole = 0;  // elements
    bool is_there() const { return element_bytes > 0; }
    bool is_part() const { return whole >= 0; }
  };
  std::array<Piece, kCount> pieces;
  int64_t num_bytes = 0;
  pybind11::object word;  // torch.int32
  int whole_piece = -1;   // that is all of the block

  explicit TensorBlock(pybind11::object int32) : word(std::move(int32)) {}

  // Behind what there is.
  void put(size_t place, TensorForm form, int element_bytes) {
    const int64_t begin = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    num_bytes = begin + form.num_elements() * element_bytes;
    whole_piece = begin == 0 && form.is_vector_of(word) ? static_cast<int>(place) : -1;
    pieces[place] = {.form = std::move(form), .offset = begin, .element_bytes = element_bytes};
  }
  // Elements of a vector, from `offset` on.
  void put_part(size_t place, size_t whole, TensorForm form, int64_t offset) {
    const int element_bytes = pieces[whole].element_bytes;
    pieces[place] = {.form = std::move(form),
                     .offset = pieces[whole].offset + offset * element_bytes,
                     .element_bytes = element_bytes,
                     .whole = static_cast<int>(whole),
                     .offset_in_whole = offset};
  }
  int64_t num_words() const { return (num_bytes + 3) / 4; }
};

template <size_t kCount>
struct MadePieces {
  std::array<pybind11::object, kCount> tensors;
  std::array<uintptr_t, kCount> addresses{};
};

}  // namespace deep_comm
