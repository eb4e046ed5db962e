"""``python -m deep_comm.bench --mode layer``: ExpertParallel's modes over a sweep of token counts.

For every number of tokens: a step (dispatch, experts that return their rows, combine) by prefill,
by decode with as many slots as tokens, and by auto with the threshold; eagerly, and decode in a
CUDA graph.
Checked first: the first tokens of every rank, bit for bit. The table says where decode stops
being the faster one, and whether auto is within 5 % of the better mode.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import deep_comm
from deep_comm import reference_layer
from deep_comm.bench import machine
from deep_comm.bench.measure import Effort, Timing, time_over_ranks
from deep_comm.bench.options import integers
from deep_comm.layer.shape import DEFAULT_DECODE_TOKENS

TOKEN_SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TARGET = 1.05  # auto over the better mode
CHECKED_TOKENS = 16
FEW_TOKENS = 8  # of the other ranks, where one has all
_MAX_DECODE_BYTES = 24 << 30  # of a decode call's tensors


@dataclass(frozen=True)
class Options:
    device: str
    num_ranks: int | None
    tokens: tuple[int, ...]
    hidden: int
    experts: int
    topk: int
    decode_tokens: int
    effort: Effort
    deadline_s: float
    json: Path | None
    command: str


@dataclass(frozen=True)
class Line:
    """Microseconds of a step with so many tokens a rank; None: not measured."""

    tokens: int
    prefill: Timing
    decode: Timing | None
    decode_graph: Timing | None
    auto: Timing
    auto_one_rank: Timing  # one rank has the tokens, the others few

    @property
    def ratio(self) -> float:
        best = self.prefill.mean_us
        if self.decode is not None:
            best = min(best, self.decode.mean_us)
        return self.auto.mean_us / best

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def is_asked_for(arguments: Sequence[str]) -> bool:
    given = list(arguments)
    return "--mode=layer" in given or ("--mode", "layer") in zip(given, given[1:], strict=False)


def parse(arguments: Sequence[str], command: str) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m deep_comm.bench --mode layer", description=__doc__
    )
    add = parser.add_argument
    add("--mode", choices=("layer",))
    add("--device", choices=("cpu", "cuda"), help="default: cuda with 2 or more devices")
    add("--ranks", type=int, help="processes to start (not under torchrun)")
    add("--quick", action="store_true", help="every second size up to 4096")
    add(
        "--tokens", type=integers(TOKEN_SWEEP), help="per rank (default: the sweep; host: up to 64)"
    )
    add("--hidden", type=int, help="default: 256; on GPUs 7168")
    add("--experts", type=int, help="default: 16; on GPUs 256")
    add("--topk", type=int, default=8)
    add("--decode-tokens", type=int, help=f"auto's threshold ({DEFAULT_DECODE_TOKENS}; host: 8)")
    add("--warmup", type=int, help="steps before; default: 2; on GPUs 10")
    add("--iterations", type=int, help="steps of a round; default: 3; on GPUs 30")
    add("--rounds", type=int, help="default: 3; on GPUs 5")
    add("--deadline-s", type=float, default=600.0, help="end everything after so long")
    add("--json", type=Path, help="also write the figures to this file")
    parsed = parser.parse_args(arguments)
    device = parsed.device or ("cuda" if torch.cuda.device_count() >= 2 else "cpu")
    on_gpu = device == "cuda"

    def chosen(name: str, on_host: int, on_device: int) -> int:
        given = getattr(parsed, name)
        return (on_device if on_gpu else on_host) if given is None else int(given)

    tokens = parsed.tokens or tuple(TOKEN_SWEEP if on_gpu else TOKEN_SWEEP[:7])
    if parsed.quick and parsed.tokens is None:
        tokens = tuple(count for count in tokens[::2] if count <= 4096)
    num_calls, num_rounds = chosen("iterations", 3, 30), chosen("rounds", 3, 5)
    return Options(
        device=device,
        num_ranks=parsed.ranks,
        tokens=tokens,
        hidden=chosen("hidden", 256, 7168),
        experts=chosen("experts", 16, 256),
        topk=parsed.topk,
        decode_tokens=chosen("decode_tokens", 8, DEFAULT_DECODE_TOKENS),
        effort=Effort(
            num_warmup=chosen("warmup", 2, 10),
            num_calls=num_calls,
            num_rounds=num_rounds,
            num_single_calls=num_calls,
        ),
        deadline_s=parsed.deadline_s,
        json=parsed.json,
        command=command,
    )


def _experts(batch: deep_comm.ExpertBatch) -> Tensor:
    return batch.x


class Runner:
    """One rank."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()

    def _inputs(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        options = self._options
        generator = torch.Generator().manual_seed(1000 * num_tokens + self._rank)
        x = torch.randn(num_tokens, options.hidden, generator=generator).bfloat16()
        scores = torch.rand(num_tokens, options.experts, generator=generator)
        idx = scores.topk(options.topk, dim=1).indices
        weights = torch.rand(num_tokens, options.topk, generator=generator)
        return x.to(self._device), idx.to(self._device), weights.to(self._device)

    def _layer(self, mode: Any, max_tokens: int, decode_tokens: int) -> deep_comm.ExpertParallel:
        options = self._options
        return deep_comm.ExpertParallel(
            dist.group.WORLD,
            hidden=options.hidden,
            num_experts=options.experts,
            num_topk=options.topk,
            max_tokens=max_tokens,
            decode_tokens=decode_tokens,
            mode=mode,
            device=self._device,
        )

    def _check(self, y: Tensor, x: Tensor, idx: Tensor, weights: Tensor, what: str) -> None:
        few = slice(0, CHECKED_TOKENS)
        want = reference_layer.of_one_rank(
            x[few].cpu(), idx[few].cpu(), weights[few].cpu(), self._options.experts,
            self._num_ranks, lambda expert, rows: rows,
        )  # fmt: skip
        got = y[few].cpu()
        if not torch.equal(got.view(torch.int16), want.view(torch.int16)):
            raise deep_comm.DeepCommError(f"{what}: rank {self._rank} got other sums")

    def _time(
        self, layer: deep_comm.ExpertParallel, parts: tuple[Tensor, ...], what: str
    ) -> Timing:
        x, idx, weights = parts
        for _ in range(2):  # auto: the first step may change the mode
            self._check(layer(x, idx, weights, _experts), x, idx, weights, what)
        timing = time_over_ranks(
            lambda call: layer(x, idx, weights, _experts), self._options.effort, self._device
        )
        self._check(layer(x, idx, weights, _experts), x, idx, weights, what)
        layer.buffer.check()
        return timing

    def _time_graph(self, layer: deep_comm.ExpertParallel, parts: tuple[Tensor, ...]) -> Timing:
        x, idx, weights = parts
        calls = self._options.effort.num_calls
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                y = layer(x, idx, weights, _experts)
        effort = Effort(2, 1, self._options.effort.num_rounds, self._options.effort.num_rounds)
        timing = time_over_ranks(
            lambda call: graph.replay(), effort, self._device, calls_per_work=calls
        )
        self._check(y, x, idx, weights, "decode in a graph")
        layer.buffer.check()
        return timing

    def _decodes(self, num_tokens: int) -> bool:
        options = self._options
        if num_tokens >= 1 << 16:
            return False
        memory = deep_comm.ExpertParallel.estimate_memory(
            self._num_ranks, hidden=options.hidden, num_experts=options.experts,
            num_topk=options.topk, max_tokens=num_tokens, decode_tokens=num_tokens, mode="decode",
        )  # fmt: skip
        return memory.decode_call <= _MAX_DECODE_BYTES

    def run(self, say: Callable[[str], None]) -> list[Line]:
        options = self._options
        lines = []
        say(header(options, self._num_ranks))
        most = max(*options.tokens, options.decode_tokens + 1)
        with (
            torch.inference_mode(),
            self._layer("prefill", most, 1) as prefill,
            self._layer("auto", most, options.decode_tokens) as auto,
        ):
            for num_tokens in options.tokens:
                parts = self._inputs(num_tokens)
                decode = graph = None
                if self._decodes(num_tokens):
                    # What a caller would build who knows that there are never more.
                    slots = max(num_tokens, min(options.decode_tokens, most))
                    with self._layer("decode", slots, slots) as layer:
                        decode = self._time(layer, parts, f"decode, {num_tokens} tokens")
                        if self._device.type == "cuda":
                            graph = self._time_graph(layer, parts)
                mixed = parts if self._rank == 0 else tuple(part[:FEW_TOKENS] for part in parts)
                line = Line(
                    tokens=num_tokens,
                    prefill=self._time(prefill, parts, f"prefill, {num_tokens} tokens"),
                    decode=decode,
                    decode_graph=graph,
                    auto=self._time(auto, parts, f"auto, {num_tokens} tokens"),
                    auto_one_rank=self._time(auto, mixed, f"auto, {num_tokens} on one rank"),
                )
                lines.append(line)
                say(row(line))
        return lines


def run_rank(options: Options, device: torch.device, say: Callable[[str], None]) -> list[Line]:
    return Runner(options, device).run(say)


_COLUMNS = ("tokens", "prefill", "decode", "graph", "auto", "auto/best", "one rank", "host auto")


def header(options: Options, num_ranks: int) -> str:
    shape = f"{num_ranks} ranks on {options.device}, hidden {options.hidden}, "
    shape += f"{options.experts} experts, top-{options.topk}, auto decodes up to "
    shape += (
        f"{options.decode_tokens} tokens; microseconds of a step (dispatch + combine), slowest rank"
    )
    return shape + "\n" + " ".join(name.rjust(9) for name in _COLUMNS)


def row(line: Line) -> str:
    def number(timing: Timing | None) -> str:
        return "-" if timing is None else f"{timing.mean_us:.1f}"

    host = line.auto.host_us
    cells = (
        str(line.tokens), number(line.prefill), number(line.decode), number(line.decode_graph),
        number(line.auto), f"{line.ratio:.3f}", number(line.auto_one_rank),
        "-" if host is None else f"{host:.1f}",
    )  # fmt: skip
    return " ".join(cell.rjust(9) for cell in cells)


def crossover(lines: Sequence[Line]) -> int:
    """The largest measured size up to which decode was never slower; 0: it always was."""
    best = 0
    for line in sorted(lines, key=lambda line: line.tokens):
        if line.decode is None or line.decode.mean_us > line.prefill.mean_us:
            break
        best = line.tokens
    return best


def ending(options: Options, lines: Sequence[Line]) -> str:
    over = [line for line in lines if line.ratio > TARGET]
    texts = [
        f"decode was the faster mode up to {crossover(lines)} tokens a rank "
        f"(measured sizes; decode_tokens is {options.decode_tokens})"
    ]
    if over:
        worst = max(over, key=lambda line: line.ratio)
        texts.append(
            f"auto MISSED {TARGET:.2f} of the better mode at "
            f"{', '.join(str(line.tokens) for line in over)} tokens; worst {worst.ratio:.3f}"
        )
    else:
        texts.append(f"auto is within {TARGET:.2f} of the better mode at every size")
    return "\n".join(texts)


def publish(options: Options, lines: list[Line], num_ranks: int, elapsed_s: float) -> None:
    print("\n" + ending(options, lines))
    if options.json is not None:
        document = {
            "machine": machine.describe(options.device),
            "command": options.command,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "num_ranks": num_ranks,
            "decode_tokens": options.decode_tokens,
            "crossover": crossover(lines),
            "lines": [line.to_json() for line in lines],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    print(f"measured in {elapsed_s:.0f} s", flush=True)
