// What callers may pass, and the errors that name the argument, the value and the rule. Bindings turn
// CallError into the classes of deep_comm.errors.
#pragma once

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <string>
#include <utility>
#include <variant>

#include "device/layout/workspace.cuh"
#include "host/tensor.hpp"

namespace deep_comm {

// A property of an object of the framework's, as the message shows it.
struct GivenProperty {
  enum class Which : uint8_t {
    kValue,
    kTypeName,
    kReprAndType,
    kDevice,
    kType,
    kShape,
    kShapeAndType,    // [2] of torch.float32
    kTypeShapeDevice  // torch.float32 [2] on cpu
  };
  Which which;
  Object object;
};
// What was given; monostate: the message does not say.
using GivenValue = std::variant<std::monostate, bool, int64_t, std::string, GivenProperty>;

class CallError : public std::exception {
 public:
  // As in deep_comm/errors.py.
  enum class Class : uint8_t {
    kArgument,
    kHandleMismatch,
    kBufferTooSmall,
    kUnsupported,
    kBufferInUse,
    kBufferDestroyed,
    kCallInterrupted,  // value: the rank
    kGeneral,
    kRecorded  // the engine's record says what failed; the bindings raise that
  };

  Class error_class = Class::kGeneral;
  std::string argument;
  GivenValue value;
  std::string rule;  // of classes without an argument: the message
  int64_t needed_bytes = 0;

  const char* what() const noexcept override { return rule.c_str(); }
};

[[noreturn]] inline void refuse(CallError::Class error_class, std::string argument,
                                GivenValue value, std::string rule) {
  CallError error;
  error.error_class = error_class;
  error.argument = std::move(argument);
  error.value = std::move(value);
  error.rule = std::move(rule);
  throw error;
}
[[noreturn]] inline void refuse_argument(std::string argument, GivenValue value, std::string rule) {
  refuse(CallError::Class::kArgument, std::move(argument), std::move(value), std::move(rule));
}
[[noreturn]] inline void refuse_handle(GivenValue value, std::string rule) {
  refuse(CallError::Class::kHandleMismatch, "handle", std::move(value), std::move(rule));
}
[[noreturn]] inline void fail(CallError::Class error_class, std::string message) {
  refuse(error_class, {}, {}, std::move(message));
}

// `argument`, a number of bytes, must be larger: `rule` says what for.
[[noreturn]] inline void refuse_memory(std::string argument, size_t num_bytes, size_t needed_bytes,
                                       std::string rule) {
  CallError error;
  error.error_class = CallError::Class::kBufferTooSmall;
  error.argument = std::move(argument);
  error.value = static_cast<int64_t>(num_bytes);
  error.needed_bytes = static_cast<int64_t>(needed_bytes);
  error.rule = std::move(rule);
  throw error;
}

inline GivenValue given_property(GivenProperty::Which which, const void* object) {
  return GivenProperty{which, Object::borrow(object)};
}

// An argument that should be an integer.
struct IntegerRef {
  const void* object = nullptr;
  bool is_given = false;    // not None
  bool is_integer = false;  // of Python's type; numpy's are not, whose sums wrap
  bool fits = false;        // into 64 bits
  int64_t value = 0;
};

inline constexpr int64_t kLargestInteger = INT32_MAX;  // what kernels count in
inline constexpr int kMaxExpertAlignment = 1
                                           << 16;  // so that sums of padded counts stay below 2**31
inline constexpr int kRowAlignment = 16;
inline constexpr int kScaleBlockColumns = 128;  // share a scale where the engine quantises

// As deep_comm.settings.integers.require. `note` is appended to the rule.
int64_t require_integer(const char* name, const IntegerRef& given, int64_t smallest,
                        int64_t largest = INT64_MAX, const char* note = "");

// A tensor on the Buffer's device of this shape (-1: any extent), of one of these types (none: any).
// `device_name`: the Buffer's, for the message.
struct TensorRule {
  std::initializer_list<int64_t> shape;
  std::initializer_list<ElementType> types = {};
  bool is_contiguous = true;
};
void require_tensor(const char* name, const TensorRef& given, const TensorRule& rule,
                    const std::string& device_name);
// Its address is a multiple of 16.
void require_aligned(const char* name, const TensorRef& given);
// As kernels count and move them: a row is a positive multiple of 16 bytes, and both numbers fit an
// int32.
void require_rows(const char* name, int64_t num_rows, int64_t row_bytes);

// topk_idx [num_tokens, K] with or without weights of its shape; weights alone say nothing.
// num_tokens -1: any.
void require_topk(const TensorRef& idx, const TensorRef& weights, int64_t num_tokens,
                  const std::string& device_name);
int require_num_experts(const IntegerRef& given, int num_max_experts);
int require_expert_alignment(const IntegerRef& given);

}  // namespace deep_comm
