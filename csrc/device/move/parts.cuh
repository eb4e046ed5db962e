// Parts of tensors, by the warps of a team: copied, or added. Tensors may begin anywhere and end
// inside of a vector; a staging begins at a vector, and what follows the tensor's end there counts for nothing.
#pragma once

#include "device/move/reduce.cuh"

namespace deep_comm {

struct VecRange {
  int64_t first, end;
};

// Some warps of a block.
struct Team {
  int warp;  // of num_warps; this thread's
  int num_warps;

  DC_HOST_DEVICE static Team alone() { return {0, 1}; }
  // Calls visit(v) for vectors v, v + 32, … v + 32 * (kUnroll - 1) of this lane.
  template <int kUnroll, class Visit>
  DC_DEVICE void for_each(const VecRange& range, const Visit& visit) const {
    constexpr int kStep = kUnroll * kWarpSize;
    for (int64_t base = range.first + warp * kStep + arch::lane_idx(); base < range.end;
         base += static_cast<int64_t>(num_warps) * kStep) {
      visit(base);
    }
  }
};

DC_DEVICE bool is_whole_vec(const uint8_t* address, int64_t num_bytes) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(Vec16) == 0 &&
         num_bytes >= static_cast<int64_t>(sizeof(Vec16));
}

// By bytes. Out of line, so that the vector of the common case stays in registers.
DC_DEVICE_COLD Vec16 load_bytes(const uint8_t* src, int num_bytes) {
  Vec16 vec{};
  for (int byte = 0; byte < num_bytes; ++byte) {
    vec.words[byte / 4] |= static_cast<uint32_t>(arch::ld_nc(src + byte)) << (byte % 4 * 8);
  }
  return vec;
}
DC_DEVICE_COLD void store_bytes(uint8_t* dst, Vec16 vec, int num_bytes) {
  for (int byte = 0; byte < num_bytes; ++byte) {
    arch::st_weak(dst + byte, static_cast<uint8_t>(vec.words[byte / 4] >> (byte % 4 * 8)));
  }
}

// Vector v of input of num_bytes bytes, which nobody writes during this kernel.
DC_DEVICE Vec16 load_input(const uint8_t* input, int64_t num_bytes, int64_t v) {
  const int64_t offset = v * static_cast<int64_t>(sizeof(Vec16)), rest = num_bytes - offset;
  const uint8_t* src = input + offset;
  if (is_whole_vec(src, rest)) return arch::ld_nc(reinterpret_cast<const Vec16*>(src));
  return load_bytes(src, static_cast<int>(min_of<int64_t>(rest, sizeof(Vec16))));
}
DC_DEVICE void store_output(uint8_t* output, int64_t num_bytes, int64_t v, const Vec16& vec) {
  const int64_t offset = v * static_cast<int64_t>(sizeof(Vec16)), rest = num_bytes - offset;
  uint8_t* dst = output + offset;
  if (is_whole_vec(dst, rest)) {
    arch::st_streaming(reinterpret_cast<Vec16*>(dst), vec);
  } else {
    store_bytes(dst, vec, static_cast<int>(min_of<int64_t>(rest, sizeof(Vec16))));
  }
}

// load(v), then store(v, vec), for the vectors of the range. Loads of several are in flight together.
template <int kUnroll = 4, class Load, class Store>
DC_DEVICE void copy_range(const Team& team, const VecRange& range, const Load& load,
                          const Store& store) {
  team.for_each<kUnroll>(range, [&](int64_t base) {
    Vec16 vecs[kUnroll];
    DC_UNROLL
    for (int step = 0; step < kUnroll; ++step) {
      const int64_t v = base + step * kWarpSize;
      if (v < range.end) vecs[step] = load(v);
    }
    DC_UNROLL
    for (int step = 0; step < kUnroll; ++step) {
      const int64_t v = base + step * kWarpSize;
      if (v < range.end) store(v, vecs[step]);
    }
  });
}

// store(v, round(((0 + load(0, v)) + load(1, v)) + …)). The order is the numerical contract.
template <Dtype kDtype, class Load, class Store>
DC_DEVICE void add_range(const Team& team, const VecRange& range, int num_sources, const Load& load,
                         const Store& store) {
  using Type = Numeric<kDtype>;
  constexpr int kUnroll = 4, kInFlight = 2;
  team.for_each<kUnroll>(range, [&](int64_t base) {
    float sums[kUnroll][Type::kPerVec] = {};
    for (int first = 0; first < num_sources; first += kInFlight) {
      Vec16 vecs[kInFlight][kUnroll];
      DC_UNROLL
      for (int idx = 0; idx < kInFlight; ++idx) {
        if (first + idx >= num_sources) continue;
        DC_UNROLL
        for (int step = 0; step < kUnroll; ++step) {
          const int64_t v = base + step * kWarpSize;
          if (v < range.end) vecs[idx][step] = load(first + idx, v);
        }
      }
      DC_UNROLL
      for (int idx = 0; idx < kInFlight; ++idx) {
        if (first + idx >= num_sources) continue;
        DC_UNROLL
        for (int step = 0; step < kUnroll; ++step) {
          if (base + step * kWarpSize < range.end) Type::add(sums[step], vecs[idx][step]);
        }
      }
    }
    DC_UNROLL
    for (int step = 0; step < kUnroll; ++step) {
      const int64_t v = base + step * kWarpSize;
      if (v < range.end) store(v, Type::round(sums[step]));
    }
  });
}

}  // namespace deep_comm
