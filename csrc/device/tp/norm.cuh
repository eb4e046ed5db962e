// Root mean square normalisation of a row by a warp: round(x / sqrt(mean(x²) + eps) · weight), in float32.
//
// The order of the sum is the numerical contract: lane l adds the squares of vectors l, l + 32, …, element
// by element; then lanes are added in pairs at distances 16, 8, 4, 2, 1. Products are rounded before they
// are added.
#pragma once

#include <cmath>

#include "device/move/reduce.cuh"
#include "device/tp/args.cuh"

namespace deep_comm {

// round(vec + residual), elementwise in float32.
template <Dtype kDtype>
DC_DEVICE Vec16 add_vecs(const Vec16& vec, const Vec16& residual) {
  using Type = Numeric<kDtype>;
  float sum[Type::kPerVec] = {};
  Type::add(sum, vec);
  Type::add(sum, residual);
  return Type::round(sum);
}

// The whole warp. load(v) is called twice for each vector of the row by the same lane; the second time
// after every lane's first.
template <Dtype kDtype, class LoadFirst, class LoadAgain>
DC_DEVICE void normalise_row(const RowNorm& norm, uint8_t* normed, const LoadFirst& load_first,
                             const LoadAgain& load_again) {
  using Type = Numeric<kDtype>;
  float squares = 0.0f;
  for (int64_t v = arch::lane_idx(); v < norm.row_vecs; v += kWarpSize) {
    float values[Type::kPerVec] = {};
    Type::add(values, load_first(v));
    DC_UNROLL
    for (int idx = 0; idx < Type::kPerVec; ++idx) {
      squares += arch::multiply(values[idx], values[idx]);
    }
  }
  DC_UNROLL
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    squares += arch::shfl_xor(kFullMask, squares, distance);
  }
  const float count = static_cast<float>(norm.row_vecs * Type::kPerVec);
  const float scale = 1.0f / sqrtf(squares / count + norm.eps);
  const Vec16* weights = reinterpret_cast<const Vec16*>(norm.weight);
  for (int64_t v = arch::lane_idx(); v < norm.row_vecs; v += kWarpSize) {
    float values[Type::kPerVec] = {}, weight[Type::kPerVec] = {};
    Type::add(values, load_again(v));
    Type::add(weight, arch::ld_nc(weights + v));
    DC_UNROLL
    for (int idx = 0; idx < Type::kPerVec; ++idx) {
      values[idx] = arch::multiply(arch::multiply(values[idx], scale), weight[idx]);
    }
    arch::st_streaming(reinterpret_cast<Vec16*>(normed) + v, Type::round(values));
  }
}

}  // namespace deep_comm
