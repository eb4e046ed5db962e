"""One Buffer's calls with other numbers of tokens, in every form: the first ones and later ones,
which know what came before, bring what the reference says; what is refused launches nothing and
takes nothing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from small_calls import CASTS, E, H, K, Marked, R, T, form_of, inputs, layout_of, on_normal, to_rank
from torch import Tensor

import deep_comm
from deep_comm import reference, simulate
from deep_comm.errors import ArgumentError, BufferDestroyed
from deep_comm.reference.low_latency import pack_ue8m0, quantise

FORMS = ["bf16", "fp8", "without-weights", "int32", "aligned", *CASTS]
CONFIGS = [None, deep_comm.Config(2, 4, 16)]
BOUND = 90


def require_same(got: Tensor, want: Tensor, what: str) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    if got.dtype == torch.float8_e4m3fn:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    assert torch.equal(got, want), what


class Expected:
    """What dispatches of ``form`` bring to a rank, and what combines of it return."""

    def __init__(self, form: str, rank: int, tokens: tuple[int, ...], num_channels: int) -> None:
        given = [form_of(form, r, tokens[r]) for r in range(R)]
        payloads, options = [x for x, _ in given], [options for _, options in given]
        if form in CASTS:
            payloads = [self._cast(x, **CASTS[form]) for x in payloads]
        self.alignment = 4 if form == "aligned" else 1
        self._weights = [each["topk_weights"] for each in options if "topk_weights" in each] or None
        self._all = reference.dispatch(
            payloads, [each["topk_idx"] for each in options], E, self._weights,
            num_channels=num_channels, expert_alignment=self.alignment,
        )  # fmt: skip
        self.rank, self.tokens = rank, tokens
        self.plain = self._all[rank]
        self.max_num_tokens = max(tokens)

    @staticmethod
    def _cast(x: Tensor, use_fp8: bool, round_scale: bool = False, use_ue8m0: bool = False) -> Any:
        rows, scales = quantise(x, round_scale)
        return rows, pack_ue8m0(scales) if use_ue8m0 else scales

    def expanded(self, rank: int, num_rows: int) -> reference.Expanded:
        return reference.expand(self._all[rank], E // R, self.alignment, num_rows)

    def sums(self, num_rows: int, weighs: bool) -> tuple[Tensor, Tensor | None]:
        """Of rows as they came, each rank's as ``rows_of`` makes them. num_rows: of expanded
        outputs; -1: they are not."""
        weights = None if self._weights is None else [one.recv_topk_weights for one in self._all]
        if num_rows < 0:
            rows = [rows_of(one.recv_x) for one in self._all]
            return reference.combine(rows, self._all, weights)[self.rank]
        expanded = [self.expanded(rank, num_rows) for rank in range(R)]
        reduced = [
            reference.reduce_experts(
                rows_of(one.recv_x), one, one.recv_topk_weights if weighs else None
            )
            for one in expanded
        ]
        return reference.combine(reduced, self._all, None if weighs else weights)[self.rank]


def rows_of(recv: Tensor) -> Tensor:
    return recv.float().nan_to_num(1.0).clamp(-100, 100).bfloat16()


def parts_of(payload: Any) -> list[Tensor]:
    return list(payload) if isinstance(payload, tuple) else [payload]


def require_dispatched(
    received: tuple[Any, ...], want: Expected, form: str, bound: int, has_layout: bool
) -> None:
    rows, recv_idx, recv_weights, counts, handle, event = received
    plain, num = want.plain, want.plain.num_recv_tokens
    assert event.event is None
    num_rows = bound or num
    wanted = [plain.recv_x] if plain.recv_x_scales is None else [plain.recv_x, plain.recv_x_scales]
    for got, part in zip(parts_of(rows), wanted, strict=True):
        assert got.shape[0] == num_rows and got.is_contiguous()
        require_same(got[:num], part, "rows")
    require_same(recv_idx[:num], plain.recv_topk_idx, "indices")
    assert (recv_idx[num:] == -1).all()
    assert (
        (recv_weights is None) == (plain.recv_topk_weights is None) == (form == "without-weights")
    )
    if recv_weights is not None:
        require_same(recv_weights[:num], plain.recv_topk_weights, "weights")
        assert not recv_weights[num:].any()
    assert counts == ([] if bound else plain.num_recv_tokens_per_expert)
    assert handle.num_recv_tokens == (None if bound else num)
    assert handle.max_num_tokens == (None if bound else want.max_num_tokens)
    assert (handle.rank, handle.num_experts, handle.num_topk) == (want.rank, E, K)
    assert (handle.num_tokens, handle.num_recv_rows) == (want.tokens[want.rank], num_rows)
    assert handle.num_recv_tokens_tensor.tolist() == [num]
    assert handle.num_recv_tokens_per_expert.tolist() == plain.num_recv_tokens_per_expert
    for name in (
        "rank_prefix_matrix", "channel_prefix_matrix", "recv_channel_prefix_matrix",
        "is_token_in_rank",
    ):  # fmt: skip
        require_same(getattr(handle, name), getattr(plain, name), name)
    require_same(handle.recv_src_idx[:num], plain.recv_src_idx[:num], "recv_src_idx")
    sent = plain.send_head >= 0
    require_same(handle.send_head[sent], plain.send_head[sent], "send_head")
    assert (handle.send_head[~sent] < 0).all()


@pytest.mark.parametrize("num_direct_bytes", [0, 4 << 20], ids=["rings", "region"])
@pytest.mark.parametrize("bound", [0, BOUND])
@pytest.mark.parametrize("with_layout", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=["default", "config"])
@pytest.mark.parametrize("form", FORMS)
def test_calls_of_other_numbers_of_tokens(
    form: str, config: Any, with_layout: bool, bound: int, num_direct_bytes: int
) -> None:
    """New routing, the same along its handle, and combine."""

    def body(buffer: Any, rank: int) -> None:
        cast = CASTS.get(form, {})
        for tokens in ((T, 0), (T, 0), (3, T), (0, 0), (T, T), (2 * T, 1)):
            given, options = form_of(form, rank, tokens[rank])
            if with_layout:
                options.update(layout_of(buffer, options["topk_idx"]))
            received = buffer.dispatch(given, config=config, num_worst_tokens=bound, **options)
            rows, _, recv_weights, _, handle, _ = received
            want = Expected(form, rank, tokens, handle.num_channels)
            require_dispatched(received, want, form, bound, with_layout)
            num = want.plain.num_recv_tokens
            again, *nothing, event = buffer.dispatch(given, handle=handle, config=config, **cast)
            assert nothing == [None] * 4 and event.event is None
            for got, part in zip(parts_of(again), parts_of(rows), strict=True):
                require_same(got[:num], part[:num], "rows of a cached dispatch")
            back = rows_of(parts_of(rows)[0])
            sums, weight_sums, _ = buffer.combine(back, handle, recv_weights, config=config)
            wanted, weights_wanted = want.sums(-1, False)
            require_same(sums, wanted, "sums")
            assert (weight_sums is None) == (weights_wanted is None)
            if weight_sums is not None:
                require_same(weight_sums, weights_wanted, "sums of weights")

    on_normal(body, num_direct_bytes=num_direct_bytes)


@pytest.mark.parametrize("num_direct_bytes", [0, 4 << 20], ids=["rings", "region"])
@pytest.mark.parametrize("zero_padding", [False, True])
@pytest.mark.parametrize("bound", [0, BOUND])
@pytest.mark.parametrize("config", CONFIGS, ids=["default", "config"])
@pytest.mark.parametrize("form", [*FORMS, "layout"])
def test_expanded_calls_of_other_numbers_of_tokens(
    form: str, config: Any, bound: int, zero_padding: bool, num_direct_bytes: int
) -> None:
    def body(buffer: Any, rank: int) -> None:
        cast = CASTS.get(form, {})
        for tokens in ((T, 1), (T, 1), (3, T), (T, T), (2 * T, 1)):
            given, options = form_of(form, rank, tokens[rank])
            if form == "layout":
                options.update(layout_of(buffer, options["topk_idx"]))
            options.update(num_worst_tokens=bound, zero_padding=zero_padding, expand=True)
            received = buffer.dispatch(given, config=config, **options)
            rows, recv_idx, recv_weights, counts, handle, _ = received
            want = Expected(form, rank, tokens, handle.num_channels)
            one, num = want.expanded(rank, bound), want.plain.num_recv_tokens
            expansion, num_rows = handle.expansion, one.recv_x.shape[0]
            taken = one.recv_topk_idx >= 0
            assert counts == ([] if bound else want.plain.num_recv_tokens_per_expert)
            assert (expansion.num_rows, expansion.expert_alignment) == (num_rows, want.alignment)
            assert handle.num_output_rows == num_rows
            assert handle.num_recv_tokens == (None if bound else num)
            for name in ("expert_offsets", "expert_counts"):
                require_same(getattr(expansion, name), getattr(one, name), name)
            require_same(expansion.recv_rows[:num], one.recv_rows[:num], "recv_rows")
            assert (expansion.recv_rows[num:] == -1).all()
            require_same(recv_idx, one.recv_topk_idx.to(recv_idx.dtype), "indices")
            assert (recv_weights is None) == (form == "without-weights")
            if recv_weights is not None:
                require_same(recv_weights, one.recv_topk_weights, "weights")
            wanted = [one.recv_x] if one.recv_x_scales is None else [one.recv_x, one.recv_x_scales]
            again = buffer.dispatch(given, handle=handle, config=config, zero_padding=True, **cast)
            for got, cached, part in zip(parts_of(rows), parts_of(again[0]), wanted, strict=True):
                require_same(got[taken], part[taken], "rows")
                require_same(cached, part, "rows of a cached dispatch")
                if zero_padding:
                    require_same(got, part, "rows and padding")
            back = rows_of(parts_of(rows)[0])
            for weighs in (False, True)[: 1 if recv_weights is None else 2]:
                sums, weight_sums, _ = buffer.combine(
                    back, handle, recv_weights, config=config, apply_weights=weighs
                )
                sums_wanted, weights_wanted = want.sums(bound, weighs)
                require_same(sums, sums_wanted, "sums")
                assert (weight_sums is None) == (weights_wanted is None)
                if weight_sums is not None:
                    require_same(weight_sums, weights_wanted, "sums of weights")

    on_normal(body, num_direct_bytes=num_direct_bytes)


@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64])
def test_layouts(idx_dtype: torch.dtype) -> None:
    def body(buffer: Any, rank: int) -> None:
        for num_tokens, num_experts in ((T, E), (0, E), (T, 2 * E), (1, E)):
            idx = inputs(rank, num_tokens, idx_dtype)[1]
            per_rank, per_node, per_expert, mask, event = buffer.get_dispatch_layout(
                idx, num_experts
            )
            want = reference.get_dispatch_layout(idx, num_experts, R)
            assert per_node is None and event.event is None
            require_same(per_rank, want.num_tokens_per_rank, "per rank")
            require_same(per_expert, want.num_tokens_per_expert, "per expert")
            require_same(mask, want.is_token_in_rank, "mask")
        idx = inputs(rank, T, idx_dtype)[1]
        idx[1, 0] = E
        with pytest.raises(deep_comm.ExpertIndexError):
            buffer.get_dispatch_layout(idx, E)
        before = sys.getrefcount(idx)
        for _ in range(20):
            buffer.get_dispatch_layout(idx, E + 1)
        assert sys.getrefcount(idx) == before

    on_normal(body)


def test_what_is_refused_launches_nothing() -> None:
    """And takes no memory of the region."""

    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        layout = layout_of(buffer, idx)
        per_expert, mask = layout["num_tokens_per_expert"], layout["is_token_in_rank"]
        most = buffer._context.num_max_experts

        def dispatch(**given: Any) -> Any:
            given = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": E, **given}
            return buffer.dispatch(**given)

        plain, grouped = dispatch(), dispatch(expand=True)
        handle, expanded = plain[4], grouped[4]
        rows, row_weights = plain[0], grouped[2]
        shifted = torch.zeros(T * H + 1, dtype=torch.bfloat16)[1:].view(T, H)
        launched, free = buffer.runtime.num_launches, buffer._context.region.num_free_bytes
        wrong_x = (
            None, x[:-1], x.t(), shifted, x.to("meta"), (x, weights[:-1]), (x,), (), [x, x, x],
            torch.zeros(T, 2 * H, dtype=torch.bfloat16)[:, :H], torch.zeros(T, 3).bfloat16(), 7,
        )  # fmt: skip
        wrong_idx = (
            idx[:-1], idx.float(), idx.t(), idx.repeat(1, 2)[:, ::2], idx[:, :0], idx.tolist(),
            idx.repeat(1, 64), idx.to("meta"), None,
        )  # fmt: skip
        wrong_numbers = (None, 0, -1, most + 1, 1 << 70, float(E), torch.tensor(E), "6")
        refused = [
            *(dict(x=wrong) for wrong in wrong_x),
            *(dict(topk_idx=wrong) for wrong in wrong_idx),
            *(dict(num_experts=wrong) for wrong in wrong_numbers),
            dict(topk_weights=weights.double()), dict(topk_weights=weights[:, :-1]),
            dict(num_worst_tokens=-1), dict(num_worst_tokens=1.0), dict(num_worst_tokens=None),
            dict(expert_alignment=0), dict(expert_alignment=1 << 17), dict(zero_padding=True),
            dict(expand=True, zero_tail=True), dict(expand=True, topk_idx=None, topk_weights=None),
            dict(layout, num_experts=E + 1), dict(layout, is_token_in_rank=None),
            dict(layout, is_token_in_rank=mask.int()), dict(layout, num_tokens_per_rank=None),
            dict(layout, num_tokens_per_expert=per_expert.long()), dict(round_scale=True),
            dict(use_fp8=True, use_ue8m0=True), dict(column_major_scales=True), dict(config=7),
            dict(config=deep_comm.Config(1, 1 << 20, 1 << 21)), dict(allocate_on_comm_stream=True),
        ]  # fmt: skip
        for wrong in refused:
            with pytest.raises(deep_comm.DeepCommError):
                dispatch(**wrong)
            assert buffer.runtime.num_launches == launched, wrong
        for call in (
            lambda: buffer.dispatch(x, handle=handle, topk_idx=idx),
            lambda: buffer.dispatch(x, handle=handle, topk_weights=weights),
            lambda: buffer.dispatch(x, handle=handle, expand=True),
            lambda: buffer.dispatch(x, handle=handle, zero_padding=True),
            lambda: buffer.dispatch(x[:-1], handle=expanded),
            lambda: buffer.dispatch(x[:-1], handle=tuple(handle)),
            lambda: buffer.combine(rows[:-1], handle),
            lambda: buffer.combine(rows.to(torch.float64), handle),
            lambda: buffer.combine(rows.t(), handle),
            lambda: buffer.combine((rows,), handle),
            lambda: buffer.combine(rows, None),
            lambda: buffer.combine(rows, handle, weights.double()),
            lambda: buffer.combine(rows, handle, bias=x.float()),
            lambda: buffer.combine(rows, handle, bias=(x,)),
            lambda: buffer.combine(rows, handle, bias=()),
            lambda: buffer.combine(rows, handle, bias=(None, x[:-1])),
            lambda: buffer.combine(rows, handle, config=deep_comm.Config(9, 4, 16)),
            lambda: buffer.combine(grouped[0], expanded, weights),
            lambda: buffer.combine(grouped[0], expanded, row_weights[:-1], apply_weights=True),
            lambda: buffer.combine(grouped[0], expanded, apply_weights=True),
            lambda: buffer.combine(rows, handle, weights, apply_weights=True),
            lambda: buffer.get_dispatch_layout(idx.float(), E),
            lambda: buffer.get_dispatch_layout(idx.t(), E),
            lambda: buffer.get_dispatch_layout(None, E),
            lambda: buffer.get_dispatch_layout(idx, most + 1),
            lambda: buffer.get_dispatch_layout(idx, "6"),
        ):
            with pytest.raises(deep_comm.DeepCommError):
                call()
        assert buffer.runtime.num_launches == launched
        assert buffer._context.region.num_free_bytes == free
        # Tensors of a subclass are tensors.
        marked = x.as_subclass(Marked)
        assert torch.equal(buffer.dispatch(marked, handle=handle)[0], rows)
        buffer.destroy()
        for call in (
            dispatch,
            lambda: buffer.dispatch(x, handle=handle),
            lambda: buffer.combine(rows, handle),
            lambda: buffer.get_dispatch_layout(idx, E),
        ):
            with pytest.raises(BufferDestroyed):
                call()

    on_normal(body, 1, num_direct_bytes=4 << 20)


@pytest.mark.parametrize("options", [{}, dict(num_worst_tokens=3 * T), dict(expand=True)])
def test_after_an_error_of_a_kernel_the_buffer_goes_on(options: dict[str, Any]) -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        given = dict(topk_weights=weights, num_experts=E, **options)
        bad = idx.clone()
        bad[1, 1] = E
        want = buffer.dispatch(x, topk_idx=idx, **given)[0].clone()
        free = buffer._context.region.num_free_bytes
        for _ in range(2):
            with pytest.raises(deep_comm.ExpertIndexError):
                buffer.dispatch(x, topk_idx=bad if rank == 0 else idx, **given)
            again = buffer.dispatch(x, topk_idx=idx, **given)
            num = int(again[4].num_recv_tokens_tensor)
            assert torch.equal(again[0][:num], want[:num]) or "expand" in options
            del again
        assert buffer._context.region.num_free_bytes == free

    on_normal(body, num_direct_bytes=1 << 20)


@pytest.mark.parametrize("expand", [False, True])
def test_more_rows_than_the_bound_are_an_error_where_they_come(expand: bool) -> None:
    def body(buffer: Any, rank: int) -> None:
        arguments = to_rank(1, 12)
        buffer.dispatch(**arguments, expand=expand, num_worst_tokens=40)
        for _ in range(2):
            if rank == 1:
                with pytest.raises(deep_comm.CapacityError):
                    buffer.dispatch(**arguments, expand=expand, num_worst_tokens=20)
            else:
                buffer.dispatch(**arguments, expand=expand, num_worst_tokens=20)
        received = buffer.dispatch(**arguments, expand=expand, num_worst_tokens=24)
        assert int(received[4].num_recv_tokens_tensor) == (24 if rank == 1 else 0)

    on_normal(body, num_direct_bytes=1 << 20)


def wrong_guess(
    buffer: Any, rank: int, most: int, launches_of: tuple[int, int], **options: Any
) -> None:
    """Rank 1 has one token and gets ``most`` more: nobody could tell it before.

    ``launches_of``: a dispatch whose rows could not leave at once, and one as it should be: notify,
    what numbers rows, a dispatch that left at once, the one that moved, what places rows.
    """
    free = buffer._context.region.num_free_bytes
    cast = {name: value for name, value in options.items() if name != "expand"}
    buffer.dispatch(**to_rank(1, 1), **options)
    for launches in launches_of:
        before = buffer.runtime.num_launches
        arguments = to_rank(1, most if rank == 0 else 1)
        received = buffer.dispatch(**arguments, **options)
        assert buffer.runtime.num_launches - before == launches
        got = parts_of(received[0])[0]
        assert len(got) == (most + 1 if rank == 1 else 0)
        if rank == 1:
            x = to_rank(1, most)["x"]
            rows = quantise(x, cast.get("round_scale", False))[0] if cast else x
            require_same(got[:most], rows, "rows")
        assert received[3] == [most + 1 if rank == 1 else 0, 0, 0]
        assert received[4].num_recv_tokens == len(got)
        assert received[4].max_num_tokens == most
        again = parts_of(buffer.dispatch(arguments["x"], handle=received[4], **cast)[0])[0]
        require_same(again, got, "rows of a cached dispatch")
        if not cast:
            assert torch.equal(buffer.combine(again, received[4])[0], arguments["x"])
        del received, got, again
    assert buffer._context.region.num_free_bytes == free


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({}, (3, 2)),
        (dict(expand=True), (5, 4)),
        *((cast, (3, 2)) for cast in CASTS.values()),
        (dict(use_fp8=True, expand=True), (5, 4)),
    ],
    ids=["plain", "expanded", *CASTS, "cast-expanded"],
)
def test_rows_that_could_not_leave_at_once_are_moved(
    options: dict[str, Any], launches: tuple[int, int]
) -> None:
    on_normal(
        lambda buffer, rank: wrong_guess(buffer, rank, 40, launches, **options),
        num_direct_bytes=4 << 20,
    )


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_schedules_of_guesses_that_are_wrong(seed: int, expand: bool) -> None:
    def main(group: Any) -> None:
        with deep_comm.Buffer(
            group, 1 << 19, num_direct_bytes=1 << 18, device="cpu", timeout_s=20
        ) as buffer:
            launches = (5, 4) if expand else (3, 2)
            wrong_guess(buffer, group.rank(), 9, launches, expand=expand)

    simulate.run(main, R, seed, timeout_s=60)


@pytest.mark.parametrize("cast", [{}, *CASTS.values()], ids=["plain", *CASTS])
def test_without_room_the_rows_take_the_rings(cast: dict[str, bool]) -> None:
    """One rank's region is full, the others' are not."""

    def body(buffer: Any, rank: int) -> None:
        arguments = {**to_rank(1, 12), **cast}
        want = [part.clone() for part in parts_of(buffer.dispatch(**arguments)[0])]
        kept = None
        if rank == 1:
            region = buffer._context.region
            kept = region.allocate(region.num_free_bytes - 4096)
        for _ in range(2):
            received = buffer.dispatch(**arguments)
            handle = received[4]
            again = buffer.dispatch(arguments["x"], handle=handle, **cast)[0]
            for got, cached, part in zip(parts_of(received[0]), parts_of(again), want, strict=True):
                require_same(got, part, "rows")
                require_same(cached, part, "rows of a cached dispatch")
            assert handle.num_recv_tokens_tensor.tolist() == [len(want[0])]
        del kept
        for got, part in zip(parts_of(buffer.dispatch(**arguments)[0]), want, strict=True):
            require_same(got, part, "rows")

    on_normal(body, num_direct_bytes=1 << 18)


def test_memory_goes_back_and_a_full_region_is_no_error() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)[4]
        rows = buffer.dispatch(x, handle=handle)[0]
        sums = buffer.combine(rows, handle)[0]
        region, heap = buffer._context.region, buffer._context.heap
        free = region.num_free_bytes
        before = sys.getrefcount(x), sys.getrefcount(rows)
        for _ in range(50):
            again = buffer.dispatch(x, handle=handle)[0]
            assert torch.equal(buffer.combine(rows, handle)[0], sums)
            assert region.num_free_bytes < free
            del again
        assert (sys.getrefcount(x), sys.getrefcount(rows)) == before
        assert region.num_free_bytes == free

        def is_in_region(tensor: Tensor) -> bool:
            return heap.base <= tensor.data_ptr() < heap.base + heap.num_bytes

        for call in (
            lambda: buffer.dispatch(x, handle=handle)[0],
            lambda: buffer.dispatch(
                x, topk_idx=idx, topk_weights=weights, num_experts=E, num_worst_tokens=T
            )[0],
        ):
            held = [call()]  # until the region is full: then through the rings
            while is_in_region(held[-1]):
                held.append(call())
            assert len(held) > 3
            assert all(torch.equal(again, rows) for again in held)
            del held
        assert region.num_free_bytes == free

    on_normal(body, 1, num_direct_bytes=1 << 20)


def test_a_refused_argument_is_named() -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        for name, given in (
            ("topk_idx", dict(topk_idx=idx.float())),
            ("topk_weights", dict(topk_weights=weights.half())),
            ("num_experts", dict(num_experts="6")),
            ("x", dict(x=())),
            ("config", dict(config=7)),
        ):
            arguments = dict(x=x, topk_idx=idx, topk_weights=weights, num_experts=E)
            with pytest.raises(ArgumentError) as caught:
                buffer.dispatch(**{**arguments, **given})
            assert caught.value.argument == name

    on_normal(body, 1)
