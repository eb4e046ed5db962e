"""Every scenario checked, then timed, on all ranks together."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from deep_comm import Buffer
from deep_comm.bench import link, measure, nodes, rivals
from deep_comm.bench.expected import Expected
from deep_comm.bench.line import Line
from deep_comm.bench.measure import Graph, Timing, gather, require_on_all_ranks
from deep_comm.bench.names import Effort
from deep_comm.bench.operations import Calls, LowLatencyCalls, NormalCalls, Operation
from deep_comm.bench.options import AUTO, Options
from deep_comm.bench.report import Report, table
from deep_comm.bench.scenarios import Scenario, scenarios_of
from deep_comm.bench.targets import HOST_TOKENS
from deep_comm.settings import env
from deep_comm.settings.command_line import Progress

L2_BYTES = 128 << 20  # inputs take turns until they are together larger than any L2
_NUM_PROFILED_CALLS = 200
_MOST_HOST_TOKENS = 512  # with more, the GPU's queue gets full in a round of host time
_LIMIT_EFFORT = Effort(num_warmup=3, num_calls=5, num_rounds=3, num_single_calls=1)

Timed = tuple[Timing, dict[str, float]]
"""And microseconds of kernels."""


class Runner:
    """Measures one scenario after the other; every rank makes the same calls."""

    def __init__(self, options: Options, device: torch.device, say: Callable[[str], None]) -> None:
        self._options, self._device, self._say = options, device, say
        self._is_low_latency = options.family == "low-latency"
        self._expected: Any = None  # Expected of the scenario that is measured
        self._host_tokens = HOST_TOKENS  # the most whose host time is taken in turns
        self.report = Report()
        self._progress = Progress(dist.get_rank() == 0)

    def run(self) -> Report:
        options, report = self._options, self.report
        if options.gb_per_s is not None:
            env.NIC_GB_PER_S.set(str(options.gb_per_s))
        found = nodes.discovered()
        report.ranks_per_node = found or options.ranks_per_node
        scenarios = scenarios_of(options, dist.get_world_size(), found)
        if not self._is_low_latency:
            fewest = min(scenario.workload.num_tokens for scenario in scenarios)
            self._host_tokens = min(fewest, _MOST_HOST_TOKENS)
        # NVLink's limit says nothing between nodes; in normal mode one tier is measured, too.
        is_one_tier = options.family == "normal" or report.ranks_per_node is None
        if options.on_gpu and dist.get_world_size() > 1 and found is None and is_one_tier:
            row_bytes = scenarios[0].workload.combine_row_bytes
            report.limit = link.measure(self._device, row_bytes, _LIMIT_EFFORT)
            self._say(report.limit.describe())
        report.launch_times = measure.launch_times(self._device)
        said = ""
        for arguments, of_buffer in itertools.groupby(scenarios, key=lambda it: it.buffer):
            with Buffer(dist.group.WORLD, device=self._device, **arguments) as buffer:
                for _, part in itertools.groupby(of_buffer, key=lambda it: (it.workload, it.mode)):
                    lines: list[Line] = []
                    for scenario in part:
                        heading = self._prepare(scenario)
                        if heading != said:
                            self._say(heading)
                        said = heading
                        lines += self._measure_scenario(scenario, buffer)
                    report.lines += lines
                    self._say(table(lines))
                    self._progress.reset()
                self._synchronize()
                dist.barrier()  # nobody uses this rank's memory any more
        report.peak_rss_bytes = gather(measure.peak_rss_bytes())
        return report

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _prepare(self, scenario: Scenario) -> str:
        """Make the inputs, unless the scenario before had the same; what to say of them."""
        shape, device = scenario.workload, self._device
        if self._expected is None or self._expected.workload != shape:
            self._expected, num_inputs = None, 2
            gc.collect()  # its caches hold it in a cycle, and gigabytes with it
            if device.type == "cuda" and not self._is_low_latency:
                input_bytes = max(1, shape.num_tokens * shape.row_bytes)
                num_inputs = min(max(2, -(-L2_BYTES // input_bytes)), 4)
            self._expected = Expected(
                shape, dist.get_rank(), device, num_inputs, low_latency=self._is_low_latency
            )
        counts = [len(it.recv_src_idx) for it in self._expected.plan(0).dispatched]
        self.report.rows_received[shape.describe()] = counts
        checked, kind, how = "checked bit for bit", "normal", ""
        if self._is_low_latency:
            kind = "low-latency"
            how = f", {scenario.mode} layout, at most {scenario.max_tokens} tokens per rank"
            if shape.combine_format != "bf16":
                checked = "rows checked bit for bit, sums against the error stated for LogFMT-10"
        return (
            f"\n{kind} mode on {device.type}: {shape.describe()}{how} ({checked})\nrows received "
            f"by rank: {', '.join(map(str, counts))}; {self._expected.num_inputs} inputs take turns"
        )

    def _measure_scenario(self, scenario: Scenario, buffer: Buffer) -> list[Line]:
        by_call: dict[tuple[str, str], list[str]] = {}
        for name, phases, execution in scenario.calls:
            by_call.setdefault((name, phases), []).append(execution)
        lines: list[Line] = []
        if scenario.with_rivals:
            every = list(dict.fromkeys(execution for *_, execution in scenario.calls))
            for operation in rivals.operations(self._expected):
                executions = every if self._is_low_latency else ["eager"]
                lines += self._measure(scenario, operation, executions, {})
        calls = self._calls(scenario, buffer)
        how = self._how(scenario, calls)
        num_calls = self._options.effort.num_host_calls
        takes_turns = num_calls > 0 and scenario.workload.num_tokens <= self._host_tokens
        eager: dict[int, Operation] = {}  # by line: those whose host time is taken in turns
        for (name, phases), executions in by_call.items():
            made = calls.operation(name, phases)
            if made is None:
                continue
            if scenario.ranks_per_node is not None and not self._is_low_latency:
                how["rail_bytes"] = self._count_rail(scenario, made, calls.num_sms, buffer)
            for line in self._measure(scenario, made, executions, how):
                if takes_turns and line.execution == "eager" and not line.host_waits:
                    eager[len(lines)] = made
                lines.append(line)
        works = [self._work(operation) for operation in eager.values()]
        times = measure.host_turns(works, num_calls, self._device)
        for index, found in zip(eager, times, strict=True):
            lines[index] = replace(lines[index], timing=replace(lines[index].timing, **found))
        return lines

    def _calls(self, scenario: Scenario, buffer: Buffer) -> Calls:
        if scenario.max_tokens is not None:
            return LowLatencyCalls(buffer, self._expected, scenario.mode, scenario.max_tokens)
        has_rail_rings = scenario.buffer["num_direct_bytes"] == 0
        calls = NormalCalls(
            buffer, self._expected, scenario.config, scenario.ranks_per_node, has_rail_rings
        )
        # What the dispatch did on all ranks, which is not always what was asked for.
        modes = set(gather(calls.mode)) - {"empty"} or {scenario.mode}
        if modes != {scenario.mode}:
            what = f"{scenario.workload.describe()}, {calls.num_sms} SMs"
            self._note(f"{what}: asked for {scenario.mode} mode, got {sorted(modes)}")
        calls.mode = "/".join(sorted(modes))
        dispatch_is_right, combine_is_right = calls.first_calls_are_right()
        require_on_all_ranks(dispatch_is_right, "dispatch")
        require_on_all_ranks(combine_is_right, "combine")
        return calls

    @staticmethod
    def _how(scenario: Scenario, calls: Calls) -> dict[str, Any]:
        """What a line says of how calls are made."""
        num_sms, config = calls.num_sms, scenario.config
        if isinstance(calls, LowLatencyCalls):
            return {"layout": scenario.mode, "num_sms": num_sms}
        if config is None:
            return {"mode": calls.mode, "num_sms": num_sms, "sms": f"{AUTO} {num_sms}"}
        rings = config.num_max_nvl_chunked_send_tokens, config.num_max_nvl_chunked_recv_tokens
        return {"mode": calls.mode, "num_sms": num_sms, "sms": str(num_sms), "config": rings}

    def _measure(
        self, scenario: Scenario, operation: Operation, executions: Sequence[str],
        how: dict[str, Any],
    ) -> Iterator[Line]:  # fmt: skip
        """Check the operation with every input, then time it."""
        for input_idx in range(self._expected.num_inputs):
            self._check(operation, operation.call(input_idx), input_idx)
        for execution in executions:
            if execution == "graph" and operation.host_waits:
                continue
            what = filter(None, (operation.name, operation.phases, scenario.mode, execution))
            self._progress.step(f"{scenario.workload.num_tokens} tokens: {' '.join(what)}")
            take = self._time_graph if execution == "graph" else self._time_eager
            timed = take(operation)
            if timed is not None:
                yield Line(
                    scenario.workload, operation.name, execution, timed[0], operation.volume,
                    phases=operation.phases, kernels_us=timed[1], host_waits=operation.host_waits,
                    max_tokens=scenario.max_tokens, is_rival=operation.is_rival,
                    limit=None if self.report.limit is None else self.report.limit.gb_per_s,
                    rail_limit=self._options.gb_per_s, **how,
                )  # fmt: skip

    def _count_rail(
        self, scenario: Scenario, operation: Operation, num_sms: int, buffer: Buffer
    ) -> int:
        """One row per (token, remote node) and not a byte more, or nothing is timed."""
        before = nodes.put_bytes(buffer)
        self._check(operation, operation.call(0), 0)
        num_bytes = nodes.put_bytes(buffer) - before
        if operation.rail_row_bytes is not None:
            found = nodes.rail_count(scenario, operation, dist.get_rank(), num_sms, num_bytes)
            is_exact = num_bytes == found["rows"] * found["row_bytes"]
            require_on_all_ranks(is_exact, f"{operation.name}: bytes on the rail ({found})")
            self.report.rail += gather(found)
        return max(gather(num_bytes))

    def _check(self, operation: Operation, result: Any, input_idx: int, when: str = "") -> None:
        self._synchronize()
        what = " ".join(filter(None, (operation.name, operation.phases, when)))
        require_on_all_ranks(operation.is_right(result, input_idx), what)

    # ---- times ---------------------------------------------------------------------------------

    def _work(self, operation: Operation) -> measure.Work:
        num_inputs, call = self._expected.num_inputs, operation.call
        return lambda call_idx: call(call_idx % num_inputs)

    def _time_eager(self, operation: Operation) -> Timed:
        work, last = self._work(operation), self._expected.num_inputs - 1
        timing = measure.time_over_ranks(work, self._options.effort, self._device)
        self._check(operation, operation.call(last), last, "after timing")
        return timing, {}

    def _time_graph(self, operation: Operation) -> Timed | None:
        """Of a graph with a call of every input; low-latency mode: the mean of a graph of many
        calls, p50 and p99 of replays of a graph of one, the distance of two graphs included."""
        many = measure.CALLS_PER_GRAPH if self._is_low_latency else self._expected.num_inputs
        graphs = self._capture(operation, (many, 1) if self._is_low_latency else (many,))
        if graphs is None:
            return None
        graph, kernels_us = graphs[0], {}
        graph.replay(0)
        self._check(operation, graph.last, graph.last_input, "in a graph")
        effort = replace(self._options.effort, num_host_calls=0)

        def time_it(graph: Graph, calls_per_work: int, **changes: int) -> Timing:
            changed = replace(effort, **changes)
            replay, device = graph.replay, self._device
            return measure.time_over_ranks(replay, changed, device, calls_per_work=calls_per_work)

        if self._is_low_latency:
            timing, single = time_it(graph, many, num_single_calls=1), graphs[1]
            spread = time_it(single, 1, num_rounds=1)
            timing = replace(timing, p50_us=spread.p50_us, p99_us=spread.p99_us)
        else:
            num_calls, num_singles = effort.num_calls, effort.num_single_calls
            timing = time_it(graph, many, num_calls=-(-num_calls // many),
                             num_single_calls=-(-num_singles // many))  # fmt: skip
        if operation.kernels:
            num_graphs = -(-_NUM_PROFILED_CALLS // many)
            kernels_us = measure.kernel_times(graph.replay, num_graphs, operation.kernels)
            if not kernels_us:
                self._note("the profiler shows no kernels: no kernel times")
        graph.replay(0)  # another graph may have written to the same output since
        self._check(operation, graph.last, graph.last_input, "in a graph after timing")
        return timing, kernels_us

    def _capture(self, operation: Operation, sizes: Sequence[int]) -> list[Graph] | None:
        """Graphs of so many calls; None on all ranks if one cannot capture them."""
        graphs, reason = [], ""
        try:
            for num_calls in sizes:
                graphs.append(Graph(operation.call, num_calls, self._expected.num_inputs))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        reasons = list(filter(None, gather(reason)))
        if reasons:
            self._note(f"{operation.name}: no graph could be captured: {reasons[0]}")
        return None if reasons else graphs

    def _note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)
            self._say(f"note: {text}")
