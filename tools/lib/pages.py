"""Pages of the guide that are written from the code: errors, environment, sizes of models.

`tools/docs` runs this as a program, in an environment that has deep_comm. The pages are part of the
repository; test_docs.py says when they are out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"

_NOTE = "<!-- Written by tools/docs; change the code and run it again. -->"
_REMEDY = "What to do:"


# ---- pages of the guide --------------------------------------------------------------------------


def error_classes() -> list[type]:
    from deep_comm import errors

    own = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
        and value.__module__ == errors.__name__
    ]  # fmt: skip
    return own


def prose(text: str) -> str:
    """A paragraph in lines of 120 columns."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def bullet(text: str) -> str:
    return textwrap.fill(
        f"* {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def linked(text: str) -> str:
    """Paths of pages, which terminals show as they are, as links of a page of the guide."""
    text = re.sub(r"\bdocs/guide/([\w-]+)\.md", r"[\1](\1.md)", text)
    return re.sub(r"\bdocs/([\w-]+)/([\w-]+)\.md", r"[\2](../\1/\2.md)", text)


def errors_page() -> str:
    """Every error: what it says, when, and what to do, from its docstring."""
    lines = [
        _NOTE,
        "",
        "# Error catalogue",
        "",
        prose(
            "Everything that deep_comm raises on purpose derives from `DeepCommError`, a "
            "`RuntimeError`. Errors of arguments are raised before anything is launched, on the "
            "rank that made the call. Errors that kernels find are raised on all ranks that they "
            "concern. After `PeerTimeout`, `CallInterrupted`, `MaskedOut`, and a `ConfigMismatch` "
            "with `needs_reset`, apply the remedy below. After any other error the Buffer stays "
            "usable."
        ),
        "",
        "| error | is also | what happened |",
        "|---|---|---|",
    ]
    classes = error_classes()
    for cls in classes:
        bases = ", ".join(
            f"`{base.__name__}`" for base in cls.__mro__[1:-3] if base is not Exception
        )
        first = (
            inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split(". ")[0].replace("\n", " ")
        )
        lines.append(
            f"| [`{cls.__name__}`](#{cls.__name__.lower()}) | {bases} | {first.rstrip('.')} |"
        )
    for cls in classes:
        text = linked(inspect.cleandoc(cls.__doc__ or "").replace("``", "`"))
        about, _, remedy = text.partition(_REMEDY)
        lines += ["", f"## {cls.__name__}", "", about.strip(), ""]
        lines += [f"**{_REMEDY}** {remedy.strip()}"]
    return "\n".join(lines) + "\n"


def environment_page() -> str:
    from deep_comm.settings import env

    lines = [
        _NOTE,
        "",
        "# Environment variables",
        "",
        prose(
            "Variables are read when they are needed, never at import. "
            "`deep_comm doctor` prints them with their values, and variables with this "
            "prefix that do not exist."
        ),
        "",
        "| variable | default | meaning | value |",
        "|---|---|---|---|",
    ]
    for variable in env.REGISTRY:
        default = "unset" if variable.default is None else f"{variable.default}"
        lines.append(
            f"| `{variable.name}` | {default} | {linked(variable.doc)} | {variable.kind.rule} |"
        )
    lines += ["", "More about some of them:", ""]
    lines += [
        bullet(f"`{variable.name}`: {linked(variable.more)}")
        for variable in env.REGISTRY
        if variable.more
    ]
    lines += [
        "",
        "## Of the build",
        "",
        prose(
            "`pip install .` reads these, and `CXX`, `CUDACXX` and `NVSHMEM_HOME`, which say where "
            "compilers and NVSHMEM are (`third_party/README.md`)."
        ),
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {default} | {linked(doc)} |"
        for name, (default, doc) in env.BUILD_VARIABLES.items()
    ]
    return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    experts: int
    topk: int
    note: str = ""


# Read from public model configurations; hidden is that of the rows that travel.
MODELS = (
    Model("DeepSeek-V3, R1, V3.2", 7168, 256, 8),
    Model("DeepSeek-V4-Flash", 4096, 256, 6),
    Model("DeepSeek-V2-Lite, Moonlight-16B", 2048, 64, 6),
    Model("Kimi K2, K2.5, K2.6", 7168, 384, 8),
    Model("Kimi K3", 3584, 896, 16, "latent rows"),
    Model("Qwen3-30B-A3B", 2048, 128, 8),
    Model("Qwen3-235B-A22B", 4096, 128, 8),
    Model("Qwen3-Next-80B", 2048, 512, 10),
    Model("Qwen3.5-35B-A3B", 2048, 256, 8),
    Model("GLM-4.5-Air", 4096, 128, 8),
    Model("GLM-4.5", 5120, 160, 8),
    Model("GLM-5", 6144, 256, 8),
    Model("MiniMax-M2", 3072, 256, 8),
    Model("MiniMax-M3", 6144, 128, 4),
    Model("gpt-oss-120b", 2880, 128, 4, "no rounding up needed"),
    Model("gpt-oss-20b", 2880, 32, 4, "no rounding up needed"),
    Model("LongCat-Flash", 6144, 512, 12),
    Model("Step-3.5", 4096, 288, 8),
    Model("hy_v4", 2816, 256, 8),
)
_RANKS = 8
_PREFILL_TOKENS, _DECODE_TOKENS = 4096, 128
_ROUNDED = 8  # MiB: what is below is control words and alignment


def shapes_page() -> str:
    """Recommended sizes, by the functions that programs size their Buffers with."""
    import deep_comm
    from deep_comm.compat.hints import low_latency_bytes
    from deep_comm.layer import MoEShape, estimate_memory

    dispatch = deep_comm.Buffer.get_dispatch_config(_RANKS)
    combine = deep_comm.Buffer.get_combine_config(_RANKS)
    lines = [
        _NOTE,
        "",
        "# Sizes for known models",
        "",
        prose(
            f"For {_RANKS} ranks in a node, up to {_PREFILL_TOKENS} tokens per rank in prefill "
            f"and {_DECODE_TOKENS} in decode, BF16 rows. Sizes are MiB on every rank, rounded up "
            "to 8."
        ),
        "",
        "* **Layer**: the Buffer of `ExpertParallel` for both modes. **Calls**: the tensors of its",
        "  largest call, under uniform routing, besides.",
        "* **Normal**: `num_nvl_bytes` of a `Buffer` by `Config.get_nvl_buffer_size_hint`: rings,",
        "  and room for a dispatch and its combine under uniform routing, and a quarter more.",
        "  Less works too: rows without room go through rings.",
        "* **Low latency**: `num_rdma_bytes` by `get_low_latency_rdma_size_hint`.",
        "* **Rings only**: the least `num_nvl_bytes` for DeepEP's Configs.",
        "* **DeepEP's hint**: DeepEP's low-latency size for the same shape. It grows with the",
        "  experts.",
        "",
        "| model | hidden | experts | top-k | layer | calls | normal | low latency | rings only | "
        "DeepEP's hint |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]

    def mebibytes(num_bytes: int) -> str:
        return f"{-(-num_bytes // (_ROUNDED << 20)) * _ROUNDED}"

    for model in MODELS:
        layer = estimate_memory(
            MoEShape(model.hidden, model.experts, model.topk, _PREFILL_TOKENS, _DECODE_TOKENS),
            _RANKS,
        )
        calls = max(layer.prefill_call, layer.decode_call)
        normal = max(
            config.get_nvl_buffer_size_hint(2 * model.hidden, _RANKS, num_tokens=_PREFILL_TOKENS)
            for config in (dispatch, combine)
        )
        decode = deep_comm.Buffer.get_low_latency_rdma_size_hint(
            _DECODE_TOKENS, model.hidden, _RANKS, model.experts
        )
        rings = max(config.ring_bytes(2 * model.hidden, _RANKS) for config in (dispatch, combine))
        theirs = low_latency_bytes(_DECODE_TOKENS, model.hidden, _RANKS, model.experts)
        name = model.name + (f" ({model.note})" if model.note else "")
        cells = [name, model.hidden, model.experts, model.topk]
        cells += [mebibytes(size) for size in (layer.buffer, calls, normal, decode, rings, theirs)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        prose(
            "For another shape use `print(deep_comm.ExpertParallel.estimate_memory(...))`. "
            "FP8 rows take a little more than half of the receive region."
        ),
    ]
    return "\n".join(lines) + "\n"


PAGES = {"errors.md": errors_page, "environment.md": environment_page, "shapes.md": shapes_page}


def main() -> int:
    for name, make in PAGES.items():
        page = GUIDE / name
        text = make()
        is_new = not page.exists() or page.read_text() != text
        page.write_text(text)
        print(f"docs/guide/{name}: {'written' if is_new else 'as it was'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
