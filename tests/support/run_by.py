"""A test that is the body of every rank, without a function inside a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def run_by(run: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """The test is what ``run(body, *args, **options)`` calls, as a rule on every rank.

    What stands before the ``/`` of its parameters comes from ``run``; the rest comes from pytest.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_ranks(**given: Any) -> None:
            run(functools.partial(test, **given), *args, **options)

        return all_ranks

    return decorate
