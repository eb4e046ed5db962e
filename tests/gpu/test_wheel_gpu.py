"""The wheel with its CUDA module in an environment of its own: a fresh interpreter imports it
beside torch with CUDA and sends rows between two GPUs.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from wheels import build_wheel, clean_environment, install, run, variables

PROGRAM = """
import pathlib, sys
import torch, torch.distributed as dist
import deep_comm, deep_comm._core, deep_comm._cuda
from deep_comm import processes

for module in (deep_comm, deep_comm._core, deep_comm._cuda):
    assert pathlib.Path(sys.prefix) in pathlib.Path(module.__file__).parents, module.__file__
assert torch.cuda.is_available()


def rank_main(group):
    rank = group.rank()
    with deep_comm.Buffer(group, 64 << 20, device=torch.device("cuda", rank)) as buffer:
        x = torch.full((3, 64), float(rank + 1), dtype=torch.bfloat16, device=buffer.device)
        ids = torch.tensor([[0, 1], [1, -1], [0, 0]], device=buffer.device)
        weights = torch.ones(3, 2, device=buffer.device)
        recv_x, *_, handle, event = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_experts=2)
        combined = buffer.combine(recv_x, handle)[0][:, 0].tolist()
        return recv_x[:, 0].tolist(), combined


if __name__ == "__main__":
    first, second = processes.run(rank_main, 2, devices=range(2), timeout_s=100)
    assert first == ([1.0, 1.0, 2.0, 2.0], [2.0, 1.0, 1.0]), first
    assert second == ([1.0, 1.0, 2.0, 2.0], [4.0, 2.0, 2.0]), second
    print("good")
"""


@pytest.mark.gpu
@pytest.mark.timeout(1200)
def test_wheel_with_cuda_is_imported_and_dispatches(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, cuda="ON")
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.startswith("deep_comm/_cuda.") and name.endswith(".so")]
    python = clean_environment(tmp_path / "environment")
    install(wheel, python)
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    assert "good" in run(python, file, cwd=tmp_path, env=variables())
