"""What tests of a layer's native decode calls share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deep_comm.layer.decode import NEVER


class Spy:
    """Which halves of a layer's decode steps were one native call; ``is_off``: none may be, so that
    the step is made of the Buffer's calls."""

    def __init__(self, layer: Any) -> None:
        self.made: list[bool] = []
        self.is_off = False
        steps = layer._steps
        steps._begin, steps._end = map(self._spied, (steps._begin, steps._end))
        steps._finish = self._spied(steps._finish)
        steps.transport.quick = NEVER

    def _spied(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def spied(*arguments: Any) -> Any:
            made = None if self.is_off else call(*arguments)
            self.made.append(made is not None)
            return made

        return spied

    def taken(self) -> list[bool]:
        made, self.made = self.made, []
        return made


def require_same(one: Any, other: Any) -> None:
    assert one.dtype == other.dtype and one.shape == other.shape
    assert torch.equal(one.view(torch.int16), other.view(torch.int16))
