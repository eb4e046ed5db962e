"""The wheel in a clean environment: what is in it, and that it imports and runs there."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from wheels import build_wheel, clean_environment, install, run, variables

# Runs in the clean environment.
CHECK = """
import importlib.metadata, importlib.util, pathlib, sys
import deep_comm, deep_comm._core
package = pathlib.Path(deep_comm.__file__)
assert pathlib.Path(sys.prefix) in package.parents, package
assert importlib.metadata.version("deep_comm") == deep_comm.__version__
(plugin,) = importlib.metadata.entry_points(group="vllm.general_plugins")
plugin.load()()
from deep_comm.integrations import sglang, vllm
assert importlib.util.find_spec("deep_ep") is None
from deep_comm.compat.__main__ import main
assert main(["install"]) == 0
import deep_ep
assert pathlib.Path(sys.prefix) in pathlib.Path(deep_ep.__file__).parents
import torch
from deep_comm import local

def rank_main(group):
    buffer = deep_ep.Buffer(group, 1 << 22)
    x = torch.full((3, 64), float(group.rank() + 1), dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1], [1, -1], [0, 0]])
    layout = buffer.get_dispatch_layout(ids, 2)
    recv_x, *_, handle, event = buffer.dispatch(
        x, None, layout[0], layout[1], layout[3], layout[2], ids, torch.ones(3, 2))
    return buffer.combine(recv_x, handle)[0][:, 0].tolist()

assert local.run(rank_main, 2) == [[2.0, 1.0, 1.0], [4.0, 2.0, 2.0]]
assert main(["uninstall"]) == 0
print("good", torch.cuda.is_available())
"""


@pytest.mark.timeout(1200)
def test_wheel_holds_the_package_alone_and_runs_in_a_clean_environment(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, cuda="OFF")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "deep_comm/__init__.py",
        "deep_comm/py.typed",
        "deep_comm/_core.pyi",
        "deep_comm/compat/site/deep_ep/__init__.py",
        "deep_comm/compat/site/deep_ep/utils/__init__.py",
        "deep_comm/integrations/vllm/normal.py",
    ):
        assert wanted in names
    assert sum(name.startswith("deep_comm/_core.") and name.endswith(".so") for name in names) == 1
    roots = {name.split("/")[0] for name in names}
    assert roots == {"deep_comm", next(root for root in roots if root.endswith(".dist-info"))}
    assert not [name for name in names if "_simt_tests" in name or "__pycache__" in name]
    python = clean_environment(tmp_path / "environment")
    install(wheel, python)
    environment = variables() | {"DEEP_COMM_DEVICE": "cpu"}
    assert "good" in run(python, "-c", CHECK, cwd=tmp_path, env=environment)
