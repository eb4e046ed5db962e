"""What ExpertParallel adds to the Buffer calls under it, and what importing the package costs."""

import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
import torch
from layer_cases import LayerCase, build, inputs

from deep_comm import local
from deep_comm.layer.host_counters import shared_counters

MAX_ROWS = 256  # of bounded steps
# What a step adds to the Buffer's dispatch and combine. A prefill step costs less than they do, by
# the tensors that it does not make.
TARGET_US = {"decode": 8.0, "auto": 12.0, "prefill": 8.0, "bounded": 8.0}
MAX_FUNCTIONS = {"decode": 5, "auto": 5, "prefill": 14, "bounded": 14}
"""Of the whole package, in a step."""
IMPORT_TARGET_S = 0.5


def _without_launches(body: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
    """``body(layer, (x, idx, weights))`` with a Buffer that launches nothing, of one rank that
    shares a page with itself."""

    def main(group: Any) -> Any:
        case = LayerCase(((16,),), max_tokens=64, decode_tokens=32, experts=16, topk=8)
        with build(group, case, max_recv_rows=MAX_ROWS) as layer, torch.inference_mode():
            layer._steps.use_counters(shared_counters(layer.buffer._context.rendezvous))
            parts = inputs(case, 0, 0)
            steps = [_raw_decode(layer, parts)]
            steps += [_raw_prefill(layer, parts, bound) for bound in (0, MAX_ROWS)]
            steps += [_step(layer, parts, mode) for mode in MAX_FUNCTIONS]
            for step in 2 * steps:
                step()
            engine = layer.buffer._context.engine
            engine.skips_launches = True
            engine.stub_counts = 16, 16, True, [8] * 16
            return body(layer, parts)

    with fake_cuda.installed() as log:
        log.is_silent = True
        return local.run(main, 1, timeout_s=120)[0]


def _experts(batch: Any) -> torch.Tensor:
    return batch.x


def _raw_decode(layer: Any, parts: tuple[Any, ...]) -> Callable[[], None]:
    x, idx, weights = parts
    buffer, slots = layer.buffer, layer.shape.num_slots

    def step() -> None:
        sent = buffer.low_latency_dispatch(x, idx, slots, 16, use_fp8=False, topk_weights=weights)
        buffer.low_latency_combine(sent[0], idx, None, sent[2])

    return step


def _raw_prefill(layer: Any, parts: tuple[Any, ...], bound: int) -> Callable[[], None]:
    x, idx, weights = parts
    buffer = layer.buffer

    def step() -> None:
        sent = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=16, expand=True,
            num_worst_tokens=bound, zero_padding=bound > 0,
        )  # fmt: skip
        buffer.combine(sent[0], sent[4], topk_weights=sent[2], apply_weights=True)

    return step


def _step(layer: Any, parts: tuple[Any, ...], mode: str) -> Callable[[], None]:
    bounded = mode == "bounded"
    name = "prefill" if bounded else mode

    def step() -> None:
        layer(*parts, _experts, mode=name, bounded=bounded)

    return step


@pytest.mark.parametrize("mode", MAX_FUNCTIONS)
def test_a_step_adds_few_microseconds_to_the_buffer_calls(mode: str) -> None:
    def body(layer: Any, parts: tuple[Any, ...]) -> float:
        if mode in ("prefill", "bounded"):
            raw = _raw_prefill(layer, parts, MAX_ROWS if mode == "bounded" else 0)
        else:
            raw = _raw_decode(layer, parts)
        step = _step(layer, parts, mode)
        # The least of many, of this thread alone: whatever else runs on this machine can only add.
        # In turn, because a core may be slower for a while.
        timers = [timeit.Timer(call, timer=time.thread_time) for call in (raw, step)]
        rounds = [[timer.timeit(60) / 60 for timer in timers] for _ in range(80)]
        best_raw, best_step = (min(column) for column in zip(*rounds, strict=True))
        return (best_step - best_raw) * 1e6

    tries = []
    for _ in range(3):  # a machine with other guests has minutes in which any number comes out
        tries.append(_without_launches(body))
        if tries[-1] <= TARGET_US[mode]:
            return
    raise AssertionError(f"{tries} us")


@pytest.mark.parametrize("mode", MAX_FUNCTIONS)
def test_a_step_enters_few_functions_and_makes_no_tensor_of_its_own(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def body(layer: Any, parts: tuple[Any, ...]) -> list[str]:
        step = _step(layer, parts, mode)
        for name in ("empty", "zeros", "full", "arange"):
            monkeypatch.setattr(torch, name, lambda *args, name=name, **options: made.append(name))
        with fake_cuda.Counter() as counter:
            step()
        monkeypatch.undo()
        return counter.functions

    functions = _without_launches(body)
    assert made == []
    assert len(functions) <= MAX_FUNCTIONS[mode], " ".join(functions)


def test_importing_the_package_is_quick_beside_torch() -> None:
    program = (
        # Of this process alone, whatever else the machine does.
        "import torch, time; t = time.process_time(); import deep_comm; "
        "print(time.process_time() - t); import sys; assert 'deep_comm._cuda' not in sys.modules"
    )
    times = [
        float(subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
        ).stdout)
        for _ in range(2)
    ]  # fmt: skip
    assert min(times) <= IMPORT_TARGET_S, times
