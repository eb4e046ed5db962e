"""First on PYTHONPATH: every process of a server counts what it calls, and some are led astray.

SERVERS_WATCH=MODULE: count calls of the Buffers of deep_ep, or of deep_comm.buffer for native
adapters; SERVERS_COUNTS is the folder for one JSON file per process. SERVERS_WRONG=1: each token is
sent to the expert half a turn further, the negative control. SERVERS_HOOKS: names of functions
below that bridge what a release expects to be older, newer or there. SERVERS_NCCL: the version that
vLLM is told. SERVERS_ONE_GPU=1: all ranks have the same GPU, which NCCL refuses; what a server does
over NCCL goes through the host.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import threading
import types
from pathlib import Path

METHODS = (
    "get_dispatch_layout", "dispatch", "combine", "low_latency_dispatch", "low_latency_combine",
)  # fmt: skip
counts: dict[str, int] = {}
steps: dict[str, int] = {}  # of vLLM's dual-batch overlap: split in two, or left whole
experts: dict[int, int] = {}  # by Buffer
lock = threading.Lock()  # of counts and their file: dual-batch overlap calls from two threads


def write_counts(module) -> None:
    path = Path(os.environ["SERVERS_COUNTS"]) / f"{os.getpid()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(dict(file=module.__file__, counts=counts)))
    part.replace(path)


def lead_astray(buffer, bound) -> None:
    import torch

    given = bound.arguments
    if given.get("num_experts"):
        experts[id(buffer)] = given["num_experts"]
    ids, total = given.get("topk_idx"), experts.get(id(buffer))
    if ids is not None and total:
        given["topk_idx"] = torch.where(ids >= 0, (ids + total // 2) % total, ids)
        if ids.is_cuda and given.get("previous_event") is not None:
            # The call waits for that event, which was recorded before these ids were made.
            torch.cuda.current_stream().synchronize()


def watched(module, owner, name):
    inner = getattr(owner, name)
    signature, key = inspect.signature(inner), f"{owner.__name__}.{name}"

    @functools.wraps(inner)
    def call(self, *arguments, **options):
        if os.environ.get("SERVERS_WRONG") == "1":
            bound = signature.bind(self, *arguments, **options)
            lead_astray(self, bound)
            arguments, options = bound.args[1:], bound.kwargs
        result = inner(self, *arguments, **options)
        with lock:
            counts[key] = counts.get(key, 0) + 1
            if counts[key].bit_count() == 1:  # ever more rarely: writing takes time of a step
                write_counts(module)
        return result

    return call


def watch(module) -> None:
    for owner in (getattr(module, name, None) for name in ("Buffer", "ElasticBuffer")):
        for name in METHODS:
            if hasattr(owner, name):
                setattr(owner, name, watched(module, owner, name))


def split_steps(module) -> None:
    """Counts what vLLM's ranks decide together before each step."""
    decide = module.coordinate_batch_across_dp

    @functools.wraps(decide)
    def decided(*arguments, **options):
        result = decide(*arguments, **options)
        key = "split" if result[0] else "whole"
        steps[key] = steps.get(key, 0) + 1
        return result

    module.coordinate_batch_across_dp = decided


def older_nccl(module) -> None:
    """torch 2.11's NCCL lacks two functions with which vLLM suspends communicators."""
    library, missing = module.NCCLLibrary, ("ncclCommSuspend", "ncclCommResume")
    library.exported_functions = [f for f in library.exported_functions if f.name not in missing]


def older_stream(module) -> None:
    """torch 2.11's Stream has no is_capturing."""
    import torch

    module._is_capturing_or_compiling = lambda: (
        torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()
    )


def newer_transformers(module) -> None:
    """Names that SGLang 0.5.17 registers are transformers' own by now."""
    register = module.AutoConfig.register
    module.AutoConfig.register = staticmethod(
        lambda model_type, config, exist_ok=False: register(model_type, config, exist_ok=True)
    )


def no_flashinfer(module) -> None:
    """What SGLang imports from FlashInfer in any case. None of it runs with other backends."""
    if importlib.util.find_spec("flashinfer") is not None:
        return

    def lacking(*arguments, **options):
        raise NotImplementedError("FlashInfer is not here")

    names = {
        "flashinfer": ("bmm_fp8",),
        "flashinfer.prefill": ("cudnn_batch_prefill_with_kv_cache",),
        "flashinfer.sampling": ("min_p_sampling_from_probs", "top_k_top_p_sampling_from_probs"),
    }
    for name, lacked in names.items():
        stand_in = sys.modules[name] = types.ModuleType(name)
        stand_in.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(stand_in).update(dict.fromkeys(lacked, lacking))


def nccl_version(module) -> None:
    module._get_runtime_nccl_version = lambda: int(os.environ["SERVERS_NCCL"])


class OverHost:
    """In the place of vLLM's PyNcclCommunicator: every rank gets all tensors and sums by itself."""

    def __init__(self, group, device, library_path=None) -> None:
        import torch.distributed

        self.group, self.device = group, device
        self.rank = torch.distributed.get_rank(group)
        self.world_size = torch.distributed.get_world_size(group)
        self.available, self.disabled, self.nccl_version = True, False, 0

    def _of_all(self, tensor):
        import torch.distributed

        every = [None] * self.world_size
        # As bytes: torch 2.11 does not pickle FP8.
        mine = tensor.shape, tensor.reshape(-1).view(torch.uint8).cpu()
        torch.distributed.all_gather_object(every, mine, group=self.group)
        return [data.view(tensor.dtype).view(shape) for shape, data in every]

    def _sum(self, tensor):
        return sum(one.float() for one in self._of_all(tensor)).to(tensor.dtype)

    def all_reduce(self, in_tensor, out_tensor=None):
        result = self._sum(in_tensor).to(self.device)
        return result if out_tensor is None else out_tensor.copy_(result)

    def all_gatherv(self, output_tensor, input_tensor, sizes=None):
        import torch

        output_tensor.copy_(torch.cat(self._of_all(input_tensor)))

    all_gather = all_gatherv

    def reduce_scatterv(self, output_tensor, input_tensor, sizes=None):
        sizes = sizes or [output_tensor.shape[0]] * self.world_size
        output_tensor.copy_(self._sum(input_tensor).split(sizes)[self.rank])

    reduce_scatter = reduce_scatterv

    def broadcast(self, tensor, src):
        tensor.copy_(self._of_all(tensor)[src])

    def group_start(self) -> None:
        pass

    group_end = destroy = group_start


def pynccl_over_host(module) -> None:
    module.PyNcclCommunicator = OverHost


def gloo_groups(module) -> None:
    module.CudaPlatformBase.dist_backend = "gloo"


def first_gpu_of_worker(module) -> None:
    module.ParallelConfig.get_local_gpu_index = lambda self, local_rank, dp_local_rank=None: 0


def first_gpu_of_engine(module) -> None:
    module.get_physical_gpu_ids_for_local_dp_rank = lambda *arguments, **options: [0]


def sglang_without_pynccl(module) -> None:
    """As if there were no NCCL: then torch's process groups do all, outside of CUDA graphs."""

    def no_library(*arguments):
        raise OSError("ranks share a GPU")

    module.NCCLLibrary = no_library


def sglang_over_host(module) -> None:
    import host_copies  # noqa: F401  registers it

    module.get_default_distributed_backend = lambda device: "host_copies"


def sglang_first_gpu(module) -> None:
    """SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS=1 says the same to its process groups."""
    module.maybe_reindex_device_id = lambda gpu_id: contextlib.nullcontext(0)


ONE_GPU = {
    "sglang.srt.distributed.device_communicators.pynccl": sglang_without_pynccl,
    "sglang.srt.distributed.parallel_state": sglang_over_host,
    "sglang.srt.utils.common": sglang_first_gpu,
    "vllm.distributed.device_communicators.pynccl": pynccl_over_host,
    "vllm.platforms.cuda": gloo_groups,
    "vllm.config.parallel": first_gpu_of_worker,
    "vllm.v1.engine.utils": first_gpu_of_engine,
}

BRIDGES = {
    "newer_transformers": (
        "transformers.models.auto.configuration_auto", newer_transformers,
    ),
    "no_flashinfer": ("sglang.srt.environ", no_flashinfer),
    "older_nccl": ("vllm.distributed.device_communicators.pynccl_wrapper", older_nccl),
    "older_stream": (
        "vllm.model_executor.layers.fused_moe.experts.fused_batched_moe", older_stream,
    ),
}  # fmt: skip


class Finder(importlib.abc.MetaPathFinder):
    """Runs a hook after its module, once."""

    def __init__(self, hooks) -> None:
        self.hooks, self.searching = hooks, set()

    def find_spec(self, name, path, target=None):
        if name not in self.hooks or name in self.searching:
            return None
        self.searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching.discard(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            hook = self.hooks.pop(name, None)
            if hook is not None:
                hook(module)

        spec.loader.exec_module = exec_module
        return spec


def hooks():
    found = dict(BRIDGES[name] for name in os.environ.get("SERVERS_HOOKS", "").split())
    if os.environ.get("SERVERS_WATCH"):
        found[os.environ["SERVERS_WATCH"]] = watch
        found["vllm.v1.worker.dp_utils"] = split_steps
    if os.environ.get("SERVERS_NCCL"):
        found["vllm.utils.import_utils"] = nccl_version
    if os.environ.get("SERVERS_ONE_GPU") == "1":
        found |= ONE_GPU
    return found


if hooks():
    sys.meta_path.insert(0, Finder(hooks()))
