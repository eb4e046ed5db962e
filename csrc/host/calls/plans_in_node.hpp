// What calls inside a node have in common when they are alike: rings, and the engine's part.
#pragma once

#include "host/calls/payload_form.hpp"
#include "host/engine_calls.hpp"
#include "host/ring_plan.hpp"

namespace deep_comm {

class CallContext;

// Of a dispatch that repeats a handle's routing.
struct CachedDispatchPlan {
  RingPlan rings;
  DispatchPlan dispatch;
};
// Of one with new routing.
struct NewDispatchPlan {
  RingPlan rings;
  NotifyPlan notify;
  DispatchPlan dispatch;
};
struct InNodeCombinePlan {
  RingPlan rings;
  CombinePlan combine;
  size_t staging_row_bytes = 0;
};

struct CachedDispatchKey {
  ConfigChoice config;
  PayloadForm form;
  int num_channels;  // of the handle
  bool is_expanded;

  bool operator==(const CachedDispatchKey&) const = default;
};
struct NewDispatchKey {
  ConfigChoice config;
  PayloadForm form;
  int num_topk, topk_idx_bytes, num_experts, expert_alignment;
  bool counts_choices;  // from topk_idx; else the layout is given
  bool is_expanded;

  bool operator==(const NewDispatchKey&) const = default;
};
struct CombineKey {
  ConfigChoice config;
  Dtype dtype;
  int row_bytes, num_topk;
  int num_channels;      // of the handle
  bool has_default_sms;  // of the handle

  bool operator==(const CombineKey&) const = default;
};

struct PlansInNode {
  PlanCache<CachedDispatchKey, CachedDispatchPlan> cached_dispatches;
  PlanCache<NewDispatchKey, NewDispatchPlan> new_dispatches;
  PlanCache<CombineKey, InNodeCombinePlan> combines;
};

// Throw CallError: kArgument, kBufferTooSmall. References hold until the next call.
const CachedDispatchPlan& plan_of(CallContext& context, const CachedDispatchKey& key);
const NewDispatchPlan& plan_of(CallContext& context, const NewDispatchKey& key);
const InNodeCombinePlan& plan_of(CallContext& context, const CombineKey& key);

}  // namespace deep_comm
