"""Which releases of servers run, and what a trimmed one is made of. A new release is a new row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PYTHON = "3.12"  # of the machines with GPUs
ARCH = 90  # Hopper


@dataclass(frozen=True)
class Wheel:
    pin: str  # project==version
    platform: str
    sha256: str


@dataclass(frozen=True)
class Release:
    project: str
    version: str
    wheels: tuple[Wheel, ...]  # unpacked into one folder
    packages: tuple[str, ...]  # packages that a machine with torch and transformers lacks
    dropped: tuple[str, ...] = ()  # patterns of paths that experts in Triton do not need
    idle: tuple[str, ...] = ()  # modules that are imported, and whose kernels do not run
    absent: tuple[str, ...] = ()  # backends of combinations.py that it does not have
    hooks: tuple[str, ...] = ()  # of in_server/sitecustomize.py: what the machine lacks for it
    server: str = "vllm"  # whose rows it runs

    @property
    def name(self) -> str:
        return f"{self.project}-{self.version}"

    @property
    def packages_name(self) -> str:
        return f"{self.name}-deps"


_VLLM_PACKAGES = (
    "annotated-types", "apache-tvm-ffi", "blake3", "cachetools", "cbor2",
    "compressed-tensors==0.17.0", "distro", "fastapi==0.136.3", "httpcore2", "httptools", "httpx2",
    "jiter", "jmespath", "llguidance", "loguru", "model-hosting-container-standards", "msgspec",
    "openai", "openai-harmony", "orjson", "partial-json-parser",
    "prometheus-fastapi-instrumentator", "pybase64", "pydantic", "pydantic-core",
    "python-multipart", "pyzmq", "setproctitle", "sniffio", "starlette", "truststore",
    "typing-extensions", "typing-inspection", "uvicorn", "watchfiles", "xgrammar==0.2.8",
)  # fmt: skip

_VLLM_DROPPED = (
    "*/licenses/*", "vllm/_deepselect_C*", "vllm/_flashkda_C*", "vllm/_flashmla_*",
    "vllm/_qutlass_C*", "vllm/_rust_tool_parser*", "vllm/benchmarks/*",
    "vllm/entrypoints/serve/instrumentator/static/*", "vllm/kernels/helion/configs/*",
    "vllm/model_executor/layers/fused_moe/configs/*.json",
    "vllm/model_executor/layers/quantization/utils/configs/*.json", "vllm/third_party/*.h",
    "vllm/third_party/*.hpp", "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*",
    "vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C*",
)  # fmt: skip

# Attention runs in Triton too; one of FA2 and FA3 must be there for an import.
_VLLM_IDLE = ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",)

# sgl-deep-gemm compiles its kernels when they are first called: with DeepEP, SGLang has no others.
_SGLANG_PACKAGES = (
    "annotated-types", "apache-tvm-ffi==0.1.11", "asttokens", "cffi", "compressed-tensors==0.17.0",
    "decorator", "dill", "distro", "executing", "fastapi==0.136.3", "gguf", "interegular",
    "ipython", "ipython-pygments-lexers", "jiter", "jsonschema", "jsonschema-specifications",
    "llguidance", "loguru", "matplotlib-inline", "msgspec", "openai-harmony==0.0.4",
    "openai==2.6.1", "orjson", "partial-json-parser", "pexpect", "prompt-toolkit", "ptyprocess",
    "pure-eval", "pybase64", "pycparser", "pydantic", "pydantic-core", "python-multipart", "pyzmq",
    "referencing", "rpds-py", "setproctitle", "sgl-deep-gemm==0.1.5.post1", "sniffio", "soundfile",
    "stack-data", "starlette", "traitlets", "typing-extensions", "typing-inspection", "uvicorn",
    "watchfiles", "wcwidth", "xgrammar==0.2.8", "zstandard",
)  # fmt: skip

# Of sglang-kernel only what Hopper loads: attention runs in Triton.
_SGLANG_DROPPED = (
    "*/licenses/*", "sgl_kernel/flash_ops*", "sgl_kernel/flashmla_ops*", "sgl_kernel/infllm_ops*",
    "sgl_kernel/sm100/*", "sglang/benchmark/*", "sglang/eval/*", "sglang/multimodal_gen/*",
    "sglang/srt/*/_core*", "sglang/test/*",
)  # fmt: skip

RELEASES = (
    Release(
        "vllm", "0.33.0", (
            Wheel(
                "vllm==0.33.0", "manylinux_2_28_x86_64",
                "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
            ),
        ),
        _VLLM_PACKAGES, _VLLM_DROPPED, _VLLM_IDLE, hooks=("older_nccl", "older_stream"),
    ),
    Release(
        "vllm", "0.19.1", (
            Wheel(
                "vllm==0.19.1", "manylinux_2_31_x86_64",
                "71a87f46cafab4489c69a5c5c83b870d0235e5694d8222303d460576293dc719",
            ),
        ),
        _VLLM_PACKAGES, _VLLM_DROPPED, _VLLM_IDLE, absent=("deepep_v2",),
    ),
    Release(
        "sglang", "0.5.17", (
            Wheel(
                "sglang==0.5.17", "manylinux_2_34_x86_64",
                "fb4cba478a5dca5ee146550b39f33add1c4e475d21ee11810b86ed1c58068093",
            ),
            Wheel(
                "sglang-kernel==0.4.5", "manylinux2014_x86_64",
                "5927a14dfff92ced8b1f7c7d5844144bc574ec58e604d4fd53e6f53c709003a8",
            ),
        ),
        _SGLANG_PACKAGES, _SGLANG_DROPPED, hooks=("newer_transformers", "no_flashinfer"),
        server="sglang",
    ),
    Release(
        "megatron-core", "0.16.1", (
            Wheel(
                "megatron-core==0.16.1", "manylinux_2_28_x86_64",
                "3fb26cb407aa3c4b609c08664022c08146f1648b3d6f2ef2bbe9d3b1294ace61",
            ),
        ), (),
        server="megatron",
    ),
    Release(
        "torchtitan", "0.3.0", (
            Wheel(
                "torchtitan==0.3.0", "any",
                "5563ccf9a295b24e00a36087149e9c2d0686cecbd3972c31e67227029293af42",
            ),
        ),
        ("docstring-parser", "spmd-types==0.2.3", "typeguard", "typing-extensions", "tyro"),
        server="torchtitan",
    ),
)  # fmt: skip


def release_of(name: str) -> Release:
    """Raises KeyError, which lists the names."""
    for release in RELEASES:
        if release.name == name:
            return release
    raise KeyError(f"no release {name}: {', '.join(release.name for release in RELEASES)}")


def releases_for(servers: Iterable[str]) -> dict[str, Release]:
    """The first of each server that the table has one of."""
    wanted, found = set(servers), dict[str, Release]()
    for release in RELEASES:
        if release.server in wanted:
            found.setdefault(release.server, release)
    return found
