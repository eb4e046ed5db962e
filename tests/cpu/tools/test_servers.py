"""What tools/servers rests on, without a GPU and without a server of others: the table of rows, the
trimmed files, the models, the load, the comparison, and what processes leave behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from servers import combinations, compare, fatbin, fetch, load, models, offline, runs, serving
from servers.combinations import BASE, COMPARED, OPTIONS, ROWS, Row
from servers.load import Asked, Server
from servers.releases import RELEASES, Release, Wheel

from deep_comm import processes

ROOT = Path(__file__).resolve().parents[3]
TOOL = [sys.executable, str(ROOT / "tools" / "servers")]
BY_NAME = {row.name: row for row in ROWS}
TINY = models.Model(
    "tiny", "qwen", layers=1, experts=4, topk=2, hidden=256, inter=128, vocab=64
)  # fmt: skip


# ---- the table of combinations -------------------------------------------------------------------


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
    assert combinations.variables(control) == {"DEEP_COMM_VLLM": "1", "SERVERS_WRONG": "1"}


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
    assert "--skip-tokenizer-init" in base  # /generate takes and returns ids
    control = combinations.variables(BY_NAME["sglang/http/qwen/auto:wrong"])
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
    twice = offline.jobs(BY_NAME[f"vllm/offline/qwen/{BASE}:prefix"], machine)[0]
    assert twice["rounds"] == 2
    assert len({tuple(prompt["ids"][:64]) for prompt in twice["prompts"]}) == 1


def test_the_list_says_what_rows_lack() -> None:
    done = subprocess.run([*TOOL, "list"], capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(ROWS)
    assert sum("needs" in line for line in lines) == sum(bool(row.lacks) for row in ROWS)


@pytest.mark.parametrize(
    "row, flags, needs",
    [
        (f"vllm/offline/qwen/{BASE}", ["--installed"], "2 GPUs"),
        (f"vllm/offline/qwen/{BASE}", ["--installed", "--one-gpu"], "a GPU"),
        (f"vllm/figures/large/{BASE}:graphs", ["--installed", "--one-gpu"], "2 GPUs"),
        ("sglang/http/qwen/none", ["--one-gpu"], "a GPU"),
        ("sglang/http/qwen/auto:graphs", ["--installed", "--one-gpu"], "2 GPUs"),
    ],
)  # fmt: skip
def test_a_machine_without_gpus_runs_nothing_and_says_so(
    row: str, flags: list[str], needs: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [*TOOL, "run", str(tmp_path), row, *flags], capture_output=True, text=True,
        timeout=120, env={**os.environ, "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    if "0 good, 0 bad" not in done.stdout:
        pytest.skip("this machine has GPUs")
    assert done.returncode == 1 and f"needs {needs}" in done.stdout
    assert f"needs {needs}" in (tmp_path / "runs" / "table.md").read_text()


# ---- wheels --------------------------------------------------------------------------------------

MACHINE_CODE, PTX = 2, 1


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 1, 64, len(payload)) + bytes(12) + struct.pack("<I", arch)
    return header + bytes(64 - len(header)) + payload


def container(*entries: bytes) -> bytes:
    inside = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inside)) + inside


def elf(fatbin_section: bytes) -> bytes:
    """An ELF file of that section, and the section of names."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    start = 64
    table = start + len(fatbin_section) + len(names)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)

    def section(name: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, 0, 8, 0)

    sections = bytes(64) + section(1, start, len(fatbin_section))
    sections += section(12, start + len(fatbin_section), len(names))
    return bytes(header) + fatbin_section + names + sections


OLD, NEW = entry(MACHINE_CODE, 80, b"8" * 40), entry(MACHINE_CODE, 90, b"9" * 48)
TEXT = entry(PTX, 90, b"p" * 64)


def inside(data: bytes | bytearray) -> list[list[tuple[int, int]]]:
    return [
        [(one.kind, one.arch) for one in fatbin.entries(data, which)]
        for which in fatbin.containers(data)
    ]


def test_only_code_of_one_architecture_is_kept() -> None:
    all_three = (OLD, NEW, TEXT)
    data = bytearray(elf(container(*all_three) + bytes(8) + container(OLD) + container(TEXT)))
    before = len(data)
    trimmed = fatbin.trim(data, 90)
    num_bytes = sum(map(len, (*all_three, OLD, TEXT)))
    assert trimmed == fatbin.Trimmed(3, num_bytes, len(NEW) + 2 * len(OLD), 2)
    assert len(data) == before
    # The second and third can be registered, and never run here.
    assert inside(data) == [[(MACHINE_CODE, 90)], [(MACHINE_CODE, 80)], [(MACHINE_CODE, 80)]]
    assert b"9" * 48 in data and b"p" * 64 not in data


def test_a_module_that_is_only_imported_keeps_the_smallest_entry_everywhere() -> None:
    data = bytearray(elf(container(NEW, NEW) + container(OLD, NEW)))
    assert fatbin.trim(data, None).without_code == 2
    assert inside(data) == [[(MACHINE_CODE, 80)], [(MACHINE_CODE, 80)]]


def test_what_is_not_a_fatbin_is_refused_or_left_alone() -> None:
    data = bytearray(b"no ELF file, but long enough to look into")
    assert fatbin.trim(data, 90).containers == 0
    with pytest.raises(ValueError, match="no container at"):
        fatbin.trim(bytearray(elf(b"garbage!" * 4)), 90)
    spoilt = bytearray(elf(container(OLD)))
    struct.pack_into("<Q", spoilt, 64 + 16 + 8, 1000)
    with pytest.raises(ValueError, match="entries of the container"):
        fatbin.trim(spoilt, 90)


def packed_wheel(folder: Path, project: str, files: dict[str, str]) -> Wheel:
    named = project.replace("-", "_")
    path = folder / "wheels" / "some-server-1.0" / f"{named}-1.0-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"{named}/{name}", text)
    return Wheel(f"{project}==1.0", "any", hashlib.sha256(path.read_bytes()).hexdigest())


def packed_release(folder: Path) -> Release:
    """Of two wheels, the name of one of which begins as the other's."""
    server = packed_wheel(
        folder, "some-server", {"__init__.py": "VALUE = 3\n", "bench/big.json": ""}
    )
    kernels = packed_wheel(folder, "some-server-kernels", {"__init__.py": "VALUE = 4\n"})
    return Release("some-server", "1.0", (server, kernels), (), ("some_server/bench/*",))


def test_a_release_is_trimmed_packed_and_unpacked_elsewhere(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    release = packed_release(here)
    assert fetch.trim(release, here) == []
    packages = here / "unpacked" / release.packages_name
    (packages / "__pycache__").mkdir(parents=True)
    (packages / "__pycache__" / "x.pyc").touch()
    (packages / "requirements.txt").touch()
    packed = fetch.pack(release, here, limit_mib=1)
    there.mkdir()
    (there / "parts").mkdir()
    for path in packed:
        path.rename(there / "parts" / path.name)
    package, others = fetch.unpacked(release, there)
    assert (Path(package) / "some_server" / "__init__.py").read_text() == "VALUE = 3\n"
    assert not (Path(package) / "some_server" / "bench").exists()
    kernels = Path(package) / "some_server_kernels" / "__init__.py"
    assert kernels.read_text() == "VALUE = 4\n"
    assert [path.name for path in Path(others).iterdir()] == ["requirements.txt"]
    assert fetch.unpacked(release, there) == (package, others)  # once
    with pytest.raises(fetch.NotFetched, match="neither"):
        fetch.unpacked(release, tmp_path)


def test_another_wheel_than_the_tables_is_refused(tmp_path: Path) -> None:
    release = packed_release(tmp_path)
    server, kernels = release.wheels
    assert len(fetch.wheels_of(release, tmp_path)) == 2
    other = dataclasses.replace(kernels, sha256="0" * 64)
    with pytest.raises(fetch.NotFetched, match="some_server_kernels.*of the table"):
        fetch.trim(dataclasses.replace(release, wheels=(server, other)), tmp_path)
    with pytest.raises(fetch.NotFetched, match="has no wheel of some-server==1.0"):
        fetch.wheels_of(release, tmp_path / "elsewhere")


def test_the_table_of_releases_names_each_once_with_a_hash() -> None:
    assert len({release.name for release in RELEASES}) == len(RELEASES)
    for release in RELEASES:
        assert release.wheels[0].pin == f"{release.project}=={release.version}"
        assert all(len(bytes.fromhex(wheel.sha256)) == 32 for wheel in release.wheels)
    assert {row.server for row in ROWS if not row.lacks} == {one.server for one in RELEASES}
    bridges = hook_module().BRIDGES
    assert all(set(release.hooks) <= set(bridges) for release in RELEASES)
    backends = {row.backend for row in ROWS}
    assert all(set(release.absent) <= backends for release in RELEASES)


# ---- models --------------------------------------------------------------------------------------


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found.update(models.read_safetensors(path))
    return found


@pytest.mark.parametrize("family", ["qwen", "deepseek"])
def test_every_expert_has_weights_of_its_own_and_runs_repeat(family: str, tmp_path: Path) -> None:
    model = dataclasses.replace(TINY, family=family, layers=2)
    num_bytes = models.write_model(model, tmp_path / "a", "cpu")
    models.write_model(model, tmp_path / "b", "cpu")
    found, again = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert sum(one.nbytes for one in found.values()) == num_bytes
    assert all(torch.equal(found[name], again[name]) for name in found)
    experts = [one for name, one in found.items() if ".experts." in name and "down" in name]
    assert len(experts) == model.experts * (2 if family == "qwen" else 1)
    for index, one in enumerate(experts):
        assert one.std() > 0.1
        assert not any(torch.equal(one, other) for other in experts[index + 1 :])
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(found)
    assert index["metadata"]["total_size"] == num_bytes


def test_configurations_say_what_the_weights_are(tmp_path: Path) -> None:
    for family, key, kind in (
        ("qwen", "num_experts", "qwen3_moe"),
        ("deepseek", "n_routed_experts", "deepseek_v3"),
    ):
        folder = tmp_path / family
        models.write_model(dataclasses.replace(TINY, family=family, layers=2), folder, "cpu")
        config = json.loads((folder / "config.json").read_text())
        assert config["model_type"] == kind and config[key] == 4
        found = tensors(folder)
        assert found["model.embed_tokens.weight"].shape == (64, config["hidden_size"])
        assert found["model.layers.1.mlp.gate.weight"].shape == (4, 256)
        words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        assert sorted(words.values()) == list(range(64)) and words["w17"] == 17
    shared = [name for name in found if "shared_experts" in name]
    assert len(shared) == 3 and config["topk_group"] < config["n_group"]


def test_fp8_blocks_stand_for_the_same_weights_and_only_of_experts(tmp_path: Path) -> None:
    plain, blocks, back = (tmp_path / name for name in ("plain", "blocks", "back"))
    models.write_model(TINY, plain, "cpu")
    models.write_model(dataclasses.replace(TINY, fp8=True), blocks, "cpu")
    models.write_dequantised(blocks, back)
    expected, stored, got = tensors(plain), tensors(blocks), tensors(back)
    assert got.keys() == expected.keys()
    config = json.loads((blocks / "config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [128, 128]
    for name, one in expected.items():
        is_expert = ".experts." in name
        assert (stored[name].dtype == torch.float8_e4m3fn) == is_expert
        if is_expert:
            assert stored[f"{name}_scale_inv"].shape == tuple(size // 128 for size in one.shape)
            limit = float(one.float().abs().max()) / 16  # three bits of mantissa
            assert float((one.float() - got[name].float()).abs().max()) <= limit
            assert not torch.equal(one, got[name])
        else:
            assert torch.equal(one, got[name])
            is_linear = one.dim() == 2 and "embed" not in name
            named = name.removesuffix(".weight") in config["modules_to_not_convert"]
            assert named == is_linear, name
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_large_models_have_the_sizes_of_large_ones() -> None:
    for name in ("large", "large-fp8"):
        model = models.MODELS[name]
        assert (model.hidden, model.experts, model.topk) == (7168, 256, 8)


# ---- comparison ----------------------------------------------------------------------------------


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
    names = [f"{front}/deepep_high_throughput{end}" for end in ("", ":native", ":dbo", ":wrong")]
    keep(tmp_path, names[0], rows=[good], **OVER, **dense)
    keep(tmp_path, names[1], rows=[good], built=[], calls=[], **dense)
    keep(tmp_path, names[2], rows=[bad], **OVER, **dense)
    keep(tmp_path, names[3], rows=[bad], **OVER, **another)
    low = [f"{front}/deepep_low_latency{end}" for end in (":wrong", ":graphs", ":dbo", ":chunked")]
    keep(tmp_path, low[0], rows=[bad], **OVER, **dense)
    keep(tmp_path, low[1], rows=[bad], **OVER, **dense)
    keep(tmp_path, low[2], rows=[good], **OVER, **another)
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
    faults = "vllm/offline/qwen/deepep_low_latency:graphs:faults"
    assert "a program that stalls a rank" in found[faults].text
    text = compare.table(list(found.values()))
    assert text.count("\n") == len(ROWS) + 2 and "| BAD | deep_comm was not called |" in text


def test_what_cannot_be_judged_is_not_good(tmp_path: Path) -> None:
    """A control without tokens, a base that was skipped, a rank that did not call, NaN."""
    front, dense = "vllm/offline/qwen", dict(reference=dict(equal=20))
    names = [f"{front}/deepep_low_latency{end}" for end in (":wrong", "", ":dbo", ":chunked")]
    keep(tmp_path, f"{front}/{BASE}", skipped="2 GPUs")
    keep(tmp_path, names[0], rows=[], **OVER, reference=dict(missing=1))
    keep(tmp_path, names[1], rows=[answered([1])], **OVER, **dense)
    keep(tmp_path, names[2], rows=[], **(OVER | dict(calls=OVER["calls"][:1])), **dense)
    keep(tmp_path, names[3], rows=[], **OVER, reference=dict(equal=20, worst=float("inf")))
    found = compare.lines(tmp_path, [BY_NAME[name] for name in names])
    assert [line.is_good for line in found] == [False] * 4
    assert found[1].text.startswith("its base has no result")
    assert found[2].text == "deep_comm was not called"


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
    figures = {"8": dict(tokens_s=value, first_ms=value, each_ms=value)}
    keep(tmp_path, name, figures=figures, **OVER)
    (line,) = compare.lines(tmp_path, [BY_NAME[name]])
    assert line.is_good and "| 8 | 11 ± 13 | 11 ± 13 | 11 ± 13 |" in compare.table([line])


def test_an_interval_is_students() -> None:
    three = load.figure([1.0, 2.0, 3.0])
    assert three.mean == 2.0 and three.half_width == pytest.approx(4.303 / math.sqrt(3))
    for values in ([1.0], [1.0] * 11):
        with pytest.raises(ValueError, match="2 to 10 runs"):
            load.figure(values)


# ---- load over HTTP ------------------------------------------------------------------------------


class Completions(http.server.BaseHTTPRequestHandler):
    """Streams tokens that follow from the prompt: two in its first event, then one each. As
    OpenAI's API does, or as SGLang's: there each event repeats what came before.
    """

    protocol_version = "HTTP/1.1"
    ranks: list[int]

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        owner: Any = self.server
        owner.ranks.append(self.headers.get("X-data-parallel-rank"))
        is_sglang = self.path == "/generate"
        prompt = body["input_ids" if is_sglang else "prompt"]
        wanted = body["sampling_params"]["max_new_tokens"] if is_sglang else body["max_tokens"]
        if prompt == [666]:
            self.send_error(400, "no such prompt")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        made = [sum(prompt) + index for index in range(wanted)]
        try:
            for end in range(2, wanted + 1):
                if is_sglang:
                    self.send_all(made[:end])
                else:
                    self.send_event(made[:2] if end == 2 else [made[end - 1]])
                time.sleep(0.002)
                if prompt == [777]:
                    return
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            owner.aborted += 1

    def send_event(self, ids: list[int]) -> None:
        top = [{f"w{one}": -1.0, "w1": -1.5} for one in ids]
        said = dict(
            tokens=[f"w{one}" for one in ids], token_logprobs=[-1.0] * len(ids), top_logprobs=top
        )
        choice = dict(index=0, text="", logprobs=said)
        if self.server.has_ids:  # type: ignore[attr-defined]
            choice["token_ids"] = ids
        self.send_json(dict(choices=[choice]))

    def send_all(self, ids: list[int]) -> None:
        said = dict(
            output_token_logprobs=[[-1.0, one, None] for one in ids],
            output_top_logprobs=[[[-1.0, one, None], [-1.5, 1, None]] for one in ids],
        )
        self.send_json(dict(output_ids=ids, meta_info=said))

    def send_json(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


def server_at(port: int, has_ids: bool = True) -> Any:
    class Many(http.server.ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    server: Any = Many(("127.0.0.1", port), Completions)
    server.ranks, server.aborted, server.has_ids = [], 0, has_ids
    return server


@contextlib.contextmanager
def answering(has_ids: bool = True) -> Iterator[Any]:
    server = server_at(0, has_ids)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("has_ids, is_sglang", [(True, False), (False, False), (True, True)])
def test_a_streamed_completion_has_tokens_margins_and_times(has_ids: bool, is_sglang: bool) -> None:
    with answering(has_ids) as server:
        asked = Asked(3, [10, 20], 5, rank=1)
        answer = load.complete(Server(server.server_port, 20, is_sglang), asked)
        assert server.ranks == ["1"]
    assert answer.prompt == 3 and answer.tokens == [30, 31, 32, 33, 34]
    assert answer.logprobs == [-1.0] * 5 and answer.margins == [0.5] * 5
    assert 0 < answer.first_s < answer.last_s


@pytest.mark.parametrize("is_sglang", [False, True])
def test_an_aborted_request_closes_its_connection(is_sglang: bool) -> None:
    with answering() as server:
        asked = Asked(0, [1], 500, abort_after=3)
        answer = load.complete(Server(server.server_port, 20, is_sglang), asked)
        assert answer.aborted and 3 <= len(answer.tokens) < 500
        deadline = time.monotonic() + 20
        while not server.aborted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.aborted == 1


@pytest.mark.parametrize("is_sglang", [False, True])
def test_refusals_and_early_ends_are_errors(is_sglang: bool) -> None:
    with answering() as server:
        for ids, words in (([666], "400"), ([777], "2 of 9 tokens")):
            with pytest.raises(load.BadAnswer, match=words):
                load.complete(Server(server.server_port, 20, is_sglang), Asked(0, ids, 9))


def test_what_a_server_is_asked_covers_64_at_once_aborts_and_a_rank_without_work() -> None:
    row = BY_NAME["vllm/http/qwen/deepep_low_latency:graphs"]
    with answering() as server:
        result = serving.tokens(row, Server(server.server_port, 20))
        num_prompts = len(offline.prompts_of(row))
        assert server.ranks[-2 * num_prompts : -num_prompts] == ["0"] * num_prompts
    assert result["aborted"] == 8 and len(result["rows"]) == 3 * num_prompts + 56
    assert len({one["prompt"] for one in result["rows"]}) == len(result["rows"])
    assert compare.compare(result["rows"], result["rows"]).agrees()


def test_figures_are_measured_after_a_first_run() -> None:
    with answering() as server:
        found = load.measure(Server(server.server_port, 20), [[1], [2, 3]], 4, 8, 2, repeats=2)
        assert len(server.ranks) == 3 * 16 and set(server.ranks) == {"0", "1"}
    assert set(found) == {"tokens_s", "first_ms", "each_ms"}
    assert all(one.mean > 0 for one in found.values())


def test_prompts_have_mixed_lengths_and_repeat() -> None:
    found = load.prompts(64, 12, 1)
    assert found == load.prompts(64, 12, 1) != load.prompts(64, 12, 2)
    assert len({len(one) for one in found}) == 12 and min(map(len, found)) == 1
    assert all(3 <= token < 64 for one in found for token in one)


# ---- processes, and what they leave --------------------------------------------------------------


def machine_at(folder: Path, **others: Any) -> runs.Machine:
    for name in ("qwen", "deepseek"):  # as if they had been made
        (folder / "models" / name).mkdir(parents=True, exist_ok=True)
        config = models.config(dataclasses.replace(TINY, name=name))
        (folder / "models" / name / "config.json").write_text(json.dumps(config))
    (folder / "runs").mkdir(exist_ok=True)
    return runs.Machine(folder / "models", folder / "runs", (), **others)


def test_a_process_ends_when_its_time_is_up_and_its_log_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    command = runs.python("-uc", "print('so far'); import time; time.sleep(100)")
    with pytest.raises(runs.Failed, match=r"\[124\].*\n.*\nso far"):
        runs.run_to_end([(command, dict(os.environ), log)], 1.5)


def test_one_process_that_fails_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    commands = [
        (runs.python("-c", code), dict(os.environ), tmp_path / f"{index}.log")
        for index, code in enumerate(("import time; time.sleep(100)", "raise SystemExit(3)"))
    ]
    with pytest.raises(runs.Failed, match="None, 3"):
        runs.run_to_end(commands, 60)
    assert time.monotonic() - began < 30


RANKS = """
import sys, deep_comm
from deep_comm import processes

def serve(group):
    buffer = deep_comm.Buffer(group, 1 << 20, device="cpu")
    print("up", flush=True)
    while True:
        buffer.barrier()

if __name__ == "__main__":
    processes.run(serve, 2, timeout_s=100)
"""


def test_ranks_that_are_killed_in_the_middle_of_calls_leave_no_shared_memory(
    tmp_path: Path,
) -> None:
    program, log = tmp_path / "ranks.py", tmp_path / "ranks.log"
    program.write_text(RANKS)
    env = {**os.environ, "DEEP_COMM_LOG": "info"}
    for _ in range(2):  # and start again at once
        before = runs.Left.now()
        with runs.started(runs.python(str(program)), env, log, 60) as process:
            while log.read_text().count("up") < 2:
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            time.sleep(0.2)
            runs.end(process)
        before.require_nothing_more(limit_s=10)
    assert len(runs.built([log])) == 2  # the line of each Buffer


def test_calls_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    row, machine = BY_NAME["vllm/offline/qwen/deepep_low_latency"], machine_at(tmp_path)
    folder = Path(runs.environment(row, machine)["SERVERS_COUNTS"])
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(json.dumps(dict(file="x", counts={"Buffer.dispatch": 1})))
    assert len(runs.counted(row, machine)) == 1
    runs.forget_counts(row, machine)
    assert runs.counted(row, machine) == []


def test_what_is_left_behind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SHARED_MEMORY", tmp_path)
    before = runs.Left.now()
    (tmp_path / "deep_comm.0.1.2").touch()
    (tmp_path / "another").touch()
    with pytest.raises(runs.Failed, match=r"\['deep_comm.0.1.2'\]"):
        before.require_nothing_more(limit_s=0.1)


SERVER = """
import sys
sys.path[:0] = {paths!r}
import test_servers
port = int(sys.argv[sys.argv.index("--port") + 1])
test_servers.server_at(port).serve_forever()
"""


def test_a_row_starts_its_server_kills_it_starts_it_again_and_asks_it(tmp_path: Path) -> None:
    """With a server of a few lines in vLLM's place."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    paths = [str(Path(__file__).parent), str(ROOT / "tests" / "support")]
    (package / "main.py").write_text(SERVER.format(paths=paths))
    machine = dataclasses.replace(machine_at(tmp_path, limit_s=60), paths=(str(tmp_path),))
    row = BY_NAME["vllm/http/qwen/deepep_low_latency:graphs:kill"]
    result = serving.run(row, machine)
    assert result["aborted"] == 8 and result["facts"]["start_s"] < 60
    runs.keep(row, machine, result)
    (line,) = compare.lines(machine.out, [row])
    assert line.is_good is False and line.text == "deep_comm was not called"


ENGINE = """
import os, torch
from types import SimpleNamespace

__version__ = "0"
torch.cuda.get_device_name = lambda: "none"
SamplingParams = SimpleNamespace

class LLM:
    def __init__(self, **options):
        assert options["all2all_backend"] and options["data_parallel_size"] == 2
        assert os.environ["WORLD_SIZE"] == "2"

    def generate(self, prompts, sampling):
        outputs = []
        for prompt in prompts:
            first = sum(prompt["prompt_token_ids"])
            ids = [first + step for step in range(sampling.max_tokens)]
            said = [{one: SimpleNamespace(logprob=-1.0), 0: SimpleNamespace(logprob=-1.5)}
                    for one in ids]
            made = SimpleNamespace(token_ids=ids, logprobs=said)
            outputs.append(SimpleNamespace(outputs=[made]))
        return outputs
"""


def test_ranks_of_an_engine_get_their_prompts_and_give_their_tokens(tmp_path: Path) -> None:
    """With an engine of a few lines in vLLM's place."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(ENGINE)
    machine = dataclasses.replace(machine_at(tmp_path, limit_s=100), paths=(str(tmp_path),))
    row = BY_NAME[f"vllm/offline/qwen/{BASE}:prefix"]
    result = offline.run(row, machine)
    assert [one["ids"] for one in result["rows"]] == offline.prompts_of(row)
    for one in result["rows"]:
        assert one["tokens"] == list(range(sum(one["ids"]), sum(one["ids"]) + 24))
        assert one["logprobs"] == [-1.0] * 24 and one["margins"] == [0.5] * 24
    assert result["facts"]["server"] == "vllm 0" and result["calls"] == []


@pytest.mark.parametrize(
    ("code", "is_good"),
    [
        ("raise __import__('deep_comm').errors.ArgumentError('sizes', 1, 'too small')", True),
        ("raise SystemExit(1)", False),
        ("import time; time.sleep(100)", False),
    ],
)
def test_a_server_that_cannot_work_must_end_with_our_message(
    code: str, is_good: bool, tmp_path: Path
) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(code)
    limit_s = 5 if "sleep" in code else 60
    machine = dataclasses.replace(machine_at(tmp_path, limit_s=limit_s), paths=(str(tmp_path),))
    row = BY_NAME["vllm/http/qwen/deepep_high_throughput:refused"]
    if not is_good:
        with pytest.raises(runs.Failed, match="no error of deep_comm"):
            serving.run(row, machine)
        return
    result = serving.run(row, machine)
    assert compare.judge(row, result, None)[0]
    assert result["said"].startswith("deep_comm.errors.ArgumentError: ")


# ---- inside the server's processes ---------------------------------------------------------------


def hook_module() -> ModuleType:
    path = runs.IN_SERVER / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("servers_sitecustomize", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WATCHED = """
import torch, deep_comm
from deep_comm import local
from {module} import Buffer

def main(group):
    T, H, E = 4, 128, 4
    x = torch.ones(T, H, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1], [2, -1], [3, 0], [1, 2]])
    with_low = dict(low_latency_mode=True, device="cpu")
    size = deep_comm.Buffer.get_low_latency_rdma_size_hint(T, H, 2, E)
    buffer = Buffer(group, 1 << 20, size, **with_low)
    layout = buffer.get_dispatch_layout(ids, E)
    sent = buffer.dispatch(
        x, topk_idx=ids, topk_weights=torch.ones(T, 2), num_tokens_per_rank=layout[0],
        is_token_in_rank=layout[3], num_tokens_per_expert=layout[2])
    counts = [int((sent[1] == e).sum()) for e in range(2)]
    _, low, *_ = buffer.low_latency_dispatch(x, ids, T, E, use_fp8=False)
    return f"{{group.rank()}} {{counts}} {{low.tolist()}}"

print(*local.run(main, 2, timeout_s=60), sep="\\n")
"""


@pytest.mark.parametrize("module", ["deep_ep", "deep_comm.buffer"])
def test_calls_are_counted_and_a_control_sends_tokens_to_the_wrong_experts(
    module: str, tmp_path: Path
) -> None:
    from deep_comm.compat.installer import SITE

    said = []
    for wrong in ("0", "1"):
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(runs.IN_SERVER), str(SITE)]),
            "SERVERS_WATCH": module, "SERVERS_COUNTS": str(tmp_path), "SERVERS_WRONG": wrong,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", WATCHED.format(module=module)], env=env, cwd=tmp_path,
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    # Of both ranks' tokens each expert gets twice: 0: 2, 1: 2, 2: 2, 3: 1.
    assert said[0] == ["0 [4, 4] [4, 4]", "1 [4, 2] [4, 2]"]
    assert said[1] == ["0 [4, 2] [4, 2]", "1 [4, 4] [4, 4]"]
    counts = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(counts) == 2
    for one in counts:
        assert one["counts"]["Buffer.dispatch"] == 2
        assert one["counts"]["Buffer.low_latency_dispatch"] == 2


def test_bridges_change_what_an_older_torch_lacks() -> None:
    hooks = hook_module()
    names = ("ncclSend", "ncclCommSuspend", "ncclCommResume")
    library: Any = type("NCCLLibrary", (), {})
    library.exported_functions = [type("F", (), {"name": name}) for name in names]
    module: Any = ModuleType("pynccl_wrapper")
    module.NCCLLibrary = library
    hooks.older_nccl(module)
    assert [one.name for one in library.exported_functions] == ["ncclSend"]
    hooks.older_stream(module)
    assert callable(module._is_capturing_or_compiling)


def test_bridges_stand_in_for_what_sglang_imports_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooks, registered = hook_module(), []

    class AutoConfig:
        @staticmethod
        def register(model_type: str, config: str, exist_ok: bool = False) -> None:
            registered.append((model_type, config, exist_ok))

    module: Any = ModuleType("configuration_auto")
    module.AutoConfig = AutoConfig
    hooks.newer_transformers(module)
    module.AutoConfig.register("qwen3_asr", "its configuration")
    assert registered == [("qwen3_asr", "its configuration", True)]
    for name in ("flashinfer", "flashinfer.prefill", "flashinfer.sampling"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # is put back
        del sys.modules[name]
    hooks.no_flashinfer(module)
    from flashinfer import bmm_fp8  # type: ignore[import-not-found]
    from flashinfer.sampling import min_p_sampling_from_probs  # type: ignore[import-not-found]

    for lacking in (bmm_fp8, min_p_sampling_from_probs):
        with pytest.raises(NotImplementedError, match="FlashInfer"):
            lacking(1)
    with pytest.raises(ImportError):
        from flashinfer import mm_fp4  # type: ignore[import-not-found] # noqa: F401
    with pytest.raises(ImportError):
        import flashinfer.norm  # type: ignore[import-not-found] # noqa: F401


def exchange_over_host(group: Any) -> dict[str, list[Any]]:
    """Uneven sizes: rank r has r + 1 rows."""
    rank, over_host = group.rank(), hook_module().OverHost(group, "cpu")
    mine = torch.arange(6, dtype=torch.bfloat16).view(3, 2) * 2**rank
    rows = torch.full((rank + 1, 2), float(rank)).to(torch.float8_e4m3fn)
    gathered, kept = torch.empty(3, 2, dtype=rows.dtype), torch.empty(rank + 1, 2)
    over_host.all_gatherv(gathered, rows, sizes=[1, 2])
    over_host.reduce_scatterv(kept, mine.float(), sizes=[1, 2])
    told = torch.tensor([rank])
    over_host.broadcast(told, 1)
    return dict(
        summed=over_host.all_reduce(mine).tolist(), gathered=gathered.float().tolist(),
        kept=kept.tolist(), told=told.tolist(),
    )  # fmt: skip


def test_ranks_of_one_gpu_get_what_nccl_would_give_them() -> None:
    first, second = processes.run(exchange_over_host, 2, timeout_s=100)
    summed = [[0.0, 3.0], [6.0, 9.0], [12.0, 15.0]]
    gathered = [[0, 0], [1, 1], [1, 1]]
    common = dict(summed=summed, gathered=gathered, told=[1])
    assert first == dict(common, kept=summed[:1])
    assert second == dict(common, kept=summed[1:])


def exchange_host_copies(group: Any) -> dict[str, list[Any]]:
    """What SGLang asks of torch where its NCCL communicator is not there."""
    sys.path.insert(0, str(runs.IN_SERVER))
    import host_copies  # type: ignore[import-not-found] # noqa: F401

    rank, every = group.rank(), dist.new_group(backend="host_copies")
    mine = torch.arange(4, dtype=torch.bfloat16).view(2, 2) * 2**rank
    gathered, kept = torch.empty(4, 2).bfloat16(), torch.empty(1, 2).bfloat16()
    dist.all_gather_into_tensor(gathered, mine, group=every)
    dist.reduce_scatter_tensor(kept, mine, group=every)
    rows = [torch.empty(2, 2).bfloat16() for _ in range(2)]
    dist.all_gather(rows, mine, group=every)
    dist.all_reduce(mine, group=every)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, rank, group=every)
    dist.barrier(group=every)
    return dict(
        summed=mine.tolist(), gathered=gathered.tolist(), kept=kept.tolist(),
        listed=torch.cat(rows).tolist(), objects=objects,
    )  # fmt: skip


def test_torchs_group_for_ranks_of_one_gpu_does_what_nccls_would() -> None:
    first, second = processes.run(exchange_host_copies, 2, timeout_s=100)
    summed, gathered = [[0.0, 3.0], [6.0, 9.0]], [[0, 1], [2, 3], [0, 2], [4, 6]]
    common = dict(summed=summed, gathered=gathered, listed=gathered, objects=[0, 1])
    assert first == dict(common, kept=summed[:1])
    assert second == dict(common, kept=summed[1:])


def test_ranks_of_one_gpu_are_given_the_first_one_and_no_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooks = hook_module()
    monkeypatch.setitem(sys.modules, "host_copies", ModuleType("host_copies"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVERS_ONE_GPU", "1")
        patch.setenv("SERVERS_HOOKS", "older_nccl")
        found = hooks.hooks()
    assert set(found) > set(hooks.ONE_GPU)
    module: Any = ModuleType("vllm")
    module.CudaPlatformBase = type("CudaPlatformBase", (), dict(dist_backend="nccl"))
    module.ParallelConfig = type("ParallelConfig", (), {})
    for hook in hooks.ONE_GPU.values():
        hook(module)
    assert module.CudaPlatformBase.dist_backend == "gloo"
    assert module.ParallelConfig().get_local_gpu_index(1, 1) == 0
    assert module.get_physical_gpu_ids_for_local_dp_rank("CUDA_VISIBLE_DEVICES", 1, 1) == [0]
    assert module.PyNcclCommunicator is hooks.OverHost
    with pytest.raises(OSError, match="share a GPU"):
        module.NCCLLibrary(None)
    assert module.get_default_distributed_backend("cuda") == "host_copies"
    with module.maybe_reindex_device_id(1) as index:
        assert index == 0


def test_the_environment_of_a_row_is_bounded_to_this_machine(tmp_path: Path) -> None:
    row = Row("vllm", "http", "deepseek", "deepep_v2", ("native",))
    env = runs.environment(row, machine_at(tmp_path, hooks=("older_nccl", "older_stream")))
    assert env["SERVERS_HOOKS"] == "older_nccl older_stream" and env["SERVERS_NCCL"] == "23004"
    assert env["NCCL_NVLS_ENABLE"] == "0" and env["DEEP_COMM_LOG"] == "info"
    assert env["SERVERS_WATCH"] == "deep_comm.buffer" and env["VLLM_MLA_DISABLE"] == "1"
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(runs.IN_SERVER)
    assert env["SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS"] == "0"
    row = BY_NAME["sglang/http/qwen/auto:native"]
    env = runs.environment(row, machine_at(tmp_path, one_gpu=True))
    assert env["SERVERS_WATCH"] == "deep_comm.buffer" and env["SERVERS_ONE_GPU"] == "1"
    assert env["SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS"] == "1"
