// How many rows an expanded dispatch may bring.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace deep_comm {

// Numbers of rows to have room for, best first, none of them larger than the one before, 0: there is
// none. A little more than ever came (`most_rows`), or at first twice what even routing brings; or a
// quarter more than even routing from ranks as full as this one. These rows are many and the region
// is no larger than two or three such blocks: what is too much for a while is in the way of the next.
inline std::array<int64_t, 2> expanded_choices(int64_t num_ranks, int64_t most_rows,
                                               int64_t num_tokens, int64_t places,
                                               int64_t num_experts, int64_t expert_alignment) {
  const auto rounded_up = [](int64_t value, int64_t by) { return (value + by - 1) / by; };
  const int64_t num_local = rounded_up(num_experts, num_ranks);
  const int64_t padding = num_local * (expert_alignment - 1);
  const int64_t even = rounded_up(num_ranks * num_tokens * places * num_local, num_experts);
  const int64_t alike = even + even / 4 + padding;
  const int64_t likely = most_rows == 0 ? 2 * even + padding : most_rows + most_rows / 8;
  return {std::max(likely, alike), alike};
}

}  // namespace deep_comm
