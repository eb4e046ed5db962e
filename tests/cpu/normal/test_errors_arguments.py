"""Bad arguments: errors that name argument, value and rule; nothing launched, nothing lost."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_buffers import on_buffers
from run_by import run_by

import deep_comm
from deep_comm import (
    AllocationError,
    ArgumentError,
    Buffer,
    BufferDestroyed,
    BufferTooSmall,
    Config,
    EventHandle,
    EventOverlap,
    ExpertIndexError,
    Handle,
    HandleMismatch,
    TopologyError,
    local,
)
from deep_comm.settings import checks

T, H, K, E = 6, 64, 2, 4


def _alone(body: Callable[[Buffer], Any], **options: Any) -> Any:
    """``body(buffer)`` on a group of one rank, where every call can be made without partners."""
    return on_buffers(body, 1, **{"num_nvl_bytes": 1 << 20, **options})[0]


def _inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(T, H, generator=generator).to(torch.bfloat16),
        "topk_idx": torch.randint(0, E, (T, K), generator=generator),
        "topk_weights": torch.rand(T, K, generator=generator),
    }


def _layout(buffer: Buffer, topk_idx: torch.Tensor) -> dict[str, torch.Tensor]:
    per_rank, _, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(topk_idx, E)
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": is_token_in_rank,
    }


def _require_refusal(
    buffer: Buffer, call: Callable[[], Any], argument: str, *fragments: str
) -> ArgumentError:
    launches = buffer.runtime.num_launches
    with pytest.raises(ArgumentError) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert caught.value.argument == argument
    for fragment in (argument, *fragments):
        assert fragment in str(caught.value)
    assert buffer.runtime.num_launches == launches
    return caught.value


def _require_working(buffer: Buffer) -> None:
    given = _inputs()
    recv_x, _, _, _, handle, _ = buffer.dispatch(**given, **_layout(buffer, given["topk_idx"]))
    assert torch.equal(recv_x, given["x"])
    assert torch.equal(buffer.combine(recv_x, handle)[0], given["x"])


STRIDED = torch.zeros(T, 2 * H, dtype=torch.bfloat16)[:, ::2]


def bad(argument: str, value: Any, *fragments: str, **others: Any) -> tuple[Any, ...]:
    """What is given, which argument the error names, and what else it says."""
    return {argument: value, **others}, argument, *fragments


DISPATCH_CASES = {
    "x of a list": bad("x", [1, 2, 3], "3 items"),
    "x of a string": bad("x", "tokens", "str"),
    "x of one dimension": bad("x", torch.zeros(T * H), "[tokens, hidden]"),
    "x not contiguous": bad("x", STRIDED, "contiguous"),
    "x of 24-byte rows": bad("x", torch.zeros(T, 6), "24 bytes"),
    "x without columns": bad("x", torch.zeros(T, 0), "0 bytes"),
    "x on another device": bad("x", torch.zeros(T, H, device="meta"), "meta"),
    "scales of other rows": (
        {"x": (torch.zeros(T, H), torch.zeros(T + 1, 2))},
        "x_scales",
        f"[{T + 1}, 2]",
    ),
    "scales of 16 bytes": (
        {"x": (torch.zeros(T, H), torch.zeros(T, 2, dtype=torch.complex128))},
        "x_scales",
        "complex128",
    ),
    "scales without columns": ({"x": (torch.zeros(T, H), torch.zeros(T, 0))}, "x_scales", "column"),
    "topk_idx of int16": bad("topk_idx", torch.zeros(T, K, dtype=torch.int16), "torch.int16"),
    "topk_idx of other rows": bad(
        "topk_idx", torch.zeros(T - 1, K, dtype=torch.int64), f"[{T}, top-k]"
    ),
    "topk_idx of 65 columns": bad(
        "topk_idx", torch.zeros(T, 65, dtype=torch.int64), "64 columns", topk_weights=None
    ),
    "topk_weights of float64": bad(
        "topk_weights", torch.zeros(T, K, dtype=torch.float64), "torch.float64"
    ),
    "topk_weights of another K": bad("topk_weights", torch.zeros(T, K + 1), "[6, 2]"),
    "topk_weights alone": ({"topk_idx": None}, "topk_weights", "topk_idx"),
    "no layout": bad("num_tokens_per_rank", None, "needed"),
    "neither layout nor num_experts": (
        dict.fromkeys(("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert")),
        "num_experts",
        "needed with topk_idx",
    ),
    "topk_idx in the place of the handle": bad(
        "handle",
        torch.zeros(T, K, dtype=torch.int64),
        "pass topk_idx by name",
        topk_idx=None,
        topk_weights=None,
    ),
    "layout of int64": bad("num_tokens_per_rank", torch.zeros(1, dtype=torch.int64), "torch.int64"),
    "layout of two ranks": bad("num_tokens_per_rank", torch.zeros(2, dtype=torch.int32), "[2]"),
    "mask of bytes": bad("is_token_in_rank", torch.zeros(T, 1, dtype=torch.uint8), "torch.uint8"),
    "mask of other rows": bad(
        "is_token_in_rank", torch.zeros(T + 2, 1, dtype=torch.bool), f"[{T}, 1]"
    ),
    "num_experts beside another layout": bad("num_experts", E + 1, "5"),
    "alignment 0": bad("expert_alignment", 0, "0"),
    "alignment whose sums would wrap": bad(
        "expert_alignment", 1 << 30, "65536", num_worst_tokens=64
    ),
    "num_worst_tokens of 2**31": bad("num_worst_tokens", 1 << 31, "2147483648"),
    "num_experts of a text": bad("num_experts", "4", "'4' of type str"),
    "num_worst_tokens -1": bad("num_worst_tokens", -1, "-1"),
    "config of a dict": bad("config", {"num_sms": 2}, "dict"),
    "config of no SMs": ({"config": Config(0)}, "config.num_sms", "0"),
    "config of too many SMs": ({"config": Config(514)}, "config.num_sms", "514"),
    "previous_event of a number": bad("previous_event", 3, "int"),
    "allocate_on_comm_stream alone": bad("allocate_on_comm_stream", True, "previous_event"),
    "allocate_on_comm_stream and synchronous": bad(
        "allocate_on_comm_stream",
        True,
        "async_finish=False",
        previous_event=EventOverlap(EventHandle()),
    ),
    "allocate_on_comm_stream after no event": bad(
        "allocate_on_comm_stream",
        True,
        "previous_event=None",
        previous_event=EventOverlap(None),
        async_finish=True,
    ),
}


@pytest.mark.parametrize("name", DISPATCH_CASES)
def test_dispatch_names_a_bad_argument_and_launches_nothing(name: str) -> None:
    changed, argument, *fragments = DISPATCH_CASES[name]

    def body(buffer: Buffer) -> None:
        given = _inputs()
        arguments = {**given, **_layout(buffer, given["topk_idx"]), **changed}
        _require_refusal(buffer, lambda: buffer.dispatch(**arguments), argument, *fragments)
        _require_working(buffer)

    _alone(body)


COMBINE_CASES = {
    "x of integers": bad("x", torch.zeros(T, H, dtype=torch.int32), "torch.int32"),
    "x not contiguous": bad("x", STRIDED, "contiguous"),
    "x of 24-byte rows": bad("x", torch.zeros(T, 6), "24 bytes"),
    "x of other rows": (
        {"x": torch.zeros(T + 1, H, dtype=torch.bfloat16)},
        "handle",
        "6 received rows",
    ),
    "weights of other rows": bad("topk_weights", torch.zeros(T + 1, K), "[6, top-k]"),
    "weights of float16": bad(
        "topk_weights", torch.zeros(T, K, dtype=torch.float16), "torch.float16"
    ),
    "bias of another dtype": bad("bias", torch.zeros(T, H), "torch.float32"),
    "bias of other rows": bad("bias", torch.zeros(T - 1, H, dtype=torch.bfloat16), "[6, 64]"),
    "three biases": bad("bias", (None, None, None), "3 items"),
    "second bias of another shape": (
        {"bias": (None, torch.zeros(T, 2, dtype=torch.bfloat16))},
        "bias[1]",
        "[6, 64]",
    ),
    "no handle": bad("handle", None, "NoneType", "with a handle returns none"),
    "a tuple of five": bad("handle", (None,) * 5, "5 items"),
    "another channel count": ({"config": Config(4, 1, 1)}, "handle", "1 channels"),
}


@pytest.mark.parametrize("name", COMBINE_CASES)
def test_combine_names_a_bad_argument_and_launches_nothing(name: str) -> None:
    changed, argument, *fragments = COMBINE_CASES[name]

    def body(buffer: Buffer) -> None:
        given = _inputs()
        recv_x, _, _, _, handle, _ = buffer.dispatch(**given, **_layout(buffer, given["topk_idx"]))
        arguments = {"x": recv_x, "handle": handle, **changed}
        _require_refusal(buffer, lambda: buffer.combine(**arguments), argument, *fragments)
        assert torch.equal(buffer.combine(recv_x, handle)[0], given["x"])

    _alone(body)


@run_by(_alone, num_max_experts=32)
def test_layout_names_a_bad_argument(buffer: Buffer, /) -> None:
    idx = _inputs()["topk_idx"]
    for value, experts, argument in (
        (idx.float(), E, "topk_idx"),
        (idx[0], E, "topk_idx"),
        (idx[:, :0], E, "topk_idx"),
        (idx.t().contiguous().t(), E, "topk_idx"),
        (None, E, "topk_idx"),
        (idx, 0, "num_experts"),
        (idx, 33, "num_experts"),
        (idx, 4.0, "num_experts"),
    ):
        call = lambda v=value, e=experts: buffer.get_dispatch_layout(v, e)
        _require_refusal(buffer, call, argument)


def test_as_many_experts_as_a_block_has_counters_for() -> None:
    """More than any model has."""
    most = checks.MAX_EXPERTS
    idx = torch.tensor([[0, most - 1], [most // 2, -1]])
    x, weights = torch.ones(2, H, dtype=torch.bfloat16), torch.ones(2, 2)

    def body(buffer: Buffer) -> None:
        rows, _, _, counts, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=most
        )
        assert sum(counts) == 3 and counts[most - 1] == 1
        assert torch.equal(buffer.combine(rows, handle)[0], x)

    _alone(body, num_max_experts=most)


@pytest.mark.parametrize("bad", [E, E + 100, -2, 2**32, 2**32 - 2, -(2**40)])
@run_by(_alone)
def test_an_expert_index_out_of_range_is_named_with_its_place(buffer: Buffer, /, bad: int) -> None:
    idx = _inputs()["topk_idx"]
    idx[3, 1] = bad
    with pytest.raises(ExpertIndexError) as caught:
        buffer.get_dispatch_layout(idx, E)
    assert (caught.value.rank, caught.value.position) == (0, 3 * K + 1)
    assert "topk_idx[3, 1]" in str(caught.value)
    assert (caught.value.num_experts, caught.value.value) == (E, bad)
    assert str(caught.value).endswith(f"got {bad}")
    _require_working(buffer)


@run_by(local.run, 3)
def test_a_handle_is_refused_for_another_token_count_channel_count_or_group(
    group: local.ThreadGroup, /
) -> None:
    given = _inputs()
    buffer = Buffer(group, 1 << 20, device="cpu")
    pair = Buffer(group.subgroup([0, 1]), 1 << 20, device="cpu") if group.rank() < 2 else None
    _, _, _, _, handle, _ = buffer.dispatch(**given, num_experts=E)
    more = torch.zeros(T + 1, H)
    error = _require_refusal(buffer, lambda: buffer.dispatch(more, handle), "handle", "6 tokens")
    assert isinstance(error, HandleMismatch)
    x = given["x"]
    config = Config(4, 1, 1)
    _require_refusal(
        buffer, lambda: buffer.dispatch(x, handle, config=config), "handle", "1 channels"
    )
    if pair is not None:
        _require_refusal(pair, lambda: pair.dispatch(x, handle), "handle", "3 ranks")
    for name in ("topk_idx", "topk_weights"):
        call = lambda n=name: buffer.dispatch(x, handle, **{n: given[n]})
        _require_refusal(buffer, call, name)
    group.barrier()
    buffer.dispatch(x, handle)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_as_many_bytes_of_scales_as_fit_beside_a_row(num_ranks: int) -> None:
    """A call with more says how many, and one with just as many brings them all."""

    def fn(group: Any) -> bool:
        with Buffer(group, 32 << 20, num_direct_bytes=0, device="cpu") as buffer:
            x, topk_idx = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(3, 1).long()

            def dispatch(num_scales: int) -> tuple[torch.Tensor, torch.Tensor]:
                scales = torch.arange(3.0 * num_scales).view(3, num_scales)
                rows = buffer.dispatch((x, scales), topk_idx=topk_idx, num_experts=num_ranks)[0]
                return scales, rows[1]

            with pytest.raises(ValueError, match="scales and top-k of one token take") as raised:
                dispatch(1 << 16)
            most = int(re.search(r"room for (\d+)", str(raised.value))[1]) // 4
            num_refused, num_taken = most + 1, most - 4  # the index, weight and source of a token
            with pytest.raises(ValueError, match="scales and top-k"):
                dispatch(num_refused)
            scales, received = dispatch(num_taken)
            sent = scales.repeat(num_ranks if buffer.rank == 0 else 0, 1)
            return torch.equal(received, sent)

    assert all(local.run(fn, num_ranks, timeout_s=60))


def test_a_buffer_that_is_too_small_says_how_many_bytes_would_do() -> None:
    def body(buffer: Buffer) -> tuple[int, int]:
        given = _inputs()
        layout = _layout(buffer, given["topk_idx"])
        launches = buffer.runtime.num_launches
        with pytest.raises(BufferTooSmall) as caught:
            buffer.dispatch(**given, **layout)
        assert str(caught.value.needed_bytes) in str(caught.value)
        assert buffer.runtime.num_launches == launches
        least = re.search(r"from (\d+) on", str(caught.value))
        assert least is not None
        return int(least[1]), caught.value.needed_bytes

    least, needed = _alone(body, num_nvl_bytes=0)
    assert 0 < least < needed
    for enough in (least, needed):
        _alone(_require_working, num_nvl_bytes=enough)
    assert _alone(body, num_nvl_bytes=least - 1) == (least, needed)


@run_by(_alone, num_nvl_bytes=4096)
def test_a_given_config_that_does_not_fit_is_not_shrunk(buffer: Buffer, /) -> None:
    given = _inputs()
    layout = _layout(buffer, given["topk_idx"])
    with pytest.raises(BufferTooSmall) as caught:
        buffer.dispatch(**given, **layout, config=Config(2, 6, 256))
    assert caught.value.needed_bytes > buffer.num_nvl_bytes
    _require_working(buffer)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"num_nvl_bytes": -1}, "num_nvl_bytes"),
        ({"num_nvl_bytes": 1.5}, "num_nvl_bytes"),
        ({"num_nvl_bytes": 1 << 64}, "num_nvl_bytes"),
        ({"num_nvl_bytes": 8, "num_direct_bytes": 9}, "num_direct_bytes"),
        ({"num_rdma_bytes": -1}, "num_rdma_bytes"),
        ({"low_latency_mode": True}, "num_rdma_bytes"),
        ({"num_qps_per_rank": 0}, "num_qps_per_rank"),
        ({"num_max_experts": 0}, "num_max_experts"),
        ({"num_max_experts": 1 << 40}, "num_max_experts"),
        ({"num_max_experts": (56 << 10) + 1}, "num_max_experts"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"ranks_per_node": "2"}, "ranks_per_node"),
        ({"ranks_per_node": 3}, "ranks_per_node"),
        ({"device": "quantum"}, "device"),
        ({"device": "meta"}, "device"),
    ],
)
def test_the_constructor_names_a_bad_argument(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        _alone(lambda buffer: None, **{"num_nvl_bytes": 0, **options})
    assert caught.value.argument == argument


@run_by(_alone)
def test_a_misspelt_keyword_is_an_error_of_the_buffer(buffer: Buffer, /) -> None:
    for call in (buffer.dispatch, buffer.combine, buffer.low_latency_combine):
        with pytest.raises(TypeError, match=rf"Buffer\.{call.__name__}\(\) got .*'hande'"):
            call(None, hande=None)


@pytest.mark.parametrize("new_num_sms", [0, 2.5, "24"])
def test_a_bad_number_of_sms_is_refused_and_changes_nothing(new_num_sms: Any) -> None:
    before = Buffer.num_sms
    with pytest.raises(ArgumentError, match="new_num_sms"):
        Buffer.set_num_sms(new_num_sms)
    assert Buffer.num_sms is before


def test_a_buffer_without_room_says_how_much_it_needs() -> None:
    num_bytes = 1 << 50
    with pytest.raises(AllocationError, match="allocating") as caught:
        _alone(lambda buffer: None, num_nvl_bytes=num_bytes)
    assert caught.value.needed_bytes > num_bytes


def test_a_buffer_needs_a_group_or_a_communicator() -> None:
    # -100: what torch.distributed.new_group returns to a process that is not in the group.
    for group, text in (
        (None, "init_process_group"),
        (object(), "must be"),
        (torch.zeros(2), "must be"),  # what it is compared with is no bool
        (-100, "process"),
    ):
        with pytest.raises(ArgumentError, match=text) as caught:
            Buffer(group, device="cpu")
        assert caught.value.argument == "group"


@run_by(_alone)
def test_a_gradient_that_is_lost_is_warned_of(buffer: Buffer, /) -> None:
    given = _inputs()
    options = {"topk_idx": given["topk_idx"], "num_experts": E}
    x = given["x"].requires_grad_()
    with pytest.warns(UserWarning, match=r"Buffer\.dispatch has no gradient"):
        recv_x, *_, handle, _ = buffer.dispatch(x, **options)
    with pytest.warns(UserWarning, match=r"Buffer\.combine has no gradient"):
        buffer.combine(recv_x.detach().requires_grad_(), handle)
    weights = torch.ones(given["topk_idx"].shape, requires_grad=True)
    with pytest.warns(UserWarning, match="has no gradient: topk_weights requires one"):
        buffer.dispatch(x.detach(), topk_weights=weights, **options)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        buffer.dispatch(x, topk_weights=weights, **options)


def test_groups_that_do_not_fit_are_refused_on_every_rank() -> None:
    def main(group: local.ThreadGroup, **options: Any) -> None:
        Buffer(group, 1 << 20, device="cpu", **options)

    for num_ranks, options, text in ((9, {}, "9 ranks"), (6, {"ranks_per_node": 4}, "6 ranks")):
        errors = local.run(lambda g, o=options: main(g, **o), num_ranks, return_errors=True)
        assert len(errors) == num_ranks
        assert all(isinstance(error, TopologyError) and text in str(error) for error in errors)


@run_by(local.run, 1)
def test_use_after_destroy_is_refused_everywhere(group: local.ThreadGroup, /) -> None:
    buffer = Buffer(group, 1 << 20, device="cpu", explicitly_destroy=True)
    given = _inputs()
    recv_x, _, _, _, handle, _ = buffer.dispatch(**given, num_experts=E)
    buffer.destroy()
    buffer.destroy()
    assert buffer.runtime is None
    for call in (
        lambda: buffer.get_dispatch_layout(given["topk_idx"], E),
        lambda: buffer.dispatch(**given, num_experts=E),
        lambda: buffer.dispatch(given["x"], handle),
        lambda: buffer.combine(recv_x, handle),
        lambda: buffer.get_local_buffer_tensor(torch.int8),
        buffer.get_comm_stream,
        buffer.reset,
        buffer.check,
    ):
        with pytest.raises(BufferDestroyed):
            call()


def test_every_error_is_a_deep_comm_error() -> None:
    for name in deep_comm.__all__:
        value = getattr(deep_comm, name)
        is_error = isinstance(value, type) and issubclass(value, Exception)
        if is_error and not issubclass(value, Warning):
            assert issubclass(value, deep_comm.DeepCommError)
            assert issubclass(value, RuntimeError)
    assert isinstance(Handle, type)
