"""One rank that trains a small MoE with Megatron Core: ``megatron_rank.py JOB``.

Model, layers, router, dispatchers, schedule, data parallelism and optimizer are Megatron's, without
Transformer Engine. Each rank has half of the experts and batches of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import trainer

DISPATCHERS = {
    "alltoall": dict(moe_token_dispatcher_type="alltoall"),
    "deepep": dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep"),
}


def bridge(device):
    """What 0.16.1 leaves undefined without Transformer Engine; and splits of the host's tensors,
    which only CUDA's are turned into numbers.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None
    if device.type == "cpu":
        random._set_cuda_rng_state = lambda state, *others, **more: torch.set_rng_state(state)
        token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **others: (
            tensor.numpy() if as_numpy and tensor is not None else tensor
        )


def build(job, device):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    num_ranks = int(os.environ["WORLD_SIZE"])
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    model_parallel_cuda_manual_seed(trainer.SEED)  # other experts on each rank, all else alike
    config = TransformerConfig(
        num_layers=job["layers"], hidden_size=job["hidden"], num_attention_heads=4,
        ffn_hidden_size=job["inter"], moe_ffn_hidden_size=job["inter"],
        num_moe_experts=job["experts"], moe_router_topk=job["topk"], moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01,
        expert_model_parallel_size=num_ranks, add_bias_linear=False, init_method_std=0.05,
        hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, gradient_accumulation_fusion=False, deterministic_mode=True,
        finalize_model_grads_func=finalize_model_grads, **DISPATCHERS[job["backend"]],
    )  # fmt: skip
    layers = get_gpt_layer_local_spec(job["experts"], moe_grouped_gemm=False)
    model = GPTModel(config, layers, job["vocab"], job["length"]).to(device, torch.bfloat16)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=job["rate"], bf16=True, clip_grad=1.0), [model],
        use_gloo_process_groups=False,
    )  # fmt: skip
    return model, optimizer


def train(job, device):
    from megatron.core import __version__
    from megatron.core.pipeline_parallel import get_forward_backward_func

    bridge(device)
    model, optimizer = build(job, device)
    length, batch = job["length"], job["batch"]
    places = torch.arange(length, device=device).expand(batch, -1)
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)

    def forward(batches, model):
        tokens, labels = (one.to(device) for one in next(batches))
        losses = model(tokens, places, hidden, labels=labels)

        def reduce(losses):
            loss = losses.float().mean()
            return loss, dict(loss=loss.detach())

        return losses, reduce

    step, text = get_forward_backward_func(), trainer.Text(job, int(os.environ["RANK"]))
    log = trainer.Log()
    for _ in range(job["steps"]):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        (said,) = step(
            forward_step_func=forward, data_iterator=text, model=model, num_microbatches=1,
            seq_length=length, micro_batch_size=batch, forward_only=False,
        )  # fmt: skip
        _, norm, _ = optimizer.step()
        log.add(said["loss"], norm)
    log.write(job, f"megatron-core {__version__}", device)


if __name__ == "__main__":
    described = json.loads(Path(sys.argv[1]).read_text())
    with trainer.machine(described) as its_device:
        train(described, its_device)
