import threading
from types import SimpleNamespace
from typing import Any

import torch

_state = threading.local()


def set_tokens_of_ranks(counts: torch.Tensor | None) -> None:
    """As many as each data-parallel rank has in this step; None: vLLM does not tell."""
    metadata = None if counts is None else SimpleNamespace(num_tokens_across_dp_cpu=counts)
    _state.context = SimpleNamespace(dp_metadata=metadata)


def is_forward_context_available() -> bool:
    return hasattr(_state, "context")


def get_forward_context() -> Any:
    assert is_forward_context_available(), "as vLLM outside of a step"
    return _state.context
