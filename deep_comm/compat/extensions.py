"""Keywords that forks of DeepEP added: taken where they ask for nothing, else refused by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deep_comm
from deep_comm.errors import UnsupportedArgument


@dataclass(frozen=True)
class Extension:
    """A keyword of a fork. ``neutral``: the values that ask for what happens anyway."""

    origin: str
    neutral: tuple[Any, ...]
    reason: str


_SIGNALS = "combine starts when it is called, not when signals of a running GEMM arrive"

CONSTRUCTOR = {
    "allow_nvlink_for_normal_mode": Extension(
        "hybrid-ep", (True,), "inside a node rows always travel over NVLink"
    ),
    "eager_support": Extension("eager-rdma", (False,), "there is no eager protocol"),
}
DISPATCH = {
    "global_expert_id_offset": Extension(
        "TensorRT-LLM's copy",
        (0, None),
        "recv_topk_idx holds local indices; add the offset to those >= 0",
    ),
}
LOW_LATENCY_DISPATCH = {
    "use_ue8m0_for_sf": Extension("hybrid-ep", (False,), "scales of NVFP4 rows are e4m3"),
    "topk_weights": Extension(
        "hybrid-ep", (None,), "the seven-item result is not offered; deep_comm.Buffer takes "
        "topk_weights"
    ),
    "use_eager": Extension("eager-rdma", (False,), "there is no eager protocol"),
    "align_fp8_quantization": Extension(
        "zhuzilin/DeepEP", (False,),
        "rows are scaled as deep_comm/reference/low_latency.py says, bit for bit, and no other way",
    ),
}  # fmt: skip
LOW_LATENCY_COMBINE = {
    "overlap": Extension("hybrid-ep and antgroup-opt", (False,), _SIGNALS),
    "src_signals": Extension("hybrid-ep", (None,), _SIGNALS),
    "src_signal_expect_value": Extension("hybrid-ep", (0, None), _SIGNALS),
    "packed_recv_count": Extension("antgroup-opt", (None,), _SIGNALS),
    "comp_signal": Extension("antgroup-opt", (None,), _SIGNALS),
    # Of the overlap alone: without it they mean nothing.
    "block_m": Extension("antgroup-opt", (), ""),
    "threshold": Extension("antgroup-opt", (), ""),
    "num_sms": Extension("antgroup-opt", (), ""),
    "use_eager": Extension("eager-rdma", (False,), "there is no eager protocol"),
}


def check(function: str, known: Mapping[str, Extension], given: Mapping[str, Any]) -> None:
    """Raise UnsupportedArgument for the first keyword of ``given`` that asks for something."""
    for name, value in given.items():
        extension = known.get(name)
        if extension is None:
            raise UnsupportedArgument(function, name, value, _unknown(function, name))
        if not extension.reason or _is_neutral(value, extension.neutral):
            continue
        raise UnsupportedArgument(
            function, name, value, f"a keyword of {extension.origin}; {extension.reason}"
        )


def _unknown(function: str, name: str) -> str:
    _, _, method = function.partition(".")
    parameters = inspect.signature(getattr(deep_comm.Buffer, method or "__init__")).parameters
    if name in parameters:
        return "a keyword of deep_comm.Buffer, which DeepEP has not: import Buffer from deep_comm"
    # Those of the constructor are taken.
    own = inspect.Parameter.KEYWORD_ONLY if method else None
    known = [each.name for each in [*parameters.values()][1:] if each.kind is not own]
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"did you mean {near[0]}?"
    return "no release of DeepEP that deep_comm follows has this keyword"


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # Of the same type: a tensor must not be compared, and 0 must not stand for False.
    return any(value is item or (type(value) is type(item) and value == item) for item in neutral)
