"""Dispatch, cached dispatch and combine over a matrix of shapes, bit for bit; ranks are threads."""

import matrix
import pytest
from cases import Case
from roundtrip import check
from schedules import part_of

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("case", matrix.sample(part_of(200), seed=1), ids=str)
def test_every_rank_gets_its_rows_and_sums(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("name", matrix.SPECIAL)
def test_special_case(name: str) -> None:
    check(matrix.SPECIAL[name])


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_sum_does_not_depend_on_channels_and_rings(num_ranks: int) -> None:
    tokens = tuple(11 + 3 * rank for rank in range(num_ranks))
    for num_sms, send_chunk, slots in ((1, 1, 1), (2, 3, 3), (4, 4, 16)):
        # verify() compares with the one reference, so equal to it means equal to each other.
        check(Case(tokens, experts=16, topk=6, num_sms=num_sms, send_chunk=send_chunk, slots=slots))


@pytest.mark.parametrize("tokens", [(5000, 9), (13000, 3, 2100)], ids=str)
def test_chunks_of_many_rows(tokens: tuple[int, ...]) -> None:
    """A pair of ranks has words for 2048 chunks: of three rows and of seven, and of fewer beside
    them."""
    check(Case(tokens, hidden=8, experts=len(tokens), topk=2, num_sms=3, direct_bytes=12 << 20))
