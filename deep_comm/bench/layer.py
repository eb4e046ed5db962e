"""``--mode layer``: ExpertParallel's modes over a sweep of token counts.

First a step (dispatch, experts that return their rows, combine) by prefill and by decode, for every
number of tokens, eagerly and, on GPUs, in CUDA graphs; then by auto, with the threshold that is
given or that the first part has found (``--decode-tokens measured``). The first tokens of every
rank are checked bit for bit. ``--store`` makes the measured threshold the default of layers on
machines like this one (deep_comm.tuning).

auto is judged by what the same layer does when a mode is named (column "rival": the better mode): a
round of the one, a round of auto, a round of the one again, and so on. The ratio is the median over
these turns of auto's round over the mean of the two around it; "noise" is the median of the rival's
second round over its first. Beyond its decode_tokens a layer has no decode mode, since the memory
of decode calls grows with that bound. The figures of decode there are of layers that were built for
more, and the verdict names the sizes at which such a layer is faster.

A size that takes longer than --size-deadline-s ends the process, with the stack of where it was;
none is begun when --budget-s is spent, and sizes that were left out are named.
"""

from __future__ import annotations

import faulthandler
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_comm import DeepCommError, ExpertBatch, ExpertParallel, tuning
from deep_comm.bench.measure import (
    Graph,
    Timing,
    clock_of,
    gather,
    take_samples,
    time_in_turns,
)
from deep_comm.bench.names import Effort
from deep_comm.bench.options import THRESHOLDS, Options
from deep_comm.bench.payload import same_bits
from deep_comm.bench.report import heading, write
from deep_comm.context.shape import DEFAULT_DECODE_TOKENS
from deep_comm.reference import layer as reference_layer
from deep_comm.settings.command_line import Progress

TARGET = 1.05  # auto over the better mode
CHECKED_TOKENS = 16
FEW_TOKENS = 8  # of the other ranks, where one has all
GRAPH_TOKENS = 512  # the most whose prefill is captured, which needs room for every selection
_MAX_DECODE_BYTES = 24 << 30  # of a decode call's tensors
_CHOSEN_SHARE = 8  # of a GPU's memory, one part in so many: of a threshold that is chosen here
_HOST_CHOSEN_BYTES = 4 << 30
_FIXED_SHARE = 0.6  # of the budget, for the fixed modes
_TURNS = 4  # times as many rounds where two modes are compared and a round is short
_ROUND_US = 20e3  # a round of long calls has fewer of them

Parts = tuple[Tensor, Tensor, Tensor]
"""x, topk_idx, topk_weights."""
Step = Callable[[int], Tensor]
Turned = tuple[list[Timing], list[list[float]]]
"""Of time_in_turns()."""


# ---- figures -------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Of a number that every turn has."""
    found = [values[0]] * 3
    if len(values) > 1:
        found = statistics.quantiles(values, n=4, method="inclusive")
    return dict(zip(("low", "median", "high"), found, strict=True))


def judge(
    rival: Sequence[float], auto: Sequence[float], again: Sequence[float]
) -> dict[str, dict[str, float]]:
    """auto between two rounds of its rival, in every turn: ``ratio`` of auto's round to the mean of
    the two around it, ``noise`` of the rival's second round to its first."""
    turns = list(zip(rival, auto, again, strict=True))
    ratios = [2 * of_auto / (before + after) for before, of_auto, after in turns]
    return {"ratio": quartiles(ratios), "noise": quartiles([it[2] / it[0] for it in turns])}


@dataclass(frozen=True)
class Pair:
    """A step of so many tokens per rank by each mode, and by auto; None: not measured.

    Attributes:
        decode_fits: the layer whose auto is measured takes so many tokens with mode="decode", too;
            if not, ``decode`` is of a layer that was built for more, with its memory.
        rival: the better mode that this layer takes, named in its calls, timed in turn with auto.
        judged: of these turns, by judge().
    """

    prefill: Timing | None = None
    decode: Timing | None = None
    auto: Timing | None = None
    decode_fits: bool = True
    rival: Timing | None = None
    judged: dict[str, dict[str, float]] | None = None

    @property
    def better(self) -> str:
        """Mode of the same layer."""
        if self.decode is None or not self.decode_fits:
            return "prefill"
        is_slower = self.prefill is not None and self.prefill.mean_us < self.decode.mean_us
        return "prefill" if is_slower else "decode"

    @property
    def ratio(self) -> float | None:
        """Of auto to the better mode of the same layer."""
        return None if self.judged is None else self.judged["ratio"]["median"]

    @property
    def ratio_to_any(self) -> float | None:
        """Of auto to the better mode of any layer."""
        means = [it.mean_us for it in (self.prefill, self.decode) if it is not None]
        return None if self.auto is None or not means else self.auto.mean_us / min(means)

    @property
    def verdict(self) -> str:
        return "-" if self.ratio is None else "ok" if self.ratio <= TARGET else "MISSED"

    def turned(self, turns: Turned) -> Pair:
        """With auto and its rival, timed as (rival, auto, rival)."""
        (rival, auto, _), rounds_us = turns
        return replace(self, rival=rival, auto=auto, judged=judge(*rounds_us))

    def to_json(self) -> dict[str, Any]:
        names = ("ratio", "ratio_to_any", "verdict")
        return asdict(self) | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Line:
    """One number of tokens.

    Attributes:
        graph: the same steps in CUDA graphs; a captured auto step is a decode step.
        one_rank: auto where one rank has the tokens and the others few; None: not measured.
    """

    tokens: int
    eager: Pair
    graph: Pair
    one_rank: Timing | None = None

    @property
    def pairs(self) -> tuple[tuple[str, Pair], tuple[str, Pair]]:
        return ("eager", self.eager), ("graph", self.graph)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {name: pair.to_json() for name, pair in self.pairs}


@dataclass(frozen=True)
class Figures:
    lines: list[Line]
    left_out: list[int]
    decode_tokens: int
    measured: int | None  # the threshold that the fixed modes ask for; None: neither was slower


_PAIR = ("prefill", "decode", "rival", "auto", "ratio", "verdict", "noise")
COLUMNS = ("tokens", *_PAIR, "graph:prefill", *_PAIR[1:], "one rank", "host auto", "host rival")


def row(line: Line | None) -> str:
    """None: the heading."""
    cells = list(COLUMNS)
    if line is not None:
        values: list[Any] = []
        for _, pair in line.pairs:
            noise = None if pair.judged is None else f"{pair.judged['noise']['median']:.3f}"
            ratio = None if pair.ratio is None else f"{pair.ratio:.3f}"
            values += [pair.prefill, pair.decode, pair.rival, pair.auto, ratio, pair.verdict, noise]
        values.append(line.one_rank)
        values += [it and it.host_us for it in (line.eager.auto, line.eager.rival)]
        values = [it.mean_us if isinstance(it, Timing) else it for it in values]
        cells = [str(line.tokens)]
        cells += [it or "-" if it is None or isinstance(it, str) else f"{it:.1f}" for it in values]
    widths = [max(8, len(name)) for name in COLUMNS]
    return " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def crossover(pairs: Sequence[tuple[int, Pair]]) -> int:
    """Tokens up to which decode is not the slower mode; 0: it is from the start.

    Between the last measured size at which it is not and the first at which it is, both times are
    taken for straight lines.
    """
    best, gained_us = 0, 0.0  # by decode, at ``best``
    for tokens, pair in sorted(pairs, key=lambda entry: entry[0]):
        if pair.decode is None or pair.prefill is None:
            break
        lost_us = pair.decode.mean_us - pair.prefill.mean_us
        if lost_us > 0:
            if best > 0:
                best += math.floor((tokens - best) * gained_us / (gained_us + lost_us))
            break
        best, gained_us = tokens, -lost_us
    return best


def verdict(lines: Sequence[Line], left_out: Sequence[int], decode_tokens: int) -> str:
    """In words: whether the target is met, and where not."""
    eager = crossover([(line.tokens, line.eager) for line in lines])
    captured = crossover([(line.tokens, line.graph) for line in lines])
    graphs = f", captured up to {captured} or more" if captured else ""
    texts = [
        f"decode is not the slower mode up to {eager} tokens per rank{graphs}; auto's "
        f"decode_tokens: {decode_tokens}"
    ]
    found = [
        (name, line.tokens, pair.judged)
        for line in lines
        for name, pair in line.pairs
        if pair.judged is not None
    ]
    ratios = [(f"{tokens} ({name}", it["ratio"]["median"]) for name, tokens, it in found]
    over = [(where, ratio) for where, ratio in ratios if ratio > TARGET]
    if over:
        places = ", ".join(f"{where} {ratio:.3f})" for where, ratio in over)
        worst = max(ratio for _, ratio in over)
        texts.append(f"auto MISSED {TARGET:.2f} of the better mode at {places}; worst {worst:.3f}")
    elif ratios:
        texts.append(f"auto is within {TARGET:.2f} of the better mode at every size measured")
    for name, tokens, judged in found:
        ratio, noise = (
            f"{it['median']:.3f} ({it['low']:.3f} to {it['high']:.3f})" for it in judged.values()
        )
        texts.append(f"{tokens} tokens, {name}: auto over its rival {ratio}, the rival over itself "
                     f"{noise}")  # fmt: skip
    larger = ", ".join(
        f"{line.tokens} ({line.eager.ratio_to_any:.2f})"
        for line in lines
        if not line.eager.decode_fits and (line.eager.ratio_to_any or 0) > TARGET
    )
    if larger:
        texts.append("a layer with a larger decode_tokens, and its memory, would be faster by "
                     f"decode at {larger}")  # fmt: skip
    if left_out or not ratios:
        sizes = ", ".join(map(str, left_out))
        texts.append(f"NOT COMPLETE: time was up before {sizes or 'anything was measured'}")
    return "\n".join(texts)


# ---- a run ---------------------------------------------------------------------------------------


def _experts(batch: ExpertBatch) -> Tensor:
    return batch.x


class Runner:
    """One rank."""

    def __init__(self, options: Options, device: torch.device, say: Callable[[str], None]) -> None:
        self._options, self._device, self._say = options, device, say
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._started = time.monotonic()
        self._decoders: dict[int, ExpertParallel] = {}  # the last one, by its decode_tokens
        self._progress = Progress(self._rank == 0)

    def _inputs(self, num_tokens: int) -> Parts:
        options, device = self._options, self._device
        generator = torch.Generator(device).manual_seed(1000 * num_tokens + self._rank)
        x = torch.randn(num_tokens, options.hidden, generator=generator, device=device)
        scores = torch.rand(num_tokens, options.experts, generator=generator, device=device)
        weights = torch.rand(num_tokens, options.topk, generator=generator, device=device)
        return x.bfloat16(), scores.topk(options.topk, dim=1).indices, weights

    def _layer(self, mode: Any, max_tokens: int, decode_tokens: int | None) -> ExpertParallel:
        options = self._options
        return ExpertParallel(
            dist.group.WORLD, hidden=options.hidden, num_experts=options.experts,
            num_topk=options.topk, max_tokens=max_tokens, decode_tokens=decode_tokens, mode=mode,
            device=self._device, timeout_s=max(5.0, options.size_deadline_s / 2),
        )  # fmt: skip

    def _check(self, y: Tensor, parts: Parts, what: str) -> None:
        x, idx, weights = (part[:CHECKED_TOKENS].cpu() for part in parts)
        want = reference_layer.of_one_rank(
            x, idx, weights, self._options.experts, self._num_ranks, lambda expert, rows: rows
        )
        if not same_bits(y[:CHECKED_TOKENS].cpu(), want):
            raise DeepCommError(f"{what}: rank {self._rank} got other sums")

    # ---- timing ----------------------------------------------------------------------------------

    @staticmethod
    def _step(layer: ExpertParallel, parts: Parts, mode: Any) -> Step:
        return lambda _call: layer(*parts, _experts, mode=mode)

    def _time(
        self, layer: ExpertParallel, parts: Parts, what: str, modes: Sequence[Any] = (None,)
    ) -> Turned:
        """Eager steps of these modes, in turns; None: the layer's own."""
        self._progress.step(what)
        steps = [self._step(layer, parts, mode) for mode in modes]
        for step in (*steps, *steps):  # auto: the first step may change the mode
            self._check(step(0), parts, what)
        # Fewer calls where they are long; more rounds where steps are compared and short.
        effort: Effort = self._options.effort
        (sample,) = take_samples(steps[:1], Effort(1, 3, 1, 1), clock_of(self._device))
        mean_us = max(gather(sample.means_us[0]))
        num_calls = min(effort.num_calls, max(5, int(_ROUND_US / mean_us)))
        is_short = len(steps) > 1 and num_calls == effort.num_calls
        effort = replace(
            effort, num_calls=num_calls, num_single_calls=num_calls,
            num_rounds=effort.num_rounds * (_TURNS if is_short else 1),
            num_host_calls=min(effort.num_host_calls, num_calls),
        )  # fmt: skip
        turns = time_in_turns(steps, effort, self._device)
        for step in steps:
            self._check(step(0), parts, what)
        layer.buffer.check()
        return turns

    def _time_graphs(
        self, layer: ExpertParallel, parts: Parts, what: str, modes: Sequence[Any]
    ) -> Turned | None:
        """Captured steps of these modes, in turns; None on the host target."""
        if self._device.type != "cuda":
            return None
        num_calls, num_rounds = self._options.effort.num_calls, self._options.effort.num_rounds
        graphs = []
        for mode in modes:
            for _ in range(2):
                layer(*parts, _experts, mode=mode, bounded=mode == "prefill")
            torch.cuda.synchronize()
            dist.barrier()
            graphs.append(Graph(self._step(layer, parts, mode), num_calls, 1))
        effort = Effort(2, 1, num_rounds, num_rounds)
        replays = [graph.replay for graph in graphs]
        turns = time_in_turns(replays, effort, self._device, calls_per_work=num_calls)
        for graph in graphs:
            self._check(graph.last, parts, f"captured {what}")
        layer.buffer.check()
        return turns

    # ---- sizes -----------------------------------------------------------------------------------

    def _decode_bytes(self, decode_tokens: int) -> int:
        options = self._options
        return ExpertParallel.estimate_memory(
            self._num_ranks, hidden=options.hidden, num_experts=options.experts,
            num_topk=options.topk, max_tokens=decode_tokens, decode_tokens=decode_tokens,
            mode="decode",
        ).decode_call  # fmt: skip

    def _is_spent(self, share: float) -> bool:
        """Rank 0's clock decides for all."""
        return gather(time.monotonic() - self._started > share * self._options.budget_s)[0]

    @contextmanager
    def _one_size(self, what: str) -> Iterator[None]:
        options = self._options
        left_s = options.deadline_s - (time.monotonic() - self._started)
        # There is one such timer per process; this replaces that of the run and puts it back.
        faulthandler.dump_traceback_later(max(1.0, min(options.size_deadline_s, left_s)), exit=True)
        try:
            yield
        except DeepCommError as error:
            raise DeepCommError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            faulthandler.dump_traceback_later(max(1.0, left_s), exit=True)

    def _destroy_decoders(self) -> None:
        while self._decoders:
            self._decoders.popitem()[1].destroy()

    def _fixed(self, num_tokens: int, prefill: ExpertParallel) -> Line:
        """A step of this size by the fixed modes."""
        on_gpu, parts = self._device.type == "cuda", self._inputs(num_tokens)
        decode = decode_graph = prefill_graph = None
        if num_tokens < 1 << 16 and self._decode_bytes(num_tokens) <= _MAX_DECODE_BYTES:
            # What a caller would build who knows that there are never more.
            slots = max(num_tokens, DEFAULT_DECODE_TOKENS if on_gpu else 8)
            if slots not in self._decoders:
                self._destroy_decoders()
                self._decoders[slots] = self._layer("decode", slots, slots)
            layer, what = self._decoders[slots], f"decode, {num_tokens} tokens"
            decode = self._time(layer, parts, what)
            decode_graph = self._time_graphs(layer, parts, what, ["decode"])
        what = f"prefill, {num_tokens} tokens"
        if on_gpu and num_tokens <= GRAPH_TOKENS:
            with self._layer("prefill", num_tokens, 1) as layer:
                prefill_graph = self._time_graphs(layer, parts, what, ["prefill"])
        timed = self._time(prefill, parts, what)
        timings = [it and it[0][0] for it in (timed, decode, prefill_graph, decode_graph)]
        return Line(num_tokens, Pair(timings[0], timings[1]), Pair(timings[2], timings[3]))

    def _with_auto(self, line: Line, auto: ExpertParallel) -> Line:
        """The line, with the times of auto at its size."""
        what, parts = f"auto, {line.tokens} tokens", self._inputs(line.tokens)
        eager = replace(line.eager, decode_fits=line.tokens <= auto.shape.decode_tokens)
        modes = (eager.better, "auto", eager.better)
        eager, captured = eager.turned(self._time(auto, parts, what, modes)), None
        if eager.decode_fits:  # more are refused while a graph is captured, where auto is decode
            captured = self._time_graphs(auto, parts, what, ("decode", "auto", "decode"))
        graph = line.graph if captured is None else line.graph.turned(captured)
        num_tokens = line.tokens if self._rank == 0 else FEW_TOKENS
        few = parts[0][:num_tokens], parts[1][:num_tokens], parts[2][:num_tokens]
        one_rank = self._time(auto, few, f"{what} on one rank")[0][0]
        return replace(line, eager=eager, graph=graph, one_rank=one_rank)

    def run(self) -> Figures:
        options, say = self._options, self._say
        say(
            f"{self._num_ranks} ranks on {options.device}, hidden {options.hidden}, "
            f"{options.experts} experts, top-{options.topk}; microseconds of a step (dispatch + "
            "combine), slowest rank"
        )
        lines: list[Line] = []
        most = max(options.tokens)
        with torch.inference_mode(), self._layer("prefill", most, 1) as prefill:
            say(f"fixed modes\n{row(None)}")
            for tokens in sorted(options.tokens):
                if lines and self._is_spent(_FIXED_SHARE):
                    break
                with self._one_size(f"{tokens} tokens by the fixed modes"):
                    lines.append(self._fixed(tokens, prefill))
                say(row(lines[-1]))
            self._destroy_decoders()
        measured = self._chosen(lines)
        threshold: int | None = options.decode_tokens
        if threshold == THRESHOLDS["measured"]:
            threshold = measured or DEFAULT_DECODE_TOKENS
        elif threshold == THRESHOLDS["default"]:
            threshold = None
        judged: list[Line] = []
        max_tokens = max(most, (threshold or 0) + 1)
        with torch.inference_mode(), self._layer("auto", max_tokens, threshold) as auto:
            threshold = auto.shape.decode_tokens
            say(f"auto, decode_tokens {threshold}\n{row(None)}")
            for line in lines:
                if judged and self._is_spent(1.0):
                    break
                with self._one_size(f"{line.tokens} tokens by auto"):
                    judged.append(self._with_auto(line, auto))
                say(row(judged[-1]))
                if self._rank == 0:  # what there is, should a later size end everything
                    figures = Figures(judged, [], threshold, measured)
                    document = document_of(options, figures, self._num_ranks, is_complete=False)
                    write(options, document, with_plot=False)
        done = {line.tokens for line in judged}
        left_out = [tokens for tokens in options.tokens if tokens not in done]
        return Figures(judged, left_out, threshold, measured)

    def _chosen(self, lines: Sequence[Line]) -> int | None:
        """The threshold that the fixed modes ask for, alike on all ranks: they have the same times.

        Where decode is fast for long, the memory of its calls decides. None: nothing to compare.
        """
        if all(line.eager.decode is None for line in lines):
            return None
        found = crossover([(line.tokens, line.eager) for line in lines])
        bound = float(_HOST_CHOSEN_BYTES)
        if self._options.max_decode_gb is not None:
            bound = self._options.max_decode_gb * 1e9
        elif self._device.type == "cuda":
            bound = torch.cuda.get_device_properties(self._device).total_memory / _CHOSEN_SHARE
        while found > 1 and self._decode_bytes(found) > bound:
            found //= 2
        return max(1, found)


def document_of(
    options: Options, figures: Figures, num_ranks: int, *, is_complete: bool
) -> dict[str, Any]:
    return {
        **heading(options, num_ranks),
        "hidden": options.hidden, "experts": options.experts, "topk": options.topk,
        "decode_tokens": figures.decode_tokens, "measured_decode_tokens": figures.measured,
        "is_complete": is_complete, "left_out": figures.left_out,
        "lines": [line.to_json() for line in figures.lines],
    }  # fmt: skip


def publish(options: Options, figures: Figures, num_ranks: int) -> str:
    """The end of the report; returns its gist."""
    document = document_of(options, figures, num_ranks, is_complete=not figures.left_out)
    print("\n" + verdict(figures.lines, figures.left_out, figures.decode_tokens))
    if figures.measured is not None and figures.measured != figures.decode_tokens:
        print(f"measured: --decode-tokens {figures.measured}")
    if options.store and (figures.measured is None or figures.left_out):
        print("nothing stored: not measured to the end")
    elif options.store:
        path = tuning.tune_file()
        entry = {
            "hidden": options.hidden, "num_experts": options.experts, "num_topk": options.topk,
            "decode_tokens": figures.measured, "date": document["date"],
        }  # fmt: skip
        key = tuning.machine_key(torch.device(options.device), num_ranks)
        tuning.store_decode_tokens(path, key, entry)
        print(f"decode_tokens {figures.measured} stored in {path}")
    write(options, document)
    num_missed = sum(pair.verdict == "MISSED" for line in figures.lines for _, pair in line.pairs)
    return f"{len(figures.lines)} sizes, 0 wrong, auto {num_missed} times behind its rival"
