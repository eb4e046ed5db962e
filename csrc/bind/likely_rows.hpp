// What a Buffer expects of expanded dispatches: ops.early.ExpectedRows, for native callers.
#pragma once

#include <array>
#include <utility>

#include "bind/slots.hpp"
#include "host/likely_rows.hpp"

namespace deep_comm {

class LikelyRows {
 public:
  LikelyRows(pybind11::object expected, int64_t num_ranks)
      : expected_(std::move(expected)),
        most_expanded_rows_(pybind11::type::of(expected_), "_most_expanded_rows"),
        most_tokens_(pybind11::type::of(expected_), "most_tokens"),
        num_ranks_(num_ranks) {}

  std::array<int64_t, 2> expanded(int64_t num_tokens, int64_t places, int64_t num_experts,
                                  int64_t expert_alignment) const {
    return expanded_choices(num_ranks_, number(most_expanded_rows_), num_tokens, places,
                            num_experts, expert_alignment);
  }

  // ExpectedRows.learn_expanded, which most dispatches have nothing new for.
  void learn_expanded(int64_t num_rows, int64_t max_num_tokens) const {
    if (num_rows <= number(most_expanded_rows_) && max_num_tokens <= number(most_tokens_)) return;
    expected_.attr("learn_expanded")(num_rows, max_num_tokens);
  }

 private:
  int64_t number(const Slot& slot) const { return PyLong_AsLongLong(slot.get(expected_)); }

  pybind11::object expected_;
  Slot most_expanded_rows_, most_tokens_;
  int64_t num_ranks_;
};

}  // namespace deep_comm
