#include "host/calls/plans_in_node.hpp"

#include "host/calls/call_context.hpp"
#include "host/ring_sizes.hpp"

namespace deep_comm {

namespace {

// num_channels: as of plan_channels.
RingPlan plan_rings(const CallContext& context, const ConfigChoice& config, int row_bytes,
                    int scale_row_bytes, int num_topk, int num_channels) {
  const int num_ranks = context.group.num_ranks;
  RingPlan rings;
  rings.channels = plan_channels(
      config.config_for(row_bytes + scale_row_bytes), config.given.has_value(), num_channels,
      context.rings, [&](int channels, int slots) {
        return ring_bytes(num_ranks, channels, slots, row_bytes, scale_row_bytes, num_topk);
      });
  // A call whose SMs somebody has named holds no more of them at a time.
  rings.may_wait_beside = config.has_default_sms() || !context.rings.max_sms;
  // A few SMs fill the links, but not the memory of a GPU: docs/design/0036.
  rings.num_local_blocks = config.has_default_sms() && context.rings.max_sms
                               ? *context.rings.max_sms
                               : rings.channels.num_channels;
  return rings;
}

// A row's place in an expanded output travels with it, as scales do.
int scale_row_bytes_of(const PayloadForm& form, bool is_expanded) {
  return form.scale_row_bytes() + (is_expanded ? MessageLayout::kDstRowBytes : 0);
}

DispatchPlan plan_dispatch(const CallContext& context, const RingPlan& rings,
                           const PayloadForm& form, int num_topk, int topk_idx_bytes,
                           bool makes_handle, bool is_expanded) {
  return context.engine.plan_dispatch({.channels = rings.channels,
                                       .dtypes = form.dtypes(),
                                       .row_bytes = form.row_bytes(),
                                       .scale_bytes = form.scale_bytes(),
                                       .num_scales = form.num_scales,
                                       .num_topk = num_topk,
                                       .topk_idx_bytes = topk_idx_bytes,
                                       .makes_handle = makes_handle,
                                       .is_expanded = is_expanded,
                                       .is_quantised = form.is_quantised,
                                       .scale_format = form.scale_format});
}

}  // namespace

const CachedDispatchPlan& plan_of(CallContext& context, const CachedDispatchKey& key) {
  return context.plans_in_node.cached_dispatches.get(key, [&] {
    const PayloadForm& form = key.form;
    CachedDispatchPlan plan;
    plan.rings = plan_rings(context, key.config, form.row_bytes(),
                            scale_row_bytes_of(form, key.is_expanded), 0, key.num_channels);
    plan.dispatch = plan_dispatch(context, plan.rings, form, 0, 0, false, key.is_expanded);
    return plan;
  });
}

const NewDispatchPlan& plan_of(CallContext& context, const NewDispatchKey& key) {
  return context.plans_in_node.new_dispatches.get(key, [&] {
    const PayloadForm& form = key.form;
    NewDispatchPlan plan;
    plan.rings = plan_rings(context, key.config, form.row_bytes(),
                            scale_row_bytes_of(form, key.is_expanded), key.num_topk, 0);
    plan.notify = context.engine.plan_notify({.channels = plan.rings.channels,
                                              .dtypes = form.dtypes(),
                                              .row_bytes = form.row_bytes(),
                                              .scale_row_bytes = form.scale_row_bytes(),
                                              .cast = form.cast(),
                                              .num_topk = key.num_topk,
                                              .topk_idx_bytes = key.topk_idx_bytes,
                                              .num_experts = key.num_experts,
                                              .expert_alignment = key.expert_alignment,
                                              .counts_choices = key.counts_choices,
                                              .is_expanded = key.is_expanded});
    plan.dispatch = plan_dispatch(context, plan.rings, form, key.num_topk, key.topk_idx_bytes, true,
                                  key.is_expanded);
    return plan;
  });
}

const InNodeCombinePlan& plan_of(CallContext& context, const CombineKey& key) {
  return context.plans_in_node.combines.get(key, [&] {
    InNodeCombinePlan plan;
    plan.rings = plan_rings(context, key.config, key.row_bytes, 0, key.num_topk, key.num_channels);
    CombineSms sms{0, 0, 0};
    if (key.has_default_sms && key.config.has_default_sms()) {
      sms = key.config.chooser->combine_sms(key.row_bytes, key.num_channels);
    }
    plan.combine = context.engine.plan_combine(plan.rings.channels, key.dtype, key.num_topk,
                                               key.row_bytes, sms);
    plan.staging_row_bytes = staging_row_bytes(key.row_bytes, key.num_topk);
    return plan;
  });
}

}  // namespace deep_comm
