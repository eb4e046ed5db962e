import threading

_state = threading.local()


def set_is_extend_in_batch(is_extend: bool) -> None:
    _state.value = is_extend


def get_is_extend_in_batch() -> bool:
    return getattr(_state, "value", False)
