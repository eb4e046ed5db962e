"""The table of what runs, and what a row means to a server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from server_stand_ins import (
    BY_NAME,
    TOOL,
    machine_at,
)
from servers import combinations, models, offline, runs, serving
from servers.combinations import BASE, COMPARED, OPTIONS, ROWS


def test_every_row_has_a_name_of_its_own_a_model_a_base_and_known_options() -> None:
    assert len(BY_NAME) == len(ROWS)
    for row in ROWS:
        assert row.front in ("offline", "http", "figures", "training")
        assert row.model in models.MODELS
        assert set(row.options) <= set(OPTIONS)
        if row.front in COMPARED:
            assert row.base.name in BY_NAME, row.name
            assert not row.base.is_control and not row.base.is_over_deep_comm


def test_whatever_is_compared_has_a_negative_control() -> None:
    compared = {(row.server, row.front) for row in ROWS if row.front in COMPARED}
    assert {(row.server, row.front) for row in ROWS if row.is_control} == compared
    for model in ("qwen", "qwen-fp8", "deepseek", "deepseek-fp8"):
        for front in ("offline", "http"):
            ours = [row for row in ROWS if (row.server, row.front, row.model) ==
                    ("vllm", front, model)]  # fmt: skip
            assert any(row.is_control for row in ours), (model, front)
            assert {"deepep_high_throughput", "deepep_low_latency"} <= {r.backend for r in ours}


def test_rows_are_chosen_by_name_or_beginning_with_their_bases_first() -> None:
    chosen = combinations.rows_named(["vllm/offline/deepseek/deepep_low_latency:graphs:native"])
    assert [row.backend for row in chosen] == [BASE, "deepep_low_latency"]
    (alone,) = combinations.rows_named(
        ["vllm/offline/deepseek/deepep_low_latency:graphs:native"], False
    )
    assert alone == chosen[1]
    chosen = combinations.rows_named(["vllm/offline/qwen/deepep_high_throughput:chunked", "sglang"])
    assert chosen[0].name == f"vllm/offline/qwen/{BASE}"
    assert {row.server for row in chosen[2:]} == {"sglang"}
    assert combinations.rows_named([]) == list(dict.fromkeys(combinations.rows_named([])))
    with pytest.raises(KeyError, match="no row is named vllm/nothing"):
        combinations.rows_named(["vllm/nothing"])


def test_options_reach_the_engine_and_its_server_alike() -> None:
    row = BY_NAME["vllm/offline/qwen/deepep_low_latency:graphs:eplb"]
    options = combinations.vllm_options(row)
    assert options["all2all_backend"] == "deepep_low_latency" and not options["enforce_eager"]
    assert options["eplb_config"]["num_redundant_experts"] == 2
    flags = serving.flags(options)
    assert flags[flags.index("--all2all-backend") + 1] == "deepep_low_latency"
    assert "--no-enforce-eager" in flags and "--enable-eplb" in flags
    graphs = json.loads(flags[flags.index("--compilation-config") + 1])
    assert graphs == options["compilation_config"]
    control = BY_NAME["vllm/offline/qwen/deepep_high_throughput:native:wrong"]
    assert combinations.variables(control) == {
        "DEEP_COMM_VLLM": "1", "DEEP_COMM_DECODE_TOKENS": "0", "SERVERS_WRONG": "1",
    }  # fmt: skip
    compiled = combinations.vllm_options(
        BY_NAME["vllm/offline/qwen/deepep_high_throughput:auto:compiled"]
    )
    assert not compiled["enforce_eager"] and "mode" not in compiled["compilation_config"]


def test_sglang_has_deep_gemms_kernels_with_deep_ep_and_tritons_without() -> None:
    def flags(name: str) -> dict[str, str]:
        words = combinations.sglang_flags(BY_NAME[f"sglang/http/qwen/{name}"])
        return dict(zip(words, words[1:], strict=False))

    base, low, graphs = flags("none"), flags("low_latency"), flags("auto:graphs")
    assert base["--moe-runner-backend"] == "triton" and "--moe-a2a-backend" not in base
    assert low["--moe-runner-backend"] == "deep_gemm" and low["--moe-a2a-backend"] == "deepep"
    assert low["--deepep-mode"] == "low_latency" and graphs["--deepep-mode"] == "auto"
    # A rank sends half the tokens of a step, and a low-latency call of SGLang's takes 128.
    assert int(low["--chunked-prefill-size"]) // 2 <= 128
    assert base["--cuda-graph-backend-decode"] == low["--cuda-graph-backend-decode"] == "disabled"
    assert "--cuda-graph-backend-decode" not in graphs and "--cuda-graph-bs-decode" in graphs
    # With attention of each rank's own there is nothing for NCCL within a graph.
    assert "--enable-dp-attention" in graphs and graphs["--dp-size"] == "2"
    assert "--enable-dp-lm-head" in graphs and "--enable-dp-attention" not in low
    assert "--skip-tokenizer-init" in base  # /generate takes and returns ids
    control = combinations.variables(BY_NAME["sglang/http/qwen/auto:graphs:wrong"])
    assert control["SERVERS_WRONG"] == "1" and control["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] == "0"
    native = combinations.variables(BY_NAME["sglang/http/qwen/auto:native"])
    assert "DEEP_COMM_VLLM" not in native


def test_a_rank_without_work_has_one_prompt_of_one_token(tmp_path: Path) -> None:
    machine = machine_at(tmp_path)
    for name, shares in (("qwen/deepep_high_throughput:idle", [17, 1]), (f"qwen/{BASE}", [12, 6])):
        jobs = offline.jobs(BY_NAME[f"vllm/offline/{name}"], machine)
        assert [len(job["prompts"]) for job in jobs] == shares
    (first,) = offline.jobs(BY_NAME["vllm/offline/qwen/deepep_high_throughput:idle"], machine)[1][
        "prompts"
    ]
    assert len(first["ids"]) == 1
    (first, second) = offline.jobs(
        BY_NAME["vllm/offline/qwen/deepep_high_throughput:dbo:even"], machine
    )  # with dual-batch overlap: the same steps on both ranks, of which each can be halved
    lengths = [[len(one["ids"]) for one in job["prompts"]] for job in (first, second)]
    assert lengths[0] == lengths[1] and len(lengths[0]) == 12
    twice = offline.jobs(BY_NAME[f"vllm/offline/qwen/{BASE}:prefix"], machine)[0]
    assert twice["rounds"] == 2
    assert len({tuple(prompt["ids"][:64]) for prompt in twice["prompts"]}) == 1


def test_the_list_says_what_rows_lack() -> None:
    done = subprocess.run([*TOOL, "list"], capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(ROWS)
    assert sum("needs" in line for line in lines) == sum(bool(row.lacks) for row in ROWS)


def run_without_gpus(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOOL, "run", str(folder), *arguments], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


@pytest.mark.parametrize(
    "row, flags, needs",
    [
        (f"vllm/offline/qwen/{BASE}", ["--installed"], "2 GPUs"),
        (f"vllm/offline/qwen/{BASE}", ["--installed", "--one-gpu"], "a GPU"),
        ("vllm/figures/large/deepep_v2:graphs", ["--installed", "--one-gpu"], "2 GPUs"),
        ("sglang/http/qwen/none", ["--one-gpu"], "a GPU"),
        ("sglang/http/qwen/auto:graphs", ["--installed", "--one-gpu"], "a GPU"),
    ],
)  # fmt: skip
def test_a_machine_without_gpus_runs_nothing_and_says_so(
    row: str, flags: list[str], needs: str, tmp_path: Path
) -> None:
    done = run_without_gpus(tmp_path, row, *flags)
    if "0 good, 0 bad" not in done.stdout:
        pytest.skip("this machine has GPUs")
    assert done.returncode == 1 and f"needs {needs}" in done.stdout
    assert f"needs {needs}" in (tmp_path / "runs" / "table.md").read_text()


def test_an_earlier_result_stays_and_does_not_make_a_run_good(tmp_path: Path) -> None:
    row = BY_NAME[f"vllm/offline/qwen/{BASE}"]
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / f"{runs.file_name(row)}.json"
    kept = dict(name=row.name, rows=[], built=[], calls=[], reference=dict(equal=20))
    path.write_text(json.dumps(kept))
    done = run_without_gpus(tmp_path, row.name, "--installed")
    if "not run again" not in done.stdout:
        pytest.skip("this machine has GPUs")
    assert json.loads(path.read_text()) == kept
    assert "1 good, 0 bad" in done.stdout and done.returncode == 1
