"""Low-latency mode: every scenario checked, then timed, on all ranks together."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deep_comm import Buffer, env
from deep_comm.bench import expected as normal_expected
from deep_comm.bench import host_time, link, rivals, two_tier
from deep_comm.bench.low_latency.expected import Expected
from deep_comm.bench.low_latency.measure import Graph, kernel_times, time_eager, time_graphs
from deep_comm.bench.low_latency.operations import BufferCalls, Operation
from deep_comm.bench.low_latency.options import PAIR, Options, Scenario
from deep_comm.bench.low_latency.report import Line, Report
from deep_comm.bench.low_latency.targets import HOST_TOKENS
from deep_comm.bench.measure import Effort, Timing, Work, gather, nccl_group
from deep_comm.bench.normal import require_on_all_ranks
from deep_comm.bench.workload import Volume, Workload

_NUM_PROFILED_CALLS = 200


@contextlib.contextmanager
def _sms(num_sms: int | None) -> Iterator[None]:
    """Calls of this scope take at most so many blocks; None: as many as they like."""
    if num_sms is None:
        yield
        return
    before = os.environ.get(env.NUM_SMS.name)
    os.environ[env.NUM_SMS.name] = str(num_sms)
    try:
        yield
    finally:
        if before is None:
            del os.environ[env.NUM_SMS.name]
        else:
            os.environ[env.NUM_SMS.name] = before


class Runner:
    """Measures one scenario after the other; every rank makes the same calls."""

    def __init__(self, options: Options, device: torch.device, say: Callable[[str], None]) -> None:
        self._options = options
        self._device = device
        self._say = say
        self.report = Report(limit=None)
        self._ranks_per_node: int | None = None

    def run(self, scenarios: Sequence[Scenario], on_lines: Callable[[list[Line]], None]) -> Report:
        self._ranks_per_node = self._options.ranks_per_node or two_tier.discovered()
        self.report = Report(None, self._ranks_per_node, self._options.rail)
        # Of NVLink alone: between nodes it says nothing.
        if self._options.with_limit and dist.get_world_size() > 1 and not self._ranks_per_node:
            self._measure_limit(scenarios[0].workload)
        self.report.host_references.extend(host_time.references(self._device))
        for num_sms in dict.fromkeys(sms for scenario in scenarios for sms in scenario.sms):
            with _sms(num_sms), self._make_buffer(scenarios) as buffer:
                for scenario in scenarios:
                    if num_sms not in scenario.sms:
                        continue
                    lines = self._measure_scenario(scenario, buffer, num_sms)
                    gc.collect()  # caches hold inputs in a cycle
                    self.report.lines.extend(lines)
                    on_lines(lines)
                self._finish()
                dist.barrier()  # before this rank's heap goes, nobody uses it
        return self.report

    def _max_tokens(self, workload: Workload) -> int:
        return self._options.max_tokens or workload.num_tokens

    def _make_buffer(self, scenarios: Sequence[Scenario]) -> Buffer:
        hints = [
            Buffer.get_low_latency_rdma_size_hint(
                self._max_tokens(shape),
                shape.hidden,
                shape.num_ranks,
                shape.num_experts,
                ranks_per_node=self._ranks_per_node,
            )
            for shape in (scenario.workload for scenario in scenarios)
        ]
        return Buffer(
            dist.group.WORLD,
            0,
            max(hints),
            low_latency_mode=True,
            device=self._device,
            ranks_per_node=self._ranks_per_node,
            rail=self._options.rail,
        )

    def _measure_limit(self, workload: Workload) -> None:
        effort = Effort(num_warmup=2, num_calls=3, num_rounds=3, num_single_calls=1)
        num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        limit = link.measure(self._device, workload.combine_row_bytes, effort, num_sms)
        self.report = Report(limit=limit)
        self._say(limit.describe())

    def _how_checked(self, shape: Workload) -> str:
        where = f", nodes of {self._ranks_per_node}" if self._ranks_per_node else ""
        if shape.combine_format == "bf16":
            return f"checked bit for bit{where}"
        return f"rows checked bit for bit, sums against the error stated for LogFMT-10{where}"

    def _floor_us(self, moved: Volume) -> float | None:
        limit = self.report.limit
        return None if limit is None else moved.wire_bytes / limit.gb_per_s / 1e3

    def _measure_scenario(
        self, scenario: Scenario, buffer: Buffer, num_sms: int | None
    ) -> list[Line]:
        shape, max_tokens = scenario.workload, self._max_tokens(scenario.workload)
        self._say(
            f"\nlow-latency mode on {self._device.type}: {shape.describe()}, {scenario.layout} "
            f"layout, at most {max_tokens} tokens a rank ({self._how_checked(shape)})"
        )
        lines = []
        eager: dict[int, Operation] = {}  # by line
        if scenario.with_rivals and num_sms == scenario.sms[0]:
            lines += self._measure_rivals(scenario)
        expected = Expected(shape, scenario.layout, dist.get_rank(), self._device, max_tokens)
        subject = BufferCalls(buffer, expected, scenario.layout, self._options.num_slots)
        checked: set[tuple[str, str]] = set()
        for name, phases, execution in scenario.calls:
            operation = subject.operation(name, phases)
            if (name, phases) not in checked:
                for slot in range(self._options.num_slots):
                    self._verify(operation, operation.call(slot), slot, "")
                checked.add((name, phases))
            measured = self._time(operation, execution)
            if measured is None:
                continue
            timing, kernels_us = measured
            line = Line(
                workload=shape,
                name=name,
                layout=scenario.layout,
                phases=phases,
                execution=execution,
                num_blocks=subject.num_blocks,
                max_tokens=max_tokens,
                timing=timing,
                volume=operation.volume,
                floor_us=self._floor_us(operation.volume),
                kernels_us=kernels_us,
                is_rival=False,
            )
            if execution == "eager":
                eager[len(lines)] = operation
            lines.append(line)
        self._take_turns(lines, eager)
        return lines

    def _take_turns(self, lines: list[Line], eager: dict[int, Operation]) -> None:
        """Host time of these lines, in turns. Of few tokens: else the GPU's queue gets full."""
        effort, num_slots = self._options.effort, self._options.num_slots
        if effort.num_host_calls == 0:
            return
        few = {
            index: operation
            for index, operation in eager.items()
            if lines[index].workload.num_tokens <= HOST_TOKENS
        }

        def work_of(operation: Operation) -> Work:
            return lambda index: operation.call(index % num_slots)

        works = [work_of(operation) for operation in few.values()]
        times = host_time.in_turns(works, effort.num_host_calls, self._device)
        for index, found in zip(few, times, strict=True):
            lines[index] = dataclasses.replace(
                lines[index], timing=found.put_into(lines[index].timing)
            )

    def _time(self, operation: Operation, execution: str) -> tuple[Timing, dict[str, float]] | None:
        options = self._options
        num_slots, effort = options.num_slots, options.effort
        if execution == "eager":
            timing = time_eager(operation.call, num_slots, effort, self._device)
            last = num_slots - 1
            self._verify(operation, operation.call(last), last, " after timing")
            return timing, {}
        graphs = self._capture(operation.call, operation.name)
        if graphs is None:
            return None
        many, single = graphs
        many.replay(0)
        self._verify(operation, many.last, many.last_slot, " in a graph")
        timing = time_graphs(many, single, options.calls_per_graph, effort, self._device)
        kernels_us: dict[str, float] = {}
        if options.with_kernel_times:
            num_graphs = -(-_NUM_PROFILED_CALLS // options.calls_per_graph)
            kernels_us = kernel_times(many.replay, num_graphs, operation.kernels)
            if not kernels_us:
                self._note("the profiler shows no kernels: no kernel times")
        self._verify(operation, many.last, many.last_slot, " in a graph after timing")
        return timing, kernels_us

    def _capture(self, call: Callable[[int], Any], name: str) -> tuple[Graph, Graph] | None:
        options = self._options
        graphs: tuple[Graph, Graph] | None = None
        reason = ""
        try:
            graphs = (
                Graph(call, options.calls_per_graph, options.num_slots),
                Graph(call, 1, options.num_slots),
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        reasons = [text for text in gather(reason) if text]
        if reasons:
            self._note(f"{name}: no graph could be captured: {reasons[0]}")
            return None
        return graphs

    def _measure_rivals(self, scenario: Scenario) -> list[Line]:
        """all_gather of the rows as dispatched, reduce_scatter of bf16 rows, and both in turn: the
        same job without routing, by NCCL (gloo on the host)."""
        on_gpu = self._device.type == "cuda"
        library, group = ("NCCL", nccl_group()) if on_gpu else ("gloo", dist.group.WORLD)
        inputs = normal_expected.Expected(
            scenario.workload, dist.get_rank(), self._device, self._options.num_slots
        )
        there = rivals.all_gather(inputs, library, group)
        back = rivals.reduce_scatter(inputs, library, group)
        assert there.volume is not None and back.volume is not None

        def pair(slot: int) -> tuple[Any, Any]:
            return there.call(slot), back.call(slot)

        def pair_is_right(result: tuple[Any, Any], slot: int) -> bool:
            return there.verify(result[0], slot) and back.verify(result[1], slot)

        operations = [
            Operation(it.name, "", it.call, it.verify, it.volume, ())
            for it in (there, back)
            if it.volume is not None
        ]
        name = f"{there.name} + {rivals.REDUCE_SCATTER}"
        moved = there.volume + back.volume
        operations.append(Operation(name, "", pair, pair_is_right, moved, ()))
        executions = dict.fromkeys(
            execution for name, _, execution in scenario.calls if name == PAIR
        )
        lines = []
        for operation in operations:
            for slot in range(self._options.num_slots):
                self._verify(operation, operation.call(slot), slot, "")
            for execution in executions:
                timing = self._time_rival(operation, execution)
                if timing is None:
                    continue
                line = Line(
                    workload=scenario.workload,
                    name=operation.name,
                    layout="",
                    phases="",
                    execution=execution,
                    num_blocks=None,
                    max_tokens=self._max_tokens(scenario.workload),
                    timing=timing,
                    volume=operation.volume,
                    floor_us=self._floor_us(operation.volume),
                    kernels_us={},
                    is_rival=True,
                )
                lines.append(line)
        return lines

    def _time_rival(self, operation: Operation, execution: str) -> Timing | None:
        options = self._options
        if execution == "eager":
            return time_eager(operation.call, options.num_slots, options.effort, self._device)
        graphs = self._capture(operation.call, operation.name)
        if graphs is None:
            return None
        return time_graphs(*graphs, options.calls_per_graph, options.effort, self._device)

    def _verify(self, operation: Operation, result: Any, slot: int, when: str) -> None:
        self._finish()
        what = f"{operation.name} {operation.phases}{when}"
        require_on_all_ranks(operation.verify(result, slot), what)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)
            self._say(f"note: {text}")
