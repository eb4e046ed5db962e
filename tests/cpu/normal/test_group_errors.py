"""Errors that need several ranks: disagreement, silence, bad routing, too few rows."""

import functools

import disagreeing
import pytest
import torch
from cases import Case
from disagreeing import tokens
from on_buffers import on_buffers
from roundtrip import run_case, verify
from run_by import run_by

import deep_comm
from deep_comm import errors, local, simulate


def each_rank(change) -> list:
    """Dispatches once per rank after ``change(rank, arguments)``; returns results and errors."""

    def fn(buffer):
        arguments = tokens(5, 6)
        change(buffer.rank, arguments)
        return buffer.dispatch(**arguments)

    return on_buffers(fn, 3, 4 << 20, return_errors=True, timeout_s=20.0)


def on_pair(fn, ranks_per_node: int | None, direct_bytes: int) -> None:
    options = dict(ranks_per_node=ranks_per_node, num_direct_bytes=direct_bytes)
    on_buffers(fn, 2, 4 << 20, 4 << 20, timeout_s=20, **options)


def require_received(received: tuple, expected: tuple) -> None:
    """The same rows, selections, weights and counts."""
    for got, want in zip(received[:3], expected[:3], strict=True):
        assert torch.equal(got, want)
    assert received[3] == expected[3]


CONFIG = deep_comm.Config(2, 1, 2, 1, 2)
CHANGES = {
    "num_experts": lambda a: a.update(num_experts=9),
    "hidden": lambda a: a.update(x=torch.ones(5, 128, dtype=torch.bfloat16)),
    "top-k": lambda a: a.update(
        topk_idx=torch.zeros(5, 2, dtype=torch.int64), topk_weights=torch.ones(5, 2)
    ),
    "channels": lambda a: a.update(config=deep_comm.Config(4, 1, 2, 1, 2)),
    "rail slots": lambda a: a.update(config=deep_comm.Config(2, 1, 2, 1, 4)),
    "scales": lambda a: a.update(x=(torch.ones(5, 128, dtype=torch.int8), torch.ones(5, 4))),
}


@pytest.mark.parametrize(
    ("what", "ranks_per_node"),
    [(what, size) for size in (None, 2) for what in CHANGES if size or what != "rail slots"],
)
def test_a_rank_that_disagrees_is_found_at_the_first_notify(
    what: str, ranks_per_node: int | None
) -> None:
    def fn(buffer):
        good = {**tokens(5, 6), "config": CONFIG}
        arguments = dict(good)
        if buffer.rank == 1:
            CHANGES[what](arguments)
        with pytest.raises(errors.ConfigMismatch) as caught:
            buffer.dispatch(**arguments)
        error = caught.value
        assert len(error.values) >= 2 and error.field and not error.needs_reset
        recv_x, *_, handle, _ = buffer.dispatch(**good)  # the Buffer stays usable
        buffer.combine(recv_x, handle, config=CONFIG)

    on_buffers(fn, 6, 4 << 20, 4 << 20, timeout_s=20, ranks_per_node=ranks_per_node)


def test_ranks_that_call_different_operations_are_told_which() -> None:
    local.run(disagreeing.call_different_operations, 2, timeout_s=120)


@pytest.mark.parametrize(("ranks_per_node", "deviant"), [(1, 1), (2, 0), (2, 3)])
@run_by(local.run, 4, timeout_s=120)
def test_ranks_of_several_nodes_that_call_different_operations_are_told_which(
    group: local.ThreadGroup, /, ranks_per_node: int, deviant: int
) -> None:
    disagreeing.call_different_operations(group, deviant=deviant, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("num_direct_bytes", [0, 2 << 20], ids=["rings", "region"])
@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "deviant"), [(2, None, 1), (3, None, 0), (2, 1, 1), (4, 2, 3)]
)
def test_ranks_that_give_different_dtypes_are_told_which(
    num_ranks: int, ranks_per_node: int | None, deviant: int, num_direct_bytes: int
) -> None:
    options = dict(ranks_per_node=ranks_per_node, num_direct_bytes=num_direct_bytes)
    body = functools.partial(disagreeing.give_different_dtypes, deviant=deviant, **options)
    local.run(body, num_ranks, timeout_s=120)


# Neighbours mostly have the same size.
EVERY_DTYPE = sorted(
    (
        dtype
        for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
        if not str(dtype).startswith(("torch.qint", "torch.quint"))
    ),
    key=lambda dtype: (dtype.itemsize, str(dtype)),
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_every_dtype_travels_and_is_told_from_its_neighbour(ranks_per_node: int | None) -> None:
    def fn(buffer):
        routing = tokens(5, 6)
        rows = routing.pop("x").view(torch.uint8)
        for mine, others in zip(EVERY_DTYPE, EVERY_DTYPE[1:] + EVERY_DTYPE[:1], strict=True):
            recv_x, *_, handle, _ = buffer.dispatch(rows.view(mine), **routing)
            assert recv_x.dtype == mine
            assert buffer.dispatch(rows.view(mine), handle)[0].dtype == mine
            given = rows.view(others if buffer.rank == 1 else mine)
            with pytest.raises(errors.ConfigMismatch, match="dtype of x") as caught:
                buffer.dispatch(given, **routing)
            assert caught.value.values == {0: mine, 1: others}
            buffer.group.barrier()  # a rank that comes late may raise PeerTimeout
            with pytest.raises(errors.ConfigMismatch, match="a dtype"):
                buffer.dispatch(given, handle)
            buffer.group.barrier()

    on_pair(fn, ranks_per_node, 2 << 20)


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_rows_that_are_cast_are_told_from_rows_that_were(ranks_per_node: int | None) -> None:
    """By the dtype that the caller gave: both travel as e4m3 with float32 scales."""

    def fn(buffer):
        routing = tokens(5, 6, 128)
        x = routing.pop("x")
        cast = buffer.dispatch(x, **routing, use_fp8=True)
        if buffer.rank == 1:
            options = dict(x=(torch.ones(5, 128, dtype=torch.float8_e4m3fn), torch.ones(5, 1)))
        else:
            options = dict(x=x, use_fp8=True)
        with pytest.raises(errors.ConfigMismatch, match="dtype of x") as caught:
            buffer.dispatch(**options, **routing)
        assert caught.value.values == {0: torch.bfloat16, 1: torch.float8_e4m3fn}
        buffer.group.barrier()
        with pytest.raises(errors.ConfigMismatch, match="a dtype"):
            buffer.dispatch(**options, handle=cast[-2])
        buffer.group.barrier()
        again = buffer.dispatch(x, **routing, use_fp8=True)
        assert again[3] == cast[3]

    on_pair(fn, ranks_per_node, 0)


def test_two_threads_cannot_be_in_one_buffer() -> None:
    counts = local.run(disagreeing.enter_from_a_second_thread, 2, timeout_s=60)
    assert counts == [[2, 2, 2], [2, 2, 0]]


@pytest.mark.parametrize("direct_bytes", [0, 2 << 20])
@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_weights_travel_on_all_ranks_or_on_none(
    direct_bytes: int, ranks_per_node: int | None
) -> None:
    """Else a rank that expects some would read what nobody has written."""

    def fn(buffer):
        for _ in range(2):
            arguments = tokens(5, 6)
            buffer.dispatch(**arguments)
            if buffer.rank == 1:
                arguments["topk_weights"] = None
            with pytest.raises(errors.ConfigMismatch, match="topk_weights"):
                buffer.dispatch(**arguments)

    on_pair(fn, ranks_per_node, direct_bytes)


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_weights_come_ahead_of_low_latency_rows_on_all_ranks_or_on_none(
    ranks_per_node: int | None,
) -> None:
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(
        5, 64, 2, 6, ranks_per_node=ranks_per_node
    )

    def fn(buffer):
        given = tokens(5, 6)
        weights = given["topk_weights"] if buffer.rank == 1 else None
        with pytest.raises(errors.ConfigMismatch, match="the operation"):
            buffer.low_latency_dispatch(
                given["x"], given["topk_idx"], 5, 6, use_fp8=False, topk_weights=weights
            )

    on_buffers(
        fn, 2, 0, num_bytes, low_latency_mode=True, timeout_s=20, ranks_per_node=ranks_per_node
    )


@pytest.mark.parametrize("change", [-1, 1, 1 << 20, -(1 << 20)])
@pytest.mark.parametrize("direct_bytes", [0, 2 << 20])
@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_counts_of_a_caller_that_contradict_its_mask_move_nothing_else(
    change: int, direct_bytes: int, ranks_per_node: int | None
) -> None:
    """The mask says where tokens go."""

    def fn(buffer):
        given = tokens(5, 6)
        given["x"] += torch.arange(5).unsqueeze(1) + 8 * buffer.rank
        expected = buffer.dispatch(**given)
        num_experts = given.pop("num_experts")
        layout = buffer.get_dispatch_layout(given["topk_idx"], num_experts)
        for _ in range(3):
            received = buffer.dispatch(
                **given, num_tokens_per_rank=layout[0] + change,
                num_tokens_per_expert=layout[2], is_token_in_rank=layout[3],
            )  # fmt: skip
            require_received(received, expected)
            y = buffer.combine(received[0], received[4])[0]
            assert torch.equal(y, given["x"])

    on_pair(fn, ranks_per_node, direct_bytes)


@pytest.mark.parametrize("change", [-1, 1])
@run_by(on_buffers, 2, 4 << 20, timeout_s=20, num_direct_bytes=2 << 20)
def test_expanded_rows_are_counted_by_the_choices_whatever_a_caller_has_counted(
    buffer, /, change: int
) -> None:
    given = tokens(5, 6)
    expected = buffer.dispatch(**given, expand=True)
    layout = buffer.get_dispatch_layout(given["topk_idx"], given.pop("num_experts"))
    for _ in range(3):
        received = buffer.dispatch(
            **given, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2] + change, expand=True,
        )  # fmt: skip
        require_received(received, expected)
        rows = received[4].expansion.recv_rows
        assert torch.equal(rows, expected[4].expansion.recv_rows)


def test_ranks_may_align_their_counts_differently() -> None:
    """The alignment rounds a rank's own counts; no other rank is concerned."""

    def change(rank: int, arguments: dict) -> None:
        arguments["expert_alignment"] = 64 if rank == 1 else 1

    ended = each_rank(change)
    assert all(count % 64 == 0 for count in ended[1][3])
    assert any(count % 64 != 0 for count in ended[0][3])


@pytest.mark.parametrize("bad", [6, 1 << 20, -2, -(1 << 40), (1 << 32) + 1])
@pytest.mark.parametrize("fused", [True, False])
def test_expert_index_out_of_range_is_reported_on_every_rank(bad: int, fused: bool) -> None:
    def fn(buffer):
        arguments = tokens(5, 6)
        if buffer.rank == 2:
            arguments["topk_idx"][3, 0] = bad
        if not fused:
            num_experts = arguments.pop("num_experts")
            per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(
                arguments["topk_idx"], num_experts
            )
            arguments.update(
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                num_tokens_per_expert=per_expert,
                is_token_in_rank=mask,
            )
        return buffer.dispatch(**arguments)

    ended = on_buffers(fn, 3, 4 << 20, return_errors=True, timeout_s=2)
    assert isinstance(ended[2], errors.ExpertIndexError), repr(ended[2])
    for rank in (0, 1):
        # They hear of it from rank 2, or wait for it in vain.
        assert isinstance(ended[rank], errors.DeepCommError), repr(ended[rank])


def test_a_silent_rank_is_named_with_stage_and_word() -> None:
    def fn(buffer):
        if buffer.rank == 1:
            return None
        return buffer.dispatch(**tokens(5, 6))

    ended = on_buffers(fn, 3, 4 << 20, return_errors=True, timeout_s=2.0)
    for rank in (0, 2):
        error = ended[rank]
        assert isinstance(error, errors.PeerTimeout), repr(error)
        assert error.peer == 1 and error.rank == rank
        assert error.stage and error.word
        assert 1.9 < error.waited_s < 60
        assert "rank 1" in str(error)


def test_a_silent_rank_in_combine_is_named() -> None:
    def fn(buffer):
        recv_x, _, _, _, handle, _ = buffer.dispatch(**tokens(5, 6))
        if buffer.rank == 2:
            return None
        return buffer.combine(recv_x, handle)

    ended = on_buffers(fn, 3, 4 << 20, return_errors=True, timeout_s=2.0)
    for rank in (0, 1):
        assert isinstance(ended[rank], errors.PeerTimeout), repr(ended[rank])
        assert ended[rank].kernel == "combine"
    assert 2 in (ended[0].peer, ended[1].peer)


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_stalled_for_ever_times_out_on_the_virtual_clock(seed: int) -> None:
    case = Case(
        (4, 6, 5), experts=6, hidden=16, num_sms=1, slots=2, send_chunk=1, nvl_bytes=1 << 18
    )
    ended = simulate.run(
        lambda group: run_case(group, case), 3, seed, stalls=[(1, 150 * seed, 0)], on_stuck="clock",
        timeout_s=60, return_errors=True,
    )  # fmt: skip
    timeouts = [ended[rank] for rank in (0, 2) if isinstance(ended[rank], errors.PeerTimeout)]
    assert timeouts, [repr(item) for item in ended]
    assert any(error.peer == 1 for error in timeouts), [str(error) for error in timeouts]


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_killed_under_simulation_is_named(seed: int) -> None:
    def fn(group):
        buffer = deep_comm.Buffer(group, 1 << 18, device="cpu", timeout_s=5)
        recv_x, _, _, _, handle, _ = buffer.dispatch(**tokens(5, 6))
        if group.rank() == 2:
            group.kill()
            return None
        return buffer.combine(recv_x, handle)

    ended = simulate.run(fn, 3, seed, on_stuck="clock", timeout_s=60, return_errors=True)
    for rank in (0, 1):
        assert isinstance(ended[rank], errors.PeerTimeout), repr(ended[rank])
        assert ended[rank].peer == 2


def test_buffer_goes_on_after_reset() -> None:
    case = Case((4, 6, 5), experts=6)

    def fn(buffer):
        if buffer.rank != 0:
            with pytest.raises(errors.PeerTimeout):
                buffer.dispatch(**tokens(5, 6))
        buffer.group.barrier()
        buffer.reset()
        from roundtrip import call_once

        return [call_once(buffer, case, 0)]

    verify(case, on_buffers(fn, 3, 4 << 20, timeout_s=2.0))


@run_by(on_buffers, 2, 4 << 20, timeout_s=2.0)
def test_a_failed_buffer_says_so_until_it_is_reset(buffer, /) -> None:
    if buffer.rank == 0:
        with pytest.raises(errors.PeerTimeout):
            buffer.dispatch(**tokens(5, 6))
        launches = buffer.runtime.num_launches
        with pytest.raises(errors.DeepCommError):
            buffer.dispatch(**tokens(5, 6))
        assert buffer.runtime.num_launches - launches <= 2
    buffer.group.barrier()


def test_one_rank_that_raises_does_not_hang_the_others() -> None:
    def fn(buffer):
        if buffer.rank == 1:
            buffer.dispatch(torch.ones(5, 7, dtype=torch.uint8), topk_idx=None)
        return buffer.dispatch(**tokens(5, 6))

    ended = on_buffers(fn, 3, 4 << 20, return_errors=True, timeout_s=2.0)
    assert isinstance(ended[1], errors.ArgumentError)
    assert isinstance(ended[0], errors.PeerTimeout) and isinstance(ended[2], errors.PeerTimeout)
