"""Stand-in for vLLM's Triton experts of rows by expert."""


def use_tensor_descriptor(override: bool | None = None) -> bool:
    return bool(override)


class BatchedTritonExperts:
    """What prepare and finalize ask of them, or tell them."""

    def __init__(self, max_num_tokens: int, takes_exponents: bool = False) -> None:
        self.max_num_tokens = max_num_tokens
        self._takes_exponents = takes_exponents

    def supports_packed_ue8m0_act_scales(self) -> bool:
        return self._takes_exponents
