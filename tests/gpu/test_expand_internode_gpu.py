"""test_expand_internode.py on GPUs: one host's GPUs as logical nodes, over the software NIC."""

import dataclasses

import torch
from cases import InternodeCase, Scales, direct
from checked_runs import EXPANDED, check
from gpu_cases import internode_cases, run
from internode import model_case
from test_internode_gpu import shapes


def test_every_expert_gets_its_rows_and_every_token_its_sum(num_ranks: int) -> None:
    for shape in shapes(num_ranks):
        first_seed = 3000 + 100 * shape[0] + shape[1]
        check(run, EXPANDED, internode_cases(shape, first_seed, num_cases=24))


def test_asynchronous_calls_give_the_same(num_ranks: int) -> None:
    cases = internode_cases(shapes(num_ranks)[-1], first_seed=3900, num_cases=8)
    check(run, EXPANDED, cases, async_finish=True)


def test_many_tokens_at_a_model_shape(num_ranks: int) -> None:
    for num_nodes, ranks_per_node in shapes(num_ranks):
        plain = model_case(
            num_nodes * ranks_per_node, ranks_per_node, experts=256, alignment=16, calls=1,
            nvl_bytes=1 << 30,
        )  # fmt: skip
        quantised = dataclasses.replace(plain, dtype=torch.float8_e4m3fn, scales=Scales(56))
        cases = [dataclasses.replace(plain, direct_bytes=0), direct(plain), direct(quantised)]
        check(run, EXPANDED, cases)


def test_one_rank_numbers_a_large_batch(num_ranks: int) -> None:
    """All rows come to one rank's experts, in worst-case mode: many blocks number them."""
    for num_nodes, ranks_per_node in shapes(num_ranks):
        num = num_nodes * ranks_per_node
        case = InternodeCase(
            (3001,) * num, hidden=512, experts=4 * num, topk=4, routing="skewed", alignment=128,
            worst=5, nvl_bytes=512 << 20, rdma_bytes=256 << 20, ranks_per_node=ranks_per_node,
        )  # fmt: skip
        check(run, EXPANDED, [case, direct(case)])
