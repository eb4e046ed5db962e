"""A combine of few rows, or one that adds more than a plain one, takes more SMs than its handle has
channels, unless somebody has said how many there may be. What it gives does not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
from on_buffers import on_buffers
from run_by import run_by
from schedules import some_of
from small_calls import E, R, T, inputs, on_normal

import deep_comm
from deep_comm import Config, simulate, tuning

FEW = 11  # rows, and
SMS = 5
MORE = 3  # 1.5 times two channels


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Calls without a Config have two channels with rings of one slot, as if that had been measured
    here. Their combines get what the model gives them on a GPU."""
    monkeypatch.setenv("DEEP_COMM_TUNE_FILE", str(tmp_path / "tune.json"))
    entry = dict(row_bytes=768, num_sms=2, send=1, recv=2)
    entries = [dict(entry, operation=name) for name in ("dispatch", "combine")]
    for num_ranks in (1, R, 3):
        key = f"host target x {num_ranks}"
        tuning.store(tmp_path / "tune.json", key, "today", entries)
    monkeypatch.setattr(tuning.DefaultConfig, "combine_sms", lambda *given: (FEW, SMS, MORE))


def _sums(buffer: Any, rank: int, num_tokens: int, **options: Any) -> None:
    """Of a combine whose rows are what its dispatch brought, times the ranks of each token."""
    x, idx, weights = inputs(rank, num_tokens)
    x = x.float()
    rows, _, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=E, **options
    )
    sums, _, _ = buffer.combine(rows, handle)
    num_copies = handle.is_token_in_rank.sum(dim=1, keepdim=True)
    assert torch.equal(sums, x * num_copies)


@pytest.mark.parametrize("num_direct_bytes", [0, 4 << 20])
def test_sums_do_not_depend_on_it(num_direct_bytes: int, model: None) -> None:
    """Staged or through rings, of as many rows as are few and of more."""

    def body(buffer: Any, rank: int) -> None:
        for tokens in ((1, T), (T, 0), (T, T), (3 * T, 3 * T)) * 2:
            _sums(buffer, rank, tokens[rank])
        # A combine of one rank on more SMs, of the other one on fewer.
        _sums(buffer, rank, (2, 4 * T)[rank])

    on_normal(body, num_direct_bytes=num_direct_bytes)


def _planned(log: fake_cuda.Log) -> list[tuple[int, int, int]]:
    """What DefaultConfig.combine_sms said of combines that have been planned."""
    return [what for name, what in log.planned if name == "combine"]


@pytest.fixture
def log() -> Iterator[fake_cuda.Log]:
    with fake_cuda.installed() as log:
        yield log


def test_who_names_a_number_gets_no_more(
    model: None, log: fake_cuda.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, default_num_sms = Config(2, 4, 16), deep_comm.Buffer.num_sms

    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        routing: dict[str, Any] = dict(topk_idx=idx, topk_weights=weights, num_experts=E)

        def combined(named: Any, handle: Any, rows: Any) -> tuple[int, int, int]:
            before = len(_planned(log))
            buffer.combine(rows, handle, config=named)
            assert len(_planned(log)) == before + 1  # a form of its own
            return _planned(log)[-1]

        rows, _, _, _, ours, _ = buffer.dispatch(x, **routing)
        theirs = buffer.dispatch(x, **routing, config=config)[4]
        assert ours.num_channels == theirs.num_channels == 2
        assert ours.has_default_sms and not theirs.has_default_sms
        assert combined(None, ours, rows) == (FEW, SMS, MORE)
        assert combined(None, theirs, rows) == (0, 0, 0)
        assert combined(config, ours, rows) == (0, 0, 0)
        # The same forms again are still told apart.
        before = len(_planned(log))
        for handle in (ours, theirs):
            buffer.combine(rows, handle)
        assert len(_planned(log)) == before
        # Of six tensors nobody knows whose choice they were.
        assert buffer.dispatch(x, **routing)[4].has_default_sms
        assert not buffer.dispatch(x, **routing, config=config)[4].has_default_sms
        assert combined(None, tuple(ours), rows.float()) == (0, 0, 0)
        monkeypatch.setattr(deep_comm.Buffer, "num_sms", 2)  # as set_num_sms does
        assert not buffer.dispatch(x, **routing)[4].has_default_sms
        assert combined(None, ours, rows) == (0, 0, 0)

    on_normal(body, 1, num_direct_bytes=4 << 20)
    monkeypatch.setattr(deep_comm.Buffer, "num_sms", default_num_sms)
    monkeypatch.setenv("DEEP_COMM_NUM_SMS", "2")

    def with_variable(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=E
        )
        buffer.combine(rows, handle)
        assert _planned(log)[-1] == (0, 0, 0) and not handle.has_default_sms

    on_normal(with_variable, 1, num_direct_bytes=4 << 20)


def test_what_adds_more_takes_more(model: None) -> None:
    def body(buffer: Any, rank: int) -> None:
        x, idx, weights = inputs(rank, FEW + 1)
        x = x.bfloat16()
        rows, _, recv_weights, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=E
        )
        assert handle.num_channels == 2

        def num_blocks(rows: Any = rows, **options: Any) -> int:
            buffer.combine(rows, handle, **options)
            events = buffer.trace().events
            last = max(event.call for event in events if event.kernel == "combine")
            return len({event.block for event in events if event.call == last})

        assert num_blocks() == 2
        assert num_blocks(topk_weights=recv_weights) == MORE
        assert num_blocks(bias=x) == num_blocks(bias=(x, None)) == MORE
        assert num_blocks(rows.float()) == MORE
        assert num_blocks(topk_weights=recv_weights, config=Config(2, 4, 16)) == 2

    on_normal(body, 1, num_direct_bytes=4 << 20, trace=4)


@pytest.mark.parametrize("num_bytes", [0, 1 << 18], ids=["rings", "staged"])
def test_schedules_of_more_blocks_than_channels(num_bytes: int, model: None) -> None:
    """Ranks on other numbers of blocks, some without rows, one call behind the other."""

    def main(group: Any) -> None:
        rank = group.rank()
        with deep_comm.Buffer(
            group, 1 << 19, num_direct_bytes=num_bytes, device="cpu", timeout_s=20
        ) as buffer:
            for tokens in ((4, 9, 0), (1, 3, 3)):
                _sums(buffer, rank, tokens[rank])

    for seed in some_of(range(150)):
        simulate.run(main, 3, seed, timeout_s=60)


@run_by(on_buffers, R, 8 << 20, num_direct_bytes=4 << 20, timeout_s=1)
def test_a_rank_that_stays_away_is_named(buffer: deep_comm.Buffer, /, model: None) -> None:
    x, idx, weights = inputs(buffer.rank, 3)
    rows, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)
    if buffer.rank == 0:
        return
    with pytest.raises(deep_comm.PeerTimeout) as raised:
        buffer.combine(rows, handle)
        buffer.combine(rows, handle)
    assert raised.value.peer == 0


def test_the_model_stops_where_its_gain_is_worth_less_than_the_tolerance() -> None:
    for num_ranks in (2, 4, 8):
        for row_bytes in (2048, 14336):
            most_rows, num_sms = tuning.few_rows(row_bytes, num_ranks)
            assert num_sms > tuning.modelled_num_sms(row_bytes, num_ranks)
            call_us = tuning.COMBINE.us(most_rows, row_bytes, num_ranks, 132)
            gain = tuning.FEW_ROWS_GAIN_US / call_us
            assert tuning.TOLERANCE <= gain <= 1.1 * tuning.TOLERANCE
    assert tuning.few_rows(14336, 2, max_sms=30)[1] == 30
    default = tuning.DefaultConfig("combine", lambda ranks, sms: Config(sms), [], 2, 132)
    assert default.combine_sms(14336, 26) == (*tuning.few_rows(14336, 2, 132), 39)
    assert default.combine_sms(14336, 48) == (0, 0, 72)
    assert default.combine_sms(14336, 132) == (0, 0, 0)
    host = tuning.DefaultConfig("combine", lambda ranks, sms: Config(sms), [], 2, None)
    assert host.combine_sms(14336, 1) == (0, 0, 0)
    # 3072 tokens of 2 ranks gain more than the tolerance, 4096 do not (docs/guide/sms.md).
    assert 3072 * 1.992 < tuning.few_rows(14336, 2)[0] < 4096 * 1.992
