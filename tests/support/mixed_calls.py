"""Programs of calls of every kind, drawn from a seed: several operations are under way at a time on
one Buffer or two, layers of different shapes among them, and stop between their calls for others to
go on, on all ranks the same. What each operation got is checked as if it had been alone.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import expanded
import layer_cases
import low_latency
import quantised
import random_calls
import roundtrip
import torch
from cases import Case, InternodeCase
from layer_cases import LayerCase

import deep_comm

MOST_UNDER_WAY = 4
LOW_LATENCY_TOKENS, LOW_LATENCY_HIDDEN = 17, 256
KINDS = ("dispatch", "combine")  # of low-latency calls


class Sends(NamedTuple):
    """A low-latency call of these kinds comes next. ``waits``: for a hook."""

    kinds: tuple[str, ...]
    waits: bool


class Received(NamedTuple):
    """The hook of this operation's call of this kind has run."""

    kind: str


Stop = Sends | Received | None
Steps = Generator[Stop, None, Any]


@dataclass(frozen=True)
class Setting:
    """What a program runs on, alike on all ranks."""

    num_ranks: int
    ranks_per_node: int | None
    num_buffers: int
    nvl_bytes: int
    direct_bytes: int | None
    enable_shrink: bool
    layers: tuple[LayerCase, ...]

    @staticmethod
    def draw(choose: random.Random) -> Setting:
        num_ranks, ranks_per_node = choose.choice(
            ((1, None), (2, None), (3, None), (4, None), (2, 1), (4, 2), (6, 2), (3, 1))
        )
        nvl_bytes = choose.choice((2 << 20, 8 << 20))
        return Setting(
            num_ranks,
            ranks_per_node,
            num_buffers=choose.choice((1, 1, 2)),
            nvl_bytes=nvl_bytes,
            direct_bytes=choose.choice((0, nvl_bytes // 2, nvl_bytes - (1 << 20))),
            enable_shrink=choose.random() < 0.2,
            layers=tuple(
                _layer_of(choose, num_ranks, ranks_per_node)
                for _ in range(choose.choice((0, 1, 2, 2)))
            ),
        )


def _layer_of(choose: random.Random, num_ranks: int, ranks_per_node: int | None) -> LayerCase:
    fp8 = choose.random() < 0.25
    dtype = torch.bfloat16 if fp8 else choose.choice((torch.bfloat16, torch.float32))
    modes = ("auto", "prefill", "decode") if dtype == torch.bfloat16 else ("auto", "prefill")
    return LayerCase(
        ((0,) * num_ranks,), max_tokens=choose.choice((4, 20)), decode_tokens=choose.choice((2, 4)),
        hidden=choose.choice((128, 256) if fp8 else (64, 128, 256)),
        experts=choose.choice((num_ranks, 8, 2 * num_ranks + 3)), topk=choose.choice((1, 2, 4)),
        dtype=dtype, fp8=fp8, mode=choose.choice(modes), alignment=choose.choice((1, 1, 4)),
        ranks_per_node=ranks_per_node,
    )  # fmt: skip


class Site:
    """A rank's Buffers and layers; the layers share the first Buffer."""

    def __init__(self, group: Any, setting: Setting) -> None:
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
            LOW_LATENCY_TOKENS, LOW_LATENCY_HIDDEN, setting.num_ranks, 64,
            ranks_per_node=setting.ranks_per_node, enable_shrink=setting.enable_shrink,
        )  # fmt: skip
        self.buffers = [
            deep_comm.Buffer(
                group, setting.nvl_bytes, max(num_bytes, 4 << 20), low_latency_mode=True,
                num_direct_bytes=setting.direct_bytes, device="cpu", timeout_s=20.0,
                ranks_per_node=setting.ranks_per_node, enable_shrink=setting.enable_shrink,
                num_qps_per_rank=InternodeCase.num_qps,
            )
            for _ in range(setting.num_buffers)
        ]  # fmt: skip
        self.rank = self.buffers[0].rank
        self.layers = [
            layer_cases.build(None, case, buffer=self.buffers[0]) for case in setting.layers
        ]


class NormalOperation:
    """Dispatch, cached dispatch and combine of one form."""

    def __init__(self, choose: random.Random, setting: Setting, seed: int) -> None:
        per_node = setting.ranks_per_node
        draw = random_calls.single_tier if per_node is None else random_calls.two_tier(per_node)
        self.case: Case = draw(choose, setting.num_ranks, seed)
        self.form = choose.choice(("plain", "expanded", *quantised.FORMS))
        if isinstance(self.form, quantised.Form):
            hidden = choose.choice((128, 512))
            self.case = dataclasses.replace(
                self.case, hidden=hidden, dtype=torch.bfloat16, scales=None
            )
        self.options = {"async_finish": True} if choose.random() < 0.3 else {}
        self.which = choose.randrange(setting.num_buffers)

    def steps(self, site: Site) -> Steps:
        buffer, case = site.buffers[self.which], self.case
        if isinstance(self.form, quantised.Form):
            return quantised.call_in_steps(
                buffer, quantised.Formed(case, self.form), 0, self.options
            )
        if self.form == "expanded":
            return expanded.call_in_steps(buffer, case, 0, self.options)
        return roundtrip.call_in_steps(buffer, case, 0, self.options)

    def verify(self, results: list[Any]) -> None:
        received = [[one] for one in results]
        if isinstance(self.form, quantised.Form):
            quantised.verify(quantised.Formed(self.case, self.form), received)
        elif self.form == "expanded":
            expanded.verify(self.case, received)
        else:
            roundtrip.verify(self.case, received)


class LowLatencyOperation:
    """A pair of low-latency calls, with hooks or without."""

    RANGE: ClassVar = low_latency.Range(
        max_tokens=(1, 2, LOW_LATENCY_TOKENS), hidden=(8, 64, LOW_LATENCY_HIDDEN),
        hidden_fp8=(128, LOW_LATENCY_HIDDEN), experts=(3, 8, 11), topk=(1, 2, 4, 8),
        modes=("plain", "hook", "hook", "async"),
    )  # fmt: skip

    def __init__(self, choose: random.Random, setting: Setting, seed: int) -> None:
        case = self.RANGE.draw(
            choose, setting.num_ranks, calls=1, seed=seed, ranks_per_node=setting.ranks_per_node
        )
        self.case = dataclasses.replace(case, one_rounding=False)  # wants a larger region

    def steps(self, site: Site) -> Steps:
        pair = low_latency.Pair(site.buffers[0], self.case, 0)
        has_hook = self.case.mode == "hook"
        for kind in KINDS:
            yield Sends((kind,), has_hook)
            hook = getattr(pair, kind)()
            yield None
            if hook is not None:
                hook()
                yield Received(kind)
        return pair.received()

    def verify(self, results: list[Any]) -> None:
        low_latency.verify(self.case, [[one] for one in results])


class LayerOperation:
    """A step of a layer, in one of the ways that there are; with gradients, its backward behind
    others."""

    def __init__(self, choose: random.Random, setting: Setting, seed: int) -> None:
        self.which = choose.randrange(len(setting.layers))
        case = setting.layers[self.which]
        self.mode = choose.choice((None, None, "prefill", "decode"))
        if self.mode == "decode" and (case.mode == "prefill" or case.dtype != torch.bfloat16):
            self.mode = None
        mode = self.mode or case.mode
        most = choose.choice((0, 1, case.decode_tokens, case.max_tokens, case.max_tokens))
        if mode == "decode":
            most = min(most, case.decode_tokens)
        self.has_grad = mode != "decode" and not case.fp8 and choose.random() < 0.4
        self.may_decode = mode != "prefill" and not self.has_grad
        self.case = dataclasses.replace(
            case,
            steps=(tuple(choose.randint(0, most) for _ in range(case.num_ranks)),),
            routing=choose.choice(("random", "skewed", "holes", "one_expert", "none")),
            idx_dtype=choose.choice((torch.int64, torch.int32)),
            how=choose.choice(("forward", "shared", "split", "async")),
            bounded=mode == "prefill" and choose.random() < 0.4,
            seed=seed,
        )
        self.scope: Callable[[], Any] = torch.enable_grad
        if not self.has_grad:
            self.scope = choose.choice((torch.no_grad, torch.inference_mode))

    def steps(self, site: Site) -> Steps:
        layer, case, how = site.layers[self.which], self.case, self.case.how
        x, idx, weights = layer_cases.inputs(case, site.rank, 0)
        experts = layer_cases.Experts()
        options = dict(bounded=case.bounded, mode=self.mode)
        if self.has_grad:
            x.requires_grad_()
        if self.may_decode:
            yield Sends(KINDS, False)
        with self.scope():
            if how in ("forward", "shared"):
                shared = layer_cases.shared if how == "shared" else None
                y = layer(x, idx, weights, experts, shared=shared, **options)
            elif how == "split":
                batch = layer.dispatch(x, idx, weights, **options)
            else:
                sent = layer.dispatch_async(x, idx, weights, **options)
        if how in ("split", "async"):
            y = yield from self._rest(layer, experts, batch if how == "split" else sent)
        yield None
        if self.has_grad:
            y.sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape
        return y.detach(), experts.modes

    def _rest(self, layer: Any, experts: Any, dispatched: Any) -> Steps:
        """Without a hook in flight: an exchange that asks may go on with another one."""
        is_async = self.case.how == "async"
        if not (is_async and self.may_decode):
            yield None
        with self.scope():
            batch = dispatched.result() if is_async else dispatched
        yield None
        with self.scope():
            rows = experts(batch)
        if batch.is_masked:
            yield Sends(("combine",), False)
        with self.scope():
            if not is_async:
                return layer.combine(batch, rows)
            returning = layer.combine_async(batch, rows)
        if not batch.is_masked:
            yield None
        with self.scope():
            return returning.result()

    def verify(self, results: list[Any]) -> None:
        layer_cases.verify(self.case, [[one] for one in results])


class Waiting:
    """Which low-latency calls may be sent: two of a kind from one on whose hook has not run."""

    def __init__(self) -> None:
        self._pending: dict[str, dict[int, bool]] = {kind: {} for kind in KINDS}  # overtaken?

    def allows(self, stop: Stop) -> bool:
        if not isinstance(stop, Sends):
            return True
        pending = [self._pending[kind] for kind in stop.kinds]
        return not any(len(one) == 2 or any(one.values()) for one in pending)

    def note(self, operation: int, stop: Stop) -> None:
        """Before a call is sent; when a hook has run."""
        if isinstance(stop, Received):
            del self._pending[stop.kind][operation]
        elif isinstance(stop, Sends):
            for kind in stop.kinds:
                self._pending[kind] = dict.fromkeys(self._pending[kind], True)
            if stop.waits:
                self._pending[stop.kinds[0]][operation] = False


def draw(seed: int, length: int) -> tuple[Setting, list[Any]]:
    choose = random.Random(seed)
    setting = Setting.draw(choose)
    kinds: list[Any] = [NormalOperation, NormalOperation, LowLatencyOperation]
    kinds += [LayerOperation] * (2 if setting.layers else 0)
    operations = [choose.choice(kinds)(choose, setting, seed * 100 + n) for n in range(length)]
    return setting, operations


def run(group: Any, seed: int, setting: Setting, operations: list[Any]) -> list[Any]:
    """What a rank got, by operation."""
    choose = random.Random(seed)
    site, waiting = Site(group, setting), Waiting()
    results: dict[int, Any] = {}
    under_way: dict[int, Steps] = {}
    stops: dict[int, Stop] = {}
    while len(results) < len(operations):
        able = [number for number in under_way if waiting.allows(stops[number])]
        begun = len(results) + len(under_way)
        may_begin = begun < len(operations) and len(under_way) < MOST_UNDER_WAY
        if may_begin and (not able or choose.random() < 0.4):
            under_way[begun], stops[begun] = operations[begun].steps(site), None
            able = [begun]
        number = choose.choice(able)
        if isinstance(stops[number], Sends):
            waiting.note(number, stops[number])
        try:
            stops[number] = next(under_way[number])
        except StopIteration as end:
            results[number] = end.value
            del under_way[number]
            continue
        if isinstance(stops[number], Received):
            waiting.note(number, stops[number])
    for buffer in site.buffers:
        buffer.destroy()
    return [results[number] for number in range(len(operations))]


def verify(operations: list[Any], results: list[list[Any]]) -> None:
    """``results[rank][operation]``."""
    for number, operation in enumerate(operations):
        try:
            operation.verify([rank[number] for rank in results])
        except AssertionError as error:
            told = {name: str(value) for name, value in vars(operation).items()}
            raise AssertionError(f"operation {number}, {told}: {error}") from error
