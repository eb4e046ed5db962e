"""The tables of docs/scale.md, as Markdown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from deep_comm import _core
from deep_comm.config import (
    Config,
    recommended_combine_config,
    recommended_dispatch_config,
)
from deep_comm.context.low_latency_region import region_bytes
from deep_comm.scale import low_latency, normal
from deep_comm.scale.machine import H200, H800, Machine
from deep_comm.scale.published import DEEPEP, FIGURES, Figure
from deep_comm.scale.routing import Job
from deep_comm.scale.traffic import Traffic, Wire, count_job

NUM_SMS = 24
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
COUNTED_SIZES = (8, 16, 32, 64, 128, 256, 2048)  # where 4096 tokens of every rank are counted
SKEW_SIZES = (16, 64, 256)
DECODE_TOKENS = 128
NUM_QPS = 24  # to each other node, the default of a Buffer


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def job_of(num_ranks: int, routing: str, num_tokens: int = 4096) -> Job:
    """At least an expert a rank."""
    return Job(num_ranks, num_tokens, routing=routing, num_experts=max(256, num_ranks))


@functools.lru_cache(maxsize=64)
def traffic_of(job: Job, num_channels: int) -> Traffic:
    return count_job(job, num_channels)


def configs_of(num_ranks: int, num_sms: int) -> tuple[Config, Config]:
    """The recommended configs of dispatch and combine."""
    return (
        recommended_dispatch_config(num_ranks, num_sms),
        recommended_combine_config(num_ranks, num_sms),
    )


def normal_times(job: Job, num_sms: int, machine: Machine) -> tuple[normal.Times, normal.Times]:
    dispatch_config, combine_config = configs_of(job.num_ranks, num_sms)
    traffic = traffic_of(job, max(1, num_sms // 2))
    return (
        normal.dispatch(traffic, Wire.of_job(job, dispatch_config), machine),
        normal.combine(traffic, Wire.of_job(job, combine_config), machine),
    )


# ---- against published figures -------------------------------------------------------------------


def _published_us(figure: Figure, job: Job) -> tuple[float, float]:
    if not figure.is_rate:
        return figure.dispatch, figure.combine
    traffic = traffic_of(job, NUM_SMS // 2)
    rows = traffic.to_rank if traffic.num_nodes == 1 else traffic.to_node.sum(2)
    sent = float(rows.sum(1).double().mean())
    dispatched = sent * (job.row_bytes + job.scale_row_bytes)
    return dispatched / figure.dispatch / 1e3, sent * job.combine_row_bytes / figure.combine / 1e3


def modelled_us(figure: Figure) -> tuple[Job, tuple[float, float]]:
    """The job of a figure, and what the model says of dispatch and combine: of rows as the
    figure's system sends them.
    """
    machine = H800 if figure.system == DEEPEP else H200
    if figure.mode == "normal":
        job = job_of(figure.num_ranks, figure.routing)
        dispatched, combined = normal_times(job, NUM_SMS, machine)
        return job, (dispatched.total_us, combined.total_us)
    job = job_of(figure.num_ranks, figure.routing, DECODE_TOKENS)
    traffic = traffic_of(job, 1)
    sent = low_latency.dispatch(job, traffic, machine, "expert")
    back = low_latency.combine(job, traffic, machine, "expert")
    return job, (sent.us, back.us)


def compare() -> str:
    rows = []
    for figure in FIGURES:
        job, modelled = modelled_us(figure)
        cells = [figure.system, figure.mode, str(figure.num_ranks)]
        for name, published, model in zip(
            ("dispatch", "combine"), _published_us(figure, job), modelled, strict=True
        ):
            mark = "fitted" if name == figure.fitted else f"{100 * (model / published - 1):+.0f} %"
            cells += [f"{published:.0f}", f"{model:.0f}", mark]
        rows.append(cells)
    head = ["system", "mode", "ranks", "dispatch, published µs", "model", "error"]
    return markdown([*head, "combine, published µs", "model", "error"], rows)


# ---- predictions ---------------------------------------------------------------------------------


def time() -> str:
    rows = []
    for num_ranks in COUNTED_SIZES:
        job = job_of(num_ranks, "limited")
        cells = [str(num_ranks)]
        for times in normal_times(job, NUM_SMS, H200):
            floor = max(times.nic_us, times.nvlink_us, times.sm_us)
            cells += [f"{times.total_us:.0f}", f"{times.bound_by} {floor:.0f}"]
        rows.append(cells)
    return markdown(
        ["ranks", "dispatch FP8 µs", "its busiest resource alone", "combine BF16 µs", "likewise"],
        rows,
    )


def skew() -> str:
    rows = []
    for num_ranks in SKEW_SIZES:
        for routing in ("uniform", "zipf", "limited"):
            job = job_of(num_ranks, routing)
            cells = [str(num_ranks), routing]
            for times in normal_times(job, NUM_SMS, H200):
                cells += [f"{times.total_us:.0f}", times.bound_by]
            rows.append(cells)
    return markdown(
        ["ranks", "routing", "dispatch FP8 µs", "bound by", "combine BF16 µs", "bound by"], rows
    )


def sms() -> str:
    rows = []
    for num_ranks in (16, 64):
        for num_sms in (8, 16, 24, 48, 96):
            times = normal_times(job_of(num_ranks, "limited"), num_sms, H200)
            rows.append([str(num_ranks), str(num_sms), *(f"{each.total_us:.0f}" for each in times)])
    return markdown(["ranks", "SMs", "dispatch FP8 µs", "combine BF16 µs"], rows)


def decode() -> str:
    rows = []
    for num_ranks in SIZES:
        job = job_of(num_ranks, "uniform", DECODE_TOKENS)
        traffic = traffic_of(job, 1)
        cells = [str(num_ranks)]
        for way in low_latency.WAYS:
            sent = low_latency.dispatch(job, traffic, H200, way)
            back = low_latency.combine(job, traffic, H200, way)
            cells += [f"{sent.us:.0f} + {back.us:.0f}", f"{sent.rail_bytes / 1e6:.2f}"]
        rows.append(cells)
    head = ["ranks"]
    for way in low_latency.WAYS:
        head += [f"a row a (token, {way}): µs", "MB"]
    return markdown(head, rows)


# ---- bytes, memory, queues -----------------------------------------------------------------------


def bytes_per_tier() -> str:
    rows = []
    for num_ranks in COUNTED_SIZES:
        job = job_of(num_ranks, "limited")
        traffic = traffic_of(job, NUM_SMS // 2)
        wire = Wire.of_job(job, configs_of(num_ranks, NUM_SMS)[0])
        out, into = traffic.forwarded_rows()
        posts = traffic.dispatch_posts(wire)
        rail_rows = float(traffic.rail_rows().double().mean())
        nvlink_rows = float(out.double().mean())
        rows.append(
            [
                str(num_ranks),
                f"{rail_rows / job.num_tokens:.2f}",
                f"{rail_rows * wire.dispatch_slot_bytes / 1e6:.0f}",
                f"{rail_rows * wire.combine_slot_bytes / 1e6:.0f}",
                f"{nvlink_rows / job.num_tokens:.2f}",
                f"{nvlink_rows * wire.dispatch_row_bytes / 1e6:.0f}",
                f"{nvlink_rows * wire.combine_slot_bytes / 1e6:.0f}",
                f"{float(posts.num_puts.sum(1).double().mean()):.0f}",
                f"{float(posts.num_signals.sum(1).double().mean()):.0f}",
            ]
        )
    return markdown(
        [
            "ranks", "rail: rows per token", "MB dispatch", "MB combine",
            "NVLink: rows per token", "MB dispatch", "MB combine", "puts per dispatch", "signals",
        ],
        rows,
    )  # fmt: skip


def memory() -> str:
    rows = []
    for num_ranks in SIZES:
        job = job_of(num_ranks, "limited")
        num_nodes, num_channels, tokens = job.num_nodes, NUM_SMS // 2, job.num_tokens
        hints = [
            (
                config.ring_bytes(job.combine_row_bytes, num_ranks),
                config.get_rdma_buffer_size_hint(job.combine_row_bytes, num_ranks),
            )
            for config in configs_of(num_ranks, NUM_SMS)
        ]
        nvl, rdma = (max(sizes) for sizes in zip(*hints, strict=True))
        words = 0
        if num_nodes > 1:
            words = _core.Engine.rail_workspace_bytes(
                num_nodes=num_nodes, ranks_per_node=job.num_local, num_max_experts=job.num_experts
            )
        # is_token_in_rank, send_rdma_head and the matrices by channel; what a row adds is left out
        handle = tokens * (num_ranks + 4 * num_nodes) + 8 * num_channels * (num_ranks + num_nodes)
        low = region_bytes(num_ranks, DECODE_TOKENS, job.hidden, num_nodes > 1)
        rows.append(
            [
                str(num_ranks),
                f"{nvl / 2**20:.0f}",
                f"{rdma / 2**20:.0f}",
                f"{words / 2**20:.2f}",
                f"{handle / 2**20:.2f}",
                f"{low / 2**20:.0f}",
                f"{(num_nodes - 1) * NUM_QPS}",
                f"{(num_ranks - job.num_local) * NUM_QPS}",
            ]
        )
    return markdown(
        [
            "ranks", "`num_nvl_bytes` MiB", "`num_rdma_bytes` MiB", "words MiB", "a handle MiB",
            "low-latency region MiB", "queues to nodes", "and, for low latency, to ranks",
        ],
        rows,
    )  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "compare": compare,
    "time": time,
    "skew": skew,
    "sms": sms,
    "decode": decode,
    "bytes": bytes_per_tier,
    "memory": memory,
}
