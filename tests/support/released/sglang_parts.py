"""SGLang: the release and what stands in for the parts its dispatchers need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from released import vllm_parts
from released.package import released
from released.program import Release

_MOE = "srt.layers.moe"
MOE = f"sglang.{_MOE}"

RELEASE = Release(
    "sglang", "0.5.23", "sglang",
    (
        _MOE,
        f"{_MOE}.token_dispatcher",
        f"{_MOE}.token_dispatcher.base",
        f"{_MOE}.token_dispatcher.deepep",
        f"{_MOE}.token_dispatcher.deepep_v2",
        f"{_MOE}.utils",
        "srt.batch_overlap.two_batch_overlap",
        "srt.environ",
    ),
)  # fmt: skip

MAX_TOKENS = 64
RINGS = {
    "num_sms": 4, "num_max_nvl_chunked_send_tokens": 4, "num_max_nvl_chunked_recv_tokens": 64,
    "num_max_rdma_chunked_send_tokens": 4, "num_max_rdma_chunked_recv_tokens": 64,
}  # fmt: skip


class Server:
    """What the server of this process is set to: arguments, resources, the step's mode."""

    def __init__(self) -> None:
        self.is_extend_in_batch = True
        self.moe = SimpleNamespace(
            deepep_dispatcher_output_dtype="fp8", deepep_v2_mode="direct",
        )  # fmt: skip
        self.flags = SimpleNamespace(
            a2a_backend=None, deepep_mode=None, deepep_config="", tbo_enabled=True,
        )  # fmt: skip
        self.resources = SimpleNamespace(buffers={})

    def use(self, generation: str, dtype: str) -> None:
        """DeepGEMM's wishes on "hopper" or "blackwell"; "fp8" or "bf16" between ranks, or "auto":
        as the layer's quantisation says.
        """
        gemm = released("sglang.srt.layers.deep_gemm_wrapper")
        gemm.DEEPGEMM_BLACKWELL = gemm.DEEPGEMM_SCALE_UE8M0 = generation == "blackwell"
        self.moe.deepep_dispatcher_output_dtype = dtype


server = Server()


def quantise(
    x: Tensor, group_size: int, column_major_scales: bool = False,
    scale_tma_aligned: bool = False, scale_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As vLLM's, or with the scales' exponents, four in an int32, column by column, each column
    with room for a multiple of four rows.
    """
    rows, scales = vllm_parts.quantise(x, group_size)
    if scale_ue8m0:
        bytes_of = (scales.view(torch.int32) >> 23).to(torch.uint8)
        scales = bytes_of.contiguous().view(torch.int32)
    if column_major_scales:
        num_rows, num_columns = scales.shape
        room = -(-num_rows // 4) * 4 if scale_tma_aligned else num_rows
        columns = scales.new_zeros(num_columns, room)
        columns[:, :num_rows] = scales.t()
        scales = columns.t()[:num_rows]
    return rows, scales


def stand_ins() -> Mapping[str, Mapping[str, Any]]:
    global server
    server = Server()
    recorder = SimpleNamespace(
        on_deepep_dispatch_normal=lambda *args, **kwargs: None,
        on_deepep_dispatch_low_latency=lambda *args, **kwargs: None,
    )
    no = lambda *args, **kwargs: False
    parallel = SimpleNamespace(attn_dp_size=2, attn_cp_size=1, tp_size=1, tp_group=None)
    common = {"log_info_on_rank0": lambda *args: None}
    return {
        "sglang.srt.utils": {
            **dict.fromkeys(("is_blackwell", "is_flashinfer_available"), no),
            **dict.fromkeys(("is_hip", "is_npu", "get_bool_env_var"), no),
            "is_cuda": lambda: True,
            "get_cuda_version": lambda: (13, 0),
            "load_json_config": json.loads,
        },
        "sglang.srt.utils.common": common,
        "sglang.srt.runtime_context": {
            "get_exec": lambda: SimpleNamespace(moe=server.moe),
            "get_flags": lambda: SimpleNamespace(moe=server.flags),
            "get_parallel": lambda: parallel,
            "get_resources": lambda: server.resources,
            "get_server_args": lambda: True,
        },
        "sglang.srt.layers.deep_gemm_wrapper": {
            "ENABLE_JIT_DEEPGEMM": True,
            "DEEPGEMM_BLACKWELL": False,
            "DEEPGEMM_SCALE_UE8M0": False,
            "DEEPGEMM_NEED_TMA_ALIGNED_SCALES": False,
        },
        "sglang.srt.layers.dp_attention": {
            "get_is_extend_in_batch": lambda: server.is_extend_in_batch,
        },
        "sglang.srt.eplb.expert_distribution": {
            "get_global_expert_distribution_recorder": lambda: recorder,
        },
        "sglang.kernels.ops.quantization.fp8_kernel": {
            "sglang_per_token_group_quant_fp8": quantise,
        },
    }
