"""dispatch_async of the layer returns before anybody knows how many rows come: the host waits for
the counts in ``result()``, or in the Buffer's next operation.

On the host target a launch is the kernel's run. So these tests run the CUDA backend over stubbed
driver calls (fake_cuda), which defer launches from a notify on, until the host waits for its
counts. Other launches end before they return, since torch's memory on the host knows no streams.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import fake_cuda
import pytest
import torch
from fake_cuda import COMM, COMPUTE
from run_by import run_by

import deep_comm
from deep_comm import local
from deep_comm.errors import ArgumentError, BufferDestroyed, ExpertIndexError, PeerTimeout
from deep_comm.reference import layer as reference_layer

H, E, K, MOST = 64, 6, 2, 40
OTHER = 33
R = 3


@contextlib.contextmanager
def asynchronous() -> Iterator[None]:
    with fake_cuda.installed() as log, pytest.MonkeyPatch.context() as patch:
        log.is_silent = log.defers = True
        backend = sys.modules["deep_comm.backends.cuda"].CudaBackend
        create = backend.create_engine

        def create_engine(self: Any, *arguments: Any, **named: Any) -> Any:
            self.engine = create(self, *arguments, **named)
            return self.engine

        patch.setattr(backend, "create_engine", create_engine)
        patch.setattr(backend, "synchronize", lambda self: self.engine.drain())
        yield


class Group(NamedTuple):
    ranks_per_node: int
    is_warm: bool  # calls have been made before


@pytest.fixture(
    params=[Group(R, False), Group(R, True), Group(1, False)],
    ids=["one_node", "one_node_warm", "three_nodes"],
)
def nodes(request: pytest.FixtureRequest) -> Group:
    return request.param


def on_ranks(
    body: Callable[[Any, int], Any], nodes: Group, timeout_s: float = 20, alignment: int = 1
) -> list[Any]:
    def main(group: local.ThreadGroup) -> Any:
        with deep_comm.Buffer(
            group, 8 << 20, 8 << 20, num_direct_bytes=4 << 20, timeout_s=timeout_s,
            ranks_per_node=nodes.ranks_per_node,
        ) as buffer:  # fmt: skip
            layer = layer_on(buffer, group, alignment)
            if nodes.is_warm:
                with torch.no_grad():
                    finished(layer, layer.dispatch(*inputs(group.rank(), 2)))
            return body(layer, group.rank())

    with asynchronous():
        return local.run(main, R, timeout_s=120)


def layer_on(buffer: Any, group: Any, alignment: int = 1) -> Any:
    return deep_comm.ExpertParallel(
        group, hidden=H, num_experts=E, num_topk=K, max_tokens=MOST, mode="prefill",
        buffer=buffer, expert_alignment=alignment,
    )  # fmt: skip


def inputs(rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    num_tokens = (0, 7, MOST)[(rank + step) % 3]
    x = torch.randn(num_tokens, H, generator=generator).bfloat16()
    idx = torch.rand(num_tokens, E, generator=generator).topk(K).indices
    return x, idx, torch.rand(num_tokens, K, generator=generator)


def expert(index: int, rows: torch.Tensor) -> torch.Tensor:
    return rows * (1 + index)


def finished(layer: Any, batch: Any) -> torch.Tensor:
    return layer.combine(batch, batch.map(expert))


def verify(results: list[torch.Tensor], step: int = 0) -> None:
    parts = zip(*(inputs(rank, step) for rank in range(R)), strict=True)
    for got, want in zip(results, reference_layer.expert_parallel(*parts, E, expert), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_call_returns_before_the_peers_have_announced(
    needs_grad: bool, alignment: int, nodes: Group
) -> None:
    returned = threading.Barrier(R)

    def body(layer: Any, rank: int) -> Any:
        x, idx, weights = inputs(rank)
        x.requires_grad_(needs_grad)
        for is_first in (True, False):  # the second time the region knows how many rows come
            if rank == 0:
                returned.wait(20)  # the others are back from their calls
                time.sleep(0.3)
            began = time.perf_counter()
            sent = layer.dispatch_async(x, idx, weights)
            if rank != 0:
                assert is_first or time.perf_counter() - began < 0.25
                assert layer.buffer._context.native_calls.has_pending
                returned.wait(20)
            batch = sent.result()
            assert not layer.buffer._context.native_calls.has_pending and sent.result() is batch
            assert batch.x.requires_grad == needs_grad
            y = finished(layer, batch)
        return y.detach()

    verify(on_ranks(body, nodes, alignment=alignment))


def test_gradients_begin_where_rows_are_received(nodes: Group) -> None:
    def body(layer: Any, rank: int) -> None:
        seen = []
        for is_async in (False, True):
            x, idx, weights = inputs(rank)
            x.requires_grad_()
            weights.requires_grad_()
            if is_async:
                sent = layer.dispatch_async(x, idx, weights)
                with torch.no_grad():  # as a caller may be by then
                    batch = sent.result()
            else:
                batch = layer.dispatch(x, idx, weights)
            y = layer.combine(batch, batch.x * 1.5)
            seen.append((y.detach(), batch.x.grad_fn is not None, batch.state.weights.detach()))
        (y, has_graph, row_weights), (late_y, late_has_graph, late_weights) = seen
        assert has_graph and late_has_graph
        assert torch.equal(y, late_y) and torch.equal(row_weights, late_weights)

    on_ranks(body, nodes)


def test_the_next_operation_ends_the_one_before(nodes: Group) -> None:
    def body(layer: Any, rank: int) -> list[torch.Tensor]:
        native = layer.buffer._context.native_calls
        one = layer.dispatch_async(*inputs(rank, 0))
        other = layer.dispatch_async(*inputs(rank, 1))
        assert native.has_pending
        other_first = other.result()
        assert not native.has_pending and other.result() is other_first
        batches = [one.result(), other.result()]
        return [finished(layer, batch) for batch in batches]

    results = on_ranks(body, nodes)
    for step in (0, 1):
        verify([ys[step] for ys in results], step)


def test_a_dropped_dispatch_keeps_its_memory_until_the_next_operation(nodes: Group) -> None:
    def body(layer: Any, rank: int) -> torch.Tensor:
        ctx = layer.buffer._context
        free = ctx.region.num_free_bytes
        x, idx, weights = inputs(rank, 1)
        layer.dispatch_async(x, idx, weights)
        assert ctx.native_calls.has_pending
        # Without tokens nobody knew of any, and nothing was reserved.
        assert (ctx.region.num_free_bytes < free) == (len(x) > 0 or nodes.is_warm)
        return finished(layer, layer.dispatch(*inputs(rank, 0)))

    verify(on_ranks(body, nodes))


def test_a_dispatch_that_cannot_be_kept_is_not_launched(
    nodes: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises while the call is made: nothing has happened, and the rank may call again."""
    is_enabled, here = torch.is_inference_mode_enabled, threading.local()

    def ask() -> bool:
        if getattr(here, "raises", False):
            raise MemoryError
        return is_enabled()

    # A Buffer takes it when it is made.
    monkeypatch.setattr(torch, "is_inference_mode_enabled", ask)

    def body(layer: Any, rank: int) -> torch.Tensor:
        context = layer.buffer._context
        num_launches = context.engine.num_launches
        if rank == 1:
            here.raises = True
            with pytest.raises(MemoryError):
                layer.dispatch_async(*inputs(rank))
            here.raises = False
            assert context.engine.num_launches == num_launches
            assert not context.native_calls.has_pending
        return finished(layer, layer.dispatch_async(*inputs(rank)).result())

    with torch.no_grad():
        verify(on_ranks(body, nodes))


def test_a_silent_peer_is_named_by_result(nodes: Group) -> None:
    meet = threading.Barrier(R)

    def body(layer: Any, rank: int) -> torch.Tensor:
        if rank != 0:
            sent = layer.dispatch_async(*inputs(rank))
            for _ in range(2):
                with pytest.raises(PeerTimeout) as caught:
                    sent.result()
                assert caught.value.peer == 0
        meet.wait(30)
        layer.reset()
        return finished(layer, layer.dispatch_async(*inputs(rank)).result())

    verify(on_ranks(body, nodes, timeout_s=0.5))


def test_an_error_is_raised_by_result_and_not_by_the_operation_that_came_between(
    nodes: Group,
) -> None:
    def body(layer: Any, rank: int) -> torch.Tensor:
        x, idx, weights = inputs(rank, 1)
        wrong = idx.clone()
        if rank == 0:
            wrong[3, 1] = E
        sent = layer.dispatch_async(x, wrong, weights)
        y = finished(layer, layer.dispatch(*inputs(rank)))
        with pytest.raises(ExpertIndexError):
            sent.result()
        return y

    verify(on_ranks(body, nodes))


def test_what_is_pending_outlives_an_error_of_a_low_latency_call() -> None:
    """That error is cleared, since all ranks are in step. The result of notify must stay."""

    def main(group: local.ThreadGroup) -> torch.Tensor:
        num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(MOST, H, R, E)
        with deep_comm.Buffer(
            group, 8 << 20, num_bytes, low_latency_mode=True, num_direct_bytes=0, device="cpu",
            timeout_s=20,
        ) as buffer:  # fmt: skip
            layer = layer_on(buffer, group)
            sent = layer.dispatch_async(*inputs(group.rank()))
            assert buffer._context.native_calls.has_pending
            x, wrong = torch.zeros(1, H, dtype=torch.bfloat16), torch.full((1, K), E)
            with pytest.raises(ExpertIndexError):
                buffer.low_latency_dispatch(x, wrong, MOST, E, use_fp8=False)
            return finished(layer, sent.result())

    verify(local.run(main, R, timeout_s=120))


def test_what_is_pending_at_a_reset_or_at_the_end_is_refused_afterwards(nodes: Group) -> None:
    def body(layer: Any, rank: int) -> Any:
        sent = layer.dispatch_async(*inputs(rank))
        layer.reset()
        with pytest.raises(ArgumentError, match=r"reset\(\)"):
            sent.result()
        y = finished(layer, layer.dispatch_async(*inputs(rank)).result())
        return y, layer.dispatch_async(*inputs(rank))

    results = on_ranks(body, nodes)
    verify([y for y, _ in results])
    for _, sent in results:
        with pytest.raises(BufferDestroyed):
            sent.result()


# ---- streams -----------------------------------------------------------------------------------


def _logged(body: Callable[[Any, Any], None], **options: Any) -> None:
    """One rank whose launches run at once, and what its streams were told."""

    def main(group: Any) -> None:
        with deep_comm.Buffer(group, 8 << 20, timeout_s=20, **options) as buffer:
            layer = layer_on(buffer, group)
            log.clear()
            log.kernels.clear()
            body(layer, log)

    with fake_cuda.installed() as log:
        local.run(main, 1, timeout_s=60)


@pytest.mark.parametrize("is_warm", [False, True])
@run_by(_logged, num_direct_bytes=4 << 20)
def test_the_host_waits_in_result_behind_all_that_was_launched(
    layer: Any, log: Any, /, is_warm: bool
) -> None:
    if is_warm:
        layer.dispatch_async(*inputs(1)).result()
        log.clear()
    sent = layer.dispatch_async(*inputs(1))
    launched = [("notify", COMM), ("dispatch", COMM)]
    assert [entry for entry in log if entry[0] in ("notify", "dispatch")] == launched
    assert ("wait_counts",) not in log
    log.work("shared experts")
    log.current = OTHER
    log.clear()
    sent.result()
    assert log[0] == ("wait_counts",) and log.current == OTHER
    assert ("order", COMPUTE, COMM) not in log  # rows move beside the shared experts
    assert "shared experts" not in log.known[COMM]
    log.current = COMPUTE


def test_rows_that_could_not_leave_at_once_are_moved_by_result() -> None:
    """One rank gets more than anybody could expect."""

    def body(layer: Any, rank: int) -> Any:
        x, idx, weights = inputs(rank, 1)
        sent = layer.dispatch_async(x, torch.zeros_like(idx), weights)
        assert layer.buffer._context.native_calls.has_pending
        batch = sent.result()
        assert batch.x.shape[0] == (K * (MOST + 7) if rank == 0 else 0)
        y = finished(layer, batch)
        want = (x.float() * weights.sum(1, keepdim=True)).bfloat16()
        return (y.float() - want.float()).abs().max().item() if len(x) > 0 else 0.0

    assert max(on_ranks(body, Group(R, True))) < 0.1


@run_by(_logged, num_direct_bytes=0)
def test_memory_that_is_taken_late_is_written_behind_the_callers_work(
    layer: Any, log: Any, /
) -> None:
    sent = layer.dispatch_async(*inputs(1))
    assert "dispatch" not in log.names()  # there is no region for rows that nobody has counted
    log.work("shared experts")
    sent.result()
    assert "dispatch" in log.names()
    stream, known = log.kernels[-1]
    assert stream == COMM and "shared experts" in known
