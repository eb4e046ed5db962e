// The order in which combine adds what a token's ranks, or nodes, return: ascending, or by the last
// of the token's selections there, as the caller's reference adds them. Biases come before. A node's
// ranks are added where the token's selections are not known: dispatch brings their positions.
#pragma once

#include "device/layout/expert_map.cuh"
#include "device/move/element.cuh"

namespace deep_comm {

// A rank's top-k indices.
struct TopkIdx {
  const void* data;  // [T, K] int32 or int64, or null
  int element_bytes;
  int num_topk;
  int num_experts;
};

struct SumOrder {
  TopkIdx topk;  // of the tokens that are added; data null: ascending
  ExpertMap experts;
  Divisor ranks_per_term;  // 1, or those of a node

  static SumOrder of(const TopkIdx& topk, int num_ranks, int ranks_per_term) {
    return {topk, ExpertMap::make(topk.num_experts, num_ranks), Divisor::make(ranks_per_term)};
  }
  DC_HOST_DEVICE bool is_ascending() const { return topk.data == nullptr; }

  // Calls visit(term) for the selections of `token` from the last to the first.
  template <class Visit>
  DC_DEVICE void for_each_selection(int token, Visit visit) const {
    const int64_t first = static_cast<int64_t>(token) * topk.num_topk;
    // The first load brings the line of all.
    DC_NO_UNROLL
    for (int k = topk.num_topk - 1; k >= 0; --k) {
      const int expert = load_expert(topk.data, first + k, topk.element_bytes);
      if (expert < 0 || expert >= topk.num_experts) continue;
      visit(ranks_per_term.quotient(experts.rank_of(expert)));
    }
  }
  // Where each term of `present` (a bit each, at most 8, from `first` on) stands in the order of
  // `token`: four bits each. Terms without a selection come first.
  DC_DEVICE uint32_t positions(int token, uint32_t present, int first = 0) const {
    if ((present & (present - 1)) == 0) return 0;  // one term
    uint32_t positions = 0, rest = present;
    int position = arch::popc(present);
    const auto place = [&](int term) {
      if (term < 0 || term >= 8 || (rest >> term & 1u) == 0) return;
      rest ^= 1u << term;
      positions |= static_cast<uint32_t>(--position) << (4 * term);
    };
    if (!is_ascending()) for_each_selection(token, [&](int of_all) { place(of_all - first); });
    DC_UNROLL
    for (int term = 7; term >= 0; --term) place(term);
    return positions;
  }
  // The whole warp, lane n for term first + n, of a token that all of them pass: how many of
  // `present` (a bit each, from `first` on) come before it.
  DC_DEVICE int position_of_lane(int token, uint32_t present, int first) const {
    const int lane = arch::lane_idx();
    if (is_ascending()) return arch::popc(present & ((1u << lane) - 1));
    int num_after = 0;
    uint32_t rest = present;
    bool is_placed = false;
    for_each_selection(token, [&](int of_all) {
      const int term = of_all - first;
      is_placed = is_placed || term == lane;
      if (term < 0 || term >= kWarpSize || (rest >> term & 1u) == 0) return;
      rest ^= 1u << term;
      if (!is_placed) ++num_after;
    });
    if (!is_placed) return arch::popc(rest & ((1u << lane) - 1));
    return arch::popc(present & ~(1u << lane)) - num_after;
  }
};

}  // namespace deep_comm
