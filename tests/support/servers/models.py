"""Models with random weights, in the layout of Hugging Face checkpoints.

Weights of every expert differ, and are large enough that a token sent to a wrong expert changes
the tokens that follow. (Weights that servers draw themselves are equal on every rank and next to
nothing.) Each tensor has a seed of its own, so files are written piece by piece.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # FP8 weights have a scale for 128 x 128 elements
_LARGEST_E4M3 = 448.0
_HEAD_DIM, _NUM_HEADS, _NUM_KV_HEADS = 128, 16, 4
_Q_RANK, _KV_RANK, _ROPE_DIM = 512, 512, 64  # DeepSeek's attention
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Model:
    name: str
    family: str  # "qwen": Qwen3-MoE's; "deepseek": V3's, with grouped top-k and shared experts
    fp8: bool = False  # experts as FP8 in blocks
    layers: int = 4
    experts: int = 32
    topk: int = 8
    hidden: int = 2048
    inter: int = 512  # of an expert
    vocab: int = 4096


_LARGE: dict[str, int] = dict(layers=2, experts=256, hidden=7168, inter=2048)

MODELS = {
    model.name: model
    for model in (
        Model("qwen", "qwen"),
        Model("qwen-fp8", "qwen", fp8=True),
        Model("deepseek", "deepseek"),
        Model("deepseek-fp8", "deepseek", fp8=True),
        # With two experts per token a sum has two addends, which any order rounds alike.
        Model("small", "qwen", layers=2, experts=8, topk=2, hidden=256, vocab=256),
        Model("large", "qwen", **_LARGE),
        Model("large-fp8", "qwen", fp8=True, **_LARGE),
        Model("large-deepseek", "deepseek", **_LARGE | dict(layers=3)),  # the first is dense
    )
}


@dataclass(frozen=True)
class _Weight:
    name: str
    shape: tuple[int, ...]
    std: float  # 0: ones
    part: str = ""  # of FP8 in blocks: "weight" or "scale"

    @property
    def dtype(self) -> torch.dtype:
        dtypes = {"weight": torch.float8_e4m3fn, "scale": torch.float32}
        return dtypes.get(self.part, torch.bfloat16)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(size // BLOCK for size in self.shape) if self.part == "scale" else self.shape

    def make(self, device: str) -> Tensor:
        if self.std == 0:
            return torch.ones(self.shape, dtype=torch.bfloat16)
        generator = torch.Generator(device).manual_seed(zlib.crc32(self.name.encode()))
        values = torch.randn(self.shape, generator=generator, device=device) * self.std
        if not self.part:
            return values.bfloat16().cpu()
        weight, scale = to_blocks(values.bfloat16())
        return (weight if self.part == "weight" else scale).cpu()


def to_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] as e4m3 [N, K] and float32 scales [N / 128, K / 128]."""
    rows, columns = values.shape
    blocks = values.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-8) / _LARGEST_E4M3
    weight = (blocks / scale[:, None, :, None]).reshape(rows, columns)
    return weight.to(torch.float8_e4m3fn), scale


def from_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """The bfloat16 values that blocks stand for."""
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (weight.float() * spread).bfloat16()


# ---- what a model has ----------------------------------------------------------------------------


def config(model: Model) -> dict[str, Any]:
    """config.json."""
    common = dict(
        attention_bias=False, attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
        hidden_act="silu", hidden_size=model.hidden, initializer_range=0.02,
        intermediate_size=2 * model.inter, max_position_embeddings=4096,
        moe_intermediate_size=model.inter, norm_topk_prob=True,
        num_attention_heads=_NUM_HEADS, num_experts_per_tok=model.topk,
        num_hidden_layers=model.layers, rms_norm_eps=1e-6, rope_theta=1000000.0,
        tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, vocab_size=model.vocab,
    )  # fmt: skip
    if model.family == "qwen":
        own = dict(
            architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", decoder_sparse_step=1,
            head_dim=_HEAD_DIM, max_window_layers=model.layers, mlp_only_layers=[],
            num_experts=model.experts, num_key_value_heads=_NUM_KV_HEADS,
            output_router_logits=False, router_aux_loss_coef=0.001, sliding_window=None,
            use_sliding_window=False,
        )  # fmt: skip
    else:
        own = dict(
            architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3",
            first_k_dense_replace=1, kv_lora_rank=_KV_RANK, moe_layer_freq=1, n_group=4,
            n_routed_experts=model.experts, n_shared_experts=1, num_key_value_heads=_NUM_HEADS,
            num_nextn_predict_layers=0, q_lora_rank=_Q_RANK, qk_nope_head_dim=_HEAD_DIM - _ROPE_DIM,
            qk_rope_head_dim=_ROPE_DIM, rope_scaling=None, routed_scaling_factor=1.0,
            scoring_func="sigmoid", topk_group=2, topk_method="noaux_tc", v_head_dim=_HEAD_DIM,
        )  # fmt: skip
    if model.fp8:
        own["quantization_config"] = dict(
            quant_method="fp8", activation_scheme="dynamic", fmt="e4m3",
            weight_block_size=[BLOCK, BLOCK], modules_to_not_convert=_not_converted(model),
        )  # fmt: skip
    return common | own


def _not_converted(model: Model) -> list[str]:
    """Every linear layer but the experts."""
    kept = ["lm_head"]
    for weight in (one for layer in range(model.layers) for one in _layer(model, layer)):
        if not weight.part and len(weight.shape) == 2:
            kept.append(weight.name.removesuffix(".weight"))
    return kept


def _linear(model: Model, name: str, rows: int, columns: int) -> Iterator[_Weight]:
    """Of an expert."""
    std = 2 * columns**-0.5
    if model.fp8:
        yield _Weight(f"{name}.weight", (rows, columns), std, "weight")
        # The seed is the weight's, by its name.
        yield _Weight(f"{name}.weight", (rows, columns), std, "scale")
    else:
        yield _Weight(f"{name}.weight", (rows, columns), std)


def _mlp(model: Model, name: str, inter: int) -> Iterator[_Weight]:
    yield from _linear(model, f"{name}.gate_proj", inter, model.hidden)
    yield from _linear(model, f"{name}.up_proj", inter, model.hidden)
    yield from _linear(model, f"{name}.down_proj", model.hidden, inter)


def _attention(model: Model, name: str) -> Iterator[_Weight]:
    heads = _NUM_HEADS * _HEAD_DIM

    def plain(which: str, rows: int, columns: int) -> _Weight:
        return _Weight(f"{name}.{which}.weight", (rows, columns), columns**-0.5)

    if model.family == "qwen":
        yield plain("q_proj", heads, model.hidden)
        yield plain("k_proj", _NUM_KV_HEADS * _HEAD_DIM, model.hidden)
        yield plain("v_proj", _NUM_KV_HEADS * _HEAD_DIM, model.hidden)
        yield _Weight(f"{name}.q_norm.weight", (_HEAD_DIM,), 0)
        yield _Weight(f"{name}.k_norm.weight", (_HEAD_DIM,), 0)
    else:
        yield plain("q_a_proj", _Q_RANK, model.hidden)
        yield _Weight(f"{name}.q_a_layernorm.weight", (_Q_RANK,), 0)
        yield plain("q_b_proj", heads, _Q_RANK)
        yield plain("kv_a_proj_with_mqa", _KV_RANK + _ROPE_DIM, model.hidden)
        yield _Weight(f"{name}.kv_a_layernorm.weight", (_KV_RANK,), 0)
        yield plain("kv_b_proj", heads - _NUM_HEADS * _ROPE_DIM + heads, _KV_RANK)
    yield plain("o_proj", model.hidden, heads)


def _layer(model: Model, layer: int) -> Iterator[_Weight]:
    name = f"model.layers.{layer}"
    yield _Weight(f"{name}.input_layernorm.weight", (model.hidden,), 0)
    yield _Weight(f"{name}.post_attention_layernorm.weight", (model.hidden,), 0)
    yield from _attention(model, f"{name}.self_attn")
    is_deepseek = model.family == "deepseek"
    if is_deepseek and layer == 0:  # dense, as there
        yield from _mlp(model, f"{name}.mlp", 2 * model.inter)
        return
    yield _Weight(f"{name}.mlp.gate.weight", (model.experts, model.hidden), 2 * model.hidden**-0.5)
    if is_deepseek:
        yield _Weight(f"{name}.mlp.gate.e_score_correction_bias", (model.experts,), 0.02)
        yield from _mlp(model, f"{name}.mlp.shared_experts", model.inter)
    for expert in range(model.experts):
        yield from _mlp(model, f"{name}.mlp.experts.{expert}", model.inter)


def _outside(model: Model) -> Iterator[_Weight]:
    yield _Weight("model.embed_tokens.weight", (model.vocab, model.hidden), 1.0)
    yield _Weight("model.norm.weight", (model.hidden,), 0)
    yield _Weight("lm_head.weight", (model.vocab, model.hidden), 4 * model.hidden**-0.5)


# ---- files ---------------------------------------------------------------------------------------


def write_model(model: Model, folder: Path, device: str) -> int:
    """config.json, weights, and a tokenizer with a word for each id; bytes of all weights."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"model-outside.safetensors": list(_outside(model))}
    for layer in range(model.layers):
        files[f"model-layer-{layer}.safetensors"] = list(_layer(model, layer))
    places, num_bytes = {}, 0
    for file, weights in files.items():
        shapes = {_stored_name(one): (one.dtype, one.stored_shape) for one in weights}
        tensors = (one.make(device) for one in weights)
        num_bytes += write_safetensors(folder / file, shapes, tensors)
        places.update(dict.fromkeys(shapes, file))
    index = dict(metadata=dict(total_size=num_bytes), weight_map=places)
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "generation_config.json", dict(bos_token_id=1, eos_token_id=2))
    write_tokenizer(folder, model.vocab)
    # Last: a folder with it is complete.
    _write_json(folder / "config.json", config(model))
    return num_bytes


def _stored_name(weight: _Weight) -> str:
    return weight.name + ("_scale_inv" if weight.part == "scale" else "")


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))


def write_safetensors(
    path: Path, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterator[Tensor]
) -> int:
    """Tensors one by one, in the order of ``shapes``; their bytes."""
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = dict(dtype=_NAMES[dtype], shape=shape, data_offsets=[start, end])
    text = json.dumps(dict(__metadata__={"format": "pt"}, **header)).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            tensor.contiguous().view(torch.uint8).numpy().tofile(file)
    return end


def read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with path.open("rb") as file:
        (num_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(num_bytes))
        base = 8 + num_bytes
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            file.seek(base + start)
            data = torch.frombuffer(bytearray(file.read(end - start)), dtype=torch.uint8)
            yield name, data.view(_TYPES[entry["dtype"]]).view(entry["shape"])


_SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2}


def token_of(word: str) -> int:
    """Of the tokenizer that write_tokenizer writes."""
    return _SPECIAL[word] if word in _SPECIAL else int(word.removeprefix("w"))


def write_tokenizer(folder: Path, vocab: int) -> None:
    words = _SPECIAL | {f"w{index}": index for index in range(len(_SPECIAL), vocab)}
    tokenizer = dict(
        version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None,
        pre_tokenizer=dict(type="WhitespaceSplit"), post_processor=None, decoder=None,
        model=dict(type="WordLevel", vocab=words, unk_token="<unk>"),
    )  # fmt: skip
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(
        folder / "tokenizer_config.json",
        dict(
            tokenizer_class="PreTrainedTokenizerFast", unk_token="<unk>", bos_token="<s>",
            eos_token="</s>", model_max_length=4096, clean_up_tokenization_spaces=False,
        ),
    )  # fmt: skip


def write_dequantised(source: Path, folder: Path) -> None:
    """The same model in bfloat16, for programs that do not read FP8 in blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    places, num_bytes = {}, 0
    for path in sorted(source.glob("*.safetensors")):
        stored = dict(read_safetensors(path))
        plain = {
            name: from_blocks(tensor, stored[f"{name}_scale_inv"])
            if f"{name}_scale_inv" in stored else tensor
            for name, tensor in stored.items() if not name.endswith("_scale_inv")
        }  # fmt: skip
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in plain.items()}
        num_bytes += write_safetensors(folder / path.name, shapes, iter(plain.values()))
        places.update(dict.fromkeys(plain, path.name))
    index = dict(metadata=dict(total_size=num_bytes), weight_map=places)
    _write_json(folder / "model.safetensors.index.json", index)
    settings = json.loads((source / "config.json").read_text())
    settings.pop("quantization_config", None)
    _write_json(folder / "config.json", settings)
