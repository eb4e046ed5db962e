"""The measured operations of a Buffer: how each is called, what it must return, what it moves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_comm import Buffer, Config, reference
from deep_comm.bench import two_tier
from deep_comm.bench.expected import Expected, Rows
from deep_comm.bench.grouped import ALIGNMENT, cast
from deep_comm.bench.payload import same_bits
from deep_comm.bench.workload import Volume, Workload, combine_volume, dispatch_volume

LAYOUT = "layout"
DISPATCH = "dispatch"
DISPATCH_NO_WAIT = "dispatch no-wait"
DISPATCH_CACHED = "dispatch cached"
COMBINE = "combine"
COMBINE_IN_PLACE = "combine in place"
PAIR = "dispatch + combine"
PAIR_NO_WAIT = "dispatch + combine no-wait"
PAIR_CACHED = "dispatch cached + combine"
CAST = "dispatch cast"
CAST_CACHED = "dispatch cast cached"
EXPANDED = "dispatch expanded"
EXPANDED_CACHED = "dispatch expanded cached"
COMBINE_EXPANDED = "combine expanded"

MEANINGS = {
    LAYOUT: "get_dispatch_layout alone",
    DISPATCH: "layout, counts, host wait, rows and metadata",
    DISPATCH_NO_WAIT: "the same with num_worst_tokens: the host waits for nothing",
    DISPATCH_CACHED: "rows alone, by the handle of an earlier dispatch",
    COMBINE: "of an ordinary tensor",
    COMBINE_IN_PLACE: "of a tensor that lies where dispatch had put its rows",
    PAIR: "chained: what dispatch returned is combined",
    PAIR_NO_WAIT: "chained, with num_worst_tokens",
    PAIR_CACHED: "chained, by a handle",
    CAST: "of bf16 rows that travel as FP8 with scales, cast by the kernel",
    CAST_CACHED: "the same by a handle",
    EXPANDED: "rows grouped by local expert, a row for each selection, 128 rows aligned",
    EXPANDED_CACHED: "the same by a handle",
    COMBINE_EXPANDED: "of such rows, weighted and added where they lie before they travel",
}
OF_EXPANDED = (EXPANDED, EXPANDED_CACHED, COMBINE_EXPANDED)
NAMES = tuple(MEANINGS)


@dataclass(frozen=True)
class Operation:
    name: str
    call: Callable[[int], Any]  # of a slot
    verify: Callable[[Any, int], bool]  # is this the result of that slot?
    volume: Volume | None  # None: moves no rows
    host_waits: bool = False  # then no graph can hold it
    is_rival: bool = False  # somebody else's


def rows_equal(got: Any, want: Rows) -> bool:
    if isinstance(want, Tensor):
        return isinstance(got, Tensor) and same_bits(got, want)
    return isinstance(got, tuple) and all(map(same_bits, got, want))


def _first_rows(rows: Any, num_rows: int) -> Any:
    return tuple(part[:num_rows] for part in rows) if isinstance(rows, tuple) else rows[:num_rows]


class BufferOperations:
    """The operations of one Buffer with one Config. Collective to make: it dispatches."""

    def __init__(
        self,
        buffer: Buffer,
        expected: Expected,
        config: Config | None,
        ranks_per_node: int | None = None,
    ) -> None:
        self._buffer = buffer
        self._expected = expected
        self.config = config
        self._workload: Workload = expected.workload
        shape = self._workload
        self._num_worst = sum(shape.num_tokens_of(rank) for rank in range(shape.num_ranks))
        # Of logical nodes, between which sums are rounded once more; None: one tier.
        self._ranks_per_node = ranks_per_node
        received = self._dispatch(0)
        self.local_mode = two_tier.MODE
        if ranks_per_node is None:
            self.local_mode = mode_of(buffer, received[0])
        self.handle = received[4]
        self._padded_outputs: dict[int, Tensor] = {}

    @property
    def num_sms(self) -> int:
        """As many as the kernels used, whoever chose them."""
        return self.handle.num_channels * (1 if self._ranks_per_node is None else 2)

    # ---- calls ---------------------------------------------------------------------------------

    def _dispatch(self, slot: int, **options: Any) -> Any:
        expected = self._expected
        return self._buffer.dispatch(
            expected.x(slot),
            topk_idx=expected.topk_idx,
            topk_weights=expected.topk_weights,
            num_experts=self._workload.num_experts,
            config=self.config,
            **options,
        )

    def _dispatch_no_wait(self, slot: int) -> Any:
        return self._dispatch(slot, num_worst_tokens=self._num_worst)

    def dispatch_cached(self, slot: int) -> Any:
        return self._buffer.dispatch(self._expected.x(slot), handle=self.handle, config=self.config)

    def combine(self, slot: int) -> Any:
        return self._combine(self._expected.expert_output(slot), self.handle)

    def _combine(self, x: Tensor, handle: Any) -> Any:
        return self._buffer.combine(x, handle, config=self.config)

    # ---- results -------------------------------------------------------------------------------

    def _dispatch_is_right(self, result: Any, slot: int) -> bool:
        expected = self._expected
        rows, topk_idx, topk_weights, per_expert, handle, _ = result
        num_rows = expected.num_recv_rows
        right = rows_equal(_first_rows(rows, num_rows), expected.recv_x(slot))
        right &= same_bits(topk_idx[:num_rows], expected.recv_topk_idx)
        right &= same_bits(topk_weights[:num_rows], expected.recv_topk_weights)
        right &= same_bits(handle.recv_src_idx[:num_rows], expected.recv_src_idx)
        right &= bool((topk_idx[num_rows:] == -1).all() and (topk_weights[num_rows:] == 0).all())
        return right and per_expert in ([], expected.plan.num_recv_tokens_per_expert)

    def _layout_is_right(self, result: Any, _slot: int) -> bool:
        shape = self._workload
        topk_idx = self._expected.topk_idx.cpu()
        want = reference.get_dispatch_layout(topk_idx, shape.num_experts, shape.num_ranks)
        per_rank, _, per_expert, mask, _ = result
        return (
            same_bits(per_rank.cpu(), want.num_tokens_per_rank)
            and same_bits(per_expert.cpu(), want.num_tokens_per_expert)
            and same_bits(mask.cpu(), want.is_token_in_rank)
        )

    def _combined_is_right(self, result: Any, slot: int) -> bool:
        return same_bits(result[0], self._expected.combined(slot, self._ranks_per_node))

    def _pair_is_right(self, result: Any, slot: int) -> bool:
        expected = self._expected
        is_echo = self._workload.dtype == "bf16"
        wanted = expected.echoed if is_echo else expected.combined
        return same_bits(result[0], wanted(slot, self._ranks_per_node))

    # ---- operations ----------------------------------------------------------------------------

    def operations(self, mode: str, names: Sequence[str] = NAMES) -> Iterator[Operation]:
        """Those of ``names`` that there are. ``mode``: what was observed, all ranks together."""
        made = self._of_plain_rows(mode)
        if self._ranks_per_node is None and self._workload.dtype == "bf16":
            made = itertools.chain(made, self._casts())
        if self._ranks_per_node is None and not set(OF_EXPANDED).isdisjoint(names):
            made = itertools.chain(made, self._expanded())
        return (operation for operation in made if operation.name in names)

    def _of_plain_rows(self, mode: str) -> Iterator[Operation]:
        expected, shape = self._expected, self._workload
        uncached = dispatch_volume(shape, is_cached=False)
        cached = dispatch_volume(shape, is_cached=True)
        back = combine_volume(shape)  # of two tiers: as if they were one, so that rates compare

        def layout(_slot: int) -> Any:
            return self._buffer.get_dispatch_layout(expected.topk_idx, shape.num_experts)

        yield Operation(LAYOUT, layout, self._layout_is_right, None)
        yield Operation(
            DISPATCH, self._dispatch, self._dispatch_is_right, uncached, host_waits=True
        )
        yield Operation(DISPATCH_NO_WAIT, self._dispatch_no_wait, self._dispatch_is_right, uncached)
        yield Operation(
            DISPATCH_CACHED,
            self.dispatch_cached,
            lambda result, slot: rows_equal(result[0], expected.recv_x(slot)),
            cached,
        )
        yield Operation(
            COMBINE,
            self.combine,
            self._combined_is_right,
            back,
        )
        if mode == "direct" and shape.dtype == "bf16":
            yield self._combine_in_place(back)
        yield Operation(PAIR, self._pair, self._pair_is_right, uncached + back, host_waits=True)
        yield Operation(PAIR_NO_WAIT, self._pair_no_wait, self._pair_is_right, uncached + back)
        yield Operation(PAIR_CACHED, self._pair_cached, self._pair_is_right, cached + back)

    def _casts(self) -> Iterator[Operation]:
        """Rows that the kernel casts: they travel as those of dtype fp8 do."""
        expected = self._expected
        travels = dataclasses.replace(self._workload, dtype="fp8")

        def dispatch(slot: int) -> Any:
            return self._dispatch(slot, use_fp8=True)

        def cached(slot: int) -> Any:
            x = expected.x(slot)
            return self._buffer.dispatch(x, handle=self.handle, config=self.config, use_fp8=True)

        def is_right(result: Any, slot: int) -> bool:
            return rows_equal(result[0], cast(expected.recv_x(slot)))

        moved = dispatch_volume(travels, is_cached=False)
        yield Operation(CAST, dispatch, is_right, moved, host_waits=True)
        moved = dispatch_volume(travels, is_cached=True)
        yield Operation(CAST_CACHED, cached, is_right, moved)

    def _expanded(self) -> Iterator[Operation]:
        """A row crosses a link once, however many experts of a rank it is for."""
        grouped, shape = self._expected.grouped(), self._workload

        def dispatch(slot: int) -> Any:
            return self._dispatch(slot, expand=True, expert_alignment=ALIGNMENT)

        _, _, weights, _, handle, _ = dispatch(0)
        weights = weights.clone()  # lies in one block with the rows

        def again(slot: int) -> Any:
            return self._buffer.dispatch(self._expected.x(slot), handle=handle, config=self.config)

        def combine(slot: int) -> Any:
            return self._buffer.combine(
                grouped.outputs(slot), handle, weights, config=self.config, apply_weights=True
            )

        def rows_are_right(result: Any, slot: int) -> bool:
            return grouped.rows_are_right(result[0], slot)

        def sums_are_right(result: Any, slot: int) -> bool:
            return same_bits(result[0], grouped.combined(slot))

        moved = dispatch_volume(shape, is_cached=False)
        yield Operation(EXPANDED, dispatch, grouped.dispatch_is_right, moved, host_waits=True)
        moved = dispatch_volume(shape, is_cached=True)
        yield Operation(EXPANDED_CACHED, again, rows_are_right, moved)
        yield Operation(COMBINE_EXPANDED, combine, sums_are_right, combine_volume(shape))

    def _combine_in_place(self, moved: Volume) -> Operation:
        placed: dict[int, Tensor] = {}

        def call(slot: int) -> Any:
            if slot not in placed:
                placed[slot] = self.dispatch_cached(slot)[0]
                placed[slot].copy_(self._expected.expert_output(slot))
            return self._combine(placed[slot], self.handle)

        return Operation(COMBINE_IN_PLACE, call, self._combined_is_right, moved)

    def _pair(self, slot: int) -> Any:
        received = self._dispatch(slot)
        return self._combine(self._output_of(received[0], slot), received[4])

    def _pair_no_wait(self, slot: int) -> Any:
        received = self._dispatch_no_wait(slot)
        return self._combine(self._output_of(received[0], slot, self._num_worst), received[4])

    def _pair_cached(self, slot: int) -> Any:
        return self._combine(self._output_of(self.dispatch_cached(slot)[0], slot), self.handle)

    def _output_of(self, rows: Any, slot: int, num_rows: int | None = None) -> Tensor:
        """What experts hand to combine: the rows themselves, or for FP8 rows a bf16 tensor."""
        if self._workload.dtype == "bf16":
            assert isinstance(rows, Tensor)
            return rows
        output = self._expected.expert_output(slot)
        if num_rows is None:
            return output
        # Rows past the received ones have no source and are not read.
        return self._padded(output, slot, num_rows)

    def _padded(self, output: Tensor, slot: int, num_rows: int) -> Tensor:
        if slot not in self._padded_outputs:
            padded = torch.zeros(
                num_rows, output.shape[1], dtype=output.dtype, device=output.device
            )
            padded[: len(output)] = output
            self._padded_outputs[slot] = padded
        return self._padded_outputs[slot]


def mode_of(buffer: Buffer, rows: Rows) -> str:
    """Were rows of this dispatch written in place? Says where they lie, not what was asked for."""
    payload = rows if isinstance(rows, Tensor) else rows[0]
    if payload.numel() == 0:
        return "empty"
    heap = buffer.get_local_buffer_tensor(torch.uint8)
    offset = payload.data_ptr() - heap.data_ptr()
    return "direct" if 0 <= offset < heap.numel() else "ring"
