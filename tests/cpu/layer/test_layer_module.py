"""ExpertParallel is a torch.nn.Module: what users of modules expect of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_by import run_by
from torch import Tensor, nn

import deep_comm
from deep_comm import local
from deep_comm.layer import expert_parallel

HIDDEN, NUM_EXPERTS = 32, 4
SHAPE: dict[str, Any] = dict(hidden=HIDDEN, num_experts=NUM_EXPERTS, num_topk=2, max_tokens=8)


class Model(nn.Module):
    """A gate, a layer, weights of the experts."""

    def __init__(self, moe: deep_comm.ExpertParallel) -> None:
        super().__init__()
        self.gate, self.moe = nn.Linear(HIDDEN, NUM_EXPERTS).bfloat16(), moe
        self.scale = nn.Parameter(torch.ones(HIDDEN).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        weights, idx = self.gate(x).float().softmax(-1).topk(2)
        y: Tensor = self.moe(x, idx, weights, lambda batch: batch.x * self.scale)
        return y


def on_ranks(check: Callable[[Model, Tensor], None], mode: str = "auto") -> None:
    def main(group: Any) -> bool:
        with deep_comm.ExpertParallel(group, **SHAPE, mode=mode, device="cpu", timeout_s=30) as moe:
            check(Model(moe), torch.randn(3, HIDDEN).bfloat16())
        return True

    assert local.run(main, 2, timeout_s=60) == [True, True]


@run_by(on_ranks)
def test_it_is_a_part_of_a_model_without_parameters_of_its_own(model: Model, x: Tensor, /) -> None:
    assert isinstance(model.moe, nn.Module) and model.moe in list(model.children())
    assert list(model.moe.parameters()) == [] and list(model.moe.buffers()) == []
    names = {"gate.weight", "gate.bias", "scale"}
    assert set(model.state_dict()) == names == set(dict(model.named_parameters()))
    model.load_state_dict(model.state_dict(), strict=True)
    assert "moe): ExpertParallel(hidden=32, num_experts=4, num_topk=2, max_tokens=8" in repr(model)


@pytest.mark.parametrize("mode", ["prefill", "decode", "auto"])
def test_train_eval_to_and_copies_change_nothing_of_its_results(mode: str) -> None:
    def check(model: Model, x: Tensor) -> None:
        with torch.no_grad():
            wanted = model(x)
            assert model.train().moe.training and not model.eval().moe.training
            assert model.moe.mode == mode
            assert torch.equal(model(x), wanted)
            assert model.to("cpu").moe.buffer.device == torch.device("cpu")
            assert torch.equal(model.requires_grad_(False)(x), wanted)
            copied = copy.deepcopy(model)
            assert copied.moe is model.moe and torch.equal(copied(x), wanted)

    on_ranks(check, mode)


@run_by(on_ranks)
def test_hooks_run_and_can_change_the_result(model: Model, x: Tensor, /) -> None:
    seen: list[tuple[int, ...]] = []
    with torch.no_grad():
        wanted = model(x)
        before = model.moe.register_forward_pre_hook(
            lambda _module, inputs: seen.append(tuple(inputs[0].shape))
        )
        after = model.moe.register_forward_hook(lambda _module, _inputs, y: y * 2)
        assert torch.equal(model(x), wanted * 2) and seen == [(3, HIDDEN)]
        before.remove()
        after.remove()
        assert torch.equal(model(x), wanted) and len(seen) == 1


@run_by(on_ranks)
def test_gradients_reach_the_parameters_beside_it(model: Model, x: Tensor, /) -> None:
    model(x).float().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    model.zero_grad()


@run_by(local.run, 1, timeout_s=60)
def test_a_layer_whose_last_part_cannot_be_made_leaves_no_buffer(group, /) -> None:
    made = []

    def fail(buffer: deep_comm.Buffer, *_: object) -> None:
        made.append(buffer)
        raise RuntimeError("no steps")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel, "Steps", fail)
        with pytest.raises(RuntimeError, match="no steps"):
            deep_comm.ExpertParallel(group, **SHAPE, device="cpu")
    with pytest.raises(deep_comm.errors.BufferDestroyed):
        made[0].barrier()


def test_a_layer_that_cannot_be_built_is_refused_as_before() -> None:
    with pytest.raises(deep_comm.ArgumentError, match="hidden"):
        deep_comm.ExpertParallel(None, **{**SHAPE, "hidden": 0})
