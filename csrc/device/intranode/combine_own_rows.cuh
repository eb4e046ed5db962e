// Combine of an expanded output: a token's rows on its own rank. Nobody sends them. The adding warps
// add them from where the experts have left them, with the bits of a row that had been added and
// rounded before (docs/design/0008): one sum of their own, rounded to the dtype, then added like a
// peer's row.
#pragma once

#include "device/intranode/combine_entry.cuh"
#include "device/move/reduce.cuh"

namespace deep_comm {

// Of one token, in the order of its top-k entries; in shared memory, behind the CombineEntry.
struct OwnRow {
  int32_t row_idx;  // of own.x
  float weight;
};

struct OwnRows {
  OwnRow* entries;  // the first one holds how many follow

  // num_lists: one for each slot of the window, or in ring mode each adding warp.
  DC_HOST_DEVICE static constexpr size_t num_bytes(int num_lists, int num_topk) {
    return sizeof(OwnRow) * static_cast<size_t>(num_lists * (1 + num_topk));
  }
  DC_DEVICE static OwnRows of(const CombineArgs& args, int list) {
    OwnRow* entries =
        reinterpret_cast<OwnRow*>(arch::dynamic_smem() + args.entry_offset + sizeof(CombineEntry));
    return {entries + list * (1 + args.own.num_topk)};
  }
  DC_DEVICE int count() const { return entries[0].row_idx; }
  DC_DEVICE const OwnRow& at(int idx) const { return entries[1 + idx]; }

  // One thread. Received row `recv_row` is of this rank. Calls see(row) for each row.
  template <class See>
  DC_DEVICE void fill(const OwnRowsArgs& own, int64_t recv_row, const See& see) {
    constexpr int kAtOnce = 4;  // loads in flight
    int count = 0;
    for (int first = 0; first < own.num_topk; first += kAtOnce) {
      int32_t rows[kAtOnce];
      float weights[kAtOnce];
      DC_UNROLL
      for (int idx = 0; idx < kAtOnce; ++idx) {
        rows[idx] = first + idx < own.num_topk
                        ? arch::ld_nc(own.recv_rows + recv_row * own.num_topk + first + idx)
                        : -1;
      }
      DC_UNROLL
      for (int idx = 0; idx < kAtOnce; ++idx) {
        // Rows past num_rows, which a worst-case output has dropped, do not count.
        if (rows[idx] >= own.num_rows) rows[idx] = -1;
        weights[idx] = 1.0f;
        if (rows[idx] < 0) continue;
        see(rows[idx]);
        if (own.row_weights != nullptr) weights[idx] = arch::ld_nc(own.row_weights + rows[idx]);
      }
      DC_UNROLL
      for (int idx = 0; idx < kAtOnce; ++idx) {
        if (rows[idx] >= 0) entries[1 + count++] = {rows[idx], weights[idx]};
      }
    }
    entries[0].row_idx = count;
  }
};

// reduce_rows (move/reduce.cuh) with own rows in place of rows[own_position]; own_position -1: none.
// All rows are one list, of which up to kInFlight are loaded before the first is added.
template <Dtype kDtype>
DC_DEVICE void reduce_rows_with_own(const OwnRowsArgs& args, uint8_t* dst,
                                    const uint8_t* const* rows, int num_rows, int own_position,
                                    const OwnRows& own, int row_bytes, int part = 0,
                                    int num_parts = 1) {
  using Type = Numeric<kDtype>;
  constexpr int kInFlight = 8;
  const int num_vecs = row_bytes / 16;
  const int own_begin = own_position < 0 ? num_rows : own_position;
  const int num_own = own_position < 0 ? 0 : own.count();
  const int num_all = own_position < 0 ? num_rows : num_rows - 1 + num_own;
  for (int vec = part * kWarpSize + arch::lane_idx(); vec < num_vecs;
       vec += num_parts * kWarpSize) {
    float sums[Type::kPerVec] = {}, own_sums[Type::kPerVec] = {};
    for (int first = 0; first < num_all; first += kInFlight) {
      Vec16 vecs[kInFlight];
      DC_UNROLL
      for (int idx = 0; idx < kInFlight; ++idx) {
        const int item = first + idx;
        if (item >= num_all) continue;
        const int own_idx = item - own_begin;
        const uint8_t* src;
        if (own_idx < 0) {
          src = rows[item];
        } else if (own_idx < num_own) {
          src = args.x + static_cast<int64_t>(own.at(own_idx).row_idx) * row_bytes;
        } else {
          src = rows[item - num_own + 1];
        }
        vecs[idx] = arch::ld_weak(reinterpret_cast<const Vec16*>(src) + vec);
      }
      DC_UNROLL
      for (int idx = 0; idx < kInFlight; ++idx) {
        const int item = first + idx;
        if (item >= num_all) continue;
        const int own_idx = item - own_begin;
        if (own_idx < 0 || own_idx >= num_own) {
          Type::add(sums, vecs[idx]);
          continue;
        }
        Type::add_weighted(own_sums, vecs[idx], own.at(own_idx).weight);  // times one: exact
        // Without own rows left there is nothing to add: +0.0 changes no bit of a sum from +0.0.
        if (own_idx + 1 == num_own) Type::add(sums, Type::round(own_sums));
      }
    }
    arch::st_streaming(reinterpret_cast<Vec16*>(dst) + vec, Type::round(sums));
  }
}

}  // namespace deep_comm
