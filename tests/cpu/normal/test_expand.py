"""Expanded dispatch and combine over a matrix of shapes, bit for bit; ranks are threads."""

from dataclasses import replace

import matrix
import pytest
import torch
from cases import Case, Scales
from expanded import check, check_processes, check_refusals, dispatch_ones
from on_buffers import on_buffers
from schedules import part_of

from deep_comm import Buffer
from deep_comm.errors import ArgumentError, CapacityError, ConfigMismatch

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize(
    "case", matrix.sample(part_of(60), seed=5, alignment=[1, 16, 128]), ids=str
)
def test_every_expert_gets_its_rows_and_every_token_its_sum(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("name", matrix.SPECIAL)
def test_special_case(name: str) -> None:
    case = matrix.SPECIAL[name]
    # Padding of 256 experts to 128 rows of 7168 columns each: 200 MB to compare, time and again.
    check(replace(case, alignment=16) if case.experts * case.hidden > 1 << 20 else case)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_sums_do_not_depend_on_channels_and_rings(num_ranks: int) -> None:
    tokens = tuple(11 + 3 * rank for rank in range(num_ranks))
    for num_sms, send_chunk, slots in ((2, 1, 1), (8, 4, 16)):
        check(
            Case(
                tokens, experts=16, topk=6, num_sms=num_sms, send_chunk=send_chunk, slots=slots,
                alignment=16, scales=Scales(3),
            )
        )  # fmt: skip


@pytest.mark.parametrize("smem_bytes", [11000, None])
@pytest.mark.parametrize("direct_bytes", [0, 8 << 20])
def test_pieces_know_where_rows_belong(smem_bytes: int | None, direct_bytes: int) -> None:
    """Rows in one piece and in several: each must find its place."""
    check(
        Case(
            (13, 22, 8), hidden=1040, experts=12, topk=5, num_sms=4, scales=Scales(5),
            alignment=8, direct_bytes=direct_bytes, smem_bytes=smem_bytes,
        )
    )  # fmt: skip


def test_processes_over_shared_memory() -> None:
    cases = matrix.sample(6, seed=6, ranks=[3], alignment=[1, 16])
    check_processes(cases)


def test_without_weights() -> None:
    def main(buffer: Buffer) -> None:
        x, idx, weights, counts, handle, _ = dispatch_ones(buffer, 6, 1)
        assert weights is None
        assert idx.tolist() == [0] * 6 + [1] * 6
        assert counts == [6, 6]
        y, _, _ = buffer.combine(x, handle)
        assert y.unique().tolist() == [2.0]

    on_buffers(main, 2, 1 << 20)


def test_alignment_must_agree() -> None:
    def main(buffer: Buffer) -> None:
        with pytest.raises(ConfigMismatch, match="expert_alignment"):
            dispatch_ones(buffer, 6, 1 + buffer.rank)
        assert dispatch_ones(buffer, 6, 8)[3] == [8, 8]  # the Buffer goes on

    on_buffers(main, 2, 1 << 20)


def test_expand_must_agree() -> None:
    def main(buffer: Buffer) -> None:
        idx = torch.zeros(3, 1, dtype=torch.int64)
        x = torch.ones(3, 64, dtype=torch.bfloat16)
        with pytest.raises(ConfigMismatch, match="expand"):
            buffer.dispatch(x, topk_idx=idx, num_experts=2, expand=buffer.rank == 0)

    on_buffers(main, 2, 1 << 20)


NODES = pytest.mark.parametrize("ranks_per_node", [None, 1], ids=["node", "nodes"])


@NODES
@pytest.mark.parametrize("direct_bytes", [0, 1 << 19])
def test_too_few_worst_case_rows_are_an_error(
    direct_bytes: int, ranks_per_node: int | None
) -> None:
    def main(buffer: Buffer) -> None:
        # 12 selections a rank in two groups of 16: 32 rows.
        with pytest.raises(CapacityError) as caught:
            dispatch_ones(buffer, 6, 16, num_worst_tokens=31)
        assert (caught.value.rank, caught.value.needed_rows) == (buffer.rank, 32)
        assert dispatch_ones(buffer, 6, 16, num_worst_tokens=32)[0].shape[0] == 32
        options = dict(num_worst_tokens=40, zero_padding=True)
        x, idx, *_, handle, _ = dispatch_ones(buffer, 6, 16, **options)
        assert x.shape[0] == idx.shape[0] == handle.num_output_rows == 40
        assert int((x != 0).any(dim=1).sum()) == int((idx >= 0).sum()) == 12
        assert handle.expansion.expert_offsets.tolist() == [0, 16, 32]
        assert handle.expansion.expert_counts.tolist() == [6, 6]
        assert (handle.expansion.recv_rows[6:] == -1).all()
        y, _, _ = buffer.combine(x, handle)
        assert y.unique().tolist() == [2.0]

    on_buffers(
        main, 2, 1 << 20, 1 << 20, ranks_per_node=ranks_per_node, num_direct_bytes=direct_bytes
    )


@NODES
def test_refusals(ranks_per_node: int | None) -> None:
    def main(buffer: Buffer) -> None:
        check_refusals(buffer, 16)
        x, idx = torch.ones(4, 64, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int64)
        with pytest.raises(ArgumentError, match="zero_tail"):
            buffer.dispatch(
                x, topk_idx=idx, num_experts=2, num_worst_tokens=99, zero_tail=True, expand=True
            )

    on_buffers(main, 2, 1 << 20, 1 << 20, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("direct_bytes", [0, 8 << 20])
@pytest.mark.parametrize("tokens", [(2048, 3), (2049, 0), (4100, 2), (0, 8195)])
def test_chunks_of_several_tokens(tokens: tuple[int, ...], direct_bytes: int) -> None:
    """Of more than 2048 tokens a word tells of several."""
    check(
        Case(
            tokens, hidden=8, experts=4, topk=2, num_sms=8, calls=2, direct_bytes=direct_bytes,
            alignment=4, worst=3 if tokens[1] == 2 else 0,
        )
    )  # fmt: skip
