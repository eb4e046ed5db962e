"""``python -m deep_comm.bench --mode layer``: ExpertParallel's modes over a sweep of token counts.

First a step (dispatch, experts that return their rows, combine) by prefill and by decode, for every
number of tokens, eagerly and, on GPUs, in CUDA graphs; then by auto, with the threshold that is
given or that the first part has found (``--decode-tokens measured``). Checked before it is timed:
the first tokens of every rank, bit for bit. The table says where decode stops being the faster one
and whether auto is within 5 % of the better mode; ``--store`` makes the measured threshold the
default of layers on machines like this one (deep_comm.tuning).

auto is judged by what the same layer does when a mode is named (column "rival": the better mode): a
round of the one, a round of auto, a round of the one again, and so on. The ratio is the median over
these turns of auto's round over the mean of the two around it; "noise" is the median of the rival's
second round over its first, which is 1 but for the machine. The last lines have the quartiles of
both. Beyond its decode_tokens it has no
decode mode, since the memory of decode calls grows with that bound; the figures of decode there are
of layers that were built for more, and the verdict names the sizes at which such a layer is faster.

No size takes longer than --size-deadline-s (the process ends then, with the stack of where it was),
and none is begun when --budget-s is spent; sizes that were left out are named.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import deep_comm
from deep_comm import reference_layer, tuning
from deep_comm.bench import layer_options, machine
from deep_comm.bench import layer_report as report
from deep_comm.bench.layer_options import BY_DEFAULT, Options
from deep_comm.bench.layer_report import Judged, Line, Pair
from deep_comm.bench.measure import (
    Effort,
    Timing,
    Turns,
    clock_of,
    gather,
    take_sample,
    time_in_turn,
    time_over_ranks,
)
from deep_comm.layer.shape import DEFAULT_DECODE_TOKENS

CHECKED_TOKENS = 16
FEW_TOKENS = 8  # of the other ranks, where one has all
GRAPH_TOKENS = (
    512  # the most whose prefill is captured: room for every selection to come to one rank
)
_MAX_DECODE_BYTES = 24 << 30  # of a decode call's tensors
_CHOSEN_SHARE = 8  # of a GPU's memory, one part in so many: of a threshold that is chosen here
_HOST_CHOSEN_BYTES = 4 << 30
_FIXED_SHARE = 0.6  # of the budget, for the fixed modes
_TURNS = 4  # times as many rounds where two modes are compared and a round is short
_ROUND_US = 20e3  # a round of long calls has fewer of them


@dataclass(frozen=True)
class Figures:
    lines: list[Line]
    left_out: list[int]
    decode_tokens: int
    measured: int | None  # the threshold that the fixed modes ask for; None: neither was slower


def parse(arguments: Sequence[str], command: str) -> Options:
    return layer_options.parse(arguments, command, __doc__)


def _experts(batch: deep_comm.ExpertBatch) -> Tensor:
    return batch.x


class Runner:
    """One rank."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._started = time.monotonic()

    def _inputs(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        options = self._options
        device = self._device
        generator = torch.Generator(device).manual_seed(1000 * num_tokens + self._rank)
        x = torch.randn(num_tokens, options.hidden, generator=generator, device=device)
        scores = torch.rand(num_tokens, options.experts, generator=generator, device=device)
        idx = scores.topk(options.topk, dim=1).indices
        weights = torch.rand(num_tokens, options.topk, generator=generator, device=device)
        return x.bfloat16(), idx, weights

    def _layer(
        self, mode: Any, max_tokens: int, decode_tokens: int | None
    ) -> deep_comm.ExpertParallel:
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
            timeout_s=max(5.0, options.size_deadline_s / 2),
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

    # ---- timing ----------------------------------------------------------------------------------

    def _effort(self, step: Callable[[int], object]) -> Effort:
        """Fewer calls where they are long, as many on all ranks."""
        effort = self._options.effort
        if self._device.type != "cuda":
            return effort
        sample = take_sample(step, Effort(1, 3, 1, 0), clock_of(self._device))
        mean_us = max(gather(sample.means_us[0]))
        num_calls = max(5, min(effort.num_calls, int(_ROUND_US / mean_us)))
        return replace(
            effort, num_warmup=2, num_calls=num_calls, num_single_calls=num_calls,
            num_host_calls=min(effort.num_host_calls, num_calls),
        )  # fmt: skip

    def _time(
        self, layer: deep_comm.ExpertParallel, parts: tuple[Tensor, ...], what: str
    ) -> Timing:
        x, idx, weights = parts
        for _ in range(2):  # auto: the first step may change the mode
            self._check(layer(x, idx, weights, _experts), x, idx, weights, what)

        def step(call: int) -> Tensor:
            return layer(x, idx, weights, _experts)

        timing = time_over_ranks(step, self._effort(step), self._device)
        self._check(layer(x, idx, weights, _experts), x, idx, weights, what)
        layer.buffer.check()
        return timing

    def _time_in_turn(
        self, layer: deep_comm.ExpertParallel, parts: tuple[Tensor, ...], rival: Any, what: str
    ) -> tuple[list[Timing], Judged]:
        """By auto, and with that mode named."""
        x, idx, weights = parts

        def step_of(mode: Any) -> Callable[[int], Tensor]:
            return lambda call: layer(x, idx, weights, _experts, mode=mode)

        steps = [step_of(mode) for mode in (rival, "auto", rival)]
        for step in (*steps, *steps):  # auto: the first step may change the mode
            self._check(step(0), x, idx, weights, what)
        effort = self._effort(steps[0])
        if effort.num_calls == self._options.effort.num_calls:
            effort = replace(effort, num_rounds=_TURNS * effort.num_rounds)
        turns = time_in_turn(steps, effort, self._device)
        for step in steps:
            self._check(step(0), x, idx, weights, what)
        layer.buffer.check()
        return turns.timings, Judged.of(*turns.rounds_us)

    def _time_graphs(
        self,
        layer: deep_comm.ExpertParallel,
        parts: tuple[Tensor, ...],
        modes: Sequence[Any],
        what: str,
    ) -> Turns | None:
        """Of each mode, in turn; None on the host target."""
        if self._device.type != "cuda":
            return None
        x, idx, weights = parts
        calls = self._options.effort.num_calls
        graphs, results = [], []
        for mode in modes:
            is_bounded = mode == "prefill"
            for _ in range(2):
                layer(x, idx, weights, _experts, mode=mode, bounded=is_bounded)
            torch.cuda.synchronize()
            dist.barrier()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                for _ in range(calls):
                    y = layer(x, idx, weights, _experts, mode=mode)
            results.append(y)

        def replay_of(graph: torch.cuda.CUDAGraph) -> Callable[[int], None]:
            return lambda call: graph.replay()

        rounds = self._options.effort.num_rounds
        turns = time_in_turn(
            [replay_of(graph) for graph in graphs], Effort(2, 1, rounds, rounds), self._device,
            calls_per_work=calls,
        )  # fmt: skip
        for y in results:
            self._check(y, x, idx, weights, what)
        layer.buffer.check()
        return turns

    def _time_graph(
        self, layer: deep_comm.ExpertParallel, parts: tuple[Tensor, ...], what: str
    ) -> Timing | None:
        turns = self._time_graphs(layer, parts, [layer.mode], what)
        return None if turns is None else turns.timings[0]

    # ---- sizes -----------------------------------------------------------------------------------

    def _decode_bytes(self, decode_tokens: int) -> int:
        options = self._options
        memory = deep_comm.ExpertParallel.estimate_memory(
            self._num_ranks, hidden=options.hidden, num_experts=options.experts,
            num_topk=options.topk, max_tokens=decode_tokens, decode_tokens=decode_tokens,
            mode="decode",
        )  # fmt: skip
        return memory.decode_call

    def _decodes(self, num_tokens: int) -> bool:
        return num_tokens < 1 << 16 and self._decode_bytes(num_tokens) <= _MAX_DECODE_BYTES

    def _goes_on(self, share: float) -> bool:
        """Rank 0's clock decides for all."""
        is_spent = time.monotonic() - self._started > share * self._options.budget_s
        return not gather(is_spent)[0]

    @contextmanager
    def _one_size(self, what: str) -> Iterator[None]:
        options = self._options
        left_s = options.deadline_s - (time.monotonic() - self._started)
        # There is one such timer a process; it replaces that of the whole run and puts it back.
        faulthandler.dump_traceback_later(max(1.0, min(options.size_deadline_s, left_s)), exit=True)
        try:
            yield
        except deep_comm.DeepCommError as error:
            raise deep_comm.DeepCommError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            faulthandler.dump_traceback_later(max(1.0, left_s), exit=True)

    def _fixed(
        self, num_tokens: int, prefill: deep_comm.ExpertParallel, decoders: dict[int, Any]
    ) -> Line:
        parts = self._inputs(num_tokens)
        decode = decode_graph = prefill_graph = None
        if self._decodes(num_tokens):
            # What a caller would build who knows that there are never more.
            slots = max(num_tokens, DEFAULT_DECODE_TOKENS if self._device.type == "cuda" else 8)
            if slots not in decoders:
                for layer in decoders.values():
                    layer.destroy()
                decoders.clear()
                decoders[slots] = self._layer("decode", slots, slots)
            layer = decoders[slots]
            decode = self._time(layer, parts, f"decode, {num_tokens} tokens")
            decode_graph = self._time_graph(layer, parts, f"captured decode, {num_tokens} tokens")
        if self._device.type == "cuda" and num_tokens <= GRAPH_TOKENS:
            with self._layer("prefill", num_tokens, 1) as captured:
                prefill_graph = self._time_graph(
                    captured, parts, f"captured prefill, {num_tokens} tokens"
                )
        timing = self._time(prefill, parts, f"prefill, {num_tokens} tokens")
        return Line(num_tokens, Pair(timing, decode), Pair(prefill_graph, decode_graph))

    def _with_auto(self, line: Line, auto: deep_comm.ExpertParallel) -> Line:
        tokens = line.tokens
        parts = self._inputs(tokens)
        mixed = parts if self._rank == 0 else tuple(part[:FEW_TOKENS] for part in parts)
        fits = tokens <= auto.shape.decode_tokens
        eager = replace(line.eager, decode_fits=fits)
        timings, judged = self._time_in_turn(auto, parts, eager.better, f"auto, {tokens} tokens")
        eager = replace(eager, rival=timings[0], auto=timings[1], judged=judged)
        graph = line.graph
        if fits:  # more are refused while a graph is captured, where auto is decode
            turns = self._time_graphs(
                auto, parts, ("decode", "auto", "decode"), f"captured auto, {tokens} tokens"
            )
            if turns is not None:
                rival, of_auto, _ = turns.timings
                judged = Judged.of(*turns.rounds_us)
                graph = replace(graph, rival=rival, auto=of_auto, judged=judged)
        one_rank = self._time(auto, mixed, f"auto, {tokens} on one rank")
        return replace(line, eager=eager, graph=graph, one_rank=one_rank)

    def run(self, say: Callable[[str], None]) -> Figures:
        options = self._options
        self._started = time.monotonic()
        say(
            f"{self._num_ranks} ranks on {options.device}, hidden {options.hidden}, "
            f"{options.experts} experts, top-{options.topk}; microseconds of a step (dispatch + "
            "combine), slowest rank"
        )
        lines: list[Line] = []
        most = max(options.tokens)
        decoders: dict[int, Any] = {}
        with torch.inference_mode(), self._layer("prefill", most, 1) as prefill:
            say("fixed modes\n" + report.header())
            for tokens in sorted(options.tokens):
                if lines and not self._goes_on(_FIXED_SHARE):
                    break
                with self._one_size(f"{tokens} tokens by the fixed modes"):
                    lines.append(self._fixed(tokens, prefill, decoders))
                say(report.row(lines[-1]))
            for layer in decoders.values():
                layer.destroy()
        measured = self._chosen(lines)
        threshold = options.decode_tokens
        if threshold is None:
            threshold = measured or DEFAULT_DECODE_TOKENS
        by_default = None if threshold == BY_DEFAULT else threshold
        judged: list[Line] = []
        with (
            torch.inference_mode(),
            self._layer("auto", max(most, (by_default or 0) + 1), by_default) as auto,
        ):
            threshold = auto.shape.decode_tokens
            say(f"auto, decode_tokens {threshold}\n" + report.header())
            for line in lines:
                if judged and not self._goes_on(1.0):
                    break
                with self._one_size(f"{line.tokens} tokens by auto"):
                    judged.append(self._with_auto(line, auto))
                say(report.row(judged[-1]))
                self._write(judged, threshold, measured)
        done = {line.tokens for line in judged}
        left_out = [tokens for tokens in options.tokens if tokens not in done]
        return Figures(judged, left_out, threshold, measured)

    def _chosen(self, lines: Sequence[Line]) -> int | None:
        """The threshold that the fixed modes ask for, alike on all ranks: they have the same times.

        Where decode is fast for long, the memory of its calls decides. None: nothing to compare.
        """
        pairs = [(line.tokens, line.eager) for line in lines]
        if all(pair.decode is None for _, pair in pairs):
            return None
        found = report.crossover(pairs)
        bound = self._options.max_decode_bytes
        if bound is None and self._device.type == "cuda":
            bound = torch.cuda.get_device_properties(self._device).total_memory / _CHOSEN_SHARE
        while found > 1 and self._decode_bytes(found) > (bound or _HOST_CHOSEN_BYTES):
            found //= 2
        return max(1, found)

    def _write(self, lines: list[Line], threshold: int, measured: int | None) -> None:
        """What there is so far, should a later size end everything."""
        if self._rank == 0 and self._options.json is not None:
            figures = Figures(lines, [], threshold, measured)
            write(self._options, figures, self._num_ranks, is_complete=False)


def run_rank(options: Options, device: torch.device, say: Callable[[str], None]) -> Figures:
    return Runner(options, device).run(say)


def write(options: Options, figures: Figures, num_ranks: int, *, is_complete: bool) -> None:
    assert options.json is not None
    document = {
        **machine.heading(options.device, options.command, num_ranks),
        "hidden": options.hidden,
        "experts": options.experts,
        "topk": options.topk,
        "decode_tokens": figures.decode_tokens,
        "measured_decode_tokens": figures.measured,
        "is_complete": is_complete,
        "left_out": figures.left_out,
        "lines": [line.to_json() for line in figures.lines],
    }
    options.json.write_text(json.dumps(document, indent=2) + "\n")


def store(options: Options, figures: Figures, num_ranks: int) -> Path | None:
    """Into the file that layers read. Only what was measured to the end."""
    if figures.measured is None or figures.left_out:
        return None
    path = tuning.tune_file()
    name = machine.describe(options.device).get("gpu", "host target")
    tuning.store_decode_tokens(
        path,
        f"{name} x {num_ranks}",
        {
            "hidden": options.hidden,
            "num_experts": options.experts,
            "num_topk": options.topk,
            "decode_tokens": figures.measured,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        },
    )
    return path


def publish(options: Options, figures: Figures, num_ranks: int, elapsed_s: float) -> None:
    print("\n" + report.verdict(figures.lines, figures.left_out, figures.decode_tokens))
    if figures.measured is not None and figures.measured != figures.decode_tokens:
        print(f"measured: --decode-tokens {figures.measured}")
    if options.store:
        path = store(options, figures, num_ranks)
        what = "nothing stored: not measured to the end"
        if path is not None:
            what = f"decode_tokens {figures.measured} stored in {path}"
        print(what)
    if options.json is not None:
        write(options, figures, num_ranks, is_complete=not figures.left_out)
    print(f"measured in {elapsed_s:.0f} s", flush=True)
