"""Low-latency cases: run one on every rank, and check what came out against the reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cases import ROUTINGS, Case, make_topk_idx
from payload import assert_same_bits
from torch import Tensor

import deep_comm
from deep_comm import local, simulate
from deep_comm.ranks.topology import num_local_experts
from deep_comm.reference import low_latency as reference


@dataclass(frozen=True)
class LowLatencyCase:
    """``calls`` pairs of dispatch and combine of ``len(tokens)`` ranks."""

    tokens: tuple[int, ...]  # per rank, in the first call
    max_tokens: int
    hidden: int = 128
    experts: int = 8
    topk: int = 2
    routing: str = "random"
    idx_dtype: torch.dtype = torch.int64
    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False
    use_nvfp4: bool = False
    compact: bool = False
    global_topk_idx: bool = False  # of compact rows
    weights_ahead: bool = False  # with dispatch, not with combine
    one_rounding: bool = False
    mode: str = "plain"  # "hook": two phases; "late": two pairs at a time; "async"
    zero_copy: bool = False
    calls: int = 2
    ranks_per_node: int | None = None  # fewer than ranks: several logical nodes
    num_qps: int = 24
    hand_on: int = 8  # tokens of a rank from which on it sends each once to a node
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        if self.one_rounding:
            # A row a selection, not a rank; with masks, whatever the Buffer, a place for each too.
            return deep_comm._core.Engine.low_latency_region_bytes(
                num_ranks=self.num_ranks, num_max_tokens=self.max_tokens, hidden=self.hidden,
                num_topk=self.topk, num_experts=self.experts, num_blocks=160, format="bfloat16",
                one_rounding=True, is_internode=self.ranks_per_node is not None, can_shrink=True,
            )  # fmt: skip
        return deep_comm.Buffer.get_low_latency_rdma_size_hint(
            self.max_tokens, self.hidden, self.num_ranks, self.experts,
            ranks_per_node=self.ranks_per_node,
        )  # fmt: skip


@dataclass(frozen=True)
class Range:
    """What random cases are drawn from; ``hidden_fp8``: where rows are quantised by blocks."""

    max_tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    hidden_fp8: tuple[int, ...]
    experts: tuple[int, ...]
    topk: tuple[int, ...]
    topk_one_rounding: tuple[int, ...] | None = None  # None: as topk
    modes: tuple[str, ...] = ("plain", "hook", "late", "async")

    def draw(self, choose: random.Random, num_ranks: int, **options: Any) -> LowLatencyCase:
        """``options`` stay as they are given."""
        max_tokens = choose.choice(self.max_tokens)
        use_fp8 = choose.random() < 0.5
        round_scale = use_fp8 and choose.random() < 0.6
        compact = choose.random() < 0.4
        one_rounding = not compact and choose.random() < 0.35
        topk = self.topk
        if one_rounding and self.topk_one_rounding is not None:
            topk = self.topk_one_rounding
        drawn: dict[str, Any] = dict(
            hidden=choose.choice(self.hidden_fp8 if use_fp8 else self.hidden),
            experts=choose.choice(self.experts), topk=choose.choice(topk),
            routing=choose.choice(ROUTINGS), idx_dtype=choose.choice((torch.int64, torch.int32)),
            use_fp8=use_fp8, round_scale=round_scale,
            use_ue8m0=round_scale and choose.random() < 0.5, compact=compact,
            weights_ahead=choose.random() < 0.4, one_rounding=one_rounding,
            mode=choose.choice(self.modes), zero_copy=choose.random() < 0.3,
        )  # fmt: skip
        drawn["global_topk_idx"] = (
            compact and num_ranks > 1 and drawn["experts"] > 1 and choose.random() < 0.5
        )
        tokens = [choose.choice((0, 1, max_tokens // 2, max_tokens)) for _ in range(num_ranks)]
        return LowLatencyCase(tuple(tokens), max_tokens, **(drawn | options))


@dataclass(frozen=True)
class Received:
    """What one rank got out of one pair; tensors on the host."""

    recv_x: Tensor
    recv_scales: Tensor | None
    recv_count: Tensor
    src_info: Tensor
    layout_range: Tensor
    num_recv_tokens: int
    recv_topk_idx: Tensor | None
    recv_topk_weights: Tensor | None
    combined_x: Tensor


def num_tokens(case: LowLatencyCase, rank: int, call: int) -> int:
    """Ranks take turns, so that the share of a block changes from call to call."""
    return case.tokens[(rank + call) % case.num_ranks]


def _generator(case: LowLatencyCase, rank: int, call: int, purpose: int) -> torch.Generator:
    return torch.Generator().manual_seed(((case.seed * 64 + rank) * 1024 + call) * 8 + purpose)


def inputs_of(case: LowLatencyCase, rank: int, call: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], topk_idx [T, K], topk_weights [T, K]."""
    count = num_tokens(case, rank, call)
    generator = _generator(case, rank, call, 0)
    scale = torch.exp2(torch.randint(-14, 10, (count, 1), generator=generator).float())
    x = (torch.randn(count, case.hidden, generator=generator) * scale).to(torch.bfloat16)
    if count > 1 and case.hidden >= 128:
        x[1, :128] = 0  # a block of zeros has a scale as well
    routing = Case(
        tuple(num_tokens(case, r, call) for r in range(case.num_ranks)), experts=case.experts,
        topk=case.topk, routing=case.routing, idx_dtype=case.idx_dtype, seed=case.seed,
    )  # fmt: skip
    weights = torch.rand(count, case.topk, generator=generator)
    return x, make_topk_idx(routing, rank, call), weights


def global_scale_of(case: LowLatencyCase, rank: int, call: int) -> Tensor | None:
    """Of the sender, for NVFP4: from where scales vanish to where they saturate, or none."""
    if not case.use_nvfp4 or (rank + call + case.seed) % 3 == 0:
        return None
    generator = _generator(case, rank, call, 2)
    return torch.exp2(torch.rand((), generator=generator) * 24 - 12)


def expert_rows(case: LowLatencyCase, rank: int, call: int) -> Tensor:
    """What a rank gives to combine. Columns 0, 4, … cancel in some orders of addition only."""
    num_rows = case.num_ranks * case.max_tokens
    num_local = num_local_experts(rank, case.experts, case.num_ranks)
    shape = (num_rows,) if case.compact else (num_local, num_rows)
    generator = _generator(case, rank, call, 1)
    rows = torch.randn(*shape, case.hidden, generator=generator)
    sign = torch.randint(0, 2, (*shape, 1), generator=generator) * 2.0 - 1
    rows[..., ::4] = sign * 2.0**20
    return rows.to(torch.bfloat16)


class Pair:
    """One dispatch and the combine behind it, step by step."""

    def __init__(self, buffer: deep_comm.Buffer, case: LowLatencyCase, call: int) -> None:
        self.buffer, self.case, self.call = buffer, case, call
        self.rank = buffer.rank
        inputs = inputs_of(case, self.rank, call)
        self.x, self.idx, self.weights = (part.to(buffer.device) for part in inputs)
        global_scale = global_scale_of(case, self.rank, call)
        self.global_scale = None if global_scale is None else global_scale.to(buffer.device)
        self.rows: Tensor | None = None  # made by the first combine, kept for later ones

    def become(self, call: int, with_rows: bool = True) -> None:
        """That of another call, in the same memory: ``with_rows``: what combine is given, too."""
        given = inputs_of(self.case, self.rank, call)
        for own, new in zip((self.x, self.idx, self.weights), given, strict=True):
            own.copy_(new)
        if with_rows:
            self.rows.copy_(expert_rows(self.case, self.rank, call))
        self.call = call

    def _hooked(self, event: Any, hook: Any) -> Any:
        if self.case.mode == "async":
            event.current_stream_wait() if event.event is not None else None
        return hook

    def dispatch(self) -> Any:
        case = self.case
        self.payload, self.recv_count, self.handle, event, hook = self.buffer.low_latency_dispatch(
            self.x, self.idx, case.max_tokens, case.experts, use_fp8=case.use_fp8,
            round_scale=case.round_scale, use_ue8m0=case.use_ue8m0,
            async_finish=case.mode == "async", return_recv_hook=case.mode in ("hook", "late"),
            topk_weights=self.weights if case.weights_ahead else None, use_nvfp4=case.use_nvfp4,
            x_global_scale=self.global_scale, compact=case.compact,
            global_topk_idx=case.global_topk_idx,
        )  # fmt: skip
        return self._hooked(event, hook)

    def combine(self) -> Any:
        case = self.case
        if self.rows is None:
            self.rows = expert_rows(case, self.rank, self.call).to(self.buffer.device)
        if case.zero_copy:
            self.buffer.get_next_low_latency_combine_buffer(self.handle).copy_(self.rows)
        self.combined_x, event, hook = self.buffer.low_latency_combine(
            self.rows, self.idx,
            None if case.weights_ahead and not case.one_rounding else self.weights, self.handle,
            zero_copy=case.zero_copy, one_rounding=case.one_rounding,
            async_finish=case.mode == "async", return_recv_hook=case.mode in ("hook", "late"),
        )  # fmt: skip
        return self._hooked(event, hook)

    def run(self) -> None:
        """Both, each received at once."""
        for stage in (self.dispatch, self.combine):
            hook = stage()
            if hook is not None:
                hook()

    def received(self) -> Received:
        is_pair = self.case.use_fp8 or self.case.use_nvfp4
        recv_x, scales = self.payload if is_pair else (self.payload, None)
        handle, compact = self.handle, self.case.compact
        if self.case.use_nvfp4:
            tiles = scales.view(torch.uint8)
            scales = reference.rows_of_scale_tiles(tiles, recv_x.shape[-2])
        host = [
            None if part is None else part.cpu().clone()
            for part in (
                recv_x, scales, self.recv_count, handle.src_info, handle.layout_range,
                handle.recv_topk_idx, handle.recv_topk_weights, self.combined_x,
            )
        ]  # fmt: skip
        num_recv = int(handle.num_recv_tokens) if compact else -1
        return Received(*host[:5], num_recv, *host[5:])  # type: ignore[arg-type]


def run_pairs(buffer: deep_comm.Buffer, case: LowLatencyCase) -> list[Received]:
    results = []
    step = 2 if case.mode == "late" else 1
    for first in range(0, case.calls, step):
        pairs = [Pair(buffer, case, call) for call in range(first, min(first + step, case.calls))]
        for stage in ("dispatch", "combine"):
            hooks = [getattr(pair, stage)() for pair in pairs]
            for hook in reversed(hooks):
                if hook is not None:
                    hook()
        results += [pair.received() for pair in pairs]
    return results


def run_on_gpu(group: Any, cases: Sequence[LowLatencyCase], timeout_s: float) -> list:
    """All pairs of all cases on one Buffer."""
    num_bytes = max(case.num_bytes for case in cases)
    results = []
    with deep_comm.Buffer(
        group, 0, num_bytes, low_latency_mode=True, ranks_per_node=cases[0].ranks_per_node,
        device=torch.device("cuda", torch.cuda.current_device()), timeout_s=timeout_s,
    ) as buffer:  # fmt: skip
        for case in cases:
            buffer.runtime.low_latency_hand_on_tokens = case.hand_on
            results.append(run_pairs(buffer, case))
    return results


def pairs_amid_normal_calls(buffer: deep_comm.Buffer, case: LowLatencyCase) -> list[Received]:
    """A call of normal mode before every low-latency one: neither disturbs the other."""
    num_ranks, results = buffer.group_size, []
    x = torch.full((6, 64), 1.0 + buffer.rank, dtype=torch.bfloat16)
    idx, ones = torch.arange(6).unsqueeze(1) % num_ranks, torch.ones(6, 1)
    for call in range(case.calls):
        pair = Pair(buffer, case, call)
        received = buffer.dispatch(x, topk_idx=idx, topk_weights=ones, num_experts=num_ranks)
        pair.dispatch()
        combined = buffer.combine(received[0], received[4])[0]
        assert torch.equal(combined, x)
        pair.combine()
        results.append(pair.received())
    return results


def dispatch_in_twos(buffer: deep_comm.Buffer, case: LowLatencyCase, num_rounds: int) -> None:
    """Two dispatches in flight, checked, and nothing that answers: only credit keeps memory from
    being written while a slow rank, or a slow NIC, has yet to read it.
    """
    ranks = range(case.num_ranks)
    for first in range(0, 2 * num_rounds, 2):
        pairs = [Pair(buffer, case, call) for call in (first, first + 1)]
        hooks = [pair.dispatch() for pair in pairs]
        for hook in hooks:
            hook()
        for pair in pairs:
            xs, idxs, _ = zip(*(inputs_of(case, rank, pair.call) for rank in ranks), strict=True)
            expected = reference.low_latency_dispatch(xs, idxs, case.max_tokens, case.experts)
            pair.combined_x = pair.x
            verify_dispatch(case, pair.received(), expected[buffer.rank], f"call {pair.call}")


def found_in_dispatches(case: LowLatencyCase, seed: int, faults: tuple[str, ...]) -> str | None:
    """What goes wrong in two ranks' ``dispatch_in_twos`` under the seed's schedule, one stalled."""

    def main(group: Any) -> None:
        with open_buffer(group, case) as buffer:
            dispatch_in_twos(buffer, case, 3)

    try:
        simulate.run(
            main, 2, seed, faults=faults, stalls=[(seed % 2, 100 + 211 * seed, 4000)], timeout_s=60
        )
    except (AssertionError, deep_comm.DeepCommError, simulate.MachineError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def open_buffer(group: Any, case: LowLatencyCase, **options: Any) -> deep_comm.Buffer:
    """That the case's calls fit into."""
    return deep_comm.Buffer(
        group, 0, case.num_bytes, low_latency_mode=True, num_max_experts=case.experts,
        ranks_per_node=case.ranks_per_node, num_qps_per_rank=case.num_qps,
        **{"device": "cpu", **options},
    )  # fmt: skip


def on_case(
    body: Callable[[deep_comm.Buffer], Any], case: LowLatencyCase, **options: Any
) -> list[Any]:
    """As on_buffers, with Buffers that the case's calls fit into."""

    def main(group: local.ThreadGroup) -> Any:
        with open_buffer(group, case, **options) as buffer:
            return body(buffer)

    return local.run(main, case.num_ranks, timeout_s=250)


def run_case(group: Any, case: LowLatencyCase, **options: Any) -> list[Received]:
    with open_buffer(group, case, **options) as buffer:
        buffer.runtime.low_latency_hand_on_tokens = case.hand_on
        return run_pairs(buffer, case)


def verify(case: LowLatencyCase, results: Sequence[Sequence[Received]]) -> None:
    """``results``: by rank, then by call."""
    for call in range(case.calls):
        ranks = range(case.num_ranks)
        xs, idxs, weights = zip(*(inputs_of(case, rank, call) for rank in ranks), strict=True)
        expected = reference.low_latency_dispatch(
            xs, idxs, case.max_tokens, case.experts, topk_weights=weights, use_fp8=case.use_fp8,
            round_scale=case.round_scale, use_ue8m0=case.use_ue8m0, compact=case.compact,
            global_topk_idx=case.global_topk_idx,
            use_nvfp4=case.use_nvfp4,
            global_scales=[global_scale_of(case, rank, call) for rank in ranks],
        )  # fmt: skip
        for rank in ranks:
            verify_dispatch(case, results[rank][call], expected[rank], f"rank {rank} call {call}")
        rows = [expert_rows(case, rank, call) for rank in ranks]
        combined = reference.low_latency_combine(
            rows, expected, weights, compact=case.compact, one_rounding=case.one_rounding
        )
        for rank in ranks:
            what = f"rank {rank} call {call}: combined_x"
            assert_same_bits(results[rank][call].combined_x, combined[rank], what)


def verify_dispatch(
    case: LowLatencyCase, got: Received, expected: reference.LowLatencyDispatched, where: str
) -> None:
    assert got.recv_count.tolist() == expected.recv_count.tolist(), where
    assert got.layout_range.tolist() == expected.layout_range.tolist(), where
    if case.compact:
        num_rows = expected.num_recv_tokens
        assert got.num_recv_tokens == num_rows, where
        assert got.recv_topk_idx is not None
        assert_same_bits(got.recv_topk_idx, expected.recv_topk_idx, f"{where}: recv_topk_idx")
        if case.weights_ahead:
            assert got.recv_topk_weights is not None and expected.recv_topk_weights is not None
            weights = expected.recv_topk_weights
            assert_same_bits(got.recv_topk_weights, weights, f"{where}: recv_weights")
        groups = [(..., num_rows)]
    else:
        groups = [(expert, count) for expert, count in enumerate(expected.recv_count.tolist())]
    for group, count in groups:
        what = f"{where} expert {group}"
        assert got.src_info[group][:count].tolist() == expected.src_info[group][:count].tolist()
        rows, expected_rows = got.recv_x[group][:count], expected.recv_x[group][:count]
        assert_same_bits(
            rows.contiguous().view(torch.uint8), expected_rows.contiguous().view(torch.uint8), what
        )
        if expected.recv_scales is not None:
            assert got.recv_scales is not None
            # By column, and an extent of one keeps its odd stride: compared as flat copies.
            scales, expected_scales = (
                part[group][:count].clone(memory_format=torch.contiguous_format).reshape(-1, 1)
                for part in (got.recv_scales, expected.recv_scales)
            )
            assert_same_bits(scales, expected_scales, f"{what} scales")


def check_logfmt(case: LowLatencyCase, scale: float) -> None:
    """Rows whose elements span ``scale`` binary orders: sums of use_logfmt within the stated error,
    bit for bit the same in one phase and in two; ranks are threads."""

    def main(buffer: deep_comm.Buffer) -> tuple[Tensor, Tensor]:
        pair = Pair(buffer, case, 0)
        pair.dispatch()
        generator = torch.Generator().manual_seed(buffer.rank)
        shape = pair.handle.rows_shape
        exponents = torch.rand(*shape, generator=generator) * scale - scale / 2
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        rows = (torch.exp2(exponents) * signs).to(torch.bfloat16)
        rows[..., 3::16] = 0.0
        weights = None if case.weights_ahead or case.compact else pair.weights
        arguments = (rows, pair.idx, weights, pair.handle, True)
        combined = buffer.low_latency_combine(*arguments)[0]
        out = torch.empty_like(combined)
        hook = buffer.low_latency_combine(*arguments, return_recv_hook=True, out=out)[2]
        hook()
        assert torch.equal(out, combined)
        return rows, combined

    results = on_case(main, case)
    xs, idxs, weights = zip(
        *(inputs_of(case, rank, 0) for rank in range(case.num_ranks)), strict=True
    )
    dispatched = reference.low_latency_dispatch(
        xs, idxs, case.max_tokens, case.experts, topk_weights=weights, compact=case.compact
    )
    for rank, (_, combined) in enumerate(results):
        num_tokens = len(xs[rank])
        total = torch.zeros(num_tokens, case.hidden)
        bound = torch.zeros_like(total)
        for (rows, _), received in zip(results, dispatched, strict=True):
            recv_rows = received.recv_rows[rank, :num_tokens]
            recv_rows = recv_rows.reshape(num_tokens, 1 if case.compact else case.topk)
            taken = rows.view(-1, case.hidden)[recv_rows.clamp(min=0)].float()
            taken *= (recv_rows >= 0)[:, :, None]
            if not case.compact:
                taken *= weights[rank][:, :, None]
            partial = taken.sum(dim=1)
            total += partial
            bound += reference.logfmt_bound(partial)
        got = combined.float()
        bound = bound * 1.001 + total.abs() * 2.0**-8 + 1e-30
        assert bool(((got - total).abs() <= bound).all()), (rank, (got - total).abs().max())
        similarity = 2 * (got * total).sum() / (got.square().sum() + total.square().sum())
        assert num_tokens == 0 or 1 - float(similarity) < 1e-4
