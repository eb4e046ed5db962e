"""How deep_comm's adapters come into vLLM, against stand-ins of its modules (stubs/vllm)."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys

import pytest
from vllm import envs
from vllm.config.compilation import CompilationConfig
from vllm.distributed.device_communicators import all2all
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
from vllm.model_executor.layers.fused_moe.router import grouped_topk_router
from vllm.v1.worker.workspace import WorkspaceManager

from deep_comm import UnsupportedError
from deep_comm.integrations import vllm as adapter
from deep_comm.integrations import vllm_plugin
from deep_comm.integrations.vllm import interface, plugin


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone behind it."""
    for name in ("DeepEPHTAll2AllManager", "DeepEPLLAll2AllManager"):
        monkeypatch.setattr(all2all, name, getattr(all2all, name))
    for name in ("DeepEPHTPrepareAndFinalize", "DeepEPLLPrepareAndFinalize"):
        monkeypatch.setattr(all2all_utils, name, getattr(all2all_utils, name))
    rule = CompilationConfig.set_splitting_ops_for_v1
    monkeypatch.setattr(CompilationConfig, "set_splitting_ops_for_v1", rule)
    router = grouped_topk_router.GroupedTopKRouter
    monkeypatch.setattr(router, "__init__", router.__init__)


def test_plugin_does_nothing_unless_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "deep_comm")
    before = all2all.DeepEPHTAll2AllManager
    vllm_plugin.register_if_asked()
    assert all2all.DeepEPHTAll2AllManager is before
    assert not caplog.messages
    monkeypatch.setenv("DEEP_COMM_VLLM", "1")
    vllm_plugin.register_if_asked()
    assert "serves vLLM's deepep_high_throughput and deepep_low_latency" in caplog.messages[0]
    assert all2all.DeepEPHTAll2AllManager is adapter.NormalManager
    assert all2all_utils.DeepEPLLPrepareAndFinalize is adapter.LowLatencyPrepareFinalize


def test_plugin_refuses_a_vllm_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    before = all2all.DeepEPHTAll2AllManager
    monkeypatch.delattr(all2all_utils, "DeepEPLLPrepareAndFinalize")
    with pytest.raises(UnsupportedError, match="DeepEPLLPrepareAndFinalize"):
        adapter.register()
    assert all2all.DeepEPHTAll2AllManager is before


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_low_latency"])
def test_graphs_stay(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = inspect.unwrap(CompilationConfig.set_splitting_ops_for_v1)
    monkeypatch.setattr(CompilationConfig, "set_splitting_ops_for_v1", rule)
    config = CompilationConfig()
    config.set_splitting_ops_for_v1("deepep_high_throughput", 2)
    assert config.cudagraph_mode == "NONE"  # vLLM's rule
    for _ in range(2):  # vLLM loads its plugins more than once
        adapter.register()
    config = CompilationConfig()
    config.set_splitting_ops_for_v1(all2all_backend=backend, data_parallel_size=2)
    assert config.cudagraph_mode == "FULL"


def test_graphs_keep_their_workspaces_and_later_steps_get_larger_ones() -> None:
    adapter.register()
    adapter.register()
    manager = WorkspaceManager()
    captured = manager.get(10)
    manager.lock()
    assert manager.get(10) is captured
    assert len(manager.get(20)) == 20
    held = gc.get_referrers(captured)
    assert any(one is manager._kept_for_graphs for one in held)


@pytest.mark.parametrize("has_tma", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_experts_use_descriptors_where_there_is_tma_and_nobody_says_otherwise(
    has_tma: bool, asked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllms = inspect.unwrap(fused_batched_moe.use_tensor_descriptor)
    monkeypatch.setattr(fused_batched_moe, "use_tensor_descriptor", vllms)
    monkeypatch.setattr(plugin, "_has_tma", lambda: has_tma)
    for _ in range(2):
        adapter.register()
    assert fused_batched_moe.use_tensor_descriptor() == has_tma
    assert fused_batched_moe.use_tensor_descriptor(True)
    assert not fused_batched_moe.use_tensor_descriptor(False)
    monkeypatch.setattr(envs, "VLLM_TRITON_USE_TD", asked)
    # The stand-in's own rule is that of no XPU, without the setting.
    assert fused_batched_moe.use_tensor_descriptor() == (has_tma and asked is None)


def test_routers_of_grouped_top_k_leave_padding_out(monkeypatch: pytest.MonkeyPatch) -> None:
    router = grouped_topk_router.GroupedTopKRouter
    monkeypatch.setattr(router, "__init__", inspect.unwrap(router.__init__))
    assert not router(8, 256).skip_padding
    for _ in range(2):
        adapter.register()
    assert router(8, global_num_experts=256).skip_padding
    assert router(8, 256, skip_padding=True).skip_padding

    def older(self: object, top_k: int) -> None: ...

    monkeypatch.setattr(router, "__init__", older)
    adapter.register()
    assert not hasattr(router(8), "skip_padding")
    monkeypatch.setitem(sys.modules, grouped_topk_router.__name__, None)
    adapter.register()


def test_graphs_of_an_older_vllm_stay_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_a_backend(self: CompilationConfig) -> None: ...

    monkeypatch.setattr(CompilationConfig, "set_splitting_ops_for_v1", without_a_backend)
    adapter.register()
    assert CompilationConfig.set_splitting_ops_for_v1 is without_a_backend
    monkeypatch.delattr(CompilationConfig, "set_splitting_ops_for_v1")
    adapter.register()
    monkeypatch.setitem(sys.modules, "vllm.config.compilation", None)
    adapter.register()
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.workspace", None)
    adapter.register()
    monkeypatch.setitem(sys.modules, fused_batched_moe.__name__, None)
    adapter.register()
    assert all2all.DeepEPHTAll2AllManager is adapter.NormalManager


def test_imports_without_vllm() -> None:
    code = (
        "from deep_comm.integrations import vllm\nfrom deep_comm.errors import "
        "UnsupportedError\nfrom deep_comm.integrations.vllm import interface\nassert not "
        "interface.IS_AVAILABLE and vllm.NormalPrepareFinalize\ntry:\n    "
        "vllm.register()\nexcept UnsupportedError as error:\n    print('refused', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.stdout.startswith("refused"), done.stdout + done.stderr
    assert interface.IS_AVAILABLE
