"""Every combination that is meant to run: a row each. A row has all it needs to run, or says what
it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

BASE = "allgather_reducescatter"  # NCCL's backend, of vLLM
BASES = {"vllm": BASE, "sglang": "none", "megatron": "alltoall", "torchtitan": "standard"}


@dataclass(frozen=True)
class Row:
    """One run.

    front: offline (the engine alone), http (the server), figures (the server, timed in turn with
    its base's), training.
    options: see OPTIONS.
    """

    server: str
    front: str
    model: str
    backend: str
    options: tuple[str, ...] = ()
    lacks: str = ""  # besides GPUs: what keeps it from running

    @property
    def name(self) -> str:
        return ":".join([f"{self.server}/{self.front}/{self.model}/{self.backend}", *self.options])

    @property
    def num_gpus(self) -> int:
        return 4 if "gpus4" in self.options else 2

    @property
    def base(self) -> Row:
        """What its tokens or losses are compared with, or its times."""
        if self.front == "figures":
            return replace(self, backend=BASES[self.server], options=("graphs",))
        kept = tuple(one for one in self.options if one in _OF_BASE)
        return replace(self, backend=BASES[self.server], options=kept)

    @property
    def is_control(self) -> bool:
        return "wrong" in self.options

    @property
    def sums_as_its_base(self) -> bool:
        """Whether the same kernels see the same batches, and sums have the same order: decode has
        other kernels, a server other batches, and experts that move are summed elsewhere. With
        dual-batch overlap batches are halved; that it gives the same bits was observed.
        """
        others = {"eplb", "chunked", "auto", "idle", "graphs", "compiled"} & set(self.options)
        return self.front == "offline" and self.backend == _HT and not others

    @property
    def is_over_deep_comm(self) -> bool:
        is_exchange = self.backend.startswith("deepep") or self.server == "sglang"
        return is_exchange and self.backend != self.base.backend and "deep_ep" not in self.options


COMPARED = ("offline", "http", "training")  # fronts whose rows are compared with their base's

OPTIONS = {
    "graphs": "decoding in full CUDA graphs; SGLang's attention is data parallel then",
    "compiled": "vLLM compiles the model, and has graphs of whole steps and of parts",
    "dbo": "dual-batch overlap",
    "even": "prompts of the same lengths on both ranks, which so take the same steps",
    "native": "deep_comm's adapter in the place of the server's own, each mode alone",
    "auto": "the native adapter with low-latency steps: 32 tokens, in graphs 16, in figures 128",
    "chunked": "64 tokens in a step: longer prompts are prefilled in chunks",
    "prefix": "prefix caching: prompts with a common beginning, each asked for twice",
    "eplb": "two redundant experts, and experts moved every 32 steps",
    "idle": "a rank without work: all prompts but one of one token are the other's",
    "refused": "a buffer too small for its calls: the server must end with deep_comm's message",
    "kill": "kill -9 under load: nothing may be left, and the server starts again",
    "gpus4": "four GPUs",
    "deep_ep": "DeepEP itself instead of deep_comm",
    "wrong": "negative control: tokens go to other experts, and must come out wrong",
}
_OF_BASE = ("prefix", "even", "gpus4")  # what changes the prompts or the ranks: the base has it too

_HT, _LL, _V2 = "deepep_high_throughput", "deepep_low_latency", "deepep_v2"


def _rows(server: str, front: str, model: str, *wanted: str, lacks: str = "") -> list[Row]:
    rows = []
    for text in wanted:
        backend, *options = text.split(":")
        rows.append(Row(server, front, model, backend, tuple(options), lacks))
    return rows


_PLAIN = (
    BASE, _HT, f"{_HT}:native", _LL, f"{_LL}:native", f"{_LL}:graphs", f"{_LL}:graphs:native",
    f"{_HT}:wrong", f"{_LL}:wrong",
)  # fmt: skip

ROWS: tuple[Row, ...] = (
    *_rows("vllm", "offline", "qwen", *_PLAIN),
    *_rows(
        "vllm", "offline", "qwen", f"{_HT}:native:wrong", f"{_LL}:native:wrong",
        f"{BASE}:even", f"{_HT}:dbo:even", f"{_LL}:dbo:even", f"{_LL}:graphs:dbo:even",
        f"{_HT}:dbo:even:native", f"{_HT}:auto", f"{_HT}:auto:graphs", f"{_HT}:native:graphs",
        f"{_HT}:auto:compiled", _V2,
        f"{_V2}:graphs", f"{_V2}:wrong", f"{_HT}:chunked", f"{_LL}:chunked", f"{BASE}:prefix",
        f"{_HT}:prefix", f"{_LL}:graphs:prefix", f"{_HT}:idle", f"{_LL}:graphs:idle",
        f"{_HT}:eplb", f"{_LL}:graphs:eplb",
    ),
    *_rows("vllm", "offline", "qwen-fp8", *_PLAIN, _V2),
    *_rows("vllm", "offline", "deepseek", *_PLAIN, _V2),
    *_rows("vllm", "offline", "deepseek-fp8", *_PLAIN, _V2),
    *_rows(
        "vllm", "http", "qwen", BASE, _HT, f"{_HT}:native", f"{_HT}:auto:graphs", f"{_LL}:graphs",
        f"{_LL}:graphs:native", f"{_V2}:graphs", f"{_HT}:wrong", f"{_LL}:graphs:wrong",
        f"{_HT}:kill", f"{_LL}:graphs:kill", f"{_HT}:refused", f"{_HT}:native:refused",
        f"{_LL}:graphs:eplb", f"{BASE}:gpus4", f"{_HT}:gpus4", f"{_LL}:graphs:gpus4",
    ),
    *_rows("vllm", "http", "qwen-fp8", BASE, _HT, f"{_LL}:graphs", f"{_LL}:graphs:wrong"),
    *_rows("vllm", "http", "deepseek", BASE, _HT, f"{_LL}:graphs", f"{_LL}:graphs:wrong"),
    *_rows("vllm", "http", "deepseek-fp8", BASE, _HT, f"{_LL}:graphs", f"{_LL}:graphs:wrong"),
    *(
        row for model in ("large", "large-fp8", "large-deepseek")
        for row in (
            *_rows(
                "vllm", "figures", model, _HT, f"{_HT}:native", f"{_HT}:auto:graphs",
                f"{_LL}:graphs", f"{_LL}:graphs:native", f"{_V2}:graphs",
            ),
            *_rows(
                "vllm", "figures", model, "flashinfer_nvlink_one_sided:graphs",
                lacks="FlashInfer, which is not among the packed packages",
            ),
            *_rows(
                "vllm", "figures", model, f"{_LL}:graphs:deep_ep",
                lacks="DeepEP V1 built with NVSHMEM for this torch",
            ),
        )
    ),
    *_rows(
        "sglang", "http", "qwen", BASES["sglang"], "normal", "low_latency", "auto", "auto:native",
        "auto:graphs", "auto:graphs:native", "auto:graphs:wrong",
    ),
    *_rows(
        "sglang", "http", "deepseek-fp8", BASES["sglang"], "auto:graphs", "auto:graphs:native",
        "auto:graphs:wrong",
    ),
    *_rows("megatron", "training", "small", BASES["megatron"], "deepep", "deepep:wrong"),
    *_rows("torchtitan", "training", "small", BASES["torchtitan"], "deepep", "deepep:wrong"),
)  # fmt: skip


def rows_named(patterns: list[str], with_bases: bool = True) -> list[Row]:
    """Rows whose name is a pattern or starts with it, and their bases before them; no pattern: all.

    Raises KeyError for a pattern that fits none.
    """
    chosen = []
    for pattern in patterns:
        fitting = [row for row in ROWS if row.name == pattern]
        fitting = fitting or [row for row in ROWS if row.name.startswith(pattern)]
        if not fitting:
            raise KeyError(f"no row is named {pattern}, or starts so: see `list`")
        chosen += fitting
    if not patterns:
        chosen = list(ROWS)
    known = {row.name: row for row in ROWS}
    found = []
    for row in chosen:
        if with_bases and row.front in COMPARED:
            found.append(known[row.base.name])
        found.append(row)
    return list(dict.fromkeys(found))


# ---- what a row means to vLLM --------------------------------------------------------------------


def vllm_options(row: Row) -> dict[str, Any]:
    """Arguments of vLLM's engine, by name; its server takes the same as flags."""
    is_large = row.model.startswith("large")
    # vLLM takes 256 by itself where experts have room for as many rows of each rank.
    has_large_steps = is_large and row.backend != "deepep_low_latency"
    options: dict[str, Any] = dict(
        dtype="bfloat16", seed=0, enable_expert_parallel=True, all2all_backend=row.backend,
        data_parallel_size=row.num_gpus, attention_backend="TRITON_ATTN", moe_backend="triton",
        max_model_len=2048 if is_large else 512, max_num_seqs=64,
        max_num_batched_tokens=2048 if has_large_steps else 256,
        gpu_memory_utilization=0.1,  # what must be free at start: the KV cache has its own size
        kv_cache_memory_bytes=1 << 32 if is_large else 1 << 29, disable_custom_all_reduce=True,
        enable_prefix_caching="prefix" in row.options,
        enforce_eager=not {"graphs", "compiled"} & set(row.options),
    )  # fmt: skip
    # Few sizes start sooner. Figures have vLLM's own: a step is filled up to the next size.
    sizes = {} if is_large else dict(cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64])
    if "graphs" in row.options:
        options["compilation_config"] = dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY") | sizes
    if "compiled" in row.options:
        options["compilation_config"] = sizes
    if "dbo" in row.options:
        options |= dict(
            enable_dbo=True, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=8
        )
    if "chunked" in row.options:
        options |= dict(enable_chunked_prefill=True, max_num_batched_tokens=64)
    if "eplb" in row.options:
        balance = dict(window_size=16, step_interval=32, num_redundant_experts=2)
        options |= dict(enable_eplb=True, eplb_config=balance)
    return options


def variables(row: Row) -> dict[str, str]:
    """Environment variables of the server's processes."""
    found = dict(_SGLANG_VARIABLES) if row.server == "sglang" else {}
    if row.server == "vllm" and {"native", "auto"} & set(row.options):
        found["DEEP_COMM_VLLM"] = "1"
    if "native" in row.options:
        found["DEEP_COMM_DECODE_TOKENS"] = "0"
    if "auto" in row.options:
        found["DEEP_COMM_DECODE_TOKENS"] = _auto_tokens(row)
    if row.is_control:
        found["SERVERS_WRONG"] = "1"
    if "refused" in row.options:
        # The drop-in's rings have the size that vLLM asks for; the native adapter's shrink to fit.
        found["VLLM_DEEPEP_BUFFER_SIZE_MB"] = "0" if "native" in row.options else "1"
    if row.backend == _V2:
        # vLLM asks for a newer NCCL and for an InfiniBand card before it lets deepep_v2 run.
        found |= dict(EP_DISABLE_GIN="1", SERVERS_NCCL="23004")
    if "deepseek" in row.model:
        found["VLLM_MLA_DISABLE"] = "1"  # its kernels are not in a trimmed release
    return found


def _auto_tokens(row: Row) -> str:
    """So that small models' steps have both modes; figures are of the default."""
    if row.front == "figures":
        return "128"
    return "16" if {"graphs", "compiled"} & set(row.options) else "32"


_SGLANG_VARIABLES = dict(
    SGLANG_JIT_DEEPGEMM_PRECOMPILE="0",  # of all sizes, for many minutes
    DEEP_COMM_TIMEOUT_S="300",  # ranks compile kernels between two calls
    SGLANG_IS_FLASHINFER_AVAILABLE="false",
)


def sglang_flags(row: Row) -> list[str]:
    """With DeepEP, SGLang has only DeepGEMM's kernels for experts in BF16 or FP8."""
    options: dict[str, Any] = {
        "tp-size": row.num_gpus, "ep-size": row.num_gpus, "dtype": "bfloat16", "random-seed": 0,
        "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
        "fp8-gemm-backend": "triton", "context-length": 512, "max-running-requests": 64,
        # The KV cache has a size of its own, and the fraction leaves room for it.
        "max-total-tokens": 1 << 15, "mem-fraction-static": 0.7,
        # A low-latency call takes 128 tokens of a rank: half of these.
        "chunked-prefill-size": 256,
        "moe-runner-backend": "deep_gemm" if row.is_over_deep_comm else "triton",
        "cuda-graph-backend-prefill": "disabled",
    }  # fmt: skip
    if row.is_over_deep_comm:
        options |= {"moe-a2a-backend": "deepep", "deepep-mode": row.backend}
    if "graphs" in row.options:
        # A rank's graphs hold deep_comm's calls alone: nothing of NCCL, nor of its stand-in.
        options |= {"dp-size": row.num_gpus, "moe-dense-tp-size": 1}
    else:
        options["cuda-graph-backend-decode"] = "disabled"
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if "graphs" in row.options:
        flags += ["--enable-dp-attention", "--enable-dp-lm-head"]
        flags += ["--cuda-graph-bs-decode", "2", "4", "8", "16", "32", "64"]
    return [
        *flags, "--skip-tokenizer-init", "--disable-radix-cache", "--disable-custom-all-reduce",
        "--enforce-disable-flashinfer-allreduce-fusion",
    ]  # fmt: skip
