"""test_layer_pending.py between logical nodes, and early launches, on GPUs."""

import over_nvshmem
import pytest
import test_layer_gpu as one_node
import torch
from gpu_cases import run
from test_internode_gpu import shapes

import deep_comm


@pytest.mark.gpu
@over_nvshmem.needs_nvshmem
def test_a_dispatch_returns_while_a_rank_is_late(num_ranks: int) -> None:
    ranks = num_ranks - num_ranks % 2
    case = one_node.case_of_late_ranks(ranks, ranks // 2)
    results = over_nvshmem.run(one_node.dispatches_beside_a_late_rank, ranks, case)
    one_node.verify_late_ranks(case, results, most_s=0.2)


@pytest.mark.gpu
def test_over_the_software_nic_it_ends_first(num_ranks: int) -> None:
    """Whose calls return when their kernels have ended: rows are right all the same."""
    ranks = num_ranks - num_ranks % 2
    case = one_node.case_of_late_ranks(ranks, ranks // 2)
    results = one_node.on_gpus(one_node.dispatches_beside_a_late_rank, ranks, case)
    one_node.verify_late_ranks(case, results, most_s=60)


def launches_of(group, ranks_per_node: int) -> list[int]:
    device = torch.device("cuda", torch.cuda.current_device())
    launches = []
    with deep_comm.Buffer(
        group, 256 << 20, 64 << 20, device=device, ranks_per_node=ranks_per_node
    ) as buffer:
        for step in range(6):
            # The fourth brings more than there is room for: 96 MB of slots.
            num_tokens = (500, 0, 700, 24000, 900, 50)[step] + buffer.rank
            generator = torch.Generator().manual_seed(10 * step + buffer.rank)
            x = torch.randint(-8, 8, (num_tokens, 2048), generator=generator)
            x = x.bfloat16().to(device)
            idx = torch.rand(num_tokens, 16, generator=generator).topk(4).indices.to(device)
            before = buffer.runtime.num_launches
            recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=16)
            launches.append(buffer.runtime.num_launches - before)
            combined, *_ = buffer.combine(recv_x, handle)
            copies = handle.is_token_in_rank.sum(1, keepdim=True)
            assert torch.equal(combined, x * copies)
    return launches


@pytest.mark.gpu
def test_rows_move_before_the_host_knows_how_many(num_ranks: int) -> None:
    for num_nodes, ranks_per_node in shapes(num_ranks):
        found = run(launches_of, num_nodes * ranks_per_node, ranks_per_node)
        assert all(launches == found[0] for launches in found), found
        assert found[0][2] == found[0][5] == 4 and found[0][3] == 5, found
