// How many rows a dispatch may bring, and whether it goes out before its counts are known.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>

#include "device/arch/types.cuh"

namespace deep_comm {

// Numbers of rows to have room for, best first, each smaller than the one before.
class RowChoices {
 public:
  void add(int64_t num_rows) {
    if (num_rows > 0 && std::find(begin(), end(), num_rows) == end()) rows_[size_++] = num_rows;
  }
  void sort() { std::sort(rows_.begin(), rows_.begin() + size_, std::greater<>()); }
  const int64_t* begin() const { return rows_.data(); }
  const int64_t* end() const { return rows_.data() + size_; }

 private:
  std::array<int64_t, 4> rows_{};
  int size_ = 0;
};

// What earlier dispatches of the Buffer brought says what the next one may bring.
class RowForecast {
 public:
  RowForecast(int num_ranks, int num_nodes) : num_ranks_(num_ranks), num_nodes_(num_nodes) {}

  // The most tokens per rank that a layer's ranks agreed on; 0: they have not.
  int64_t agreed_tokens = 0;

  // What has come to this rank, and the most tokens of any.
  void learn(int64_t num_rows, int64_t max_num_tokens) {
    most_rows_ = std::max(most_rows_, num_rows);
    most_tokens_ = std::max(most_tokens_, max_num_tokens);
  }
  void learn_expanded(int64_t num_rows, int64_t max_num_tokens) {
    most_expanded_rows_ = std::max(most_expanded_rows_, num_rows);
    learn(0, max_num_tokens);
  }

  // Candidate capacities, largest first, for R ranks: 125 % and 100 % of R times the most tokens that any
  // rank has had, 112 % of the most rows that have come here, R times this rank's num_tokens.
  RowChoices rows(int64_t num_tokens) const {
    const int64_t likely = most_rows_ + most_rows_ / 8;
    const int64_t most = num_ranks_ * std::max(num_tokens, most_tokens_);
    RowChoices choices;
    choices.add(std::max(most + most / 4, likely));
    choices.add(std::max(most, likely));
    choices.add(likely);
    choices.add(num_ranks_ * num_tokens);
    choices.sort();
    return choices;
  }

  // Of an expanded dispatch with num_topk rows of a token: a little more than ever came, or at first
  // twice what even routing brings; or a quarter more than even routing from ranks as full as this
  // one. These rows are many and the region is no larger than two or three such blocks: what is too
  // much for a while is in the way of the next.
  RowChoices expanded_rows(int64_t num_tokens, int64_t num_topk, int64_t num_experts,
                           int64_t expert_alignment) const {
    const int64_t num_local = ceil_div(num_experts, num_ranks_);
    const int64_t padding = num_local * (expert_alignment - 1);
    const int64_t even = ceil_div(num_ranks_ * num_tokens * num_topk * num_local, num_experts);
    const int64_t alike = even + even / 4 + padding;
    const int64_t likely = most_expanded_rows_ == 0 ? 2 * even + padding
                                                    : most_expanded_rows_ + most_expanded_rows_ / 8;
    RowChoices choices;
    choices.add(std::max(likely, alike));
    choices.add(alike);
    return choices;
  }

  // Between nodes: rows that can come to be handed on, when all ranks have as many tokens as this
  // one, as any rank has ever had, or as they have agreed on.
  int64_t forwarded_rows(int64_t num_tokens) const {
    return num_nodes_ * std::max({num_tokens, agreed_tokens, most_tokens_});
  }

 private:
  int64_t num_ranks_, num_nodes_;
  int64_t most_rows_ = 0;  // of one dispatch
  int64_t most_expanded_rows_ = 0;
  int64_t most_tokens_ = 0;
};

// Whether a dispatch between nodes goes out before its counts are known. All ranks must do alike: they
// see the same outcomes, of the same calls. After failures in a row it is tried less and less often.
class EarlyDispatches {
 public:
  bool is_next() {
    if (num_to_skip_ == 0) return true;
    --num_to_skip_;
    return false;
  }
  void learn(bool has_sent) {
    num_failures_ = has_sent ? 0 : num_failures_ + 1;
    // The first one may well have been a guess by a rank that knew of no tokens.
    num_to_skip_ = std::min(std::max(num_failures_ - 1, 0), kMostSkipped);
  }

 private:
  static constexpr int kMostSkipped = 63;
  int num_failures_ = 0, num_to_skip_ = 0;
};

}  // namespace deep_comm
