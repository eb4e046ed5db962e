"""Two runs token by token, and the table of all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from server_stand_ins import (
    BY_NAME,
)
from servers import compare, load, offline, runs
from servers.combinations import BASE, ROWS


def answered(tokens: list[int], prompt: object = 0, **others: Any) -> dict[str, Any]:
    made = dict(logprobs=[-1.0] * len(tokens), margins=[2.0] * len(tokens))
    return dict(prompt=prompt, ids=[5], tokens=tokens, **(made | others))


def test_equal_tokens_agree() -> None:
    verdict = compare.compare([answered([1, 2, 3])], [answered([1, 2, 3])])
    assert verdict == compare.Verdict(equal=1) and verdict.agrees()


def test_another_token_is_wrong_unless_the_base_had_a_near_tie_there() -> None:
    base, tie = answered([1, 2, 3]), answered([1, 2, 3], margins=[2.0, 0.1, 2.0])
    other = answered([1, 7, 9], logprobs=[-1.2, -9.0, -9.0])
    assert not compare.compare([base], [other]).agrees()
    verdict = compare.compare([tie], [other])
    assert verdict.near_ties == 1 and verdict.agrees()
    assert verdict.worst == pytest.approx(0.2)  # what comes after a tie is another text
    assert not compare.compare([tie], [other], tolerance=0.05).agrees()


def test_log_probabilities_count_too_and_nan_is_no_agreement() -> None:
    far = answered([1, 2, 3], logprobs=[-1.0, -2.0, -1.0])
    verdict = compare.compare([answered([1, 2, 3])], [far])
    assert verdict.equal == 1 and not verdict.agrees()
    nan = answered([1, 2, 3], logprobs=[math.nan] * 3)
    assert not compare.compare([answered([1, 2, 3])], [nan]).agrees()


def test_what_was_not_answered_is_no_agreement() -> None:
    base = [answered([1, 2], 0), answered([1, 2], 1)]
    assert compare.compare(base, base[:1]).missing == 1
    assert compare.compare(base, [base[0], answered([1], 1)]).missing == 1
    assert not compare.compare([], []).agrees()


def test_the_dense_model_is_compared_token_by_token() -> None:
    rows = [answered([1, 2, 3, 4])]
    dense = answered([1, 9, 8, 4], margins=[1.0, 0.1, 1.0, 1.0])
    verdict = compare.compare_with_reference(rows, [dense])
    assert (verdict.equal, verdict.near_ties, verdict.wrong) == (2, 1, 1)
    assert not verdict.resembles()
    # A router that chooses another expert once in a while is no fault; one in ten tokens is.
    assert compare.Verdict(equal=397, near_ties=29, wrong=6, worst=3.2).resembles()
    assert not compare.Verdict(equal=380, near_ties=9, wrong=43).resembles()
    assert not compare.Verdict(equal=400, missing=1).resembles()
    assert compare.compare_with_reference(rows, []).missing == 1


def keep(folder: Path, name: str, **result: Any) -> None:
    path = folder / f"{runs.file_name(BY_NAME[name])}.json"
    path.write_text(json.dumps(dict(name=name, **result)))


OVER = dict(built=["<Buffer: …>"], calls=2 * [dict(file="x", counts={"Buffer.dispatch": 4})])


def test_the_table_says_of_each_row_what_became_of_it(tmp_path: Path) -> None:
    front = "vllm/offline/qwen"
    base, good = answered([1, 2, 3]), answered([1, 2, 3])
    bad = answered([1, 7, 3])
    dense, another = (dict(reference=dict(equal=20 - n, wrong=n)) for n in (1, 2))
    keep(tmp_path, f"{front}/{BASE}", rows=[base], built=[], calls=[], **dense)
    names = [f"{front}/deepep_high_throughput{end}" for end in ("", ":auto", ":native", ":wrong")]
    keep(tmp_path, names[0], rows=[good], **OVER, **dense)
    keep(tmp_path, names[1], rows=[good], built=[], calls=[], **dense)
    keep(tmp_path, names[2], rows=[bad], **OVER, **dense)
    keep(tmp_path, names[3], rows=[bad], **OVER, **another)
    ends = (":wrong", ":graphs", ":graphs:eplb", ":chunked")
    low = [f"{front}/deepep_low_latency{end}" for end in ends]
    keep(tmp_path, low[0], rows=[bad], **OVER, **dense)
    keep(tmp_path, low[1], rows=[bad], **OVER, **dense)
    keep(tmp_path, low[2], rows=[good], rearranged=2, **OVER, **another)
    keep(tmp_path, low[3], rows=[good], **OVER)
    keep(tmp_path, f"{front}/deepep_low_latency", failure="no server\nits log")
    keep(tmp_path, "vllm/http/qwen/deepep_high_throughput:gpus4", skipped="4 GPUs")
    found = {line.row.name: line for line in compare.lines(tmp_path)}
    assert [found[name].is_good for name in names] == [True, False, False, True]
    assert found[names[1]].text == "deep_comm was not called"
    assert found[names[2]].text.startswith("prompts 0 equal, 0 near ties, 1 wrong")
    assert [found[name].is_good for name in low] == [False, True, False, False]
    assert found[low[0]].text.startswith("control, NOT WRONG")
    assert found[low[1]].text.endswith("beside the dense model 19 equal, 0 near ties, 1 wrong")
    assert found[low[3]].text == "not compared with the dense model"
    assert found[f"{front}/deepep_low_latency"].text == "failed: no server"
    assert found["vllm/http/qwen/deepep_high_throughput:gpus4"].is_good is None
    lacking = "vllm/figures/large/deepep_low_latency:graphs:deep_ep"
    assert "DeepEP V1 built" in found[lacking].text
    text = compare.table(list(found.values()))
    assert text.count("\n") == len(ROWS) + 2 and "| BAD | deep_comm was not called |" in text


def test_what_cannot_be_judged_is_not_good(tmp_path: Path) -> None:
    """A control without tokens, a base that was skipped, a rank that did not call, NaN."""
    front, dense = "vllm/offline/qwen", dict(reference=dict(equal=20))
    names = [f"{front}/deepep_low_latency{end}" for end in (":wrong", "", ":native", ":chunked")]
    keep(tmp_path, f"{front}/{BASE}", skipped="2 GPUs")
    keep(tmp_path, names[0], rows=[], **OVER, reference=dict(missing=1))
    keep(tmp_path, names[1], rows=[answered([1])], **OVER, **dense)
    keep(tmp_path, names[2], rows=[], **(OVER | dict(calls=OVER["calls"][:1])), **dense)
    keep(tmp_path, names[3], rows=[], **OVER, reference=dict(equal=20, worst=float("inf")))
    found = compare.lines(tmp_path, [BY_NAME[name] for name in names])
    assert [line.is_good for line in found] == [False] * 4
    assert found[1].text.startswith("its base has no result")
    assert found[2].text == "deep_comm was not called"


def test_an_option_that_did_nothing_makes_a_row_bad(tmp_path: Path) -> None:
    front, rows = "vllm/offline/qwen", [answered([1, 2, 3])]
    for base in ("even", "prefix"):
        keep(tmp_path, f"{front}/{BASE}:{base}", rows=rows, cached=1)
    had = dict(rows=rows, reference=dict(equal=20), **OVER)
    for name, done, nothing, why in (
        ("dbo:even", dict(steps=dict(split=2, whole=1)), dict(steps={}), "no step was split"),
        ("prefix", dict(cached=64), dict(cached=0), "no prefix was found in the cache"),
    ):
        row = BY_NAME[f"{front}/deepep_high_throughput:{name}"]
        keep(tmp_path, row.name, **had, **done)
        (line,) = compare.lines(tmp_path, [row])
        assert line.is_good and ("'split': 2" in line.text) == ("dbo" in name)
        keep(tmp_path, row.name, **had, **nothing)
        assert compare.lines(tmp_path, [row])[0].text == why


def test_moves_of_experts_are_counted_but_not_those_of_a_profile(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "Rearranging experts (async mode) (profile)...\nRearranged experts  (profile)  in 0.78 s.\n"
        "Rearranging experts (async mode) ...\nRearranging experts (async mode) ...\n"
    )
    assert offline.rearranged([log]) == 2


def test_the_table_has_figures_with_their_intervals(tmp_path: Path) -> None:
    name = "vllm/figures/large/deepep_high_throughput"
    value = vars(load.figure([10.0, 12.0]))
    base, mine = (
        dict(tokens_s=value, gain=gain, first_ms=value, each_ms=value)
        for gain in (dict(mean=1, half_width=0), dict(mean=1.25, half_width=0.03))
    )
    keep(tmp_path, name, figures={"8": [base, mine]}, **OVER)
    (line,) = compare.lines(tmp_path, [BY_NAME[name]])
    table = compare.table([line])
    assert line.is_good
    assert f"{BASE}:graphs` | 8 | 11 ± 13 | 1 ± 0 | 11 ± 13 | 11 ± 13 |" in table
    assert f"`{name}` | 8 | 11 ± 13 | 1.25 ± 0.03 | 11 ± 13 | 11 ± 13 |" in table


def test_an_interval_is_students() -> None:
    three = load.figure([1.0, 2.0, 3.0])
    assert three.mean == 2.0 and three.half_width == pytest.approx(4.303 / math.sqrt(3))
    for values in ([1.0], [1.0] * 11):
        with pytest.raises(ValueError, match="2 to 10 runs"):
            load.figure(values)
