import threading
from types import SimpleNamespace
from typing import Any

_state = threading.local()


def set_most_tokens(most: Any) -> None:
    _state.metadata = SimpleNamespace(max_tokens_across_dp_cpu=most)


def get_forward_context() -> Any:
    return SimpleNamespace(dp_metadata=getattr(_state, "metadata", None))
