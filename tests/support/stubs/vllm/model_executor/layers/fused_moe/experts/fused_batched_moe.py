"""Stand-in for vLLM's Triton experts of rows by expert."""


def use_tensor_descriptor(override: bool | None = None) -> bool:
    return bool(override)
