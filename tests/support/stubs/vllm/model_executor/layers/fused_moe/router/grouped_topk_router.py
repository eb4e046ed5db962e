"""Stand-in for vLLM's router of grouped top-k."""


class GroupedTopKRouter:
    def __init__(self, top_k: int, global_num_experts: int, skip_padding: bool = False) -> None:
        self.top_k = top_k
        self.global_num_experts = global_num_experts
        self.skip_padding = skip_padding
