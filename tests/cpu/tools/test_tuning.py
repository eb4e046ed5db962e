"""SMs of calls that name none: the model, the stored measurements, and who decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_comm
from deep_comm import ArgumentError, config, errors, local, tuning
from deep_comm.tune import choices as tune
from deep_comm.tuning import COMBINE, DISPATCH, DefaultConfig, Model, modelled_num_sms

CPU = torch.device("cpu")
# Copies of 4096 tokens, top-8 of 256 experts, by ranks: of one rank, its own ones among them.
ROWS = {2: 8164, 4: 14801}

BF16, FP8 = 14336, 7392  # bytes of a row of 7168 columns, with scales
MEASURED = {
    # docs/guide/sms.md, cached dispatch, direct mode, eager: {SMs: µs}
    (DISPATCH, BF16, 2): {
        8: 295.2, 10: 237.5, 12: 199.7, 14: 172.4, 15: 168.0, 16: 168.5, 24: 170.5, 48: 171.0,
    },
    (DISPATCH, FP8, 2): {
        8: 158.0, 10: 127.1, 12: 106.8, 14: 94.3, 15: 91.3, 16: 92.1, 24: 94.2, 48: 93.5,
    },
    (DISPATCH, 4096, 2): {
        8: 90.4, 10: 74.6, 12: 64.0, 14: 55.9, 15: 55.5, 16: 55.7, 24: 55.7, 48: 56.2,
    },
    # docs/performance.md
    (COMBINE, BF16, 2): {8: 473, 16: 263, 22: 203, 24: 193, 48: 185, 96: 186},
    (DISPATCH, BF16, 4): {8: 548.4, 16: 455.7, 17: 456.9, 24: 457.6, 48: 460.3, 96: 464.1},
    (DISPATCH, FP8, 4): {8: 282.3, 17: 238.7, 24: 239.1, 48: 239.9, 96: 241.8},
    (COMBINE, BF16, 4): {
        8: 872.8, 12: 588.9, 16: 477.8, 17: 471.7, 20: 470.4, 24: 469.9, 48: 466.9, 96: 465.2,
    },
}  # fmt: skip


@pytest.fixture
def tune_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Named by the variable; it is not there yet."""
    path = tmp_path / "tune.json"
    monkeypatch.setenv("DEEP_COMM_TUNE_FILE", str(path))
    return path


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: f"{case[1]} bytes x {case[2]}")
def test_the_model_says_what_was_measured(case: tuple[Model, int, int]) -> None:
    """Its constants are of 2 GPUs; how far it is from 4 is part of what it claims."""
    model, row_bytes, num_ranks = case
    within = 0.04 if num_ranks == 4 else 0.035 if model is COMBINE else 0.025
    for num_sms, measured_us in MEASURED[case].items():
        modelled_us = model.us(ROWS[num_ranks], row_bytes, num_ranks, num_sms)
        assert modelled_us == pytest.approx(measured_us, rel=within), num_sms


@pytest.mark.parametrize("model", [DISPATCH, COMBINE])
def test_what_the_model_takes_is_near_the_best_measured(model: Model) -> None:
    """A dispatch of 4 GPUs runs on the SMs that its combine wants, and was measured so."""
    for (measured_model, row_bytes, num_ranks), measured in MEASURED.items():
        if measured_model is model:
            chosen = (modelled_num_sms if num_ranks == 4 else model.num_sms)(row_bytes, num_ranks)
            no_more = max(num_sms for num_sms in measured if num_sms <= chosen)
            assert measured[no_more] <= 1.045 * min(measured.values())


@pytest.mark.parametrize("model", [DISPATCH, COMBINE])
def test_the_model_takes_the_fewest_sms_within_the_tolerance(model: Model) -> None:
    for num_ranks in (2, 4, 8):
        for row_bytes in (2048, FP8, BF16, 28672):
            chosen = model.num_sms(row_bytes, num_ranks)
            assert tuning.FEWEST_SMS <= chosen <= tuning.MOST_SMS

            def moving_us(num_sms: int) -> float:
                return model.us(8000, row_bytes, num_ranks, num_sms) - model.fixed_us

            best = moving_us(1 << 30) * (1 + tuning.TOLERANCE)
            if chosen < tuning.MOST_SMS:
                assert moving_us(chosen) <= best
            if chosen > tuning.FEWEST_SMS:
                assert moving_us(chosen - 1) > best
    assert model.num_sms(BF16, 8, max_sms=6) == 6
    assert model.num_sms(BF16, 1) == tuning.MOST_SMS  # no link to wait for


def test_a_handle_gets_what_its_dispatch_and_its_combine_want() -> None:
    for num_ranks in (1, 2, 4, 8):
        wanted = [model.num_sms(BF16, num_ranks, 132) for model in (DISPATCH, COMBINE)]
        assert modelled_num_sms(BF16, num_ranks, 132) == max(wanted)


def entry(operation: str, row_bytes: int, num_sms: int, **more: Any) -> dict[str, Any]:
    return dict(operation=operation, row_bytes=row_bytes, num_sms=num_sms, send=4, recv=32, **more)


def test_measurements_go_before_the_model_for_rows_like_theirs() -> None:
    entries = [
        entry("dispatch", 14336, 16),
        entry("dispatch", 7392, 26),
        entry("combine", 14336, 40),
    ]
    default = DefaultConfig("dispatch", config.recommended_dispatch_config, entries, 4, 132)
    assert default(14336) == deep_comm.Config(16, 4, 32)
    assert default(12000).num_sms == 16
    assert default(7168).num_sms == 26
    assert default(2048) == config.recommended_dispatch_config(4, modelled_num_sms(2048, 4, 132))
    small = DefaultConfig("dispatch", config.recommended_dispatch_config, entries, 4, 20)
    assert small(7392).num_sms == modelled_num_sms(7392, 4, 20)  # 26 SMs do not exist there
    other = DefaultConfig("combine", config.recommended_combine_config, entries, 4, 132)
    assert other(14336).num_sms == 40
    host = DefaultConfig("dispatch", config.recommended_dispatch_config, entries, 4, None)
    assert host(12000).num_sms == 16 and host(2048) == config.host_default()


def test_files_keep_what_other_machines_measured(tune_file: Path) -> None:
    tuning.store(tune_file, "host target x 2", "today", [entry("dispatch", 128, 3)])
    tuning.store(tune_file, "another x 8", "today", [entry("dispatch", 128, 30)])
    tuning.store(tune_file, "host target x 2", "later", [entry("combine", 256, 4)])
    tuning.store(tune_file, "host target x 2", "later", [entry("dispatch", 128, 5)])
    # Rows of other sizes, and other operations, keep theirs.
    assert tuning.read(CPU, 2) == [entry("combine", 256, 4), entry("dispatch", 128, 5)]
    assert tuning.read(CPU, 3) == []
    machines = json.loads(tune_file.read_text())["machines"]
    assert machines["another x 8"]["entries"][0]["num_sms"] == 30


@pytest.mark.parametrize(
    "text",
    [None, "no json", "[]", '{"version": 99, "machines": {}}',
     '{"version": 1, "machines": {"host target x 2": {"entries": [{"num_sms": -1}]}}}'],
)  # fmt: skip
def test_a_named_file_that_cannot_be_read_is_reported(tune_file: Path, text: str | None) -> None:
    if text is not None:
        tune_file.write_text(text)
    with pytest.raises(ArgumentError, match="DEEP_COMM_TUNE_FILE"):
        tuning.read(CPU, 2)


def test_the_file_of_the_cache_folder_is_not_for_the_host_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.tune_file() == tmp_path / "deep_comm" / "tune.json"
    tuning.store(tuning.tune_file(), "host target x 2", "today", [entry("dispatch", 128, 3)])
    assert tuning.read(CPU, 2) == []
    # Only that folder is made: in a path that somebody gives, a word may be mistyped.
    monkeypatch.setenv("DEEP_COMM_TUNE_FILE", str(tmp_path / "typo" / "tune.json"))
    with pytest.raises(FileNotFoundError):
        tuning.store(tuning.tune_file(), "host target x 2", "today", [entry("dispatch", 128, 3)])


def _channels(group: Any, hidden: int = 64, **options: Any) -> int:
    with deep_comm.Buffer(group, 1 << 20, device="cpu", timeout_s=20, trace=4) as buffer:
        x = torch.ones(6, hidden).bfloat16()
        idx = torch.arange(6)[:, None] % 4
        received, _, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=torch.ones(6, 1), num_experts=4, **options
        )
        assert torch.equal(buffer.combine(received, handle)[0], x)
        blocks = {event.block for event in buffer.trace().events if event.kernel == "combine"}
        assert len(blocks) == handle.num_channels  # not the more that the model gives it on GPUs
        return handle.num_channels


def test_buffers_use_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tune.json"
    tuning.store(path, "host target x 2", "today", [entry("dispatch", 128, 3)])
    assert local.run(_channels, 2, timeout_s=60) == [1, 1]  # the host target's own default
    monkeypatch.setenv("DEEP_COMM_TUNE_FILE", str(path))
    assert local.run(_channels, 2, timeout_s=60) == [3, 3]
    unlike = local.run(lambda group: _channels(group, hidden=640), 2, timeout_s=60)
    assert unlike == [1, 1]  # the model is about GPUs
    # A Config, the variable and set_num_sms go before it.
    given = deep_comm.Config(2, 4, 32)
    assert local.run(lambda group: _channels(group, config=given), 2, timeout_s=60) == [2, 2]
    monkeypatch.setenv("DEEP_COMM_NUM_SMS", "4")
    assert local.run(_channels, 2, timeout_s=60) == [4, 4]
    monkeypatch.delenv("DEEP_COMM_NUM_SMS")
    monkeypatch.setattr(deep_comm.Buffer, "num_sms", 20)  # the same number, but chosen
    assert local.run(_channels, 2, timeout_s=60) == [1, 1]  # where SMs mean nothing


def test_ranks_agree_although_their_files_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter((2, 7, 5))
    monkeypatch.setattr(tuning, "read", lambda *args: [entry("dispatch", 128, next(numbers))])
    channels = local.run(_channels, 3, timeout_s=60)
    assert len(set(channels)) == 1 and channels[0] in (2, 5, 7)


def test_a_bad_file_stops_all_ranks(tune_file: Path) -> None:
    """Here it is missing."""
    for ended in local.run(_channels, 2, timeout_s=60, return_errors=True):
        assert isinstance(ended, (ArgumentError, errors.PeerLost))


def choice(name: str, num_tokens: int, num_sms: int, **more: Any) -> dict[str, Any]:
    made = dict(
        name=name, num_tokens=num_tokens, num_sms=num_sms, config=[8, 64], mean_us=1.0,
        mode="direct", routing="uniform", execution="eager",
        row_bytes=14336, combine_row_bytes=14336,
    )  # fmt: skip
    return made | more


def test_what_is_stored_is_the_choice_at_the_most_tokens() -> None:
    stored = tune.entries(
        [
            choice("dispatch cached", 128, 8),
            choice("dispatch cached", 4096, 24),
            choice("dispatch", 4096, 32),
            choice("dispatch cached", 8192, 40, mode="ring"),
            choice("dispatch cached", 8192, 44, execution="graph"),
            choice("dispatch cached", 4096, 28, row_bytes=7392),
            choice("combine", 4096, 48),
            choice("layout", 4096, 2),
        ]
    )
    assert [(e["operation"], e["row_bytes"], e["num_sms"]) for e in stored] == [
        ("combine", 14336, 48),
        ("dispatch", 7392, 28),
        ("dispatch", 14336, 24),
    ]


# ---- thresholds of layers ------------------------------------------------------------------------


def layer_entry(hidden: int, num_topk: int, num_experts: int, decode_tokens: int) -> dict[str, Any]:
    return dict(
        hidden=hidden, num_topk=num_topk, num_experts=num_experts, decode_tokens=decode_tokens
    )


def test_the_measured_layer_most_like_this_one_is_taken(tune_file: Path) -> None:
    key = "host target x 4"
    tuning.store(tune_file, key, "today", [entry("dispatch", 128, 3)])
    for measured in (
        (7168, 8, 256, 200),
        (7168, 8, 128, 300),
        (4096, 8, 256, 90),
        (7168, 8, 256, 150),
    ):
        tuning.store_decode_tokens(tune_file, key, layer_entry(*measured))
    assert len(tuning.read_decode_tokens(CPU, 4)) == 3  # of one shape, the last
    assert tuning.read(CPU, 4) == [entry("dispatch", 128, 3)]
    tuning.store(tune_file, key, "later", [])
    assert tuning.decode_tokens(CPU, 4, 7168, 8, 256) == 150
    assert tuning.decode_tokens(CPU, 4, 7168, 8, 140) == 300
    assert tuning.decode_tokens(CPU, 4, 5120, 6, 256) == 90
    assert tuning.decode_tokens(CPU, 4, 2048, 8, 256) is None
    assert tuning.decode_tokens(CPU, 4, 7168, 2, 256) is None
    assert tuning.decode_tokens(CPU, 2, 7168, 8, 256) is None


def test_a_measured_threshold_that_cannot_be_is_reported(tune_file: Path) -> None:
    tuning.store_decode_tokens(tune_file, "host target x 2", layer_entry(64, 2, 6, 0))
    with pytest.raises(ArgumentError, match="DEEP_COMM_TUNE_FILE"):
        tuning.read_decode_tokens(CPU, 2)


def _threshold(group: Any, buffer: bool = False, **options: Any) -> int:
    shape = dict(hidden=64, num_experts=6, num_topk=2, max_tokens=40)
    with deep_comm.ExpertParallel(
        group, **{**shape, **options}, device="cpu", timeout_s=20
    ) as layer:
        if buffer:
            return deep_comm.ExpertParallel(
                None, **{**shape, **options}, buffer=layer.buffer
            ).shape.decode_tokens
        return layer.shape.decode_tokens


def test_layers_take_the_stored_threshold_unless_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tune.json"
    tuning.store_decode_tokens(path, "host target x 2", layer_entry(64, 2, 6, 30))

    def thresholds(**options: Any) -> list[int]:
        return local.run(lambda group: _threshold(group, **options), 2, timeout_s=60)

    assert thresholds() == [40, 40]  # 128, at most max_tokens
    monkeypatch.setenv("DEEP_COMM_TUNE_FILE", str(path))
    assert thresholds() == [30, 30]
    assert thresholds(buffer=True) == [30, 30]
    assert thresholds(decode_tokens=7) == [7, 7]
    assert thresholds(max_tokens=20) == [20, 20]
    monkeypatch.setenv("DEEP_COMM_DECODE_TOKENS", "11")
    assert thresholds() == [11, 11]


def test_layers_agree_on_a_threshold_although_files_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter((21, 22, 23))
    monkeypatch.setattr(tuning, "decode_tokens", lambda *args: next(numbers))
    chosen = local.run(_threshold, 3, timeout_s=60)
    assert len(set(chosen)) == 1 and chosen[0] in (21, 22, 23)


def product_entry(op: str, rows: int, columns: int, method: str) -> dict[str, Any]:
    return {"op": op, "rows": rows, "depth": 64, "columns": columns, "dtype": "float32",
            "method": method, "mean_us": 1.0}  # fmt: skip


def test_products_take_the_method_that_was_measured_for_the_nearest(tune_file: Path) -> None:
    key = tuning.machine_key(CPU, 4)
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    first = [product_entry(gather, 8, 64, "fused"), product_entry(gather, 16, 64, "unfused")]
    tuning.store_products(tune_file, key, [*first, product_entry(scatter, 8, 64, "unfused")])
    tuning.store_products(tune_file, key, [product_entry(gather, 8, 64, "decomposed")])
    entries = tuning.read_products(CPU, 4)
    assert len(entries) == 3  # of one shape, the last
    method = lambda op, *extents: tuning.product_method(entries, op, torch.float32, extents)
    assert method(gather, 8, 64, 64) == "decomposed"
    assert method(gather, 10, 60, 70) == "decomposed"
    assert method(gather, 14, 64, 64) == "unfused"
    assert method(scatter, 9, 64, 64) == "unfused"
    for unlike in ((gather, 30, 64, 64), (gather, 8, 128, 64), (gather, 0, 64, 64)):
        assert method(*unlike) is None
    assert tuning.product_method(entries, gather, torch.bfloat16, (8, 64, 64)) is None
    tune_file.write_text(tune_file.read_text().replace('"rows": 16', '"rows": 0'))
    with pytest.raises(ArgumentError, match="DEEP_COMM_TUNE_FILE"):
        tuning.read_products(CPU, 4)


def test_auto_follows_what_the_bench_has_stored(tune_file: Path) -> None:
    from deep_comm import tp
    from deep_comm.symmetric import SymmetricMemory

    entry = product_entry("all_gather_matmul", 4, 8, "decomposed")
    tuning.store_products(tune_file, tuning.machine_key(CPU, 3), [entry])

    def products(group: Any) -> list[int]:
        """How many of them went beside their collective."""
        with SymmetricMemory(group, 0, staging_bytes=8192, device="cpu") as memory:
            counts = []
            for rows in (4, 10):  # as measured; unlike it
                tp.all_gather_matmul(torch.ones(rows, 64), torch.ones(64, 8), memory)
                counts.append(int(memory.progress.local[-2]))
            return counts

    assert local.run(products, 3, timeout_s=60) == [[1, 1]] * 3
