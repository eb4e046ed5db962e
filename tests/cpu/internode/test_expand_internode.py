"""Expanded dispatch and combine over two tiers, bit for bit; ranks are threads or processes."""

from typing import Any

import pytest
import roundtrip
import torch
from cases import SHAPES, InternodeCase, Scales, direct, make_inputs
from expanded import check, check_processes, dispatch_ones
from internode import random_case
from on_buffers import on_buffers
from schedules import some_of

from deep_comm import Buffer, local
from deep_comm.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("seed", some_of(range(48)))
def test_every_expert_gets_its_rows_and_every_token_its_sum(seed: int) -> None:
    case = random_case(seed)
    check(direct(case) if seed % 2 else case)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_every_shape_with_alignment_and_scales(shape: tuple[int, int]) -> None:
    num_ranks = shape[0] * shape[1]
    case = InternodeCase(
        tuple((7 * rank) % 19 for rank in range(num_ranks)), hidden=80, experts=2 * num_ranks + 3,
        topk=5, dtype=torch.float8_e4m3fn, scales=Scales(5, layout="column"), routing="skewed",
        alignment=16, ranks_per_node=shape[1], calls=2, biases=1, seed=shape[0],
    )  # fmt: skip
    check(direct(case))


@pytest.mark.parametrize("smem_bytes", [3 * 4 * 40, 2 * 4 * 40, None])
def test_numbering_needs_no_more_than_a_warp(smem_bytes: int | None) -> None:
    """40 experts a rank: counters of two warps and blocks, of one, of all. Rings need little."""
    rings = InternodeCase(
        (23, 4, 17, 9), hidden=16, experts=160, topk=8, routing="duplicates", num_sms=2, seed=4
    )
    results = local.run(lambda group: _numbered(group, rings, smem_bytes), 4, timeout_s=120)
    assert all(results)


def _numbered(group: Any, case: InternodeCase, smem_bytes: int | None) -> bool:
    inputs = make_inputs(case, group.rank())
    with roundtrip.buffer_of(group, case, "cpu") as buffer:
        # Given, since its kernel counts all experts in a block.
        per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(inputs.topk_idx, case.experts)

        def numbered() -> Any:
            return buffer.dispatch(
                inputs.x, topk_idx=inputs.topk_idx, num_tokens_per_rank=per_rank,
                num_tokens_per_expert=per_expert, is_token_in_rank=mask, expand=True,
            )[4].expansion  # fmt: skip

        want = numbered()
        if smem_bytes is not None:
            buffer.runtime.smem_bytes_limit = smem_bytes
        got = numbered()
        return all(
            torch.equal(getattr(got, name), getattr(want, name))
            for name in ("recv_rows", "expert_offsets", "expert_counts")
        )


def test_processes_over_shared_memory() -> None:
    cases = [random_case(seed, (2, 2)) for seed in range(500, 504)]
    cases += [direct(case) for case in cases]
    check_processes(cases)


def test_without_weights_and_with_other_alignments_elsewhere() -> None:
    """Rows are numbered where they have come: nobody else need know of the alignment."""

    def main(buffer: Buffer) -> None:
        x, idx, weights, counts, handle, _ = dispatch_ones(buffer, 6, 1 + 7 * buffer.rank)
        assert weights is None
        per_expert = 6 if buffer.rank == 0 else 8
        assert idx.tolist() == [
            expert if row < 6 else -1 for expert in (0, 1) for row in range(per_expert)
        ]
        assert counts == [per_expert] * 2
        assert handle.num_recv_rows == 6 and handle.num_output_rows == sum(counts)
        y, _, _ = buffer.combine(x, handle)
        assert y.unique().tolist() == [2.0]

    on_buffers(main, 2, 1 << 20, 1 << 20, ranks_per_node=1)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("num_tokens", [(7, 0, 5, 18), (0, 0, 0, 0)])
def test_scales_come_back_column_by_column(expand: bool, num_tokens: tuple[int, ...]) -> None:
    case = InternodeCase(
        num_tokens, hidden=256, dtype=torch.float8_e4m3fn, scales=Scales(5), alignment=2
    )

    def main(group: local.ThreadGroup) -> None:
        inputs = make_inputs(case, group.rank())
        options: dict[str, Any] = dict(zero_padding=True) if expand else {}
        arguments = dict(
            topk_idx=inputs.topk_idx, num_experts=case.experts, expand=expand, expert_alignment=2
        )
        with roundtrip.buffer_of(group, case, "cpu") as buffer:
            x = inputs.x, inputs.scales
            by_row, *_, handle, _ = buffer.dispatch(x, **arguments, **options)
            found = [
                buffer.dispatch(x, **arguments, **options, column_major_scales=True)[0],
                buffer.dispatch(x, handle=handle, **options, column_major_scales=True)[0],
            ]
            for recv_x, scales in found:
                assert torch.equal(recv_x.view(torch.uint8), by_row[0].view(torch.uint8))
                assert torch.equal(scales, by_row[1]) and scales.shape == by_row[1].shape
                assert scales.stride(1) % 4 == 0 and scales.stride(1) >= scales.shape[0]
                assert scales.stride(0) == 1
            for name, given in (
                ("column_major_scales", dict(column_major_scales=True)),
                ("round_scale", dict(round_scale=True)),
            ):
                with pytest.raises(ArgumentError, match=name):
                    buffer.dispatch(torch.ones(2, 16), **arguments, **given)

    local.run(main, 4)
