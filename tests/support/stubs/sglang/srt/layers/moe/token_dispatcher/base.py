from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


class DispatchOutputFormat(Enum):
    STANDARD = "standard"
    DEEPEP_NORMAL = "deepep_normal"
    DEEPEP_LL = "deepep_ll"


class CombineInputFormat(Enum):
    STANDARD = "standard"
    DEEPEP_NORMAL = "deepep_normal"
    DEEPEP_LL = "deepep_ll"


@runtime_checkable
class DispatchOutput(Protocol):
    hidden_states: Tensor

    @property
    def format(self) -> DispatchOutputFormat: ...


class BaseDispatcher(ABC):
    def __init__(self) -> None:
        self.quant_config: dict = {}
        self.runner_backend: Any = None
        self.overlap_args: Any = None
        self.meta_overlap_args: dict | None = None
        self._post_combine: list[Callable] = []

    @abstractmethod
    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> DispatchOutput: ...

    @abstractmethod
    def combine(self, combine_input: Any) -> Tensor: ...

    def register_post_combine_hook(self, hook: Callable) -> None:
        """As SGLang: the first registration wraps the method of this instance."""
        if not self._post_combine:
            combine = self.combine

            def wrapped(combine_input: Any) -> Tensor:
                out = combine(combine_input)
                for one in self._post_combine:
                    changed = one(self, out)
                    out = out if changed is None else changed
                return out

            self.combine = wrapped  # type: ignore[method-assign]
        self._post_combine.append(hook)

    def set_quant_config(self, quant_config: dict) -> None:
        self.quant_config = quant_config

    def set_overlap_args(self, combine_overlap_args: Any, meta_overlap_args: dict) -> None:
        self.overlap_args = combine_overlap_args
        self.meta_overlap_args = meta_overlap_args

    def clear_overlap_args(self) -> None:
        self.overlap_args = None
        self.meta_overlap_args = None
