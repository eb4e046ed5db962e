"""Calls while a Buffer is reset, destroyed or in another call, and errors that are raised again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import deep_comm
from deep_comm import errors, local
from deep_comm.layer.mode import ModeRule

HIDDEN, EXPERTS, TOPK, TOKENS = 256, 8, 2, 4


def dispatch_of(buffer: deep_comm.Buffer) -> Callable[[], Any]:
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    idx = torch.randint(0, EXPERTS, (TOKENS, TOPK))
    weights = torch.rand(TOKENS, TOPK)
    return lambda: buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS)


def prefill_of(buffer: deep_comm.Buffer) -> tuple[deep_comm.ExpertParallel, Tensor, Tensor]:
    """A layer, x and topk_idx."""
    layer = deep_comm.ExpertParallel(
        hidden=HIDDEN, num_experts=EXPERTS, num_topk=TOPK, max_tokens=TOKENS,
        mode="prefill", buffer=buffer,
    )  # fmt: skip
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    return layer, x, torch.randint(0, EXPERTS, (TOKENS, TOPK))


def raised_in_a_thread(call: Callable[[], Any]) -> type[BaseException] | None:
    raised: list[type[BaseException]] = []

    def run() -> None:
        try:
            call()
        except errors.DeepCommError as error:
            raised.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_no_call_begins_while_a_buffer_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(group: Any) -> type[BaseException] | None:
        buffer = deep_comm.Buffer(group, 1 << 20, device="cpu", timeout_s=5)
        call = dispatch_of(buffer)
        call()
        seen: list[type[BaseException] | None] = []
        # On CUDA devices the Buffer waits for its kernels here, and other threads run.
        monkeypatch.setattr(
            buffer._context, "synchronize", lambda: seen.append(raised_in_a_thread(call))
        )
        buffer.destroy()
        return seen[0]

    assert local.run(main, 1) == [errors.BufferDestroyed]


def test_memory_is_not_freed_before_kernels_end_although_the_wait_is_interrupted() -> None:
    def main(group: Any) -> list[str]:
        buffer = deep_comm.Buffer(group, 1 << 20, device="cpu", timeout_s=5)
        context, done = buffer._context, []
        free = context.heap.close

        def synchronize() -> None:
            done.append("waited")
            if len(done) == 1:
                raise KeyboardInterrupt

        context.synchronize = synchronize  # type: ignore[method-assign]
        context.heap.close = lambda: (done.append("freed"), free())  # type: ignore
        with pytest.raises(KeyboardInterrupt):
            buffer.destroy()
        return done

    assert local.run(main, 1) == [["waited", "waited", "freed"]]


def test_no_call_begins_while_a_buffer_is_reset() -> None:
    def main(group: Any) -> type[BaseException] | None:
        with deep_comm.Buffer(group, 1 << 20, device="cpu", timeout_s=5) as buffer:
            call, seen = dispatch_of(buffer), []
            call()
            engine_reset = buffer._context.engine.reset
            intrude = lambda: seen.append(raised_in_a_thread(call))
            buffer._context._reset(lambda: (intrude(), engine_reset()))
            call()
            return seen[0]

    assert local.run(main, 2) == [errors.BufferInUse] * 2


def test_no_other_thread_takes_the_record_of_a_call() -> None:
    def main(group: Any) -> type[BaseException] | None:
        with deep_comm.Buffer(group, 1 << 20, device="cpu", timeout_s=20) as buffer:
            if group.rank() == 1:
                group.barrier()
                return raised_in_a_thread(buffer.barrier)
            waits = threading.Thread(target=buffer.barrier)
            waits.start()
            while not buffer._context.native_calls.is_in_use:
                pass
            seen = raised_in_a_thread(buffer.check)
            group.barrier()  # now the peer may come
            waits.join()
            buffer.check()
            return seen

    assert local.run(main, 2) == [errors.BufferInUse, None]


def test_what_was_refused_because_of_another_thread_can_be_received_later() -> None:
    def main(group: Any) -> int:
        with deep_comm.Buffer(group, 1 << 20, device="cpu", timeout_s=20) as buffer:
            layer, x, idx = prefill_of(buffer)
            with torch.no_grad():
                sent = layer.dispatch_async(x, idx, torch.rand(TOKENS, TOPK))
                if group.rank() == 0:
                    waits = threading.Thread(target=buffer.barrier)
                    waits.start()
                    while not buffer._context.native_calls.is_in_use:
                        pass
                    with pytest.raises(errors.BufferInUse):
                        sent.result()
                    group.barrier()  # now the peer may come
                    waits.join()
                else:
                    group.barrier()
                    buffer.barrier()
                batch = sent.result()
                assert layer.combine(batch, batch.x).shape == x.shape
            return int(batch.num_tokens_per_expert.sum())

    assert sum(local.run(main, 2)) == 2 * TOKENS * TOPK


def test_a_step_that_was_refused_half_way_goes_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode exchange has been received, and says that prefill must follow."""
    learn, between = ModeRule.learn, threading.local()

    def learn_and_wait(rule: ModeRule, most_tokens: int) -> bool:
        were_few = learn(rule, most_tokens)
        getattr(between, "step", lambda: None)()
        return were_few

    monkeypatch.setattr(ModeRule, "learn", learn_and_wait)

    def main(group: Any) -> str:
        with deep_comm.ExpertParallel(
            group, hidden=64, num_experts=4, num_topk=TOPK, max_tokens=16, decode_tokens=4,
            device="cpu", timeout_s=20,
        ) as layer, torch.no_grad():  # fmt: skip
            num_tokens = 9 if group.rank() == 0 else 2
            idx = torch.arange(num_tokens * TOPK).view(num_tokens, TOPK) % 4
            sent = layer.dispatch_async(
                torch.ones(num_tokens, 64, dtype=torch.bfloat16), idx, torch.ones(idx.shape)
            )
            if group.rank() == 0:
                waits = threading.Thread(target=layer.buffer.barrier)

                def enter_a_barrier() -> None:
                    waits.start()
                    while not layer.buffer._context.native_calls.is_in_use:
                        pass

                between.step = enter_a_barrier
                with pytest.raises(errors.BufferInUse):
                    sent.result()
                del between.step
                group.barrier()  # now the peer may come
                waits.join()
            else:
                group.barrier()
                layer.buffer.barrier()
            batch = sent.result()
            assert sum(batch.counts) == int((batch.num_tokens_per_expert).sum())
            layer.combine(batch, batch.x)
            return batch.mode

    assert local.run(main, 2) == ["prefill", "prefill"]


def test_an_error_that_is_kept_can_be_raised_again() -> None:
    def main(group: Any) -> int:
        with deep_comm.Buffer(
            group, 1 << 20, device="cpu", timeout_s=0.5, num_direct_bytes=0
        ) as buffer:
            layer, x, idx = prefill_of(buffer)
            with torch.no_grad():
                sent = layer.dispatch_async(x, idx, torch.rand(TOKENS, TOPK))
            receive, num_raised = sent._finish, 0
            assert receive is not None
            while group.rank() == 0 and num_raised < 3:  # the peer never receives
                with pytest.raises(errors.PeerTimeout):
                    receive()
                num_raised += 1
            group.barrier()
            return num_raised

    assert local.run(main, 2) == [3, 0]


@pytest.mark.parametrize("direct_bytes", [0, 1 << 18])
def test_a_bad_index_of_a_low_latency_call_is_raised_before_the_next_call_launches(
    direct_bytes: int,
) -> None:
    def main(group: Any) -> type[BaseException] | None:
        hint = deep_comm.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, 2, EXPERTS)
        with deep_comm.Buffer(
            group, 1 << 20, hint, low_latency_mode=True, device="cpu", timeout_s=20,
            num_direct_bytes=direct_bytes,
        ) as buffer:  # fmt: skip
            x = torch.randn(TOKENS, HIDDEN).bfloat16()
            idx = torch.randint(0, EXPERTS, (TOKENS, TOPK))
            if group.rank() == 0:
                idx[0, 0] = 99
            sent = buffer.low_latency_dispatch(
                x, idx, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
            )
            call, raised = dispatch_of(buffer), None
            try:
                result = call()
            except errors.ExpertIndexError as error:
                raised = type(error)
                result = call()  # nothing was launched, and the peer waits
            with pytest.raises(errors.ArgumentError):
                buffer.reset(without=[group.rank()])  # refused, so that the hook stays
            sent.hook()
            buffer.combine(result.recv_x, result.handle)
            return raised

    assert local.run(main, 2) == [errors.ExpertIndexError, None]
