"""The log of calls by level."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_buffers import on_buffers

import deep_comm
from deep_comm import local, log
from deep_comm.settings import env

SHAPE: dict[str, Any] = dict(hidden=128, num_experts=4, num_topk=2, max_tokens=8)
CALLS = ("get_dispatch_layout", "dispatch", "combine", "low_latency_dispatch",
         "low_latency_combine", "barrier")  # fmt: skip


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    yield
    log.logger.setLevel(logging.NOTSET)


def calls(group: Any) -> bool:
    """Whether the Buffer's methods are those of the library's class."""
    with deep_comm.Buffer.for_shape(
        group, **SHAPE, device="cpu", enable_shrink=True, timeout_s=30
    ) as buffer:
        x, weights = torch.randn(3, 128).bfloat16(), torch.ones(3, 2)
        idx = torch.tensor([[0, 1], [2, 3], [0, 3]])
        buffer.get_dispatch_layout(idx, 4)
        sent = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=4)
        assert type(sent) is deep_comm.DispatchResult
        buffer.combine(sent.recv_x, sent.handle)
        few = buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False)
        rows = buffer.get_next_low_latency_combine_buffer(few.handle)
        buffer.low_latency_combine(rows, idx, weights, few.handle, zero_copy=True)
        buffer.barrier()
        buffer.low_latency_clean_mask_buffer()
        buffer.reset()
        return type(buffer) is deep_comm.Buffer


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [it.getMessage() for it in caplog.records if it.levelno == level and
            it.name == "deep_comm"]  # fmt: skip


def test_nothing_is_said_or_wrapped_by_default(caplog: pytest.LogCaptureFixture) -> None:
    assert local.run(calls, 2, timeout_s=60) == [True, True]
    assert not lines(caplog, logging.INFO) and not lines(caplog, logging.DEBUG)


def test_info_has_a_line_for_a_buffer_and_for_what_changes_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_LOG", "INFO")
    assert local.run(calls, 2, timeout_s=60) == [True, True]
    said = lines(caplog, logging.INFO)
    built = [line for line in said if " is built: " in line]
    assert len(built) == 2  # one per rank
    for line in built:
        assert f"of deep_comm {deep_comm.__version__} is built: one node; normal and low-l" in line
        assert "MiB" in line and "receive region" in line and line.startswith("<Buffer: rank ")
        assert line.endswith(f"from {os.path.dirname(deep_comm.__file__)}")
    for words in ("is reset; absent ranks: []", "takes back all ranks", "bytes for combine(zero"):
        assert sum(words in line for line in said) == 2, words
    assert not lines(caplog, logging.DEBUG)


def test_the_line_of_a_buffer_says_through_what_it_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from deep_comm.compat.elastic import ElasticBuffer
    from deep_comm.compat.legacy import Buffer

    log.logger.setLevel(logging.INFO)

    def build(group: Any) -> None:
        Buffer(group, 1 << 20, device="cpu").destroy()
        ElasticBuffer(group, 8 << 20, device="cpu").destroy()
        size = deep_comm.Buffer.get_low_latency_rdma_size_hint(8, 128, 1, 4)
        deep_comm.Buffer(group, 0, size, low_latency_mode=True, device="cpu").destroy()

    local.run(build, 1, timeout_s=60)
    said = [re.search(r" is built(.*?): one node; (.*?);", it) for it in
            lines(caplog, logging.INFO)]  # fmt: skip
    assert [found.groups() for found in said if found] == [
        (" for deep_ep.Buffer", "normal calls"),
        (" for deep_ep.ElasticBuffer", "normal calls"),
        ("", "low-latency calls"),
    ]


def test_debug_has_a_line_for_each_call_with_sizes_and_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.logger.setLevel(logging.DEBUG)  # as a program does
    assert local.run(calls, 2, timeout_s=60) == [False, False]
    said = lines(caplog, logging.DEBUG)
    for name in CALLS:
        for rank in range(2):
            assert sum(line.startswith(f"rank {rank}: Buffer.{name}(") for line in said) == 1, name
    assert not any("tensor(" in line for line in said)
    (line, _) = [line for line in said if ": Buffer.dispatch(" in line]
    assert "(bfloat16 [3, 128], topk_idx=int64 [3, 2], topk_weights=float32 [3, 2]" in line
    assert re.search(
        r"-> DispatchResult\(.*\) by dispatch_(direct|rings), \d+ us on the host$", line
    )


def test_a_buffer_that_nothing_else_holds_can_be_called(caplog: pytest.LogCaptureFixture) -> None:
    log.logger.setLevel(logging.DEBUG)
    local.run(lambda group: deep_comm.Buffer(group, 1 << 20, device="cpu").barrier(), 1)
    (line,) = lines(caplog, logging.DEBUG)
    assert line.startswith("rank 0: Buffer.barrier() -> None")


def test_a_call_that_raises_has_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    log.logger.setLevel(logging.DEBUG)

    def waits(buffer: deep_comm.Buffer) -> None:
        if buffer.rank == 1:
            with pytest.raises(deep_comm.PeerTimeout):
                buffer.barrier()
        both.wait()

    both = threading.Barrier(2)
    on_buffers(waits, 2, 1 << 20, timeout_s=0.5)
    (line,) = lines(caplog, logging.DEBUG)
    assert re.search(r"^rank 1: Buffer.barrier\(\) raised PeerTimeout, \d+ us on the host$", line)


def test_a_layer_says_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    log.logger.setLevel(logging.DEBUG)

    def steps(group: Any) -> None:
        with deep_comm.ExpertParallel(
            group, **SHAPE, mode="prefill", device="cpu", timeout_s=30
        ) as layer, torch.no_grad():  # fmt: skip
            x, idx = torch.randn(1, 128).bfloat16(), torch.tensor([[0, 1]])
            layer(x, idx, torch.ones(1, 2), lambda batch: batch.x)

    local.run(steps, 2, timeout_s=60)
    (line, _) = [it for it in lines(caplog, logging.DEBUG) if "ExpertParallel.forward(" in it]
    assert "bfloat16 [1, 128]" in line and re.search(r" by dispatch_\w+, combine_\w+, \d+ us", line)
    assert sum("is built over <Buffer" in it for it in lines(caplog, logging.INFO)) == 2


def test_a_buffer_that_is_watched_ends_with_its_last_reference() -> None:
    log.logger.setLevel(logging.DEBUG)

    def ends(group: Any) -> bool:
        buffer = deep_comm.Buffer(group, 1 << 20, device="cpu")
        finalizer = buffer._finalizer
        del buffer
        return not finalizer.alive

    assert local.run(ends, 1, timeout_s=60) == [True]


def test_a_level_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_LOG", "loud")
    with pytest.raises(deep_comm.ArgumentError, match="must be warning, info or debug"):
        env.LOG.get()


def test_a_program_without_handlers_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from deep_comm import local, Buffer\n"
        "def main(group):\n    Buffer(group, 1 << 20, device='cpu').destroy()\n"
        "local.run(main, 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/",
        env={**os.environ, "DEEP_COMM_LOG": "info"},
    )  # fmt: skip
    assert done.returncode == 0
    assert "INFO deep_comm[" in done.stderr and done.stderr.count(" is built: ") == 1
