"""What ElasticBuffer has in DeepEP and cannot have here: each says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from deep_comm.errors import UnsupportedError

_ENGRAM = "Engram tables (rows fetched from other ranks' memory) are not offered"
_PIPELINE = "pipeline send and receive are not offered: use torch.distributed"
_GATHER = "all-gather sessions are not offered: use torch.distributed"

_METHODS = {
    "engram_write": _ENGRAM,
    "engram_fetch": _ENGRAM,
    "pp_set_config": _PIPELINE,
    "pp_send": _PIPELINE,
    "pp_recv": _PIPELINE,
    "create_agrs_session": _GATHER,
    "destroy_agrs_session": _GATHER,
    "agrs_new_session": _GATHER,
    "agrs_set_config": _GATHER,
    "agrs_get_inplace_tensor": _GATHER,
    "all_gather": _GATHER,
}
_STATIC_METHODS = {
    "get_engram_storage_size_hint": _ENGRAM,
    "get_pp_buffer_size_hint": _PIPELINE,
    "get_agrs_num_max_session_bytes": _GATHER,
    "get_agrs_buffer_size_hint": _GATHER,
}


def _refusal(name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise UnsupportedError(f"ElasticBuffer.{name}: {why}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raises UnsupportedError: {why}."
    return refuse


class Refused:
    """Base of ElasticBuffer: methods that raise UnsupportedError."""


for _name, _why in _METHODS.items():
    setattr(Refused, _name, _refusal(_name, _why))
for _name, _why in _STATIC_METHODS.items():
    setattr(Refused, _name, staticmethod(_refusal(_name, _why)))
