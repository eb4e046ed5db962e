"""ExpertParallel in every mode gives the reference's bits; ranks are threads or processes."""

import dataclasses
import random
from typing import Any

import forked
import layer_cases
import pytest
import torch
from cases import ROUTINGS
from layer_cases import LayerCase, build, inputs, random_steps, run, verify
from run_by import run_by
from schedules import some_of

import deep_comm
from deep_comm import ArgumentError, BufferTooSmall, ConfigMismatch, local
from deep_comm.reference.low_latency import quantise

pytestmark = pytest.mark.usefixtures("poison")


def check(case: LayerCase) -> list[Any]:
    results = local.run(lambda group: run(group, case), case.num_ranks, timeout_s=120)
    verify(case, results)
    return results


def sampled(seed: int, mode: str) -> LayerCase:
    choose = random.Random(seed)
    num_ranks = choose.choice((1, 2, 3, 4, 5, 8))
    few = choose.choice((1, 3, 7))
    dtype = torch.bfloat16
    if mode == "prefill":
        dtype = choose.choice((torch.bfloat16, torch.float16, torch.float32))
    most = few if mode == "decode" else few + choose.choice((1, 5, 20))
    return LayerCase(
        random_steps(choose, num_ranks, most, few, 5 if mode == "auto" else 2), max_tokens=most,
        decode_tokens=few, hidden=choose.choice((8, 56, 128)), experts=choose.choice((1, 3, 8, 19)),
        topk=choose.choice((1, 2, 5)), routing=choose.choice(ROUTINGS),
        idx_dtype=choose.choice((torch.int64, torch.int32)), dtype=dtype, mode=mode,
        alignment=choose.choice((1, 1, 4, 16)), bounded=mode == "prefill" and choose.random() < 0.4,
        how=choose.choice(("forward", "split", "async", "shared", "mixed")), seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["prefill", "decode", "auto"])
def test_every_rank_gets_its_sums(mode: str) -> None:
    for seed in some_of(range(45)):
        case = sampled(seed, mode)
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {case}: {error}") from error


def test_prefill_and_decode_give_the_same_bits() -> None:
    steps = ((5, 0, 7), (7, 7, 7), (1, 2, 0))
    base = dict(steps=steps, max_tokens=7, decode_tokens=7, hidden=96, experts=10, topk=4)
    decode = check(LayerCase(**base, mode="decode"))
    prefill = check(LayerCase(**base, mode="prefill"))
    for one, other in zip(decode, prefill, strict=True):
        for (y, modes), (z, other_modes) in zip(one, other, strict=True):
            assert modes == ["decode"] and other_modes == ["prefill"]
            assert torch.equal(y.view(torch.int16), z.view(torch.int16))


def test_ranks_may_be_processes() -> None:
    case = LayerCase(((3, 9, 0), (2, 2, 2), (1, 0, 3)), 9, 3, hidden=128, topk=3)
    verify(case, forked.run(run, 3, case, timeout_s=100))


FP8 = LayerCase(((5,) * 3,), 8, 8, hidden=384, experts=6, topk=3, fp8=True)


def of_wide_rows(batch: deep_comm.ExpertBatch) -> torch.Tensor:
    assert batch.scales is not None
    return layer_cases.wide(batch.x, batch.scales)


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_fp8_scales_of_a_decode_step_that_is_received_later(ranks_per_node: int | None) -> None:
    """They are stored by column, and turned into rows behind the receive phase, not before it."""
    case = dataclasses.replace(FP8, mode="decode", ranks_per_node=ranks_per_node)

    def main(group: Any) -> None:
        given = layer_cases.inputs(case, group.rank(), 0)
        with build(group, case, timeout_s=30) as layer, torch.no_grad():
            expected = layer(*given, of_wide_rows)
            with layer.dispatch_async(*given) as sent:
                pass
            rows = of_wide_rows(sent.result())
            assert torch.equal(layer.combine(sent.result(), rows), expected)
            assert torch.equal(layer(*given, of_wide_rows, shared=torch.zeros_like), expected)

    local.run(main, 2)


@run_by(local.run, 3, timeout_s=60)
def test_fp8_rows_are_those_of_quantising_first(group: Any, /) -> None:
    """Both modes hand experts the same bytes, of which experts make the same rows."""
    case = dataclasses.replace(FP8, hidden=256, alignment=4)
    x, idx, weights = layer_cases.inputs(case, group.rank(), 0)
    seen: dict[str, torch.Tensor] = {}
    with build(group, case, timeout_s=30) as layer, torch.no_grad():
        for mode in ("prefill", "decode"):
            seen[mode] = layer(x, idx, weights, of_wide_rows, mode=mode)
        with (
            torch.enable_grad(),
            pytest.raises(ArgumentError, match="gradient in a layer with fp8"),
        ):
            layer(x.detach().requires_grad_(), idx, weights, of_wide_rows, mode="prefill")
    assert torch.equal(seen["prefill"], seen["decode"])
    # The sum over selections of dequantised rows.
    near = layer_cases.wide(*quantise(x)).float() * weights.sum(1, keepdim=True)
    assert torch.allclose(seen["decode"].float(), near, rtol=0.02, atol=1e-3)


# ---- arguments ----------------------------------------------------------------------------------

CASE = LayerCase(((1, 1),), max_tokens=6, decode_tokens=2)


@run_by(local.run, 1, timeout_s=30)
def test_bad_arguments_are_named_before_anything_is_exchanged(group: Any, /) -> None:
    good = dict(hidden=64, num_experts=4, num_topk=2, max_tokens=8, device="cpu")
    for name, value in (
        ("hidden", 7), ("hidden", 0), ("num_experts", 0), ("num_topk", 65), ("max_tokens", 0),
        ("decode_tokens", 9), ("decode_tokens", 0), ("mode", "fast"), ("dtype", torch.int8),
        ("expert_alignment", 0), ("max_recv_rows", 0), ("fp8", True),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            deep_comm.ExpertParallel(group, **{**good, name: value})
        assert caught.value.argument == name, (name, value, str(caught.value))
    with pytest.raises(ArgumentError, match="bfloat16"):
        deep_comm.ExpertParallel(group, **good, mode="decode", dtype=torch.float32)


@run_by(local.run, 1, timeout_s=30)
def test_options_that_cannot_be_are_named_before_anything_is_launched(group: Any, /) -> None:
    """Bad tensors: test_layer_steps.py."""
    with build(group, CASE) as layer, torch.no_grad():
        x, idx = torch.zeros(2, 64).bfloat16(), torch.zeros(2, 2).long()
        weights, same = torch.ones(2, 2), layer_cases.Experts()
        with pytest.raises(ArgumentError, match="mode"):
            layer(x, idx, weights, same, mode="other")
        with pytest.raises(ArgumentError, match="bounded"):
            layer(x, idx, weights, same, bounded=True)
        assert same.modes == []
        with pytest.raises(ArgumentError, match="no gradients"), torch.enable_grad():
            layer(x.requires_grad_(), idx, weights, same, mode="decode")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_topk", (2, 3)), ("max_tokens", (8, 9)), ("hidden", (64, 128)),
        ("mode", ("auto", "prefill")), ("dtype", (torch.bfloat16, torch.float16)),
        ("ranks_per_node", (2, 1)), ("expert_alignment", (1, 2)),
    ],
)  # fmt: skip
def test_ranks_that_are_built_differently_are_told(name: str, values: tuple[Any, Any]) -> None:
    good = dict(hidden=64, num_experts=4, num_topk=2, max_tokens=8, decode_tokens=4, device="cpu")

    def main(group: Any) -> None:
        with pytest.raises(ConfigMismatch, match=f"about {name}:"):
            deep_comm.ExpertParallel(group, **{**good, name: values[group.rank()]})

    local.run(main, 2, timeout_s=30)


@run_by(local.run, 1, timeout_s=30)
def test_what_is_no_buffer_is_named(group: Any, /) -> None:
    with pytest.raises(ArgumentError, match="buffer must be a Buffer"):
        build(group, CASE, device=None, buffer=3)


@run_by(local.run, 2, timeout_s=30)
def test_a_buffer_may_be_shared_and_is_not_destroyed_with_the_layer(group: Any, /) -> None:
    memory = deep_comm.ExpertParallel.estimate_memory(
        2, hidden=64, num_experts=8, num_topk=2, max_tokens=6, decode_tokens=2,
        device_type="cpu",
    )  # fmt: skip
    with deep_comm.Buffer(
        group, memory.num_nvl_bytes, memory.low_latency_region, low_latency_mode=True,
        device="cpu", timeout_s=30,
    ) as buffer, torch.no_grad():  # fmt: skip
        for mode in ("auto", "decode"):
            case = LayerCase(((2, 1),), 6, 2, mode=mode)
            layer = build(None, case, device=None, buffer=buffer)
            y = layer(*layer_cases.inputs(case, buffer.rank, 0), layer_cases.Experts())
            assert y.shape[0] == (2, 1)[buffer.rank]
            layer.destroy()
        assert buffer.runtime is not None
    with deep_comm.Buffer(group, 1 << 20, device="cpu", timeout_s=30) as small:
        with pytest.raises(ArgumentError, match="low_latency_mode"):
            build(None, CASE, device=None, buffer=small)
    with (
        deep_comm.Buffer(
            group, 1 << 20, 1 << 10, low_latency_mode=True, device="cpu", timeout_s=30
        ) as small,
        pytest.raises(BufferTooSmall),
    ):
        build(None, CASE, device=None, buffer=small)


@run_by(local.run, 2, timeout_s=30)
def test_a_layer_that_has_lost_a_peer_can_be_reset(group: Any, /) -> None:
    case = LayerCase(((2, 2), (5, 1)), 6, 2)
    with build(group, case, timeout_s=3) as layer, torch.no_grad():
        layer(*layer_cases.inputs(case, group.rank(), 1), layer_cases.Experts())
        assert not layer.rule.begins_with_decode
        if group.rank() == 0:
            with pytest.raises(deep_comm.PeerTimeout):
                layer(*layer_cases.inputs(case, 0, 0), layer_cases.Experts())
        group.barrier()
        layer.reset()
        assert layer.rule.begins_with_decode
        experts = layer_cases.Experts()
        layer(*layer_cases.inputs(case, group.rank(), 0), experts)
        assert experts.modes == ["decode"]


# ---- captured calls, batches --------------------------------------------------------------------


@run_by(local.run, 2, timeout_s=30)
def test_a_captured_step_is_decode_and_asks_nothing(
    group: Any, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = LayerCase(((2, 1), (6, 1)), 6, 2)
    with build(group, case) as layer, torch.no_grad():
        layer(*layer_cases.inputs(case, group.rank(), 1), layer_cases.Experts())
        before = layer.rule.num_steps
        layer._steps.is_capturing = lambda: True
        experts = layer_cases.Experts()
        layer(*layer_cases.inputs(case, group.rank(), 0), experts)
        assert experts.modes == ["decode"] and layer.rule.num_steps == before
        batch = layer.dispatch(*layer_cases.inputs(case, group.rank(), 0), mode="prefill")
        assert batch.counts is None and batch.x.shape[0] == 2 * 6 * case.topk
        layer.combine(batch, batch.x)
        many = torch.zeros(3, 64).bfloat16()
        with pytest.raises(ArgumentError, match="captured"):
            layer.dispatch(many, torch.zeros(3, 2).long(), torch.ones(3, 2))


def test_groups_hold_rows_by_source_rank_and_token() -> None:
    def main(group: Any) -> Any:
        case = LayerCase(((4, 3),), 8, 4, experts=4, topk=2)
        x = torch.full((case.steps[0][group.rank()], 64), float(group.rank() * 100)).bfloat16()
        x += torch.arange(x.shape[0]).unsqueeze(1).bfloat16()
        idx = torch.tensor([[0, 1], [1, 2], [3, 3], [0, -1]])[: x.shape[0]]
        found = {}
        with build(group, case) as layer, torch.no_grad():
            for mode in ("prefill", "decode"):
                batch = layer.dispatch(x, idx, torch.ones(len(x), 2), mode=mode)
                found[mode] = [
                    batch.x[first : first + count, 0].tolist()
                    for first, count in zip(
                        batch.offsets.tolist(), batch.num_tokens_per_expert.tolist(), strict=False
                    )
                ]
                if mode == "decode":
                    assert batch.masked().shape == (2, layer._steps.calls.capacity, 64)
                    assert batch.masked(batch.x).data_ptr() == batch.x.data_ptr()
                else:
                    with pytest.raises(ArgumentError, match="decode batch"):
                        batch.masked()
                layer.combine(batch, batch.x)
        return found

    first, second = local.run(main, 2, timeout_s=30)
    expected = [[0.0, 3.0, 100.0], [0.0, 1.0, 100.0, 101.0]]
    assert first["prefill"] == first["decode"] == expected
    # A token that selects an expert twice: a row a selection in prefill, one row in decode.
    assert second["prefill"] == [[1.0, 101.0], [2.0, 2.0, 102.0, 102.0]]
    assert second["decode"] == [[1.0, 101.0], [2.0, 102.0]]


def test_copies_of_a_model_share_the_layer() -> None:
    import copy
    import pickle

    def main(group: Any) -> None:
        with build(group, CASE) as layer:
            assert copy.deepcopy({"layer": layer})["layer"] is layer
            assert copy.copy(layer) is layer
            with pytest.raises(deep_comm.UnsupportedError, match="state_dict"):
                pickle.dumps(layer)

    local.run(main, 1, timeout_s=30)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_row_that_overflows_stays_with_its_token(mode: str) -> None:
    def main(group: Any) -> torch.Tensor:
        case = LayerCase(((3, 3),), 8, 4, experts=4, alignment=4)
        x = torch.ones(3, 64).bfloat16()
        # The first row of every group is the one that missing selections could be mistaken for.
        idx = torch.tensor([[0, 2], [1, -1], [-1, 3]])
        with build(group, case) as layer, torch.no_grad():

            def explode(batch: deep_comm.ExpertBatch) -> torch.Tensor:
                rows = batch.x.clone()
                rows[~batch.mask()] = float("nan")
                if batch.first_expert == 0 and group.rank() == 0:
                    rows[0] = float("inf")  # of rank 0's first token, by expert 0
                return rows

            return layer(x, idx, torch.ones(3, 2), explode, mode=mode)

    first, second = local.run(main, 2, timeout_s=30)
    assert first[0].isinf().all()
    assert torch.equal(first[1:].float(), torch.ones(2, 64))
    assert torch.equal(second.float(), torch.tensor([[2.0], [1.0], [1.0]]).expand(3, 64))


@pytest.mark.parametrize(("ranks_per_node", "num_ranks"), [(2, 4), (1, 3), (3, 6)])
@pytest.mark.parametrize("mode", ["auto", "prefill", "decode"])
def test_ranks_of_several_nodes_get_their_sums(
    ranks_per_node: int, num_ranks: int, mode: str
) -> None:
    seen = set()
    for seed in range(3):
        choose = random.Random(seed)
        most = 3 if mode == "decode" else 9
        dtypes = (torch.bfloat16, torch.float32) if mode == "prefill" else (torch.bfloat16,)
        case = LayerCase(
            random_steps(choose, num_ranks, most, 3, 6 if mode == "auto" else 2), max_tokens=most,
            decode_tokens=3, hidden=64, experts=choose.choice((5, 12)), topk=choose.choice((2, 5)),
            routing=choose.choice(ROUTINGS), dtype=choose.choice(dtypes), mode=mode,
            alignment=choose.choice((1, 8)), how="mixed", ranks_per_node=ranks_per_node, seed=seed,
        )  # fmt: skip
        seen |= {m for steps in check(case) for _, modes in steps for m in modes}
    assert seen == ({"prefill", "decode"} if mode == "auto" else {mode})


@run_by(local.run, 6)
def test_bounded_batches_between_nodes_do_not_bound_what_is_handed_on(
    group: local.ThreadGroup, /
) -> None:
    """Rank 0 has no token, hands 18 on and keeps 9, with room for 10."""
    rank = group.rank()
    num_tokens = 9 if rank in (2, 4) else 0
    x = torch.arange(num_tokens * 64.0).view(num_tokens, 64).bfloat16()
    idx = ((torch.arange(num_tokens) + rank // 2) % 2).unsqueeze(1)
    with deep_comm.ExpertParallel(
        group, hidden=64, num_experts=6, num_topk=1, max_tokens=9, mode="prefill",
        max_recv_rows=10, device="cpu", ranks_per_node=2,
    ) as layer:  # fmt: skip
        batch = layer.dispatch(x, idx, torch.full((num_tokens, 1), 0.5), bounded=True)
        assert batch.x.shape[0] == 10
        assert batch.num_tokens_per_expert.tolist() == [9 if rank < 2 else 0]
        y = layer.combine(batch, batch.x)
        assert torch.equal(y, x * 0.5)


def test_nodes_of_processes_take_every_mode() -> None:
    steps = ((3, 1, 0, 2), (9, 1, 3, 0), (2, 9, 9, 9), (1, 2, 3, 0), (0, 0, 1, 0))
    case = LayerCase(steps, 9, 3, experts=8, ranks_per_node=2)
    results = forked.run(run, 4, case, timeout_s=120)
    verify(case, results)
    assert [modes for _, modes in results[0]] == [
        ["decode"], ["decode", "prefill"], ["prefill"], ["prefill"], ["decode"],
    ]  # fmt: skip


def test_a_rank_without_experts_returns_rows_of_the_layers_dtype() -> None:
    """Also where rows travel as FP8."""
    case = LayerCase(((3, 2),), 4, 4, hidden=128, experts=1, topk=1, mode="prefill", fp8=True)

    def main(group: Any) -> None:
        with build(group, case) as layer:
            x, idx, weights = inputs(case, group.rank(), 0)
            batch = layer.dispatch(x, idx, weights)
            y = layer.combine(batch, batch.map(lambda expert, rows: rows.bfloat16()))
            assert y.dtype == torch.bfloat16 and y.shape == x.shape

    local.run(main, 2)
