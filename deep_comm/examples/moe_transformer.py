"""A small Mixture-of-Experts transformer that learns a text, byte by byte, over several ranks.

Every rank has its own sentences (data parallel: attention, gate and embedding are copies, and their
gradients are added) and its own experts (expert parallel: ExpertParallel moves tokens to them and
gradients back). ``--compare`` also trains the same model in one process, where sums are taken in
the same order, and expects the same losses, bit by bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import deep_comm
from deep_comm.launch import add_ranks, device_of, on_ranks, say
from deep_comm.ranks.rendezvous import all_gather_object
from deep_comm.ranks.topology import first_expert, num_local_experts
from deep_comm.settings import command_line
from deep_comm.settings.command_line import at_least

WIDTH, EXPERT_WIDTH, NUM_LAYERS, NUM_HEADS = 32, 64, 2, 2
NUM_EXPERTS, NUM_TOPK = 8, 2
LENGTH, NUM_SENTENCES = 24, 4  # of a rank and step
LEARNING_RATE = 3e-3
ENOUGH_STEPS = 20  # for a loss that is a fifth lower

Dense = dict[str, Tensor]
MoE = Callable[[int, list[Tensor], list[Tensor], list[Tensor]], list[Tensor]]
"""(layer, tokens, chosen experts, weights) -> sums; each a list by shard."""


def make_dense() -> Dense:
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[0] ** 0.5

    dense = {"embedding": weight(256, WIDTH) * 4, "position": weight(LENGTH, WIDTH)}
    for layer in range(NUM_LAYERS):
        dense[f"qkv{layer}"] = weight(WIDTH, 3 * WIDTH)
        dense[f"out{layer}"] = weight(WIDTH, WIDTH)
        dense[f"gate{layer}"] = weight(WIDTH, NUM_EXPERTS)
    dense["head"] = weight(WIDTH, 256)
    return dense


def make_experts() -> list[tuple[Tensor, Tensor]]:
    """(up [E, width, expert width], down) of each layer, all experts."""
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(NUM_EXPERTS, WIDTH, EXPERT_WIDTH, generator=generator) / WIDTH**0.5,
            torch.randn(NUM_EXPERTS, EXPERT_WIDTH, WIDTH, generator=generator) / EXPERT_WIDTH**0.5,
        )
        for _ in range(NUM_LAYERS)
    ]


def expert(up: Tensor, down: Tensor, rows: Tensor) -> Tensor:
    return torch.relu(rows @ up) @ down


def attention(dense: Dense, layer: int, x: Tensor) -> Tensor:
    size = (x.shape[0], LENGTH, NUM_HEADS, WIDTH // NUM_HEADS)
    parts = (F.layer_norm(x, (WIDTH,)) @ dense[f"qkv{layer}"]).chunk(3, dim=-1)
    q, k, v = (part.view(size).transpose(1, 2) for part in parts)
    scores = (q @ k.transpose(-1, -2)) / size[-1] ** 0.5
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return mixed.transpose(1, 2).reshape(x.shape) @ dense[f"out{layer}"]


def losses(denses: Sequence[Dense], shards: Sequence[Tensor], moe: MoE) -> list[Tensor]:
    """Cross entropy of each shard [sentences, LENGTH + 1] of bytes; all shards go layer by
    layer."""
    xs = [d["embedding"][s[:, :-1]] + d["position"] for d, s in zip(denses, shards, strict=True)]
    for layer in range(NUM_LAYERS):
        xs = [x + attention(d, layer, x) for d, x in zip(denses, xs, strict=True)]
        tokens = [F.layer_norm(x, (WIDTH,)).view(-1, WIDTH) for x in xs]
        gates = [(t @ d[f"gate{layer}"]).softmax(-1) for d, t in zip(denses, tokens, strict=True)]
        chosen = [gate.topk(NUM_TOPK) for gate in gates]
        ys = moe(layer, tokens, [c.indices for c in chosen], [c.values for c in chosen])
        xs = [x + y.view(x.shape) for x, y in zip(xs, ys, strict=True)]
    return [
        F.cross_entropy((F.layer_norm(x, (WIDTH,)) @ d["head"]).flatten(0, 1), s[:, 1:].flatten())
        for d, x, s in zip(denses, xs, shards, strict=True)
    ]


def shard(text: Tensor, step: int, rank: int) -> Tensor:
    """What a rank reads in a step: [NUM_SENTENCES, LENGTH + 1]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(0, len(text) - LENGTH - 1, (NUM_SENTENCES,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts])


def optimizer_of(dense: Dense, experts: list[tuple[Tensor, Tensor]]) -> torch.optim.Optimizer:
    leaves = [*dense.values(), *(part for pair in experts for part in pair)]
    for leaf in leaves:
        leaf.requires_grad_()
    return torch.optim.Adam(leaves, lr=LEARNING_RATE, foreach=False)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def add_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def train(group: Any, text: Tensor, num_steps: int, device: torch.device) -> list[float]:
    """Losses over all ranks, step by step; the same on every rank."""
    rank, num_ranks = group.rank(), group.size()
    first = first_expert(rank, NUM_EXPERTS, num_ranks)
    local = slice(first, first + num_local_experts(rank, NUM_EXPERTS, num_ranks))
    dense = {name: value.to(device) for name, value in make_dense().items()}
    experts = [(up[local].to(device), down[local].to(device)) for up, down in make_experts()]
    optimizer = optimizer_of(dense, experts)
    history = []
    with deep_comm.ExpertParallel(
        group, hidden=WIDTH, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK,
        max_tokens=NUM_SENTENCES * LENGTH, dtype=torch.float32, device=device,
    ) as parallel:  # fmt: skip

        def moe(
            layer: int, tokens: list[Tensor], idx: list[Tensor], weights: list[Tensor]
        ) -> list[Tensor]:
            ups, downs = experts[layer]

            def compute(batch: deep_comm.ExpertBatch) -> Tensor:
                return batch.map(lambda e, rows: expert(ups[e - first], downs[e - first], rows))

            return [parallel(tokens[0], idx[0], weights[0], compute)]

        for step in range(num_steps):
            optimizer.zero_grad()
            loss = losses([dense], [shard(text, step, rank).to(device)], moe)[0] / num_ranks
            loss.backward()
            flat = torch.cat([loss.detach().view(1), *(_grad(p).flatten() for p in dense.values())])
            total = add_in_rank_order(all_gather_object(group, flat.cpu())).to(device)
            history.append(float(total[0]))
            sizes = [p.numel() for p in dense.values()]
            for p, grad in zip(dense.values(), total[1:].split(sizes), strict=True):
                _grad(p).copy_(grad.view_as(p))
            optimizer.step()
    return history


def train_alone(text: Tensor, num_steps: int, num_ranks: int) -> list[float]:
    """The same in this process: what every rank reads is a shard, and all experts are here."""
    dense, experts = make_dense(), make_experts()
    optimizer = optimizer_of(dense, experts)

    def moe(
        layer: int, tokens: list[Tensor], idx: list[Tensor], weights: list[Tensor]
    ) -> list[Tensor]:
        ups, downs = experts[layer]
        x, chosen = torch.cat(tokens), torch.cat(idx)
        rows = torch.zeros(*chosen.shape, WIDTH)
        for e in range(NUM_EXPERTS):
            token, k = (chosen == e).nonzero(as_tuple=True)
            rows = rows.index_put((token, k), expert(ups[e], downs[e], x[token]))
        weight = torch.cat(weights).unsqueeze(2)
        # Two addends: their order does not matter, as it would with more.
        y = rows[:, 0] * weight[:, 0] + rows[:, 1] * weight[:, 1]
        return list(y.split([t.shape[0] for t in tokens]))

    history = []
    for step in range(num_steps):
        optimizer.zero_grad()
        # Copies, so that what the ranks' tokens contribute can be added in the ranks' order.
        copies = [
            {name: p.detach().clone().requires_grad_() for name, p in dense.items()}
            for _ in range(num_ranks)
        ]
        shards = [shard(text, step, rank) for rank in range(num_ranks)]
        parts = [loss / num_ranks for loss in losses(copies, shards, moe)]
        torch.autograd.backward(parts)
        for name, p in dense.items():
            p.grad = add_in_rank_order([_grad(copy[name]) for copy in copies])
        history.append(float(add_in_rank_order([part.detach() for part in parts])))
        optimizer.step()
    return history


def rank_main(group: Any, text: bytes, num_steps: int, compare: bool) -> bool:
    device = device_of(group)
    bytes_of_text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    history = train(group, bytes_of_text, num_steps, device)
    begin, end = history[0], sum(history[-10:]) / len(history[-10:])
    where = f"on {group.size()} ranks ({device.type})"
    say(group, f"loss {begin:.3f} -> {end:.3f} after {num_steps} steps {where}")
    most = 0.8 if num_steps >= ENOUGH_STEPS else 1.0
    is_right = end < most * begin
    if not is_right:
        say(group, f"the loss is {end / begin:.0%} of the first, and should be below {most:.0%}")
    if compare and group.rank() == 0:
        alone = train_alone(bytes_of_text, num_steps, group.size())
        if device.type == "cpu":
            same = alone == history
        else:  # another device's matrix products
            same = all(abs(a - b) < 0.05 * a for a, b in zip(alone, history, strict=True))
        if same:
            say(group, "the single-process run has the same losses")
        else:
            losses = f"{alone[:3]}… and {history[:3]}…"
            say(group, f"the single-process run has OTHER losses: {losses}")
        is_right = is_right and same
    return is_right


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(
        "examples moe_transformer",
        __doc__ or "",
        "deep_comm examples moe_transformer README.md --steps 60 --compare",
    )
    parser.add_argument("file", type=command_line.file_to_read, help="the text to learn")
    parser.add_argument("--steps", type=at_least(2), default=300, help="of the optimizer")
    add_ranks(parser, 4)
    parser.add_argument(
        "--compare", action="store_true", help="train in one process too and compare the losses"
    )
    parsed = parser.parse_args(arguments)
    text = parsed.file.read_bytes()[: 1 << 20]
    if len(text) < 2 * LENGTH:
        parser.error(f"{parsed.file} has fewer than {2 * LENGTH} bytes")
    return on_ranks(rank_main, parsed.ranks, text, parsed.steps, parsed.compare)


if __name__ == "__main__":
    sys.exit(main())
