"""Rings of one call between nodes: inside the node and on the rail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from deep_comm.checks import PayloadForm
from deep_comm.config import Config, plan_rings, require_config
from deep_comm.context import Context
from deep_comm.errors import ArgumentError, BufferTooSmall, HandleMismatch
from deep_comm.ops.call import CallOptions


@dataclass(frozen=True)
class TwoTierPlan:
    """Geometry of the rings of one call in both tiers."""

    num_channels: int
    num_send_tokens: int
    num_slots: int
    num_rail_send_tokens: int
    num_rail_slots: int
    num_local_blocks: int  # of kernels that only work in this rank's memory

    def as_arguments(self) -> dict[str, int]:
        """By the names that the engine knows."""
        return {
            "num_channels": self.num_channels,
            "num_send_tokens": self.num_send_tokens,
            "num_slots": self.num_slots,
            "num_rail_send_tokens": self.num_rail_send_tokens,
            "num_rail_slots": self.num_rail_slots,
        }


def plan_two_tiers(
    ctx: Context,
    options: CallOptions,
    row_bytes: int,
    scale_row_bytes: int,
    num_topk: int,
    num_channels: int | None = None,
) -> TwoTierPlan:
    """Rings for one call. A caller's config is taken as it is; the
    default is shrunk until it fits.

    ``num_channels``: of the handle, which the plan must have.

    Raises:
        ArgumentError, BufferTooSmall, HandleMismatch.
    """
    config, default, names_sms = options.config, options.default_config, options.names_sms
    require_config(config)
    shape = (row_bytes, scale_row_bytes, num_topk, num_channels)
    key = (config, default, names_sms, *shape)
    known = ctx.two_tier_plans.get(key)
    if known is None:
        known = _plan(ctx, config, default, names_sms, *shape)
        ctx.two_tier_plans[key] = known
    return known


Launcher = Callable[..., None]

FILL_TAIL, ZERO_TAIL, IS_EARLY = 1, 2, 4
"""Flags of a dispatch."""


def notify_launcher(
    ctx: Context,
    plan: TwoTierPlan,
    form: PayloadForm,
    num_topk: int,
    num_experts: int,
    expert_alignment: int,
) -> Launcher:
    """The engine's part of a notify: num_tokens_per_expert, is_token_in_rank, num_tokens;
    node_channel_prefix, rank_channel_prefix, send_node_head, send_places; recv_node_channel_prefix,
    recv_node_prefix_sum, recv_rank_channel_start, recv_rank_prefix_sum, combine_start,
    forward_places, num_recv_tokens_per_expert, num_recv_tokens_per_rank; has_weights, stream.
    """
    key = (plan, form, num_topk, num_experts, expert_alignment)
    known: Launcher | None = ctx.two_tier_plans.get(key)
    if known is None:
        known = ctx.engine.plan_internode_notify(
            row_bytes=form.row_bytes,
            scale_row_bytes=form.scale_row_bytes,
            num_topk=num_topk,
            cast=form.quantises + form.round_scale + form.use_ue8m0,
            num_experts=num_experts,
            expert_alignment=expert_alignment,
            **plan.as_arguments(),
        )
        ctx.two_tier_plans[key] = known
    return known


def dispatch_launcher(
    ctx: Context, plan: TwoTierPlan, form: PayloadForm, num_topk: int, topk_idx_bytes: int
) -> Launcher:
    """The engine's part of a dispatch of this form: num_experts, is_token_in_rank, send_node_head,
    recv_node_channel_prefix, recv_node_prefix_sum, recv_rank_channel_start, recv_rank_prefix_sum,
    node_channel_prefix, send_places; x, num_tokens, x_scales, scale_token_stride,
    scale_column_stride, topk_idx, topk_weights; recv_x, recv_x_scales, recv_topk_idx,
    recv_topk_weights, num_recv_rows, num_forward_rows, output_offset; recv_src_idx, recv_src_meta,
    send_rank_head, src_offset, combine_start, forward_places; flags, source, stream.
    """
    key = (plan, form, num_topk, topk_idx_bytes)
    known: Launcher | None = ctx.two_tier_plans.get(key)
    if known is None:
        known = ctx.engine.plan_internode_dispatch(
            row_bytes=form.row_bytes,
            scale_bytes=form.scale_bytes,
            num_scales=form.num_scales,
            num_topk=num_topk,
            topk_idx_bytes=topk_idx_bytes,
            round_scale=form.round_scale,
            use_ue8m0=form.use_ue8m0,
            **plan.as_arguments(),
        )
        ctx.two_tier_plans[key] = known
    return known


def combine_launcher(
    ctx: Context, plan: TwoTierPlan, dtype: str, row_bytes: int, num_topk: int
) -> Launcher:
    """Of a combine: send_node_head, send_rank_head, recv_node_channel_prefix, recv_node_prefix_sum,
    recv_rank_channel_start, recv_rank_prefix_sum, node_channel_prefix, forward_places,
    num_recv_rows, num_forward_rows; x, topk_weights, bias_0, bias_1, num_tokens, combined_x,
    combined_topk_weights, staging_offset, num_staging_rows, stream.
    """
    key = (plan, dtype, row_bytes, num_topk)
    known: Launcher | None = ctx.two_tier_plans.get(key)
    if known is None:
        known = ctx.engine.plan_internode_combine(
            dtype=dtype, row_bytes=row_bytes, num_topk=num_topk, **plan.as_arguments()
        )
        ctx.two_tier_plans[key] = known
    return known


def _with_channels_of_two_sms(config: Config) -> Config:
    """As plan_rings wants it, whose channels are one SM each, with half as many slots."""
    return replace(
        config,
        num_sms=max(1, config.num_sms // 2),
        num_max_nvl_chunked_recv_tokens=2 * config.num_max_nvl_chunked_recv_tokens,
    )


def _plan(
    ctx: Context,
    config: Config | None,
    default: Config | None,
    names_sms: bool,
    row_bytes: int,
    scale_row_bytes: int,
    num_topk: int,
    num_channels: int | None,
) -> TwoTierPlan:
    shape = dict(row_bytes=row_bytes, scale_row_bytes=scale_row_bytes, num_topk=num_topk)

    def ring_bytes(channels: int, slots: int) -> int:
        return ctx.engine.two_tier_ring_bytes(
            ranks_per_node=ctx.topology.ranks_per_node,
            num_channels=channels,
            num_slots=slots,
            **shape,
        )

    def rail_bytes(channels: int, slots: int) -> int:
        return ctx.engine.rail_ring_bytes(
            num_nodes=ctx.topology.num_nodes, num_channels=channels, num_slots=slots, **shape
        )

    chosen = config if config is not None else default
    assert chosen is not None
    if config is not None and (config.num_sms < 2 or config.num_sms % 2 != 0):
        raise ArgumentError(
            "config.num_sms", config.num_sms, "must be even and at least 2 between nodes"
        )
    halved = _with_channels_of_two_sms(chosen)
    max_sms = ctx.backend.max_sms
    rings = plan_rings(
        None if config is None else halved,
        halved,
        num_channels=num_channels,
        max_sms=None if max_sms is None else max_sms // 2,
        num_nvl_bytes=ctx.num_nvl_bytes,
        num_ring_bytes=ctx.num_ring_bytes,
        ring_bytes=ring_bytes,
    )
    if num_channels is not None and rings.num_channels != num_channels:
        raise HandleMismatch(
            "handle",
            f"{num_channels} channels",
            f"must have the config's {rings.num_channels} channels (num_sms / 2); "
            "leave config away to take the handle's",
        )
    channels = rings.num_channels
    slots = chosen.num_max_rdma_chunked_recv_tokens
    if config is None:
        while slots > 1 and rail_bytes(channels, slots) > ctx.num_rdma_bytes:
            slots //= 2
    if rail_bytes(channels, slots) > ctx.num_rdma_bytes:
        raise BufferTooSmall(
            ctx.num_rdma_bytes,
            rail_bytes(channels, slots),
            f"{channels} channels with rings of {slots} slots to each of "
            f"{ctx.topology.num_nodes} nodes",
            "num_rdma_bytes",
        )
    return TwoTierPlan(
        num_channels=channels,
        num_send_tokens=rings.num_send_tokens,
        num_slots=rings.num_slots,
        num_rail_send_tokens=min(chosen.num_max_rdma_chunked_send_tokens, slots),
        num_rail_slots=slots,
        # A few SMs fill the links, but not the memory of a GPU: docs/design/0036.
        num_local_blocks=2 * channels if names_sms or max_sms is None else max_sms,
    )
