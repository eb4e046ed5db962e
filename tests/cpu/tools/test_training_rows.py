"""tools/servers, rows of trainers: released ones train on the host target; losses are compared."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from servers import compare, fetch, models, runs, training
from servers.combinations import ROWS
from servers.releases import releases_for

from deep_comm.compat.installer import SITE

BY_NAME = {row.name: row for row in ROWS}
TRAINERS = ("megatron", "torchtitan")
BASE, OURS, CONTROL = (
    BY_NAME[f"megatron/training/small/{name}"] for name in ("alltoall", "deepep", "deepep:wrong")
)


def trained(losses: list[float], norm: float = 2.0, **others: Any) -> dict[str, Any]:
    """The result of a run, the same on both ranks."""
    ours = dict(built=["<Buffer>"], calls=2 * [dict(counts=dict(dispatch=1))])
    return dict(losses=[losses, losses], norms=[[norm] * len(losses)] * 2, **(ours | others))


LEARNED = [5.5, 4.0, 3.0]


@pytest.mark.parametrize(
    ("losses", "norm", "is_good"),
    [
        (LEARNED, 2.0, True),
        ([5.5, 4.0, 3.03], 2.0, True),
        ([5.5, 4.0, 3.06], 2.0, False),
        ([5.502, 4.0, 3.0], 2.0, False),
        (LEARNED, 2.01, False),
        ([5.5, math.nan, 3.0], 2.0, False),
    ],
)
def test_losses_are_those_of_the_base_and_a_controls_are_not(
    losses: list[float], norm: float, is_good: bool
) -> None:
    base = trained(LEARNED)
    assert compare.judge(OURS, trained(losses, norm), base)[0] is is_good
    assert compare.judge(CONTROL, trained(losses, norm), base)[0] is not is_good


def test_a_row_must_have_learned_called_deep_comm_and_have_a_base() -> None:
    base = trained(LEARNED)
    assert compare.judge(BASE, trained(LEARNED, built=[], calls=[]), None)[0]
    for losses in ([5.5, 5.4, 5.3], [5.5, 4.0, math.nan]):
        good, text = compare.judge(BASE, trained(losses), None)
        assert not good and text.startswith("has not learned")
    assert compare.judge(OURS, trained(LEARNED, calls=[]), base)[1] == "deep_comm was not called"
    assert compare.judge(OURS, trained(LEARNED), None)[1] == "its base has no result"
    with pytest.raises(ValueError, match="zip"):
        compare.compare_training(base, trained(LEARNED[:2]))


def test_each_server_has_its_newest_release() -> None:
    found = releases_for(["vllm", "megatron", "sglang", "another"])
    assert {server: one.name for server, one in found.items()} == {
        "vllm": "vllm-0.33.0", "megatron": "megatron-core-0.16.1", "sglang": "sglang-0.5.17",
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_RETRIES", "0")
    tiny = dataclasses.replace(models.MODELS["small"], layers=1, hidden=128, inter=128)
    monkeypatch.setitem(models.MODELS, "small", tiny)
    monkeypatch.setattr(training, "LENGTH", 32)
    monkeypatch.setattr(training, "BATCH", 4)
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", TRAINERS)
def test_a_released_trainer_trains_over_deep_comm_as_over_its_own_all_to_all(
    server: str, folder: Path
) -> None:
    """As released, on two processes of the host target, with stand-ins for what is CUDA's."""
    release = releases_for([server])[server]
    try:
        fetch.fetch(release, folder)
    except fetch.NotFetched as error:
        pytest.skip(f"the release is on PyPI alone: {error}")
    fetch.trim(release, folder)
    paths = (*fetch.unpacked(release, folder), str(SITE))
    (folder / "runs").mkdir()
    machine = runs.Machine(folder, folder / "runs", paths, device="cpu", steps=12, limit_s=100)
    rows = [row for row in ROWS if row.server == server]
    for row in rows:
        runs.keep(row, machine, training.run(row, machine))
    found = compare.lines(machine.out, rows)
    assert [line.is_good for line in found] == [True, True, True], compare.table(found)
    if server == "megatron":  # torchtitan rounds gradients of scores to BF16
        assert "24 of 24 losses equal bit for bit" in found[1].text


def test_a_row_without_gpus_of_its_own_exchanges_over_gloo(tmp_path: Path) -> None:
    for options, copies in (
        (dict(), False),
        (dict(one_gpu=True), True),
        (dict(device="cpu"), True),
    ):
        described = training.job(OURS, runs.Machine(tmp_path, tmp_path, (), **options), 1)
        assert described["copies"] is copies and described["experts"] == 8
