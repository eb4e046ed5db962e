"""The readable truth of low-latency mode, in plain torch; see deep_comm.reference.

Rows past the received ones are zeros here and anything in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_comm.ranks.topology import first_expert, num_local_experts

SCALE_BLOCK = 128
FP4_SCALE_BLOCK = 16
_LARGEST_E4M3 = 448.0


@dataclass(frozen=True)
class LowLatencyDispatched:
    """What one rank has after a dispatch. N = R * M rows an expert, compact: N rows in all."""

    recv_x: Tensor  # [L, N, H]; compact: [N, H]
    recv_scales: Tensor | None  # [L, N, S]; compact: [N, S]; NVFP4: bytes of e4m3
    recv_count: Tensor  # int32 [L]
    src_info: Tensor  # int32 [L, N]; compact: [N]
    layout_range: Tensor  # int64 [L, R]; compact: [R]
    recv_rows: Tensor  # int32 [R, M, K], row in [L * N], or -1; compact: [R, M], row in [N]
    num_recv_tokens: int  # a token counts once
    recv_topk_idx: Tensor  # int32 [N, K], rows as in compact output
    recv_topk_weights: Tensor | None  # float32 [N, K]


def quantise(x: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """bfloat16 [T, H] as (float8_e4m3fn [T, H], float32 scales [T, H / 128]).

    The scale of a block is its largest magnitude, at least 1e-4, over 448; ``round_scale`` rounds
    it up to a power of two. An element is x * (448 / largest), or x / scale if rounded, to nearest.
    """
    blocks = x.float().view(x.shape[0], x.shape[1] // SCALE_BLOCK, SCALE_BLOCK)
    amax = blocks.abs().amax(dim=2).clamp(min=1e-4)
    scales = amax * torch.tensor(1.0 / _LARGEST_E4M3, dtype=torch.float32)
    if round_scale:
        mantissa, exponent = torch.frexp(scales)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        # 2**exponent by its bits: ldexp goes through a power, whose bits are the device's.
        scales = ((exponent + 127) << 23).view(torch.float32)
        factors = 1.0 / scales
    else:
        factors = torch.full_like(amax, _LARGEST_E4M3) / amax  # a scalar would be multiplied
    scaled = (blocks * factors.unsqueeze(2)).clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
    return scaled.to(torch.float8_e4m3fn).view(x.shape), scales


def pack_ue8m0(scales: Tensor) -> Tensor:
    """Powers of two [T, S] as their exponent bytes, four in an int32 [T, ceil(S / 4)]."""
    exponents = (scales.view(torch.int32) >> 23) & 0xFF
    num_packs = -(-exponents.shape[1] // 4)
    exponents = torch.nn.functional.pad(exponents, (0, 4 * num_packs - exponents.shape[1]))
    exponents = exponents.view(scales.shape[0], num_packs, 4)
    packed = (exponents.to(torch.int64) << torch.tensor([0, 8, 16, 24])).sum(dim=2)
    return packed.to(torch.int32)


def to_e2m1(values: Tensor, of: Tensor | None = None) -> Tensor:
    """float32 as codes of e2m1, uint8: to nearest, ties to even, at most 6; a NaN becomes 6. Signs
    are those of ``of``, from which ``values`` were made, if it is given."""
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    # Between the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6: halfway goes to the even code.
    for bound in (0.25, 1.25, 2.5, 5.0):
        codes += ~(magnitude <= bound)
    for bound in (0.75, 1.75, 3.5):
        codes += ~(magnitude < bound)
    return codes | torch.signbit(values if of is None else of).to(torch.uint8) << 3


def quantise_nvfp4(x: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """bfloat16 [T, H] as (uint8 [T, H / 2], the first of two elements in the low half, uint8 [T, H
    / 16] bytes of e4m3 scales).

    A scale is the largest magnitude of 16 elements * (1 / 6) * ``global_scale``, rounded to e4m3,
    at most 448; an element is x * (global_scale / scale), times 0 if the scale is 0, as e2m1. Eight
    negative zeros, from a multiple of eight on, become seven and a positive one.
    """
    factor = torch.ones(()) if global_scale is None else global_scale.reshape(())
    blocks = x.float().view(x.shape[0], x.shape[1] // FP4_SCALE_BLOCK, FP4_SCALE_BLOCK)
    magnitudes = torch.where(blocks.isnan(), 0.0, blocks.abs())
    wanted = magnitudes.amax(dim=2) * torch.tensor(1.0 / 6.0) * factor
    scales = wanted.clamp(max=_LARGEST_E4M3).to(torch.float8_e4m3fn)
    divisors = scales.float().unsqueeze(2)
    codes = to_e2m1(blocks * torch.where(divisors == 0, 0.0, factor / divisors), blocks)
    groups = codes.view(x.shape[0], x.shape[1] // 8, 8)
    groups[:, :, 7] = torch.where((groups == 8).all(dim=2), 0, groups[:, :, 7])
    pairs = codes.view(x.shape[0], x.shape[1] // 2, 2)
    return pairs[:, :, 0] | pairs[:, :, 1] << 4, scales.view(torch.uint8)


def rows_of_scale_tiles(tiles: Tensor, num_rows: int) -> Tensor:
    """[..., A, D, 32, 4, 4] as [..., num_rows, 4 * D]: row 128 a + 32 b + c, column 4 d + e is [a,
    d, c, b, e]."""
    *groups, num_tiles, num_words, _, _, _ = tiles.shape
    rows = tiles.movedim(-2, -4).movedim(-2, -3)  # a, b, c, d, e
    return rows.reshape(*groups, num_tiles * 128, 4 * num_words)[..., :num_rows, :]


def low_latency_dispatch(
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    num_max_tokens: int,
    num_experts: int,
    *,
    topk_weights: Sequence[Tensor] | None = None,
    use_fp8: bool = False,
    round_scale: bool = False,
    use_ue8m0: bool = False,
    compact: bool = False,
    use_nvfp4: bool = False,
    global_scales: Sequence[Tensor | None] | None = None,
    global_topk_idx: bool = False,
) -> list[LowLatencyDispatched]:
    """What every rank receives: rows of an expert by (source rank, source token).

    ``global_scales``: of every rank's call, for NVFP4.
    """
    num_ranks, num_topk = len(xs), topk_idxs[0].shape[1]
    num_slots = num_ranks * num_max_tokens
    payloads: list[tuple[Tensor, Tensor | None]] = []
    for rank, x in enumerate(xs):
        if use_nvfp4:
            payloads.append(quantise_nvfp4(x, global_scales[rank] if global_scales else None))
            continue
        if not use_fp8:
            payloads.append((x, None))
            continue
        data, scales = quantise(x, round_scale)
        payloads.append((data.view(torch.uint8), pack_ue8m0(scales) if use_ue8m0 else scales))
    results = []
    for rank in range(num_ranks):
        first = first_expert(rank, num_experts, num_ranks)
        num_local = num_local_experts(rank, num_experts, num_ranks)
        count = [0] * num_local
        rows: list[tuple[int, int, int, int]] = []  # (expert, row, source, token)
        tokens: list[tuple[int, int]] = []
        ranges = torch.zeros(num_local, num_ranks, dtype=torch.int64)
        token_ranges = torch.zeros(num_ranks, dtype=torch.int64)
        recv_rows = torch.full((num_ranks, num_max_tokens, num_topk), -1, dtype=torch.int32)
        token_rows = torch.full((num_ranks, num_max_tokens), -1, dtype=torch.int32)
        recv_idx = torch.full((num_slots, num_topk), -1, dtype=torch.int32)
        recv_weights = torch.zeros(num_slots, num_topk)
        for source, topk_idx in enumerate(topk_idxs):
            before, tokens_before = list(count), len(tokens)
            for token, selection in enumerate(topk_idx.tolist()):
                local = [e - first if 0 <= e - first < num_local else -1 for e in selection]
                for k, expert in enumerate(local):
                    if expert < 0:
                        continue
                    if expert in local[:k]:  # one row, whatever the number of selections
                        recv_rows[source, token, k] = recv_rows[source, token, local.index(expert)]
                        continue
                    recv_rows[source, token, k] = expert * num_slots + count[expert]
                    rows.append((expert, count[expert], source, token))
                    count[expert] += 1
                if max(local) < 0:
                    continue
                token_rows[source, token] = len(tokens)
                recv_idx[len(tokens)] = torch.tensor(local, dtype=torch.int32)
                if topk_weights is not None:
                    is_here = torch.tensor(local) >= 0
                    recv_weights[len(tokens)] = torch.where(
                        is_here, topk_weights[source][token], 0.0
                    )
                tokens.append((source, token))
            for expert in range(num_local):
                ranges[expert, source] = before[expert] << 32 | count[expert] - before[expert]
            token_ranges[source] = tokens_before << 32 | len(tokens) - tokens_before
        if global_topk_idx:
            other = 0 if first > 0 else num_experts - 1
            recv_idx = torch.where(recv_idx < 0, other, recv_idx + first)
        if compact:
            rows = [(0, row, source, token) for row, (source, token) in enumerate(tokens)]
        num_groups = 1 if compact else num_local
        recv_x, recv_scales = (
            None if part is None else part.new_zeros(num_groups, num_slots, part.shape[1])
            for part in payloads[0]
        )
        src_info = torch.zeros(num_groups, num_slots, dtype=torch.int32)
        assert recv_x is not None
        for group, row, source, token in rows:
            data, token_scales = payloads[source]
            recv_x[group, row] = data[token]
            src_info[group, row] = token
            if recv_scales is not None and token_scales is not None:
                recv_scales[group, row] = token_scales[token]
        if use_fp8 and not use_nvfp4:
            recv_x = recv_x.view(torch.float8_e4m3fn)
        results.append(
            LowLatencyDispatched(
                recv_x=recv_x[0] if compact else recv_x,
                recv_scales=recv_scales[0] if compact and recv_scales is not None else recv_scales,
                recv_count=torch.tensor(count, dtype=torch.int32),
                src_info=src_info[0] if compact else src_info,
                layout_range=token_ranges if compact else ranges,
                recv_rows=token_rows if compact else recv_rows,
                num_recv_tokens=len(tokens),
                recv_topk_idx=recv_idx,
                recv_topk_weights=recv_weights if topk_weights is not None else None,
            )
        )
    return results


def low_latency_combine(
    xs: Sequence[Tensor],
    dispatched: Sequence[LowLatencyDispatched],
    topk_weights: Sequence[Tensor],
    *,
    compact: bool = False,
    one_rounding: bool = False,
) -> list[Tensor]:
    """Every token's weighted sum, bfloat16 [T, H].

    Two roundings: the rank of the experts adds weight * row in float32, k ascending, starting at
    0.0, each product rounded to float32, and rounds the sum to bfloat16; the token's rank adds
    those in float32, ranks ascending, and rounds to bfloat16. Compact rows skip the first step.

    ``one_rounding``: the token's rank adds weight * row, k ascending, and rounds.
    """
    if one_rounding:
        return [_sum_selections(xs, dispatched, rank, w) for rank, w in enumerate(topk_weights)]
    results = []
    for rank, weights in enumerate(topk_weights):
        hidden = xs[0].shape[-1]
        total = torch.zeros(weights.shape[0], hidden, dtype=torch.float32)
        for x, received in zip(xs, dispatched, strict=True):
            rows = x.reshape(-1, hidden)
            for token in range(weights.shape[0]):
                recv_rows = received.recv_rows[rank, token].reshape(-1)
                if int(recv_rows.max()) < 0:
                    continue
                partial = torch.zeros(hidden, dtype=torch.float32)
                for k, place in enumerate(recv_rows.tolist()):
                    if place < 0:
                        continue
                    row = rows[place].float()
                    partial += row if compact else row * weights[token, k]
                total[token] += partial.to(x.dtype).float()
        results.append(total.to(xs[0].dtype))
    return results


def logfmt_bound(x: Tensor) -> Tensor:
    """float32 [T, H]: by how much elements may be wrong that travel in LogFMT-10.

    16 neighbours share a range of r = log2(largest / least) <= 32 that 510 steps divide; a
    logarithm is wrong by half a step.
    """
    pieces = x.float().abs().unflatten(-1, (x.shape[-1] // 16, 16))
    largest = pieces.amax(dim=-1, keepdim=True)
    least = torch.where(pieces > 0, pieces, largest).amin(dim=-1, keepdim=True)
    ratio = torch.where(largest > 0, largest / least, 1.0)
    log_range = torch.log2(ratio).clamp(max=32.0) + 1 / 64
    relative = torch.exp2(log_range / 1020) - 1
    bound: Tensor = pieces * relative + largest * 2.0**-32
    return bound.reshape(x.shape)


def _sum_selections(
    xs: Sequence[Tensor], dispatched: Sequence[LowLatencyDispatched], rank: int, weights: Tensor
) -> Tensor:
    hidden = xs[0].shape[-1]
    total = torch.zeros(weights.shape[0], hidden, dtype=torch.float32)
    for token, token_weights in enumerate(weights):
        for k, weight in enumerate(token_weights):
            for x, received in zip(xs, dispatched, strict=True):
                place = int(received.recv_rows[rank, token, k])
                if place >= 0:
                    total[token] += x.reshape(-1, hidden)[place].float() * weight
    return total.to(xs[0].dtype)
