import threading
from typing import Any

_state = threading.local()


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_deepep_dispatch_normal(
        self,
        local_physical_count_of_layer: list[int],
        num_tokens_per_rank: Any,
        num_tokens_per_rdma_rank: Any,
        num_tokens_per_expert: Any,
    ) -> None:
        assert num_tokens_per_rank.ndim == 1
        assert num_tokens_per_rdma_rank is None or num_tokens_per_rdma_rank.ndim == 1
        self.seen.append(("normal", local_physical_count_of_layer, num_tokens_per_expert))

    def on_deepep_dispatch_low_latency(self, local_physical_count_of_layer: Any) -> None:
        self.seen.append(("low_latency", local_physical_count_of_layer))


def get_global_expert_distribution_recorder() -> Recorder:
    if not hasattr(_state, "recorder"):
        _state.recorder = Recorder()
    return _state.recorder
