from typing import Any

from torch import Tensor


class All2AllManagerBase:
    rank: int
    world_size: int

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        self.cpu_group = cpu_group
        self.tcp_store_group = tcp_store_group
        self.rank = cpu_group.rank()
        self.world_size = cpu_group.size()
        self.internode = False

    def get_handle(self, kwargs: dict) -> Any:
        raise NotImplementedError

    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> Any:
        raise NotImplementedError

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> Any:
        raise NotImplementedError

    def set_num_sms(self, num_sms: int) -> None:
        pass

    def max_sms_used(self) -> int | None:
        return None

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        raise NotImplementedError

    def destroy(self) -> None:
        pass
