from typing import Any

from vllm.distributed.device_communicators import all2all  # noqa: F401


class DeepEPHTPrepareAndFinalize:
    pass


class DeepEPLLPrepareAndFinalize:
    pass


def make_high_throughput(manager: Any, dp_size: int, num_local_experts: int) -> Any:
    """As vLLM makes it: by the name in this module."""
    return DeepEPHTPrepareAndFinalize(
        manager.get_handle({}),
        num_dispatchers=manager.world_size,
        dp_size=dp_size,
        rank_expert_offset=manager.rank * num_local_experts,
    )


def make_low_latency(
    manager: Any, max_num_tokens: int, hidden_dim: int, num_experts: int, use_fp8_dispatch: bool,
    routing_tables: tuple | None = None,
) -> Any:  # fmt: skip
    global_to_physical = physical_to_global = local_expert_global_ids = None
    if routing_tables is not None:
        global_to_physical, physical_to_global, local_expert_global_ids = routing_tables
    handle = manager.get_handle(
        dict(
            max_num_tokens_per_dp_rank=max_num_tokens,
            token_hidden_size=hidden_dim,
            num_ep_ranks=manager.world_size,
            num_global_experts=num_experts,
            num_local_experts=num_experts // manager.world_size,
        )
    )
    return DeepEPLLPrepareAndFinalize(
        handle, max_tokens_per_rank=max_num_tokens, num_dispatchers=manager.world_size,
        use_fp8_dispatch=use_fp8_dispatch, global_to_physical=global_to_physical,
        physical_to_global=physical_to_global, local_expert_global_ids=local_expert_global_ids,
    )  # fmt: skip
