// Tensors as calls see them: what a caller gave (TensorRef), what is to be made (TensorSpec), and what
// was made (Object). Nothing here knows which framework they belong to.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

namespace deep_comm {

// An address as the engine's structs take it.
template <class T>
T* pointer_of(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A counted reference to an object of the framework's. Copies and ends need the interpreter's lock.
class Object {
 public:
  // Set once by the bindings.
  static inline void (*retain)(void* pointer) = nullptr;
  static inline void (*release)(void* pointer) = nullptr;

  Object() = default;
  static Object steal(void* pointer) { return Object(pointer); }
  static Object borrow(const void* pointer) {
    if (pointer != nullptr) retain(const_cast<void*>(pointer));
    return Object(const_cast<void*>(pointer));
  }
  Object(const Object& other) : Object(borrow(other.pointer_)) {}
  Object(Object&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  Object& operator=(Object other) noexcept {
    std::swap(pointer_, other.pointer_);
    return *this;
  }
  ~Object() {
    if (pointer_ != nullptr) release(pointer_);
  }
  void* get() const { return pointer_; }
  void* take() { return std::exchange(pointer_, nullptr); }
  explicit operator bool() const { return pointer_ != nullptr; }

 private:
  explicit Object(void* pointer) : pointer_(pointer) {}
  void* pointer_ = nullptr;
};

// Keeps borrowed objects; null ones are left out.
template <class Pointers>
std::vector<Object> borrow_all(const Pointers& pointers) {
  std::vector<Object> kept;
  for (const void* pointer : pointers) {
    if (pointer != nullptr) kept.push_back(Object::borrow(pointer));
  }
  return kept;
}

// The types that calls tell apart have fixed numbers; every other type of the framework's has one
// from kFirstOther on (bind/torch/types.hpp), so that rows of any type travel as bytes.
enum class ScalarType : uint8_t {
  kBool,
  kUint8,
  kInt32,
  kInt64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat8E4m3,
  kFirstOther
};

struct ElementType {
  ScalarType id = ScalarType::kUint8;
  uint8_t num_bytes = 1;

  bool operator==(const ElementType&) const = default;
  bool operator==(ScalarType other) const { return id == other; }
};

inline constexpr ElementType kBool{ScalarType::kBool, 1}, kUint8{ScalarType::kUint8, 1},
    kInt32{ScalarType::kInt32, 4}, kInt64{ScalarType::kInt64, 8}, kFloat16{ScalarType::kFloat16, 2},
    kBfloat16{ScalarType::kBfloat16, 2}, kFloat32{ScalarType::kFloat32, 4},
    kFloat8E4m3{ScalarType::kFloat8E4m3, 1};

inline constexpr int kMaxTensorDims = 8;

// Shape, strides in elements, type. Contiguous unless strides are given.
struct TensorSpec {
  int num_dims = 0;
  std::array<int64_t, kMaxTensorDims> shape{};
  std::array<int64_t, kMaxTensorDims> strides{};
  ElementType type;

  static TensorSpec of(ElementType type, std::initializer_list<int64_t> shape) {
    TensorSpec spec;
    spec.type = type;
    for (const int64_t extent : shape) spec.shape[spec.num_dims++] = extent;
    int64_t stride = 1;
    for (int dim = spec.num_dims - 1; dim >= 0; --dim) {
      spec.strides[dim] = stride;
      stride *= spec.shape[dim] > 1 ? spec.shape[dim] : 1;
    }
    return spec;
  }
  static TensorSpec strided(ElementType type, std::initializer_list<int64_t> shape,
                            std::initializer_list<int64_t> strides) {
    TensorSpec spec = of(type, shape);
    int dim = 0;
    for (const int64_t stride : strides) spec.strides[dim++] = stride;
    return spec;
  }
  int64_t num_elements() const {
    int64_t product = 1;
    for (int dim = 0; dim < num_dims; ++dim) product *= shape[dim];
    return product;
  }
  // Of memory without gaps.
  size_t num_bytes() const { return static_cast<size_t>(num_elements()) * type.num_bytes; }
};

// An argument that should be a tensor. The framework's object is borrowed for the length of the call.
struct TensorRef {
  enum class Kind : uint8_t { kAbsent, kTensor, kOther };

  const void* object = nullptr;
  Kind kind = Kind::kAbsent;
  bool is_on_device = false;  // the Buffer's
  ElementType type;
  int num_dims = 0;  // beyond kMaxTensorDims only the number is known
  std::array<int64_t, kMaxTensorDims> shape{};
  std::array<int64_t, kMaxTensorDims> strides{};
  uintptr_t address = 0;

  bool is_given() const { return kind != Kind::kAbsent; }
  int64_t num_elements() const {
    int64_t product = 1;
    for (int dim = 0; dim < num_dims && dim < kMaxTensorDims; ++dim) product *= shape[dim];
    return product;
  }
  bool is_empty() const { return num_elements() == 0; }
  bool is_contiguous() const {
    int64_t stride = 1;
    if (is_empty()) return true;
    for (int dim = num_dims - 1; dim >= 0; --dim) {
      if (shape[dim] != 1 && strides[dim] != stride) return false;
      stride *= shape[dim];
    }
    return true;
  }
};

// A tensor that was made, and where it begins; an empty one may begin at 0.
struct MadeTensor {
  Object tensor;
  uintptr_t address = 0;
};

}  // namespace deep_comm
