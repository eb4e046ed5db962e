"""ElasticBuffer against plain loops over everybody's routing, on the host target."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from elastic import ElasticCase, alone, main
from run_by import run_by

from deep_comm import local
from deep_comm.compat.elastic import ElasticBuffer
from deep_comm.errors import ArgumentError, HandleMismatch

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        ElasticCase((7, 0, 12), alignment=1),
        ElasticCase((7, 0, 12), alignment=128, fp8=True),
        ElasticCase((5, 9), routing="duplicates", alignment=16, topk=7),
        ElasticCase((3, 4, 1, 40), routing="one", alignment=8, weights=False),
        ElasticCase((6, 2), routing="none", alignment=4),
        ElasticCase((8,), experts=3, topk=3, alignment=3),
        ElasticCase((9, 3, 5), experts=13, topk=6, alignment=5, fp8=True, weights=False),
    ],
    ids=str,
)
def test_rows_fields_and_sums(case: ElasticCase, sync: bool, expand: bool) -> None:
    case = dataclasses.replace(case, sync=sync, expand=expand)
    local.run(lambda group: main(group, case), case.num_ranks, timeout_s=60)


@run_by(alone)
def test_padding_is_zero_on_request_and_only_then_written(buffer, x, idx, /) -> None:
    recv, _, _, handle, _ = buffer.dispatch(
        x + 1, idx, num_experts=4, expert_alignment=8, do_expand=True, do_zero_padding=True
    )
    real = torch.zeros(recv.shape[0], dtype=torch.bool)
    real[handle.slots[handle.slots >= 0].long()] = True
    assert bool((recv[real] != 0).all()) and bool((recv[~real] == 0).all())
    assert int((~real).sum()) > 0


@run_by(alone)
def test_scales_in_columns_for_bulk_copies(buffer, x, idx, /) -> None:
    sf = torch.arange(12, dtype=torch.int32).view(3, 4).t()
    for expand in (False, True):
        (_, recv_sf), *_ = buffer.dispatch(
            (x, sf), idx, num_experts=4, do_expand=expand, use_tma_aligned_col_major_sf=True
        )
        assert recv_sf.stride() == (1, -(-recv_sf.shape[0] // 4) * 4)
        assert recv_sf.dtype == torch.int32
    assert recv_sf[:2].tolist() == [sf[0].tolist(), sf[3].tolist()]


@pytest.mark.parametrize("adds_once", [False, True])
@run_by(local.run, 3, timeout_s=60)
def test_results_have_no_gradients(group, /, adds_once: bool) -> None:
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=8, hidden=64, num_topk=2,
        allow_multiple_reduction=not adds_once,
    )  # fmt: skip
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    idx = torch.tensor([[0, 1], [1, 2], [2, -1], [3, 0]])
    weights = torch.ones(4, 2, requires_grad=True)
    bias = torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=True)
    handle = None
    for expand in (False, True, True):
        given = {"topk_idx": idx, "num_experts": 4} if handle is None else {"handle": handle}
        recv, _, recv_weights, handle, _ = buffer.dispatch(
            x, topk_weights=weights, do_expand=expand, **given
        )
        assert not recv.requires_grad and not recv_weights.requires_grad
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            combined, sums, _ = buffer.combine(
                recv.requires_grad_(), handle, recv_weights.requires_grad_(), bias
            )
        assert not combined.requires_grad and not sums.requires_grad
    group.barrier()
    buffer.destroy()


@run_by(alone)
def test_combine_honours_rewritten_metadata(buffer, x, idx, /) -> None:
    recv, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4, do_expand=True)
    handle.recv_src_metadata[:, 2:] = -1
    handle.recv_src_metadata[:, 3] = torch.tensor([2, 0, 1, 1000], dtype=torch.int32)
    rows = torch.tensor([10.0, 20.0, 30.0]).view(-1, 1).expand(3, 64).to(torch.bfloat16)
    combined, _, _ = buffer.combine(rows.contiguous(), handle)
    assert combined[:, 0].tolist() == [30.0, 10.0, 20.0, 0.0]


@pytest.mark.parametrize("sync", [False, True])
@run_by(alone)
def test_metadata_may_be_cut_to_the_rows_that_arrived(buffer, x, idx, /, sync: bool) -> None:
    _, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4, do_expand=True, do_cpu_sync=sync)
    num_recv_tokens = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    handle.recv_src_metadata = handle.recv_src_metadata[:num_recv_tokens]
    assert handle.recv_src_metadata.shape == (4, 4)
    rows = torch.arange(1, 8).view(-1, 1).expand(7, 64).to(torch.bfloat16)
    combined, _, _ = buffer.combine(rows.contiguous(), handle)
    # By expert: tokens 0 and 3, 0 and 1, 1 and 2, 3.
    assert combined[:, 0].tolist() == [1.0 + 3.0, 4.0 + 5.0, 6.0, 2.0 + 7.0]
    for wrong in (handle.recv_src_metadata.long(), handle.recv_src_metadata[:, 1:]):
        with pytest.raises(ArgumentError, match="recv_src_metadata"):
            handle.recv_src_metadata = wrong


@pytest.mark.parametrize("adds_once", [False, True])
@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_combine_takes_rows_that_are_cut_as_their_metadata(
    ranks_per_node: int | None, adds_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ranks_per_node is not None:
        monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", str(ranks_per_node))

    def main(group):
        buffer = ElasticBuffer(
            group, num_max_tokens_per_rank=8, hidden=64, num_topk=2,
            allow_multiple_reduction=not adds_once,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(group.rank())
        x = torch.randn(5, 64, generator=generator).to(torch.bfloat16)
        idx = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(5)])
        recv, _, weights, handle, _ = buffer.dispatch(
            x, idx, torch.rand(5, 2, generator=generator), num_experts=8, do_cpu_sync=False
        )
        wanted, wanted_weights, _ = buffer.combine(recv, handle, weights, bias=x)
        num_recv = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        handle.recv_src_metadata = handle.recv_src_metadata[:num_recv]
        for num_rows in (num_recv, recv.shape[0]):
            combined, sums, _ = buffer.combine(
                recv[:num_rows].clone(), handle, weights[:num_rows].clone(), bias=x
            )
            assert combined.equal(wanted) and sums.equal(wanted_weights)
            combined, sums, _ = buffer.combine(recv[:num_rows].clone(), handle, bias=x)
            assert combined.equal(wanted) and sums is None
        # The metadata do not say so.
        with pytest.raises(HandleMismatch, match="as many rows"):
            buffer.combine(recv[: num_recv + 1].clone(), handle)
        group.barrier()
        buffer.destroy()

    local.run(main, 2, timeout_s=60)


@pytest.mark.parametrize("sync", [False, True])
def test_combine_honours_rewritten_metadata_between_nodes(
    sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "1")

    def main(group):
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64, num_topk=2)
        x = torch.ones(4, 64, dtype=torch.bfloat16)
        idx = torch.tensor([[0, 1], [1, 2], [2, -1], [3, 0]])
        _, _, _, handle, _ = buffer.dispatch(
            x, idx, num_experts=4, do_expand=True, do_cpu_sync=sync
        )
        # Both ranks have received three tokens of each.
        handle.recv_src_metadata[:, 2:] = -1
        handle.recv_src_metadata[:6, 3] = torch.arange(6, dtype=torch.int32).flip(0)
        handle.recv_src_metadata[0, 2] = 1000
        rows = (torch.arange(6) + 1).mul(10).view(-1, 1).expand(6, 64).to(torch.bfloat16)
        combined, _, _ = buffer.combine(rows.contiguous(), handle)
        wanted = [[60.0, 110.0, 50.0, 80.0], [30.0, 50.0, 20.0, 20.0]][group.rank()]
        assert combined[:, 0].tolist() == wanted
        group.barrier()
        buffer.destroy()

    local.run(main, 2, timeout_s=60)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        ElasticCase((7, 0, 12, 3), nodes=2, alignment=1),
        ElasticCase((7, 0, 12, 3), nodes=2, alignment=128, fp8=True, hybrid=False),
        ElasticCase((5, 9), nodes=2, routing="duplicates", alignment=16, topk=7),
        ElasticCase((6, 2, 0, 1, 40, 8), nodes=3, experts=13, topk=6, alignment=5, weights=False),
        ElasticCase((3, 4), nodes=2, routing="none", alignment=4),
    ],
    ids=str,
)
def test_rows_fields_and_sums_over_several_nodes(
    case: ElasticCase, sync: bool, expand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", str(case.num_ranks // case.nodes))
    case = dataclasses.replace(case, sync=sync, expand=expand)
    local.run(lambda group: main(group, case), case.num_ranks, timeout_s=60)
