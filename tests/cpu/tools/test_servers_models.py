"""The small models: their weights repeat, and other libraries can read them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from server_stand_ins import (
    TINY,
)
from servers import models


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found.update(models.read_safetensors(path))
    return found


@pytest.mark.parametrize("family", ["qwen", "deepseek"])
def test_every_expert_has_weights_of_its_own_and_runs_repeat(family: str, tmp_path: Path) -> None:
    model = dataclasses.replace(TINY, family=family, layers=2)
    num_bytes = models.write_model(model, tmp_path / "a", "cpu")
    models.write_model(model, tmp_path / "b", "cpu")
    found, again = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert sum(one.nbytes for one in found.values()) == num_bytes
    assert all(torch.equal(found[name], again[name]) for name in found)
    experts = [one for name, one in found.items() if ".experts." in name and "down" in name]
    assert len(experts) == model.experts * (2 if family == "qwen" else 1)
    for index, one in enumerate(experts):
        assert one.std() > 0.1
        assert not any(torch.equal(one, other) for other in experts[index + 1 :])
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(found)
    assert index["metadata"]["total_size"] == num_bytes


def test_configurations_say_what_the_weights_are(tmp_path: Path) -> None:
    for family, key, kind in (
        ("qwen", "num_experts", "qwen3_moe"),
        ("deepseek", "n_routed_experts", "deepseek_v3"),
    ):
        folder = tmp_path / family
        models.write_model(dataclasses.replace(TINY, family=family, layers=2), folder, "cpu")
        config = json.loads((folder / "config.json").read_text())
        assert config["model_type"] == kind and config[key] == 4
        found = tensors(folder)
        assert found["model.embed_tokens.weight"].shape == (64, config["hidden_size"])
        assert found["model.layers.1.mlp.gate.weight"].shape == (4, 256)
        words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        assert sorted(words.values()) == list(range(64)) and words["w17"] == 17
    shared = [name for name in found if "shared_experts" in name]
    assert len(shared) == 3 and config["topk_group"] < config["n_group"]


def test_fp8_blocks_stand_for_the_same_weights_and_only_of_experts(tmp_path: Path) -> None:
    plain, blocks, back = (tmp_path / name for name in ("plain", "blocks", "back"))
    models.write_model(TINY, plain, "cpu")
    models.write_model(dataclasses.replace(TINY, fp8=True), blocks, "cpu")
    models.write_dequantised(blocks, back)
    expected, stored, got = tensors(plain), tensors(blocks), tensors(back)
    assert got.keys() == expected.keys()
    config = json.loads((blocks / "config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [128, 128]
    for name, one in expected.items():
        is_expert = ".experts." in name
        assert (stored[name].dtype == torch.float8_e4m3fn) == is_expert
        if is_expert:
            assert stored[f"{name}_scale_inv"].shape == tuple(size // 128 for size in one.shape)
            limit = float(one.float().abs().max()) / 16  # three bits of mantissa
            assert float((one.float() - got[name].float()).abs().max()) <= limit
            assert not torch.equal(one, got[name])
        else:
            assert torch.equal(one, got[name])
            is_linear = one.dim() == 2 and "embed" not in name
            named = name.removesuffix(".weight") in config["modules_to_not_convert"]
            assert named == is_linear, name
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_large_models_have_the_sizes_of_large_ones() -> None:
    for name in ("large", "large-fp8", "large-deepseek"):
        model = models.MODELS[name]
        assert (model.hidden, model.experts, model.topk) == (7168, 256, 8)
