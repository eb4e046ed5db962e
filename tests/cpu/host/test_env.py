"""The registry of environment variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import deep_comm
from deep_comm import ArgumentError, local
from deep_comm.backends import resolve_device
from deep_comm.settings import env


def test_unset_variables_have_their_defaults() -> None:
    assert env.TIMEOUT_S.get() == 30.0
    assert env.NUM_SMS.get() is None
    assert env.POISON.get() is False
    assert not env.TIMEOUT_S.is_set()


def test_variables_are_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_TIMEOUT_S", "2.5")
    monkeypatch.setenv("DEEP_COMM_POISON", "1")
    monkeypatch.setenv("DEEP_COMM_NUM_SMS", "8")
    assert env.TIMEOUT_S.get() == 2.5
    assert env.POISON.get() is True
    assert env.NUM_SMS.get() == 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DEEP_COMM_TIMEOUT_S", "soon"),
        ("DEEP_COMM_TIMEOUT_S", "-1"),
        ("DEEP_COMM_TIMEOUT_S", "inf"),
        ("DEEP_COMM_TIMEOUT_S", "nan"),
        ("DEEP_COMM_NUM_SMS", "0"),
        ("DEEP_COMM_RANKS_PER_NODE", "0"),
        ("DEEP_COMM_POISON", "perhaps"),
    ],
)
def test_a_value_that_does_not_parse_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    variable = next(variable for variable in env.REGISTRY if variable.name == name)
    with pytest.raises(ArgumentError) as caught:
        variable.get()
    assert caught.value.argument == name
    assert text in str(caught.value)


@pytest.mark.parametrize("text", ["", "gpu", "meta"])
def test_a_device_that_is_none_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("DEEP_COMM_DEVICE", text)
    with pytest.raises(ArgumentError, match="DEEP_COMM_DEVICE must be a") as caught:
        resolve_device(None)
    assert (text or "''") in str(caught.value)
    with pytest.raises(ArgumentError, match="^device must be a torch device; got 'gpu'"):
        resolve_device("gpu")


def test_describe_lists_every_variable_with_value_and_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEEP_COMM_TIMEOUT_S", "7")
    lines = env.describe().splitlines()
    assert len(lines) == 1 + len(env.REGISTRY)
    row = next(line for line in lines if line.startswith("DEEP_COMM_TIMEOUT_S"))
    assert re.match(r"DEEP_COMM_TIMEOUT_S\s+7\s+30\.0\s+How long", row)


def test_typing_errors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_TIMEOUT", "7")
    assert env.unknown() == ["DEEP_COMM_TIMEOUT"]


def test_no_other_file_reads_the_environment() -> None:
    package = Path(deep_comm.__file__).parent
    readers = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path.name != "env.py"
        and re.search(r"environ[^\n]*DEEP_COMM_|getenv\(.DEEP_COMM_", path.read_text())
    ]
    assert readers == []


def test_variables_of_the_build_are_those_that_it_reads() -> None:
    project = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    read = re.findall(r'env = "(\w+)", default = "([^"]*)"', project)
    assert {name: default for name, (default, _) in env.BUILD_VARIABLES.items()} == dict(read)


class CountingGroup:
    """A ThreadGroup that counts what is exchanged over it."""

    in_process, simulation = True, None

    def __init__(self, group: local.ThreadGroup) -> None:
        self._group, self.num_exchanges = group, 0

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def all_gather_object(self, value: Any) -> list[Any]:
        self.num_exchanges += 1
        return self._group.all_gather_object(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DEEP_COMM_NUM_SMS", "none"),
        ("DEEP_COMM_NUM_SMS", "9999"),
        ("DEEP_COMM_POISON", "perhaps"),
        ("DEEP_COMM_EARLY_LAUNCHES", "perhaps"),
        ("DEEP_COMM_RAIL_NEAR", "perhaps"),
        ("DEEP_COMM_NUM_DIRECT_BYTES", str(1 << 21)),
    ],
)
def test_a_buffer_names_a_bad_variable_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """A rank that failed later would let the others wait."""

    def main(thread_group: local.ThreadGroup) -> int:
        group = CountingGroup(thread_group)
        with pytest.raises(ArgumentError, match=name):
            deep_comm.Buffer(group, 1 << 20, device="cpu")
        refused_after = group.num_exchanges
        monkeypatch.delenv(name, raising=False)
        thread_group.barrier()
        with deep_comm.Buffer(group, 1 << 20, device="cpu"):
            assert group.num_exchanges > 0
        return refused_after

    monkeypatch.setenv(name, text)
    assert local.run(main, 1) == [0]
