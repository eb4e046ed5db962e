"""The kernels of one rank on one GPU, each checked against the reference: what tools/sanitize runs.

A sanitizer slows kernels down by a factor of up to a hundred, so that shapes are
small and deadlines long. One rank runs every kernel and every mode; what needs peers
is left to the simulation.
"""

from __future__ import annotations

import dataclasses
import os

import low_latency
import roundtrip
import torch
from cases import Case, Scales

from deep_comm import local

CASES = [
    Case(
        (33,),
        hidden=256,
        experts=7,
        topk=3,
        num_sms=4,
        slots=3,
        send_chunk=2,
        direct_bytes=0,
        biases=1,
    ),
    Case((33,), hidden=256, experts=7, topk=3, num_sms=4, slots=8, fused_layout=True, biases=2),
    Case(
        (19,),
        hidden=1024,
        experts=40,
        topk=8,
        num_sms=2,
        routing="holes",
        worst=5,
        fused_layout=True,
    ),
    Case(
        (21,),
        hidden=512,
        experts=5,
        topk=2,
        num_sms=4,
        slots=4,
        dtype=torch.int8,
        scales=Scales(3, layout="column"),
        idx_dtype=torch.int32,
        combine_dtype=torch.float32,
    ),
    Case((0,), hidden=128, experts=4, topk=2, num_sms=2),
]
LOW_LATENCY = [
    low_latency.LowLatencyCase((9,), 16, hidden=256, experts=5, topk=3),
    low_latency.LowLatencyCase((9,), 16, hidden=256, experts=5, topk=3, use_fp8=True, mode="hook"),
    low_latency.LowLatencyCase(
        (9,), 16, hidden=256, experts=5, topk=3, compact=True, weights_ahead=True
    ),
]


def main() -> None:
    os.environ["DEEP_COMM_TIMEOUT_S"] = "600"
    os.environ["DEEP_COMM_POISON"] = "1"
    for case in CASES:
        case = dataclasses.replace(case, nvl_bytes=128 << 20)
        results = local.run(
            lambda group: roundtrip.run_case(group, case, "cuda:0"), 1, timeout_s=600
        )
        roundtrip.verify(case, results)
        print(f"{case}: same bits", flush=True)
    for pair in LOW_LATENCY:
        results = local.run(
            lambda group: low_latency.run_case(group, pair, device="cuda:0", timeout_s=600),
            1,
            timeout_s=600,
        )
        low_latency.verify(pair, results)
        print(f"{pair}: same bits", flush=True)


if __name__ == "__main__":
    main()
