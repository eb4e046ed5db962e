"""Normal mode: every scenario checked, then timed, on all ranks together."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from deep_comm import Buffer
from deep_comm.bench import grouped, host_time, link, rivals, two_tier
from deep_comm.bench.expected import Expected
from deep_comm.bench.measure import Effort, Timing, Work, gather, peak_rss_bytes, time_over_ranks
from deep_comm.bench.operations import OF_EXPANDED, BufferOperations, Operation
from deep_comm.bench.options import AUTO, Options, Scenario
from deep_comm.bench.workload import Volume, Workload

L2_BYTES = 128 << 20  # inputs take turns until they are together larger than any L2
_MOST_HOST_TOKENS = 512
_BLOCKS_IN_FLIGHT = 8  # outputs of dispatch that live at once, those that graphs keep included


class WrongResult(RuntimeError):
    """The measured operation does not compute what the reference says; it was not timed."""


@dataclass(frozen=True)
class Measured:
    """One line of the report. ``volume`` is that of the rank that moves most."""

    workload: Workload
    name: str
    mode: str  # "direct", "ring", "two-tier"; "" for what has none
    sms: str  # "24", or "auto 20"; "" for what has none
    num_sms: int | None
    config: tuple[int, int] | None  # (rows between publications, slots); None: the Buffer's choice
    execution: str
    timing: Timing
    volume: Volume | None
    host_waits: bool
    is_rival: bool
    limit_fraction: float | None

    def rate(self, num_bytes: int) -> float:
        """GB/s (10^9 bytes per second) at the mean time."""
        return num_bytes / self.timing.mean_us / 1e3

    def to_json(self) -> dict[str, Any]:
        rates: dict[str, Any] = {}
        if self.volume is not None:
            rates = {
                "logical_bytes": self.volume.logical_bytes,
                "wire_bytes": self.volume.wire_bytes,
                "logical_gb_per_s": self.rate(self.volume.logical_bytes),
                "wire_gb_per_s": self.rate(self.volume.wire_bytes),
                "fraction_of_limit": self.limit_fraction,
            }
        return {
            "name": self.name,
            "workload": self.workload.describe(),
            "num_tokens": self.workload.num_tokens,
            "dtype": self.workload.dtype,
            "row_bytes": self.workload.row_bytes,
            "combine_row_bytes": self.workload.combine_row_bytes,
            "routing": self.workload.routing,
            "mode": self.mode,
            "sms": self.sms,
            "num_sms": self.num_sms,
            "config": self.config,
            "execution": self.execution,
            "host_waits": self.host_waits,
            "is_rival": self.is_rival,
            **self.timing.to_json(),
            **rates,
        }


@dataclass(frozen=True)
class Report:
    limit: link.LinkLimit | None
    lines: list[Measured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows_received: dict[str, list[int]] = field(default_factory=dict)  # by workload: by rank
    peak_rss_bytes: list[int] = field(default_factory=list)  # by rank
    rail: list[two_tier.RailCount] = field(default_factory=list)
    host_references: list[host_time.Reference] = field(default_factory=list)


def require_on_all_ranks(good: bool, what: str) -> None:
    bad = [rank for rank, verdict in enumerate(gather(bool(good))) if not verdict]
    if bad:
        raise WrongResult(f"{what} differs from the reference on ranks {bad}")


def make_buffer(scenario: Scenario, device: torch.device) -> Buffer:
    """Rings that every Config fits into, and in direct mode a receive region for all that lives."""
    if scenario.ranks_per_node is not None:
        return two_tier.make_buffer(scenario, device)
    shape = scenario.workload
    row_bytes = max(shape.row_bytes, shape.combine_row_bytes)
    smallest = (64 if device.type == "cuda" else 16) << 20
    hints = [
        config.get_nvl_buffer_size_hint(row_bytes, shape.num_ranks)
        for config in scenario.configs
        if config is not None
    ]
    num_nvl_bytes = max([smallest, *hints])
    if scenario.mode == "ring":
        return Buffer(dist.group.WORLD, num_nvl_bytes, device=device, num_direct_bytes=0)
    num_worst = sum(shape.num_tokens_of(rank) for rank in range(shape.num_ranks))
    if not set(OF_EXPANDED).isdisjoint(scenario.names):
        num_worst = max(num_worst, grouped.most_rows(shape))
    block_bytes = num_worst * (row_bytes + 16 * shape.num_topk + 64) + (1 << 16)
    num_nvl_bytes += _BLOCKS_IN_FLIGHT * block_bytes
    return Buffer(
        dist.group.WORLD, num_nvl_bytes, device=device, num_direct_bytes=num_nvl_bytes - smallest
    )


def num_slots_of(workload: Workload, device: torch.device, asked: int | None) -> int:
    if asked is not None:
        return asked
    if device.type != "cuda":
        return 2
    input_bytes = max(1, workload.num_tokens * workload.row_bytes)
    return min(max(2, -(-L2_BYTES // input_bytes)), 4)


class Graph:
    """A CUDA graph of one call per slot; ``last`` is what the call of the last slot returned."""

    def __init__(self, operation: Operation, num_slots: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            operation.call(0)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            for slot in range(num_slots):
                self.last = operation.call(slot)

    def replay(self, _call: int) -> None:
        self.graph.replay()


class Runner:
    """Measures one scenario after the other; every rank makes the same calls."""

    def __init__(self, options: Options, device: torch.device, say: Callable[[str], None]) -> None:
        self._options = options
        self._device = device
        self._say = say
        self.report = Report(limit=None)
        self._fewest_tokens = 0

    def run(
        self, scenarios: Sequence[Scenario], on_lines: Callable[[list[Measured]], None]
    ) -> Report:
        if self._options.with_limit and dist.get_world_size() > 1:
            self._measure_limit(scenarios[0].workload)
        self.report.host_references.extend(host_time.references(self._device))
        self._fewest_tokens = min((one.workload.num_tokens for one in scenarios), default=0)
        # Runs of scenarios over one workload share inputs and expected results.
        expected: Expected | None = None
        for scenario in scenarios:
            if expected is None or expected.workload != scenario.workload:
                expected = None
                gc.collect()  # its caches hold it in a cycle, and gigabytes with it
                expected = self._expect(scenario.workload)
            lines = self._measure_scenario(scenario, expected)
            if lines:
                self.report.lines.extend(lines)
                on_lines(lines)
        self.report.peak_rss_bytes.extend(gather(peak_rss_bytes()))
        return self.report

    def _expect(self, workload: Workload) -> Expected:
        num_slots = num_slots_of(workload, self._device, self._options.num_slots)
        expected = Expected(workload, dist.get_rank(), self._device, num_slots)
        counts = gather(expected.num_recv_rows)
        self.report.rows_received[workload.describe()] = counts
        self._say(
            f"\nnormal mode on {self._device.type}: {workload.describe()} (checked bit for bit)\n"
            f"rows received by rank: {', '.join(map(str, counts))}; {num_slots} inputs take turns"
        )
        return expected

    def _measure_limit(self, workload: Workload) -> None:
        effort = Effort(num_warmup=3, num_calls=5, num_rounds=3, num_single_calls=1)
        num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        limit = link.measure(self._device, workload.combine_row_bytes, effort, num_sms)
        self.report = Report(limit=limit)
        self._say(limit.describe())

    def _measure_scenario(self, scenario: Scenario, expected: Expected) -> list[Measured]:
        lines: list[Measured] = []
        if scenario.with_rivals:
            for operation in rivals.operations(expected):
                lines += self._measure(scenario, expected, operation, ("eager",), None)
        with make_buffer(scenario, self._device) as buffer:
            for config in scenario.configs:
                subject = BufferOperations(buffer, expected, config, scenario.ranks_per_node)
                if scenario.ranks_per_node is not None:
                    self._count_rail(buffer, subject, scenario)
                mode = self._observed_mode(scenario, subject)
                eager: dict[int, Operation] = {}  # by line
                for operation in subject.operations(mode, scenario.names):
                    for line in self._measure(
                        scenario, expected, operation, scenario.executions, subject
                    ):
                        if line.execution == "eager" and not line.host_waits:
                            eager[len(lines)] = operation
                        lines.append(dataclasses.replace(line, mode=mode))
                self._take_turns(lines, eager, expected.num_slots)
                del subject, operation, eager  # they hold outputs in the receive region
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()  # before this rank's heap goes, nobody uses it
        return lines

    def _take_turns(
        self, lines: list[Measured], eager: dict[int, Operation], num_slots: int
    ) -> None:
        """Host time of these lines, in turns, if they have the fewest tokens of this run. Not of
        many: there the GPU's queue gets full."""
        num_calls = self._options.effort.num_host_calls
        if num_calls == 0 or not eager:
            return
        if lines[-1].workload.num_tokens > min(self._fewest_tokens, _MOST_HOST_TOKENS):
            return

        def work_of(operation: Operation) -> Work:
            return lambda call: operation.call(call % num_slots)

        works = [work_of(operation) for operation in eager.values()]
        times = host_time.in_turns(works, num_calls, self._device)
        for index, found in zip(eager, times, strict=True):
            lines[index] = dataclasses.replace(
                lines[index], timing=found.put_into(lines[index].timing)
            )

    def _count_rail(self, buffer: Buffer, subject: BufferOperations, scenario: Scenario) -> None:
        """One row a (token, remote node) and not a byte more, or nothing is timed."""
        assert scenario.ranks_per_node is not None
        traffic = two_tier.traffic_of(scenario.workload, scenario.ranks_per_node)
        for mine in two_tier.count_rail(buffer, subject, scenario.workload, traffic):
            require_on_all_ranks(mine.is_exact, f"{mine.operation}: bytes on the rail ({mine})")
            self.report.rail.extend(gather(mine))

    def _observed_mode(self, scenario: Scenario, subject: BufferOperations) -> str:
        """What the dispatch did on all ranks, which is not always what was asked for."""
        modes = set(gather(subject.local_mode)) - {"empty"} or {scenario.mode}
        if modes != {scenario.mode}:
            what = f"{scenario.workload.describe()}, {subject.num_sms} SMs"
            self._note(f"{what}: asked for {scenario.mode} mode, got {sorted(modes)}")
        return "/".join(sorted(modes))

    def _measure(
        self,
        scenario: Scenario,
        expected: Expected,
        operation: Operation,
        executions: Sequence[str],
        subject: BufferOperations | None,
    ) -> Iterator[Measured]:
        num_slots = expected.num_slots
        for slot in range(num_slots):
            self._verify(operation, operation.call(slot), slot, "")
        for execution in executions:
            if execution == "graph" and operation.host_waits:
                continue
            if execution == "graph":
                timing = self._time_graph(operation, num_slots)
            else:
                timing = self._time_eager(operation, num_slots)
            if timing is not None:
                yield self._line(scenario, operation, execution, timing, subject)

    def _time_eager(self, operation: Operation, num_slots: int) -> Timing:
        def work(call: int) -> object:
            return operation.call(call % num_slots)

        timing = time_over_ranks(work, self._options.effort, self._device)
        self._verify(operation, operation.call(num_slots - 1), num_slots - 1, " after timing")
        return timing

    def _time_graph(self, operation: Operation, num_slots: int) -> Timing | None:
        graph: Graph | None = None
        reason = ""
        try:
            graph = Graph(operation, num_slots)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        reasons = [text for text in gather(reason) if text]
        if reasons or graph is None:
            self._note(f"{operation.name}: no graph could be captured: {reasons[0]}")
            return None
        graph.replay(0)
        self._verify(operation, graph.last, num_slots - 1, " in a graph")
        effort = self._options.effort
        effort = dataclasses.replace(
            effort,
            num_calls=-(-effort.num_calls // num_slots),
            num_single_calls=-(-effort.num_single_calls // num_slots),
            num_host_calls=0,
        )
        timing = time_over_ranks(graph.replay, effort, self._device, calls_per_work=num_slots)
        self._verify(operation, graph.last, num_slots - 1, " in a graph after timing")
        return timing

    def _verify(self, operation: Operation, result: Any, slot: int, when: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        require_on_all_ranks(operation.verify(result, slot), f"{operation.name}{when}")

    def _line(
        self,
        scenario: Scenario,
        operation: Operation,
        execution: str,
        timing: Timing,
        subject: BufferOperations | None,
    ) -> Measured:
        fraction = None
        if operation.volume is not None:
            rate = operation.volume.wire_bytes / timing.mean_us / 1e3
            fraction = link.fraction(rate, self.report.limit)
        config = None if subject is None else subject.config
        sms = ""
        if subject is not None:
            sms = str(subject.num_sms) if config is not None else f"{AUTO} {subject.num_sms}"
        return Measured(
            workload=scenario.workload,
            name=operation.name,
            mode="",
            sms=sms,
            num_sms=None if subject is None else subject.num_sms,
            config=None
            if config is None
            else (config.num_max_nvl_chunked_send_tokens, config.num_max_nvl_chunked_recv_tokens),
            execution=execution,
            timing=timing,
            volume=operation.volume,
            host_waits=operation.host_waits,
            is_rival=operation.is_rival,
            limit_fraction=fraction,
        )

    def _note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)
            self._say(f"note: {text}")
