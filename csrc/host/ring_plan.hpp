// From a caller's Config, or what stands in for it, to the rings of one call.
//
// Plans are looked up by value in every call, and worked out once: a Buffer's memory does not change.
// Ranks with equal arguments get equal plans, as the protocols want.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "host/plans.hpp"
#include "host/tensor.hpp"

namespace deep_comm {

// As deep_comm.Config.
struct Config {
  int num_sms = 0;
  int nvl_send_tokens = 0, nvl_recv_tokens = 0;
  int rdma_send_tokens = 0, rdma_recv_tokens = 0;

  bool operator==(const Config&) const = default;
  // Slots of a ring inside a node; every SM is a channel.
  int num_slots() const { return (nvl_recv_tokens + 1) / 2; }
};

// What calls without a Config get once their rows are known: measured, or from a model
// (deep_comm/tuning.py).
class ConfigChooser {
 public:
  virtual ~ConfigChooser() = default;
  // row_bytes: of payload and scales.
  virtual Config choose(int64_t row_bytes) const = 0;
  // Where a combine gets more SMs than the dispatch had channels; {0, 0, 0}: nowhere.
  virtual CombineSms combine_sms(int64_t row_bytes, int num_channels) const = 0;
};

// The Config of one call.
struct ConfigChoice {
  std::optional<Config> given;             // by the caller
  std::optional<Config> fallback;          // otherwise this one, shrunk until it fits
  const ConfigChooser* chooser = nullptr;  // or what this says; one of the two is there
  bool names_sms = true;                   // somebody has said how many SMs the call may have

  // Nobody has said how many SMs the call gets.
  bool has_default_sms() const { return !given && chooser != nullptr; }
  Config config_for(int64_t row_bytes) const {
    if (given) return *given;
    return fallback ? *fallback : chooser->choose(row_bytes);
  }
  bool operator==(const ConfigChoice&) const = default;
};

// Memory for rings, and the SMs that there are.
struct RingResources {
  size_t num_nvl_bytes = 0;   // as the Buffer was built
  size_t num_ring_bytes = 0;  // of them, what the receive region leaves
  size_t num_rdma_bytes = 0;
  std::optional<int> max_sms;  // empty: no limit
};

struct RingPlan {
  ChannelConfig channels;
  int num_local_blocks = 0;  // of kernels that only work in this rank's memory
  // A kernel may hold SMs while it waits beside another one of the call.
  bool may_wait_beside = false;
  RailConfig rail{};  // between nodes
};

// What a plan between nodes follows from. num_channels: of the handle; 0: of new routing.
struct TwoTierKey {
  ConfigChoice choice;
  int row_bytes = 0, scale_row_bytes = 0, num_topk = 0, num_channels = 0;

  bool operator==(const TwoTierKey&) const = default;
};

// Rings inside a node for `config`, with half of its slots, a quarter and so on, until they fit into
// num_ring_bytes. If it was given, num_nvl_bytes must hold all of them. ring_bytes(channels, slots).
// num_channels replaces the channels of a config that was not given; 0: does not. Throws CallError:
// kArgument, kBufferTooSmall.
ChannelConfig plan_channels(const Config& config, bool is_given, int num_channels,
                            const RingResources& resources,
                            const std::function<size_t(int, int)>& ring_bytes);

// Plans by what they follow from.
template <class Key, class Plan>
class PlanCache {
 public:
  const Plan* find(const Key& key) const {
    for (const auto& [known, plan] : plans_) {
      if (known == key) return &plan;
    }
    return nullptr;
  }
  // The reference holds until the next `add`.
  const Plan& add(const Key& key, Plan plan) {
    if (plans_.size() >= kMost) plans_.clear();  // a program uses a handful
    return plans_.emplace_back(key, std::move(plan)).second;
  }
  template <class Make>
  const Plan& get(const Key& key, const Make& make) {
    if (const Plan* known = find(key)) return *known;
    return add(key, make());
  }

 private:
  static constexpr size_t kMost = 512;
  std::vector<std::pair<Key, Plan>> plans_;
};

}  // namespace deep_comm
