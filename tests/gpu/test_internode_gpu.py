"""test_internode.py on GPUs: one host's GPUs as logical nodes, over the software NIC."""

import dataclasses
import functools
import time

import pytest
import torch
from cases import InternodeCase, direct
from checked_runs import ROUNDTRIP, check
from gpu_cases import POISON, internode_cases, run
from internode import model_case

import deep_comm
from deep_comm import errors
from deep_comm.settings import env


def shapes(num_ranks: int) -> list[tuple[int, int]]:
    """(nodes, ranks per node) of at most ``num_ranks`` GPUs, several nodes each."""
    wanted = [(2, 1), (3, 1), (2, 2), (4, 1), (3, 2), (2, 4), (4, 2), (8, 1)]
    return [shape for shape in wanted if shape[0] * shape[1] <= num_ranks]


def test_every_rank_gets_its_rows_and_sums(num_ranks: int) -> None:
    for shape in shapes(num_ranks):
        first_seed = 100 * shape[0] + shape[1]
        check(run, ROUNDTRIP, internode_cases(shape, first_seed, num_cases=24))


def test_asynchronous_calls_give_the_same(num_ranks: int) -> None:
    shape = shapes(num_ranks)[-1]
    check(run, ROUNDTRIP, internode_cases(shape, first_seed=900, num_cases=8), async_finish=True)


def test_nccl_group_serves_as_well(num_ranks: int) -> None:
    cases = internode_cases(shapes(num_ranks)[-1], first_seed=950, num_cases=4)
    check(functools.partial(run, backend="nccl"), ROUNDTRIP, cases)


def test_many_tokens_at_a_model_shape(num_ranks: int) -> None:
    for num_nodes, ranks_per_node in shapes(num_ranks):
        case = model_case(num_nodes * ranks_per_node, ranks_per_node)
        check(run, ROUNDTRIP, [dataclasses.replace(case, direct_bytes=0), direct(case)])


def test_a_hundred_calls_with_rings_of_few_slots(num_ranks: int) -> None:
    num_nodes, ranks_per_node = shapes(num_ranks)[-1]
    case = InternodeCase(
        tuple(40 + 7 * rank for rank in range(num_nodes * ranks_per_node)), hidden=512, experts=32,
        topk=4, num_sms=4, send_chunk=2, slots=3, rail_chunk=1, rail_slots=2, calls=100,
        ranks_per_node=ranks_per_node,
    )  # fmt: skip
    check(run, ROUNDTRIP, [case])


def silent_rank(group, silent: int, ranks_per_node: int):
    device = torch.device("cuda", torch.cuda.current_device())
    with deep_comm.Buffer(
        group, 64 << 20, 64 << 20, device=device, timeout_s=3.0, ranks_per_node=ranks_per_node
    ) as buffer:
        x = torch.ones(64, 256, dtype=torch.bfloat16, device=device)
        idx = (torch.arange(128, device=device) % 16).view(64, 2)
        recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=16)
        torch.cuda.synchronize()
        named = None
        if buffer.rank != silent:
            try:
                buffer.combine(recv_x, handle)
                torch.cuda.synchronize()
                buffer.check()
            except errors.PeerTimeout as error:
                named = error.peer, str(error)
        else:
            time.sleep(8.0)
        buffer.reset()
        recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=16)
        combined, *_ = buffer.combine(recv_x, handle)
        copies = handle.is_token_in_rank.sum(1, keepdim=True)
        assert torch.equal(combined, x * copies)
        return named


def test_a_silent_rank_is_named_and_the_buffer_recovers(num_ranks: int) -> None:
    num_nodes, ranks_per_node = shapes(num_ranks)[-1]
    num = num_nodes * ranks_per_node
    check_named(run(silent_rank, num, num - 1, ranks_per_node))


def check_named(named: list) -> None:
    """The last rank was silent: all others name it."""
    assert named[-1] is None and None not in named[:-1], named
    messages = "\n".join(message for _, message in named[:-1])
    assert [peer for peer, _ in named[:-1]] == [len(named) - 1] * (len(named) - 1), messages


def copies_at_once(group, ranks_per_node: int) -> bool:
    device = torch.device("cuda", torch.cuda.current_device())
    with deep_comm.Buffer(
        group, 256 << 20, 64 << 20, num_direct_bytes=128 << 20, device=device, timeout_s=10.0,
        ranks_per_node=ranks_per_node, rail="software",
    ) as buffer:  # fmt: skip
        x = torch.randint(-8, 9, (1024, 1024), device=device).to(torch.bfloat16)
        idx = torch.rand(1024, 32, device=device).topk(4).indices
        recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=32)
        wanted = x * handle.is_token_in_rank.sum(1, keepdim=True)
        is_right = True
        for _ in range(5):
            rows = buffer.dispatch(x, handle)[0].cpu()
            sums = buffer.combine(recv_x, handle)[0].cpu()
            is_right &= torch.equal(rows, recv_x.cpu()) and torch.equal(sums, wanted.cpu())
        buffer.check()
        return is_right


def test_a_copy_to_the_host_may_stand_right_behind_a_call(num_ranks: int) -> None:
    """The driver waits in it for the kernel with the context locked, which the NIC's calls need."""
    num_nodes, ranks_per_node = shapes(num_ranks)[-1]
    variables = {**POISON, env.NIC_GB_PER_S.name: "5"}  # kernels last
    assert all(run(copies_at_once, num_nodes * ranks_per_node, ranks_per_node, variables=variables))


def paced(group, ranks_per_node: int, gb_per_s: float):
    """Seconds that the slowest rail is busy at that speed, by what it carried, and
    seconds that the call took.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    config = deep_comm.Config(24, 6, 256, 6, 128)
    num_calls = 5
    results = {}
    with deep_comm.Buffer(
        group, 1 << 30, 1 << 30, device=device, timeout_s=20.0, ranks_per_node=ranks_per_node
    ) as buffer:
        x = torch.randn(4096, 7168, device=device).to(torch.bfloat16)
        idx = torch.rand(4096, 256, device=device).topk(8).indices
        recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=256, config=config)
        calls = {
            "dispatch": lambda: buffer.dispatch(x, handle, config=config),
            "combine": lambda: buffer.combine(recv_x, handle, config=config),
        }
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            buffer.runtime.quiet_rail()
            before = sum(map(sum, buffer.rail_put_bytes))
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(num_calls):
                call()
            end.record()
            end.synchronize()
            buffer.check()
            buffer.runtime.quiet_rail()
            num_bytes = sum(map(sum, buffer.rail_put_bytes)) - before
            results[name] = num_bytes / (gb_per_s * 1e9), begin.elapsed_time(end) / 1e3
    return results


@pytest.mark.parametrize("gb_per_s", [10.0, 50.0])
def test_a_rail_of_a_given_speed_is_kept_busy(num_ranks: int, gb_per_s: float, capsys) -> None:
    """The speed is a verdict: nothing is carried faster. How busy the rail is gets printed."""
    num = num_ranks // 2 * 2
    variables = {**POISON, env.NIC_GB_PER_S.name: str(gb_per_s)}
    results = run(paced, num, num // 2, gb_per_s, variables=variables)
    for name in ("dispatch", "combine"):
        busy_s = max(result[name][0] for result in results)
        took_s = max(result[name][1] for result in results)
        assert took_s > 0.97 * busy_s, (name, busy_s, took_s)
        with capsys.disabled():
            share = 100 * busy_s / took_s
            print(
                f"\n{num} GPUs as two nodes, rails of {gb_per_s:.0f} GB/s: {name} {share:.0f} % "
                "busy"
            )
