// What payloads of dispatches may have in common: what plans are made for.
#pragma once

#include <cstdint>
#include <optional>

#include "device/move/quantise.cuh"
#include "host/tensor.hpp"

namespace deep_comm {

// How a dispatch treats scales; see Buffer.dispatch.
struct ScaleOptions {
  bool use_fp8 = false;
  bool round_scale = false;
  bool use_ue8m0 = false;
  bool column_major = false;
};

// Types of x and of its scales, which ranks compare as one word.
struct PayloadDtypes {
  ScalarType x;
  std::optional<ScalarType> scales;

  int word() const {
    return static_cast<int>(x) | (scales ? static_cast<int>(*scales) + 1 : 0) << 8;
  }
  static PayloadDtypes of(int word) {
    PayloadDtypes dtypes{static_cast<ScalarType>(word & 0xff), {}};
    if (word >> 8 != 0) dtypes.scales = static_cast<ScalarType>((word >> 8) - 1);
    return dtypes;
  }
};

// All that payloads of one form have in common; the rest is tokens and addresses.
struct PayloadForm {
  ElementType type;  // of what is received
  int64_t hidden = 0;
  ElementType scale_type;
  int num_scales = 0;  // 0: without
  bool is_quantised = false;
  ScaleFormat scale_format{};

  bool operator==(const PayloadForm&) const = default;
  bool has_scales() const { return num_scales > 0; }
  int row_bytes() const { return static_cast<int>(hidden * type.num_bytes); }
  int scale_bytes() const { return has_scales() ? scale_type.num_bytes : 0; }
  // Equal on all ranks: PayloadDtypes, of what the caller gave.
  int dtypes() const {
    if (is_quantised) return PayloadDtypes{ScalarType::kBfloat16, {}}.word();
    return PayloadDtypes{type.id, has_scales() ? std::optional(scale_type.id) : std::nullopt}
        .word();
  }
  // Equal on all ranks: 0 none, 1 e4m3, 2 with rounded scales, 3 with scales as exponents.
  int cast() const { return is_quantised + scale_format.round_scale + scale_format.use_ue8m0; }
  int scale_row_bytes() const { return num_scales * scale_bytes(); }
};

}  // namespace deep_comm
