"""One rank that trains a small MoE with torchtitan: ``torchtitan_rank.py JOB``.

Model (Qwen3's), layers, router, dispatchers, expert parallelism and optimizer are torchtitan's.
Its FSDP needs a newer torch than 2.11, and its Trainer FSDP: so gradients of what all ranks have
are summed here. Each rank has half of the experts and batches of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import trainer
from torch.distributed.tensor import DTensor


def _hollow(name):
    """A module whose names can be used as decorators and in annotations."""
    module = ModuleType(name)
    module.jit = lambda function=None, **options: function or module.jit
    for name in ("bfloat16", "constexpr", "float16", "float32", "int32", "int64", "pointer_type"):
        setattr(module, name, lambda kind=None: object)
    return module


@contextlib.contextmanager
def bridge(device):
    """What its modules ask for, and do not use here: of a newer torch, and Triton on the host."""
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        torch.distributed.fsdp.DataParallelMeshDims = object
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):
        torch.compiler._is_non_strict_tracing = lambda: False
    kind = mock.patch.object(torch._utils, "_get_available_device_type", lambda: device.type)
    with kind:
        if importlib.util.find_spec("triton") is None:
            importlib.import_module("torch._inductor.codecache")  # it sees that there is none
            sys.modules.update((name, _hollow(name)) for name in ("triton", "triton.language"))
            importlib.import_module("torchtitan.distributed.minimal_async_ep.kernels")
            del sys.modules["triton"], sys.modules["triton.language"]
        yield


def operators_on_host():
    """torchtitan makes them for CUDA alone."""
    from torchtitan.distributed.deepep import deepep

    for name in ("dispatch", "combine"):
        torch.library.impl(deepep._lib, name, "CPU")(getattr(deepep, f"_{name}_op_impl"))


def build(job, device):
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models import qwen3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    num_ranks = int(os.environ["WORLD_SIZE"])
    config = qwen3.Qwen3Model.Config(
        vocab_size=job["vocab"], dim=job["hidden"], norm=qwen3._qwen3_norm(job["hidden"]),
        tok_embeddings=qwen3.Embedding.Config(
            num_embeddings=job["vocab"], embedding_dim=job["hidden"],
            param_init=qwen3._EMBEDDING_INIT,
        ),
        lm_head=qwen3.Linear.Config(
            in_features=job["hidden"], out_features=job["vocab"], param_init=qwen3._LINEAR_INIT
        ),
        layers=qwen3._build_qwen3_moe_layers(
            n_layers=job["layers"], dim=job["hidden"], n_heads=4, n_kv_heads=2, head_dim=64,
            moe_hidden_dim=job["inter"], num_experts=job["experts"], top_k=job["topk"],
            attn_backend="flex", moe_comm_backend=job["backend"],
            rope=qwen3.CosSinRoPE.Config(dim=64, max_seq_len=job["length"], theta=10000.0),
        ),
    )  # fmt: skip
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        dispatcher = layer.moe.routed_experts.token_dispatcher
        if job["backend"] == "deepep":
            dispatcher.num_max_tokens_per_rank = job["batch"] * job["length"]
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=True)
    given = ParallelismConfig(expert_parallel_degree=num_ranks, spmd_backend="partial_dtensor")
    utils.set_spmd_backend(given.spmd_backend)
    parallel = ParallelDims.from_config(given, num_ranks)
    with torch.device("meta"):
        model = config.build().to(torch.bfloat16)
    model.parallelize(parallel)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
        torch.manual_seed(trainer.SEED + 1 + dist.get_rank())  # other experts on each rank
        for one in model.parameters():
            if isinstance(one, DTensor):
                one.to_local().normal_(std=0.05)
    return model.train()


def reduce(model):
    """Sum the gradients of what every rank has; the norm of all gradients."""
    shared = [one.grad for one in model.parameters() if not isinstance(one, DTensor)]
    experts = [one.grad.to_local() for one in model.parameters() if isinstance(one, DTensor)]
    for grad in shared:
        total = grad.float()
        dist.all_reduce(total)
        grad.copy_(total)
    squares = torch.stack([one.float().square().sum() for one in experts]).sum()
    dist.all_reduce(squares)
    return (squares + sum(one.float().square().sum() for one in shared)).sqrt()


def train(job, device):
    with bridge(device):
        model = build(job, device)
        if device.type == "cpu" and job["backend"] == "deepep":
            operators_on_host()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["rate"], foreach=False)
    text, log = trainer.Text(job, int(os.environ["RANK"])), trainer.Log()
    places = torch.arange(job["length"], device=device).expand(job["batch"], -1)
    for _ in range(job["steps"]):
        tokens, labels = (one.to(device) for one in next(text))
        optimizer.zero_grad()
        said = model(tokens, positions=places)
        loss = torch.nn.functional.cross_entropy(said.float().flatten(0, 1), labels.flatten())
        (loss / dist.get_world_size()).backward()
        norm = reduce(model)
        optimizer.step()
        log.add(loss.detach(), norm)
    log.write(job, f"torchtitan {metadata.version('torchtitan')}", device)


if __name__ == "__main__":
    described = json.loads(Path(sys.argv[1]).read_text())
    with trainer.machine(described) as its_device:
        train(described, its_device)
