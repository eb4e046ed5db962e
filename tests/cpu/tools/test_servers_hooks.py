"""What runs inside a server's processes: calls are counted, controls led astray, NCCL bridged."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from server_stand_ins import (
    BY_NAME,
    hook_module,
    machine_at,
)
from servers import runs
from servers.combinations import Row

from deep_comm import processes

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


def num_group_threads() -> int:
    """Threads of gloo, which free tensors of collectives under the GIL."""
    found = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # has ended
            found += "runloop" in (thread / "comm").read_text()
    return found


def exchange_host_copies(group: Any) -> dict[str, list[Any]]:
    """What SGLang asks of torch where its NCCL communicator is not there."""
    sys.path.insert(0, str(runs.IN_SERVER))
    import host_copies  # type: ignore[import-not-found] # noqa: F401

    dist.barrier()  # the threads of its own group begin with the first collective
    before = num_group_threads()
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
    began = num_group_threads() - before
    dist.destroy_process_group(every)  # `every` still refers to it, as a mesh of torch does
    deadline = time.monotonic() + 20  # a thread that has been joined stays in /proc for a while
    while num_group_threads() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    return dict(
        summed=mine.tolist(), gathered=gathered.tolist(), kept=kept.tolist(),
        listed=torch.cat(rows).tolist(), objects=objects, threads=[began > 0],
        left=[num_group_threads() - before],
    )  # fmt: skip


def test_torchs_group_for_ranks_of_one_gpu_does_what_nccls_would() -> None:
    first, second = processes.run(exchange_host_copies, 2, timeout_s=100)
    summed, gathered = [[0.0, 3.0], [6.0, 9.0]], [[0, 1], [2, 3], [0, 2], [4, 6]]
    common = dict(summed=summed, gathered=gathered, listed=gathered, objects=[0, 1])
    common |= dict(threads=[True], left=[0])
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


def test_steps_that_dual_batch_overlap_splits_are_counted_apart() -> None:
    module, hooks = ModuleType("dp_utils"), hook_module()
    module.coordinate_batch_across_dp = lambda num: (num > 8, None, 0)  # type: ignore[attr-defined]
    hooks.split_steps(module)
    answers = [module.coordinate_batch_across_dp(num) for num in (9, 3, 12)]
    assert answers == [(True, None, 0), (False, None, 0), (True, None, 0)]
    assert hooks.steps == dict(split=2, whole=1)
