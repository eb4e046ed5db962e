"""The shapes of the models on docs/guide/shapes.md, as cases of both modes."""

from __future__ import annotations

from typing import Any

import low_latency
import roundtrip
import tool_modules
from cases import Case
from low_latency import LowLatencyCase

MODELS: dict[str, Any] = {model.name: model for model in tool_modules.load("lib/pages.py").MODELS}


def normal_case(name: str, tokens: tuple[int, ...]) -> Case:
    model = MODELS[name]
    return Case(
        tokens, hidden=model.hidden, experts=model.experts, topk=model.topk, calls=2, alignment=16,
        nvl_bytes=64 << 20, seed=model.hidden,
    )  # fmt: skip


def low_latency_cases(name: str, tokens: tuple[int, ...]) -> list[LowLatencyCase]:
    """BF16 by expert with weights at the end, and what servers decode with: FP8 rows by hooks."""
    model = MODELS[name]
    shape = dict(hidden=model.hidden, experts=model.experts, topk=model.topk, seed=model.hidden)
    cases = [LowLatencyCase(tokens, max(tokens), **shape)]
    if model.hidden % 128 == 0:
        cases.append(LowLatencyCase(tokens, max(tokens), use_fp8=True, mode="hook", **shape))
    return cases


def run(group: Any, device: Any, name: str, tokens: tuple[int, ...]) -> tuple[list, list]:
    """One rank's part in all cases of a model."""
    return (
        roundtrip.run_case(group, normal_case(name, tokens), device),
        [
            low_latency.run_case(group, case, device=device)
            for case in low_latency_cases(name, tokens)
        ],
    )


def verify(name: str, tokens: tuple[int, ...], results: list) -> None:
    roundtrip.verify(normal_case(name, tokens), [normal for normal, _ in results])
    for number, case in enumerate(low_latency_cases(name, tokens)):
        low_latency.verify(case, [of_rank[number] for _, of_rank in results])
