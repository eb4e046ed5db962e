"""The measured operations of a Buffer: how each is called, what it must return, what it moves."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deep_comm import Buffer, Config, reference
from deep_comm.bench.expected import ALIGNMENT, Expected, Rows
from deep_comm.bench.names import COMBINE_FORMS, HOST_WAITS, TWO_TIER
from deep_comm.bench.payload import same_bits
from deep_comm.bench.workload import Volume, mean_volume
from deep_comm.reference import low_latency as reference_low_latency
from deep_comm.settings.checks import SCALE_BLOCK
from deep_comm.settings.integers import round_up

Call = Callable[[int], Any]
"""By input."""


@dataclass(frozen=True)
class Operation:
    name: str
    call: Call
    is_right: Callable[[Any, int], bool]  # (result, input)
    volume: Volume | None  # None: moves no rows
    host_waits: bool = False  # for counts: no graph can hold it
    is_rival: bool = False  # of another library
    phases: str = ""
    kernels: tuple[str, ...] = ()  # that a low-latency call launches, in order
    rail_row_bytes: int | None = None  # of a row between nodes; None: other things are put, too


class NormalCalls:
    """The operations of one Buffer with one Config. Collective to make: it dispatches.

    Attributes:
        mode: what the first dispatch did on this rank: "direct", "ring", "empty"; or "two-tier".
    """

    def __init__(
        self, buffer: Buffer, expected: Expected, config: Config | None,
        ranks_per_node: int | None = None, has_rail_rings: bool = False,
    ) -> None:  # fmt: skip
        self._buffer, self._expected, self._config = buffer, expected, config
        self._ranks_per_node, self._has_rail_rings = ranks_per_node, has_rail_rings
        self._shape, self._inputs = expected.workload, range(expected.num_inputs)
        self._first = self._dispatch("dispatch")(0)
        self.handle = self._first[4]
        self.mode = TWO_TIER if ranks_per_node else mode_of(buffer, self._first[0])

    @property
    def num_sms(self) -> int:
        """As many as the kernels used, whoever chose them."""
        return self.handle.num_channels * (1 if self._ranks_per_node is None else 2)

    def first_calls_are_right(self) -> tuple[bool, bool]:
        """The dispatch that made the handle, and a combine with top-k weights."""
        dispatched, self._first = self._first, None  # its rows lie in the receive region
        result = self._buffer.combine(
            self._outputs()[0], self.handle, topk_weights=dispatched[2], config=self._config
        )
        right = self._sums_are_right(result, 0, "weights")
        return self._dispatch_is_right(dispatched, 0, "dispatch"), right

    # ---- calls ---------------------------------------------------------------------------------

    def _dispatch(self, name: str, handle: Any = None) -> Call:
        """The call that an operation's name means; ``handle``: of cached ones."""
        xs, dispatch, routing = self._expected.x, self._buffer.dispatch, self._expected.routings[0]
        options: dict[str, Any] = {"config": self._config, "handle": handle}
        if handle is None:
            options |= {"topk_idx": routing.topk_idx, "topk_weights": routing.topk_weights,
                        "num_experts": self._shape.num_experts}  # fmt: skip
            if "expanded" in name:
                options |= {"expand": True, "expert_alignment": ALIGNMENT}
            if "no-wait" in name:
                options["num_worst_tokens"] = self._shape.total_tokens
        if "cast" in name:
            options["use_fp8"] = True
        if "column" in name:
            options["column_major_scales"] = True
        return lambda idx: dispatch(xs[idx], **options)

    def _combine(
        self, xs: Sequence[Tensor], handle: Any, biases: Sequence[Tensor] = (), **options: Any
    ) -> Call:
        combine, config = self._buffer.combine, self._config
        if biases:
            return lambda idx: combine(xs[idx], handle, bias=biases[idx], config=config, **options)
        return lambda idx: combine(xs[idx], handle, config=config, **options)

    def _pair(self, name: str) -> Call:
        """bf16 rows are combined as they came; for others a tensor of what experts return."""
        dispatch = self._dispatch(name, self.handle if "cached" in name else None)
        num_rows = self._shape.total_tokens if "no-wait" in name else None
        xs = [] if self._shape.dtype == "bf16" else self._outputs(num_rows=num_rows)

        def pair(idx: int) -> Any:
            rows, _, _, _, handle, _ = dispatch(idx)
            handle = self.handle if handle is None else handle
            return self._buffer.combine(xs[idx] if xs else rows, handle, config=self._config)

        return pair

    def _rows(self, name: str = "") -> Rows:
        return self._expected.expert_rows(0) if "expanded" in name else self._expected.rows(0)

    def _outputs(self, name: str = "", num_rows: int | None = None) -> list[Tensor]:
        rows = self._rows(name)
        num_rows = len(rows.topk_idx) if num_rows is None else num_rows
        dtype = torch.float32 if "float32" in name else torch.bfloat16
        return [self._expected.outputs(rows, idx, num_rows, dtype) for idx in self._inputs]

    # ---- results -------------------------------------------------------------------------------

    def _dispatch_is_right(self, result: Any, input_idx: int, name: str) -> bool:
        x, topk_idx, topk_weights, per_expert, handle, _ = result
        rows, dtype = self._rows(name), "fp8" if "cast" in name else "bf16"
        right = self._expected.rows_are_right(x, rows, input_idx, dtype)
        if "column" in name:
            right = right and (x[1].shape[0] < 2 or x[1].stride(0) == 1)
        if handle is None:  # cached
            return right
        num_rows = len(rows.topk_idx)
        return (
            right
            and same_bits(topk_idx[:num_rows], rows.topk_idx.to(topk_idx.dtype))
            and same_bits(topk_weights[:num_rows], rows.topk_weights)
            and bool((topk_idx[num_rows:] == -1).all() and (topk_weights[num_rows:] == 0).all())
            and per_expert in ([], rows.counts)
            and ("expanded" in name or same_bits(handle.recv_src_idx[:num_rows], rows.token))
        )

    def _sums_are_right(self, result: Any, input_idx: int, kind: str) -> bool:
        if kind == "weights":
            routing = self._expected.routings[0]
            wanted = torch.where(routing.topk_idx >= 0, routing.topk_weights, 0.0)
            if not same_bits(result[1], wanted):
                return False
        sums = self._expected.combined(input_idx, kind, self._ranks_per_node)
        return same_bits(result[0], sums)

    def _layout_is_right(self, result: Any, _input_idx: int) -> bool:
        shape, topk_idx = self._shape, self._expected.routings[0].topk_idx.cpu()
        want = reference.get_dispatch_layout(topk_idx, shape.num_experts, shape.num_ranks)
        wanted = want.num_tokens_per_rank, want.num_tokens_per_expert, want.is_token_in_rank
        gots = result[0], result[2], result[3]
        return all(same_bits(got.cpu(), part) for got, part in zip(gots, wanted, strict=True))

    # ---- operations ----------------------------------------------------------------------------

    def operation(self, name: str, _phases: str = "") -> Operation | None:
        """None: there is no such operation of this workload in this mode."""
        is_bf16, shape = self._shape.dtype == "bf16", self._shape
        if (
            ("cast" in name and not (is_bf16 and shape.hidden % SCALE_BLOCK == 0))
            or (name == "combine in place" and not (is_bf16 and self.mode == "direct"))
            or ("expanded" in name and self._ranks_per_node is not None)
            or ("column" in name and is_bf16)
        ):
            return None
        if name == "layout":
            layout, topk_idx = self._buffer.get_dispatch_layout, self._expected.routings[0].topk_idx
            call: Call = lambda _idx: layout(topk_idx, shape.num_experts)
            return Operation(name, call, self._layout_is_right, None)
        kind = "experts" if "expanded" in name else "echo" if "+" in name and is_bf16 else "rank"
        kind = name.removeprefix("combine ") if name in COMBINE_FORMS else kind
        is_right: Callable[[Any, int], bool] = partial(self._sums_are_right, kind=kind)
        handle, options = self.handle, {}
        if "expanded" in name:
            _, _, weights, _, handle, _ = self._dispatch("dispatch expanded")(0)
            # The weights lie in one block with the rows.
            options = {"topk_weights": weights.clone(), "apply_weights": True}
        if "+" in name:
            call = self._pair(name)
        elif name.startswith("dispatch"):
            call = self._dispatch(name, handle if "cached" in name else None)
            is_right = partial(self._dispatch_is_right, name=name)
        else:
            xs = self._outputs(name)
            if name == "combine in place":
                dispatch = self._dispatch("dispatch cached", handle)
                xs = [dispatch(idx)[0].copy_(x) for idx, x in enumerate(xs)]
            if kind == "weights":
                options["topk_weights"] = self._expected.rows(0).topk_weights
            if kind == "biased":
                options["biases"] = list(map(self._expected.biases, self._inputs))
            call = self._combine(xs, handle, **options)
        volume, rail_row_bytes = self._moved(name)
        return Operation(
            name, call, is_right, volume, name in HOST_WAITS, rail_row_bytes=rail_row_bytes
        )

    def _moved(self, name: str) -> tuple[Volume, int | None]:
        """Bytes of a call, and of a row of it between nodes if nothing else is put there.

        Between nodes a row and its metadata lie in lines of 128 bytes. Through rings: row, scales,
        source token and a mask of ranks. Direct: scales, source token and a place per rank of the
        node, then the row. Of combine: the sum.
        """
        shape, is_cached = self._shape, "cached" in name
        back_bytes = shape.combine_row_bytes * (2 if "float32" in name else 1)
        if name == "combine weights":
            back_bytes += 4 * shape.num_topk
        back = mean_volume(shape, back_bytes)
        if name.startswith("combine"):
            return back, round_up(back_bytes)
        # New routing sends source index, expert indices (int64) and weights beside each row.
        beside_bytes = 4 if is_cached else 4 + shape.num_topk * (8 + 4)
        travels = dataclasses.replace(shape, dtype="fp8") if "cast" in name else shape
        there = mean_volume(shape, travels.row_bytes, beside_bytes)
        if "+" in name:
            return there + back, None
        if not is_cached or self._ranks_per_node is None:
            return there, None
        scale_bytes = 4 * travels.num_scales
        row_bytes = travels.row_bytes - scale_bytes
        if self._has_rail_rings:
            return there, round_up(row_bytes + round_up(scale_bytes + 8, 16))
        return there, round_up(scale_bytes + 4 + 4 * self._ranks_per_node) + round_up(row_bytes)


def mode_of(buffer: Buffer, rows: Any) -> str:
    """Says where the rows of a dispatch lie, not what was asked for."""
    payload = rows[0] if isinstance(rows, tuple) else rows
    if payload.numel() == 0:
        return "empty"
    heap = buffer.get_local_buffer_tensor(torch.uint8)
    offset = payload.data_ptr() - heap.data_ptr()
    return "direct" if 0 <= offset < heap.numel() else "ring"


class LowLatencyCalls:
    """The low-latency operations of one Buffer for one workload in one layout.

    Collective to make: it dispatches.
    """

    def __init__(self, buffer: Buffer, expected: Expected, layout: str, max_tokens: int) -> None:
        self._buffer, self._expected, self._shape = buffer, expected, expected.workload
        self._is_compact, self._weights_ahead = layout == "compact", layout != "packed-late"
        self._max_tokens, self._inputs = max_tokens, range(expected.num_inputs)
        self._num_rows = self._shape.num_ranks * max_tokens  # of an expert; compact: in all
        self._rows = [self._rows_of(idx) for idx in self._inputs]
        self._handles = [self._dispatch(idx, "fused")()[2] for idx in self._inputs]

    @property
    def num_sms(self) -> int:
        """Blocks of a kernel of these calls, of one SM each."""
        shape = self._shape
        sizes = self._max_tokens, shape.hidden, shape.num_topk, shape.num_experts
        return self._buffer.low_latency_num_blocks(*sizes)

    def _rows_of(self, input_idx: int) -> Rows:
        if self._is_compact:
            return self._expected.rows(input_idx)
        rows = self._expected.expert_rows(input_idx, 1)
        counts = torch.tensor(rows.counts, device=rows.places.device)
        local = rows.topk_idx  # every row belongs to a token
        first = (counts.cumsum(0) - counts)[local]
        return dataclasses.replace(rows, places=local * self._num_rows + rows.places - first)

    @functools.cached_property
    def _outputs(self) -> list[Tensor]:
        """What this rank gives to combine: bf16, shaped like recv_x."""
        num_experts, make = len(self._expected.experts), self._expected.outputs
        sizes = (self._num_rows,) if self._is_compact else (num_experts, self._num_rows)
        xs = [make(self._rows[idx], idx, math.prod(sizes)) for idx in self._inputs]
        return [x.view(*sizes, x.shape[1]) for x in xs]

    # What a call is given is looked up beforehand: its host time is to be the call's alone.

    def _dispatch(self, input_idx: int, phases: str) -> Callable[[], Any]:
        routing, shape = self._expected.routings[input_idx], self._shape
        return partial(
            self._buffer.low_latency_dispatch, self._expected.x[input_idx], routing.topk_idx,
            self._max_tokens, shape.num_experts, use_fp8=shape.dtype == "fp8",
            use_nvfp4=shape.dtype == "nvfp4", return_recv_hook=phases == "hooked",
            topk_weights=routing.topk_weights if self._weights_ahead else None,
            compact=self._is_compact,
        )  # fmt: skip

    def _combine(self, input_idx: int, phases: str) -> Callable[..., Any]:
        routing = self._expected.routings[input_idx]
        return partial(
            self._buffer.low_latency_combine, self._outputs[input_idx], routing.topk_idx,
            routing.topk_weights, use_logfmt=self._shape.combine_format == "logfmt",
            return_recv_hook=phases == "hooked",
        )  # fmt: skip

    def operation(self, name: str, phases: str) -> Operation:
        dispatches = [self._dispatch(idx, phases) for idx in self._inputs]
        combines = [self._combine(idx, phases) for idx in self._inputs if name != "dispatch"]

        def call(idx: int) -> Any:
            handle = self._handles[idx]
            if name != "combine":
                result = dispatches[idx]()
                if result[4] is not None:
                    result[4]()
                if name == "dispatch":
                    return result
                handle = result[2]
            combined = combines[idx](handle=handle)
            if combined[2] is not None:
                combined[2]()
            return combined

        shape, num_inputs = self._shape, len(self._inputs)
        there = mean_volume(shape, shape.row_bytes, num_routings=num_inputs)
        back = mean_volume(shape, shape.combine_row_bytes, num_routings=num_inputs)
        moved = {"dispatch": there, "combine": back}.get(name, there + back)
        is_right = self._dispatch_is_right if name == "dispatch" else self._sums_are_right
        steps = ("",) if phases == "fused" else (" send", " receive")
        kernels = ("dispatch", "combine") if name == "pair" else (name,)
        launches = tuple(kernel + step for kernel in kernels for step in steps)
        return Operation(name, call, is_right, moved, phases=phases, kernels=launches)

    def _dispatch_is_right(self, result: Any, input_idx: int) -> bool:
        got, recv_count, handle = result[:3]
        rows, num_rows = self._rows[input_idx], len(self._rows[input_idx].origin)
        if self._shape.dtype == "nvfp4":
            tiles = got[1].view(torch.uint8)
            got = got[0], reference_low_latency.rows_of_scale_tiles(tiles, self._num_rows)
        right = self._expected.rows_are_right(got, rows, input_idx)
        right &= recv_count.tolist() == rows.counts
        right &= same_bits(handle.src_info.view(-1)[rows.places], rows.token)
        if self._is_compact:
            right &= int(handle.num_recv_tokens) == num_rows
            topk_idx = rows.topk_idx.to(torch.int32)
            right &= same_bits(handle.recv_topk_idx[:num_rows], topk_idx)
            right &= same_bits(handle.recv_topk_weights[:num_rows], rows.topk_weights)
        return right

    def _sums_are_right(self, result: Any, input_idx: int) -> bool:
        kind = "rank" if self._is_compact else "experts"
        if self._shape.combine_format == "bf16":
            return same_bits(result[0], self._expected.combined(input_idx, kind))
        total, bound = self._expected.logfmt_bounds(input_idx, kind)
        got: Tensor = result[0]
        return got.shape == total.shape and bool(((got.float() - total).abs() <= bound).all())


Calls = NormalCalls | LowLatencyCalls
