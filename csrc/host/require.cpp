#include "host/require.hpp"

#include <string_view>

namespace deep_comm {

namespace {

const char* name_of(ElementType type) {
  switch (type.id) {
    case ScalarType::kBool:
      return "torch.bool";
    case ScalarType::kUint8:
      return "torch.uint8";
    case ScalarType::kInt32:
      return "torch.int32";
    case ScalarType::kInt64:
      return "torch.int64";
    case ScalarType::kFloat16:
      return "torch.float16";
    case ScalarType::kBfloat16:
      return "torch.bfloat16";
    case ScalarType::kFloat32:
      return "torch.float32";
    case ScalarType::kFloat8E4m3:
      return "torch.float8_e4m3fn";
    default:
      return "another type";
  }
}

bool has_shape(const TensorRef& given, std::initializer_list<int64_t> shape) {
  if (given.num_dims != static_cast<int>(shape.size())) return false;
  int dim = 0;
  for (const int64_t wanted : shape) {
    if (wanted >= 0 && given.shape[dim] != wanted) return false;
    ++dim;
  }
  return true;
}

// Of an extent that may be any.
std::string extent_name(std::string_view tensor, int dim) {
  if (tensor == "num_tokens_per_expert") return "experts";
  if (dim == 0) return tensor == "topk_weights" ? "rows" : "tokens";
  const bool is_routing = tensor == "topk_idx" || tensor == "topk_weights";
  return is_routing ? "top-k" : tensor == "x" ? "hidden" : "scales";
}

bool has_type(const TensorRef& given, std::initializer_list<ElementType> types) {
  if (types.size() == 0) return true;
  for (const ElementType type : types) {
    if (given.type == type) return true;
  }
  return false;
}

[[noreturn]] void refuse_tensor(const char* name, const TensorRef& given, const TensorRule& rule,
                                const std::string& device_name) {
  using Which = GivenProperty::Which;
  const auto property = [&](Which which) { return given_property(which, given.object); };
  if (given.kind != TensorRef::Kind::kTensor) {
    refuse_argument(name, property(Which::kTypeName), "must be a tensor");
  }
  if (!given.is_on_device) {
    refuse_argument(name, property(Which::kDevice),
                    "must be on this Buffer's device " + device_name);
  }
  if (!has_type(given, rule.types)) {
    std::string types;
    for (const ElementType type : rule.types) {
      types += (types.empty() ? "" : " or ") + std::string(name_of(type));
    }
    refuse_argument(name, property(Which::kType), "must have dtype " + types);
  }
  if (!has_shape(given, rule.shape)) {
    std::string extents;
    int dim = 0;
    for (const int64_t wanted : rule.shape) {
      extents += (dim == 0 ? "" : ", ");
      extents += wanted < 0 ? extent_name(name, dim) : std::to_string(wanted);
      ++dim;
    }
    refuse_argument(name, property(Which::kShape), "must have shape [" + extents + "]");
  }
  std::string strides;
  for (int dim = 0; dim < given.num_dims; ++dim) {
    strides += (dim == 0 ? "" : ", ") + std::to_string(given.strides[dim]);
  }
  if (given.num_dims == 1) strides += ",";
  refuse_argument(name, "strides (" + strides + ")", "must be contiguous");
}

}  // namespace

int64_t require_integer(const char* name, const IntegerRef& given, int64_t smallest,
                        int64_t largest, const char* note) {
  const bool is_number = given.is_given && given.is_integer;
  if (is_number && given.fits && given.value >= smallest && given.value <= largest) {
    return given.value;
  }
  const bool is_low = !is_number || (given.fits && given.value < smallest);
  std::string rule = "must be an integer of ";
  if (largest == INT64_MAX || (largest == kLargestInteger && is_low)) {
    rule += "at least " + std::to_string(smallest);
  } else {
    rule += std::to_string(smallest) + " to " + std::to_string(largest);
  }
  using Which = GivenProperty::Which;
  refuse_argument(name,
                  given_property(is_number ? Which::kValue : Which::kReprAndType, given.object),
                  rule + note);
}

void require_tensor(const char* name, const TensorRef& given, const TensorRule& rule,
                    const std::string& device_name) {
  if (given.kind == TensorRef::Kind::kTensor && given.is_on_device && has_type(given, rule.types) &&
      has_shape(given, rule.shape) && (!rule.is_contiguous || given.is_contiguous())) {
    return;
  }
  refuse_tensor(name, given, rule, device_name);
}

void require_aligned(const char* name, const TensorRef& given) {
  if (given.address % kRowAlignment == 0) return;
  constexpr char kDigits[] = "0123456789abcdef";
  std::string digits;
  for (uintptr_t rest = given.address; rest != 0; rest /= 16)
    digits.insert(0, 1, kDigits[rest % 16]);
  refuse_argument(name, "address 0x" + digits,
                  "must start at a multiple of " + std::to_string(kRowAlignment) + " bytes");
}

void require_rows(const char* name, int64_t num_rows, int64_t row_bytes) {
  const bool is_aligned = row_bytes > 0 && row_bytes % kRowAlignment == 0;
  if (is_aligned && row_bytes <= kLargestInteger && num_rows <= kLargestInteger) return;
  const std::string most = std::to_string(kLargestInteger);
  const std::string given_rows = "rows of " + std::to_string(row_bytes) + " bytes";
  if (!is_aligned) {
    refuse_argument(
        name, given_rows,
        "must have rows of a positive multiple of " + std::to_string(kRowAlignment) + " bytes");
  }
  if (row_bytes > kLargestInteger) {
    refuse_argument(name, given_rows, "must have rows of at most " + most + " bytes");
  }
  refuse_argument(name, std::to_string(num_rows) + " rows", "must have at most " + most + " rows");
}

void require_topk(const TensorRef& idx, const TensorRef& weights, int64_t num_tokens,
                  const std::string& device_name) {
  if (!idx.is_given()) {
    if (!weights.is_given()) return;
    refuse_argument("topk_weights", {}, "must come with topk_idx");
  }
  require_tensor("topk_idx", idx, {{num_tokens, -1}, {kInt64, kInt32}}, device_name);
  if (idx.shape[1] < 1 || idx.shape[1] > kMaxTopk) {
    refuse_argument("topk_idx", given_property(GivenProperty::Which::kShape, idx.object),
                    "must have 1 to " + std::to_string(kMaxTopk) + " columns");
  }
  if (weights.is_given()) {
    require_tensor("topk_weights", weights, {{idx.shape[0], idx.shape[1]}, {kFloat32}},
                   device_name);
  }
}

int require_num_experts(const IntegerRef& given, int num_max_experts) {
  return static_cast<int>(require_integer("num_experts", given, 1, num_max_experts,
                                          " (num_max_experts of the Buffer)"));
}

int require_expert_alignment(const IntegerRef& given) {
  return static_cast<int>(require_integer("expert_alignment", given, 1, kMaxExpertAlignment));
}

}  // namespace deep_comm
