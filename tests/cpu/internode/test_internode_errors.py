"""Failures between nodes: who is named, on which ranks, and what a reset restores."""

import dataclasses
import os
import re
import signal
import threading

import forked
import pytest
import roundtrip
import torch
from cases import InternodeCase, direct
from on_buffers import on_buffers
from roundtrip import num_channels_of, run_case, verify
from run_by import run_by

import deep_comm
from deep_comm import context, errors, local, simulate

NUM_RANKS, RANKS_PER_NODE = 6, 2


def make_buffer(group, timeout_s: float = 20.0, **options) -> deep_comm.Buffer:
    return deep_comm.Buffer(
        group, 1 << 18, 1 << 18, device="cpu", timeout_s=timeout_s, num_max_experts=64,
        **{"ranks_per_node": RANKS_PER_NODE, **options},
    )  # fmt: skip


def arguments_of(num_tokens: int = 5, num_experts: int = 12, hidden: int = 64) -> dict:
    return {
        "x": torch.ones(num_tokens, hidden, dtype=torch.bfloat16),
        "topk_idx": (torch.arange(num_tokens * 2) * 5 % num_experts).view(num_tokens, 2),
        "topk_weights": torch.ones(num_tokens, 2),
        "num_experts": num_experts,
        "config": deep_comm.Config(2, 1, 2, 1, 2),
    }


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
@run_by(local.run, NUM_RANKS, timeout_s=120)
def test_a_cached_call_with_another_config_is_found_on_all_ranks(group, /, operation: str) -> None:
    """Also by ranks whose own rails agree, long before they would give up."""
    with make_buffer(group) as buffer:
        arguments = arguments_of()
        recv_x, *_, handle, _ = buffer.dispatch(**arguments)

        def call(config: deep_comm.Config) -> None:
            if operation == "dispatch":
                buffer.dispatch(arguments["x"], handle=handle, config=config)
            else:
                buffer.combine(recv_x, handle, config=config)

        config = arguments["config"]
        other = deep_comm.Config(2, 1, 2, 1, 4)
        with pytest.raises(errors.ConfigMismatch, match="the operation") as caught:
            call(other if group.rank() == 3 else config)
        assert group.rank() in caught.value.values
        group.barrier()  # a rank that has not come yet would take the next call for this one
        call(config)  # the Buffer stays usable


# Of 2**18 bytes: with a region every row and sum of combine has a slot, without it takes the rings.
REGIONS = {"staged": 1 << 17, "rings": 0}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("silent", [0, 3, 5])
@pytest.mark.parametrize("operation", ["notify", "cached", "cached fp8", "combine"])
def test_every_rank_names_the_rank_that_never_comes(
    silent: int, operation: str, region: str
) -> None:
    def fn(group):
        with make_buffer(group, timeout_s=2.0, num_direct_bytes=REGIONS[region]) as buffer:
            if operation == "notify":
                if group.rank() != silent:
                    buffer.dispatch(**arguments_of())
                return
            arguments = arguments_of(hidden=128)
            recv_x, *_, handle, _ = buffer.dispatch(**arguments)
            if group.rank() == silent:
                return
            if operation.startswith("cached"):
                options = dict(config=arguments["config"], use_fp8=operation == "cached fp8")
                buffer.dispatch(arguments["x"], handle, **options)
            else:
                buffer.combine(recv_x, handle, config=arguments["config"])

    ended = simulate.run(fn, NUM_RANKS, 7, on_stuck="clock", return_errors=True, timeout_s=120)
    for rank, error in enumerate(ended):
        if rank == silent:
            continue
        assert isinstance(error, errors.PeerTimeout), f"rank {rank}: {error!r}"
        assert (error.rank, error.peer) == (rank, silent), f"rank {rank}: {error}"


def end_of_ranks(stalled: int, operation: str, region: str, faults: tuple[str, ...] = ()) -> list:
    """What the ranks of other nodes end with if a rank's NIC delivers nothing more."""

    def fn(group):
        with make_buffer(group, timeout_s=2.0, num_direct_bytes=REGIONS[region]) as buffer:
            arguments = arguments_of(hidden=128)
            if operation != "dispatch":
                recv_x, *_, handle, _ = buffer.dispatch(**arguments)
                group.barrier()  # the others need not its last signals any more
            if group.rank() == stalled:
                group.simulation.stall_rail(stalled)
            if operation == "dispatch":
                buffer.dispatch(**arguments)
            elif operation == "cached fp8":
                buffer.dispatch(arguments["x"], handle, config=arguments["config"], use_fp8=True)
            else:
                buffer.combine(recv_x, handle, config=arguments["config"])

    ended = simulate.run(
        fn, NUM_RANKS, 3, faults=faults, on_stuck="clock", return_errors=True, timeout_s=120
    )
    node = stalled // RANKS_PER_NODE  # inside it nothing is late before the next call
    return [error for rank, error in enumerate(ended) if rank // RANKS_PER_NODE != node]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("operation", ["dispatch", "cached fp8", "combine"])
@pytest.mark.parametrize("stalled", [1, 4])
def test_a_stalled_rail_is_named_by_its_rank(stalled: int, operation: str, region: str) -> None:
    """The ranks of its local index name it, and tell their nodes."""
    for error in end_of_ranks(stalled, operation, region):
        assert isinstance(error, errors.PeerTimeout), repr(error)
        assert error.peer == stalled, str(error)


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_ranks_that_do_not_tell_whom_they_blame_are_found(operation: str) -> None:
    ended = end_of_ranks(1, operation, "staged", ("skip_blame",))
    assert any(getattr(error, "peer", None) != 1 for error in ended)


@pytest.mark.parametrize("region", REGIONS)
def test_reset_makes_the_buffer_usable_after_a_stalled_rail(region: str) -> None:
    case = InternodeCase(
        (7, 3, 9, 5), experts=8, topk=3, num_sms=2, slots=2, send_chunk=1, rail_slots=2,
        rail_chunk=1,
    )  # fmt: skip

    def fn(group):
        with make_buffer(group, timeout_s=2.0, num_direct_bytes=REGIONS[region]) as buffer:
            roundtrip.call_once(buffer, case, 0)
            group.barrier()  # the others need not its last signals any more
            if group.rank() == 1:
                group.simulation.stall_rail(1)
            try:
                roundtrip.call_once(buffer, case, 1)
            except errors.PeerTimeout:
                pass
            buffer.reset()
            return [roundtrip.call_once(buffer, case, 2)]

    for seed in range(8):
        results = simulate.run(fn, 4, seed, on_stuck="clock", timeout_s=120)
        roundtrip.verify_call(case, [calls[0] for calls in results], 2)


def test_buffer_sizes_name_the_bytes_that_are_needed() -> None:
    def fn(group):
        with make_buffer(group) as buffer:
            arguments = arguments_of()
            arguments["config"] = deep_comm.Config(4, 1, 2, 8, 4096)
            with pytest.raises(errors.BufferTooSmall, match="num_rdma_bytes") as caught:
                buffer.dispatch(**arguments)
            return caught.value.needed_bytes

    needed = local.run(fn, NUM_RANKS, timeout_s=60)[0]

    def enough(buffer):
        buffer.dispatch(**{**arguments_of(), "config": deep_comm.Config(4, 1, 2, 8, 4096)})

    on_buffers(enough, 2 * RANKS_PER_NODE + 2, 1 << 18, needed, ranks_per_node=RANKS_PER_NODE)


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(3, 2), (2, 4), (9, 1)])
def test_size_hints_suffice(num_nodes: int, ranks_per_node: int) -> None:
    config = deep_comm.Config(4, 3, 7, 2, 5)
    num_ranks = num_nodes * ranks_per_node
    case = InternodeCase(
        (6,) * num_ranks, hidden=112, experts=2 * num_ranks, topk=6, num_sms=4, send_chunk=3,
        slots=7, rail_chunk=2, rail_slots=5, ranks_per_node=ranks_per_node,
        nvl_bytes=config.ring_bytes(224, num_ranks, ranks_per_node),
        rdma_bytes=config.get_rdma_buffer_size_hint(224, num_ranks, ranks_per_node),
    )  # fmt: skip
    results = local.run(lambda group: run_case(group, case), num_ranks, timeout_s=120)
    assert num_channels_of(results[0][0]) == 2  # two SMs make a channel
    verify(case, results)


@run_by(local.run, NUM_RANKS, timeout_s=60)
def test_handles_are_checked(group, /) -> None:
    with make_buffer(group) as buffer:
        arguments = arguments_of()
        recv_x, *_, handle, _ = buffer.dispatch(**arguments)
        assert len(handle) == 10 and handle[-4] is handle.recv_gbl_rank_prefix_sum
        assert [*handle][0] is handle.is_token_in_rank and handle[7].shape[1] == 8
        for bad, kind in (
            ((1, 2), errors.ArgumentError),
            (tuple(handle)[:9] + (None,), errors.ArgumentError),
        ):
            with pytest.raises(kind, match="handle"):
                buffer.combine(recv_x, bad)
        for position, dim in (
            (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (5, 0), (5, 1), (6, 0), (7, 1), (8, 0),
            (8, 1), (9, 1),
        ):  # fmt: skip
            wrong = list(handle)
            wrong[position] = wrong[position].narrow(dim, 0, wrong[position].shape[dim] - 1)
            wrong[position] = wrong[position].contiguous()
            with pytest.raises(ValueError, match=r"^handle(\[\d\])? "):
                buffer.combine(recv_x, wrong)
        for name, shape in (("send_slots", (handle.num_tokens, 1)), ("forward_slots", (3,))):
            slots = torch.zeros(shape, dtype=torch.int32)
            wrong = dataclasses.replace(handle, **{name: slots})
            with pytest.raises(errors.ArgumentError, match=f"^handle.{name} "):
                buffer.combine(recv_x, wrong)
        with pytest.raises(errors.HandleMismatch, match="rows"):
            buffer.combine(torch.cat([recv_x, recv_x]), handle)
        with pytest.raises(errors.HandleMismatch, match="tokens"):
            buffer.dispatch(torch.ones(9, 64, dtype=torch.bfloat16), handle)
        with pytest.raises(errors.HandleMismatch, match="channels"):
            buffer.combine(recv_x, handle, config=deep_comm.Config(6, 1, 2, 1, 2))


@run_by(local.run, 2, timeout_s=60)
def test_one_node_has_no_internode_calls(group, /) -> None:
    with make_buffer(group, ranks_per_node=2) as buffer:
        with pytest.raises(errors.TopologyError, match="one node"):
            buffer.internode_dispatch(**arguments_of())
        with pytest.raises(errors.TopologyError, match="one node"):
            buffer.internode_combine(torch.ones(1, 64), ())


def test_hosts_make_nodes_and_other_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that believe to be on two hosts; this target reaches one alone,
    and says so on all ranks.
    """
    for identity in ("host_identity", "memory_identity"):
        monkeypatch.setattr(context, identity, _host_of_thread)

    def fn(group):
        _hosts.rank = group.rank()
        with pytest.raises(errors.TopologyError, match="2 nodes .* on 2 hosts"):
            make_buffer(group, ranks_per_node=None)

    local.run(fn, 4, timeout_s=60)


_hosts = threading.local()


def _host_of_thread() -> str:
    return f"host {_hosts.rank // 2}"


def test_ranks_per_node_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "3")

    def fn(group):
        with make_buffer(group, ranks_per_node=None) as buffer:
            per_node = buffer.get_dispatch_layout(arguments_of()["topk_idx"], 12)[1]
            return None if per_node is None else per_node.shape[0]

    assert local.run(fn, 6, timeout_s=60) == [2] * 6
    assert local.run(fn, 3, timeout_s=60) == [None] * 3


# ---- processes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        InternodeCase((20, 0, 13, 17), experts=13, topk=4, hidden=512, calls=3, biases=2),
        InternodeCase(
            (9, 14, 3, 8, 6, 11), experts=12, topk=3, num_sms=4, slots=1, send_chunk=1, calls=3,
            rail_slots=2, rail_chunk=1, ranks_per_node=3,
        ),
        InternodeCase((8,) * 4, experts=8, topk=2, num_sms=2, ranks_per_node=1, calls=2),
        direct(InternodeCase((20, 0, 13, 17), experts=13, topk=4, hidden=512, calls=3, biases=2)),
        direct(InternodeCase((9, 14, 3, 8, 6, 11), experts=12, topk=3, num_sms=4, calls=2)),
    ],
    ids=str,
)  # fmt: skip
def test_processes_get_their_rows_and_sums(case: InternodeCase) -> None:
    variables = {"DEEP_COMM_POISON": "1"}
    results = forked.run(
        run_case, case.num_ranks, case, timeout_s=120, variables=variables,
    )  # fmt: skip
    verify(case, results)


def call_and_die(group, silent: int, operation: str):
    with make_buffer(group, timeout_s=3.0, num_direct_bytes=REGIONS["staged"]) as buffer:
        arguments = arguments_of()
        recv_x, *_, handle, _ = buffer.dispatch(**arguments)
        if buffer.rank == silent:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if operation == "dispatch":
                buffer.dispatch(**arguments)
            else:
                buffer.combine(recv_x, handle, config=arguments["config"])
        except errors.PeerTimeout as error:
            return error.peer
    return None


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_killed_process_is_named_by_all_others(operation: str) -> None:
    ended = forked.outcomes(call_and_die, NUM_RANKS, 2, operation, timeout_s=120)
    named = [outcome.value for outcome in ended if outcome.rank != 2]
    assert named == [2] * (NUM_RANKS - 1), [
        re.sub(r"\s+", " ", str(outcome.error)) for outcome in ended
    ]


def two_groups(group):
    """A Buffer over the world as two nodes, and one over each half of it, in turn."""
    import torch.distributed as dist

    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = halves[dist.get_rank() // 2]
    rows = []
    with make_buffer(group) as world, make_buffer(own, ranks_per_node=1) as half:
        for _ in range(3):
            for buffer in (world, half):
                arguments = arguments_of()
                recv_x, *_, handle, _ = buffer.dispatch(**arguments)
                combined, *_ = buffer.combine(recv_x, handle)
                copies = handle.is_token_in_rank.sum(1, keepdim=True)
                assert torch.equal(combined, arguments["x"] * copies)
                rows.append(recv_x.shape[0])
    return rows


def test_buffers_over_a_world_and_over_parts_of_it() -> None:
    rows = forked.run(two_groups, 4, timeout_s=120)
    assert all(part[:2] == part[2:4] == part[4:] for part in rows)


def test_more_tokens_than_a_block_can_count_are_refused_before_anything_is_sent() -> None:
    def main(group) -> str:
        with make_buffer(group, ranks_per_node=1) as buffer:
            assert buffer.runtime is not None
            whole_sm = buffer.runtime.smem_bytes_limit
            buffer.runtime.smem_bytes_limit = 80  # a channel of nine words: 288 tokens
            with pytest.raises(ValueError, match="num_tokens = 289, must be fewer") as refused:
                buffer.dispatch(**arguments_of(289))
            buffer.runtime.smem_bytes_limit = whole_sm
            rows = buffer.dispatch(**arguments_of(289)).recv_x
            assert rows.shape[1] == 64
            return str(refused.value)

    assert len(set(local.run(main, 2, timeout_s=60))) == 1
