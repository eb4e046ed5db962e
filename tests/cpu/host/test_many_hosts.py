"""torchrun on several hosts: an agent a host, on one machine, each with a name of its
own (DEEP_COMM_HOST_NAME).

Agents, rendezvous, ranks and groups are those of several machines. What is not: the memory, through
which the host target's network reaches everybody.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import warm
from free_port import free_port

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support"
GUIDE = ROOT / "docs" / "guide" / "nodes.md"
TIMEOUT_S = 240


def torchrun(ranks_per_host: int, port: int, *program: str) -> list[str]:
    return [
        warm.python(), "-m", "torch.distributed.run", "--nnodes", "2",
        "--nproc-per-node", str(ranks_per_host), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", *program,
    ]  # fmt: skip


def run_hosts(commands: Sequence[Sequence[str]], folder: Path, **variables: str) -> list[str]:
    """One command a host, at once; what each wrote. Fails if one of them does."""
    agents = []
    for number, command in enumerate(commands):
        environment = {
            **os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "DEEP_COMM_HOST_NAME": f"host{number}", **variables,
        }  # fmt: skip
        output = (folder / f"host{number}").open("w+")
        agent = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        agents.append((agent, output))
    deadline = time.monotonic() + TIMEOUT_S
    try:
        for agent, _ in agents:
            agent.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # the return code says so
    finally:
        for agent, _ in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    texts = []
    for _, output in agents:
        output.seek(0)
        texts.append(output.read())
        output.close()
    assert [agent.returncode for agent, _ in agents] == [0] * len(agents), "\n".join(texts)
    return texts


def test_the_bench_runs_on_two_hosts(tmp_path: Path) -> None:
    bench = (
        "-m", "deep_comm.bench", "--device", "cpu", "--tokens", "6", "--hidden", "128",
        "--experts", "5", "--topk", "2", "--iterations", "1", "--rounds", "1", "--warmup", "0",
        "--simulation-runs", "0", "--ops", "dispatch cached,combine",
    )  # fmt: skip
    said = "".join(run_hosts([torchrun(2, free_port(), *bench)] * 2, tmp_path))
    assert re.search(r"^dispatch cached +two-tier ", said, re.MULTILINE), said
    assert "exactly one row a (token, remote node)" in said
    assert not re.search(r"^combine +(direct|ring) ", said, re.MULTILINE), said


def test_groups_of_several_hosts(tmp_path: Path) -> None:
    program = str(SUPPORT / "many_hosts.py")
    texts = run_hosts([torchrun(3, free_port(), program)] * 2, tmp_path, PYTHONPATH=str(SUPPORT))
    said = "".join(texts)
    for line in (
        "a Buffer over all hosts and one inside each, at once: equal",
        "a Buffer over some ranks of each host: equal",
        "an uneven part of the hosts: refused",
    ):
        assert {rank for rank in range(6) if f"rank {rank} of 6: {line}" in said} == set(
            range(6)
        ), said


def test_commands_of_the_guide_run_as_written(tmp_path: Path) -> None:
    """The demo on two hosts. But for the port, which may be taken, and torchrun's program."""
    text = GUIDE.read_text().replace("\\\n", " ")
    (block,) = re.findall(r"```sh\n((?:DEEP_COMM_HOST_NAME=[^\n]+\n)+)```", text)
    lines = block.replace("29500", str(free_port())).splitlines()
    assert len(lines) == 2
    commands = []
    for line in lines:
        words = shlex.split(line.removesuffix(" &"))
        start = words.index("torchrun")
        assert "DEEP_COMM_HOST_NAME" in words[0]
        commands.append(
            [
                "env",
                *words[:start],
                warm.python(),
                "-m",
                "torch.distributed.run",
                *words[start + 1 :],
            ]
        )
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    said = "".join(run_hosts(commands, tmp_path))  # rank 0 speaks, on whichever host it is
    assert "2 nodes of 2 ranks" in said and "verdict: OK" in said


def test_other_machines_are_still_out_of_reach_of_the_host_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names may be made up; memory may not."""
    import deep_comm
    from deep_comm import context, local

    def host(group: local.ThreadGroup) -> None:
        deep_comm.Buffer(group, 1 << 20, 1 << 20, device="cpu", ranks_per_node=1).destroy()

    memories = iter(["one/1", "other/2"])
    monkeypatch.setattr(context, "memory_identity", lambda: next(memories))
    errors = local.run(host, 2, return_errors=True)
    assert all(isinstance(error, deep_comm.TopologyError) for error in errors)
    assert "on 2 hosts" in str(errors[0])
