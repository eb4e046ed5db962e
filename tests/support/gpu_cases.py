"""Cases of the end-to-end tests on GPUs, and the processes of their ranks."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gpu_pool
import matrix
import pytest
import torch
from cases import Case, InternodeCase, direct
from internode import model_case, random_case
from quantised import FORMS, Form

NUM_CASES = 64
POISON = {"DEEP_COMM_POISON": "1"}


def on_gpus(*counts: int) -> pytest.MarkDecorator:
    """Runs a test with each of these ``num_ranks`` that the machine has devices for."""
    marks = [pytest.param(count, marks=pytest.mark.gpu(num_devices=count)) for count in counts]
    return pytest.mark.parametrize("num_ranks", marks)


def run(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: object,
    backend: str = "gloo",
    devices: Sequence[int] | None = None,
    variables: Mapping[str, str] = POISON,
    timeout_s: float = 280,
) -> list:
    """One process of the session's pool a rank, on a device of its own unless ``devices`` says
    otherwise.
    """
    return gpu_pool.shared().run(
        fn, num_ranks, *args, backend=backend, variables=variables, timeout_s=timeout_s,
        devices=range(num_ranks) if devices is None else devices,
    )  # fmt: skip


def on_own_device(group: Any, fn: Callable[..., Any], *args: object) -> Any:
    """Of a rank: ``fn(group, device, *args)``."""
    return fn(group, torch.device("cuda", torch.cuda.current_device()), *args)


def matrix_for(num_ranks: int, seed: int, num_cases: int = NUM_CASES) -> list[Case]:
    cases = matrix.sample(num_cases, seed, ranks=[num_ranks])
    # A default config on a GPU takes more room than one on the host.
    return [dataclasses.replace(case, nvl_bytes=128 << 20) for case in cases]


def internode_cases(shape: tuple[int, int], first_seed: int, num_cases: int) -> list[InternodeCase]:
    cases = [random_case(first_seed + number, shape) for number in range(num_cases)]
    # A default config on a GPU has ten channels and takes more room than one on the host.
    cases = [dataclasses.replace(case, nvl_bytes=128 << 20, rdma_bytes=128 << 20) for case in cases]
    return [
        direct(case) if number % 2 == 0 else dataclasses.replace(case, direct_bytes=0)
        for number, case in enumerate(cases)
    ]


def quantised_cases(
    shape: tuple[int, int], first_seed: int, num_cases: int
) -> list[tuple[InternodeCase, Form]]:
    choose = random.Random(first_seed)
    cases = internode_cases(shape, first_seed, num_cases)
    return [
        (
            dataclasses.replace(
                case, hidden=choose.choice((128, 384, 2176)), dtype=torch.bfloat16, scales=None
            ),
            FORMS[number // 2 % len(FORMS)],
        )
        for number, case in enumerate(cases)
    ]


def quantised_model_cases(num_nodes: int, ranks_per_node: int) -> list[tuple[InternodeCase, Form]]:
    rings = model_case(
        num_nodes * ranks_per_node, ranks_per_node, experts=256, alignment=16, biases=0, calls=2,
        nvl_bytes=1 << 30, direct_bytes=0,
    )  # fmt: skip
    exponents = Form(round_scale=True, use_ue8m0=True, column_major=True)
    return [(rings, Form()), (direct(rings), Form(expand=True)), (direct(rings), exponents)]
