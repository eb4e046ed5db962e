"""The kernels of one rank on one GPU, each checked against the reference: what tools/sanitize runs.

A sanitizer slows kernels down by a factor of up to a hundred, so that shapes are
small and deadlines long. One rank runs every kernel and every mode; what needs peers
is left to the simulation.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import expanded
import low_latency
import quantised
import roundtrip
import torch
from cases import Case, Scales

import deep_comm
from deep_comm import local
from deep_comm.reference import low_latency as reference_low_latency

CASES = [
    Case(
        (33,), hidden=256, experts=7, topk=3, num_sms=4, slots=3, send_chunk=2, direct_bytes=0,
        biases=1,
    ),
    Case((33,), hidden=256, experts=7, topk=3, num_sms=4, slots=8, fused_layout=True, biases=2),
    Case(
        (19,), hidden=1024, experts=40, topk=8, num_sms=2, routing="holes", worst=5,
        fused_layout=True,
    ),
    Case(
        (21,), hidden=512, experts=5, topk=2, num_sms=4, slots=4, dtype=torch.int8,
        scales=Scales(3, layout="column"), idx_dtype=torch.int32, combine_dtype=torch.float32,
    ),
    Case((0,), hidden=128, experts=4, topk=2, num_sms=2),
]  # fmt: skip
EXPANDED = [
    Case((33,), hidden=256, experts=7, topk=3, num_sms=4, alignment=16, biases=1),
    Case(
        (19,), hidden=512, experts=5, topk=4, num_sms=2, slots=4, direct_bytes=0, alignment=4,
        routing="holes", worst=7, dtype=torch.int8, scales=Scales(3), seed=1,
    ),
]  # fmt: skip
QUANTISED = [
    (Case((33,), hidden=256, experts=7, topk=3, num_sms=4), quantised.Form()),
    (
        Case((19,), hidden=384, experts=5, topk=2, num_sms=2, direct_bytes=0, alignment=8),
        quantised.Form(round_scale=True, use_ue8m0=True, column_major=True, expand=True),
    ),
]
_FEW = dict(hidden=256, experts=5, topk=3)
LOW_LATENCY = [
    low_latency.LowLatencyCase((9,), 16, **_FEW),
    low_latency.LowLatencyCase((9,), 16, **_FEW, use_fp8=True, mode="hook"),
    low_latency.LowLatencyCase((9,), 16, **_FEW, compact=True, weights_ahead=True),
    low_latency.LowLatencyCase((9,), 16, **_FEW, one_rounding=True, zero_copy=True),
    low_latency.LowLatencyCase((9,), 16, **_FEW, use_nvfp4=True, compact=True),
]


def log_format(group: local.ThreadGroup, device: str) -> None:
    """Combine in LogFMT-10, whose sums are compared with their stated error."""
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(16, 256, 1, 5)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 256, generator=generator).bfloat16()
    idx = torch.rand(9, 5, generator=generator).topk(3).indices
    ones = torch.ones(9, 3)
    with deep_comm.Buffer(
        group, 0, num_bytes, low_latency_mode=True, device=device, timeout_s=600
    ) as buffer:
        there = [part.to(device) for part in (x, idx, ones)]
        rows, _, handle, *_ = buffer.low_latency_dispatch(*there[:2], 16, 5, use_fp8=False)
        got = buffer.low_latency_combine(rows, *there[1:], handle, use_logfmt=True)[0].cpu().float()
    want = 3 * x.float()
    bound = reference_low_latency.logfmt_bound(want) * 1.001 + want.abs() * 2.0**-8
    assert bool(((got - want).abs() <= bound).all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda:0", help="cpu: without a sanitizer, to try it")
    device = parser.parse_args().device
    os.environ["DEEP_COMM_TIMEOUT_S"] = "600"
    os.environ["DEEP_COMM_POISON"] = "1"

    def check(
        subject: Any, case: Any, run_case: Callable[..., Any], verify: Callable[..., None]
    ) -> None:
        verify(case, local.run(lambda group: run_case(group, case), 1, timeout_s=600))
        print(f"{subject}: same bits", flush=True)

    for case in CASES:
        case = dataclasses.replace(case, nvl_bytes=128 << 20)
        check(case, case, functools.partial(roundtrip.run_case, device=device), roundtrip.verify)
    for case in EXPANDED:
        case = dataclasses.replace(case, nvl_bytes=128 << 20)
        run_case = functools.partial(expanded.run_case, device=device)
        check(f"expanded {case}", case, run_case, expanded.verify)
    for case, form in QUANTISED:
        formed = quantised.Formed(dataclasses.replace(case, nvl_bytes=128 << 20), form)
        run_case = functools.partial(quantised.run_case, device=device)
        check(f"{form} {case}", formed, run_case, quantised.verify)
    for pair in LOW_LATENCY:
        run_case = functools.partial(low_latency.run_case, device=device, timeout_s=600)
        check(pair, pair, run_case, low_latency.verify)
    local.run(lambda group: log_format(group, device), 1, timeout_s=600)
    print("LogFMT-10: within its stated error")


if __name__ == "__main__":
    main()
